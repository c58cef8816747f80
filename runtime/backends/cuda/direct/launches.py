"""A decoder's launches: its embeddings, each layer and its head, for buckets of rows."""

from __future__ import annotations

import math

from .....loader.device.driver.base import KernelLaunch
from ....models.decoder_config import Norm
from ....models.executor import Accepts, one_of, refusal_of
from ....models.matrices import DecoderLayerWeights, DecoderWeights, Projection, Tensor
from ....models.spec import DecoderSpec
from ....tensors import DType
from ..implemented import IMPLEMENTED
from .arguments import Attention, Embed, Gate, PlaceHeads, RmsNorm
from .attention import attention_launches
from .memory import Array
from .products import WEIGHT_KINDS, Mode, Output, format_of, product_launch
from .program import Kernels, Program
from .sources import BLOCKS, CHOOSE, DTYPES, HEAD_DIMS, ROWS, attention_module, product_module
from .storage import DirectKVStorage
from .tables import ProgramKey
from .workspace import Workspace

SEES_ALL = 1 << 30  # a window that no context reaches
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}
_THREADS = 256
_HEAD_THREADS, _HEADS_PER_BLOCK = 128, 4
_EIGHT = 8  # numbers that are read at once

FEATURES: dict[str, Accepts] = {
    **IMPLEMENTED,
    "dtype": one_of(*DTYPES),
    "norm": one_of(Norm.RMS),
    "head_dim": lambda dim: dim % _EIGHT == 0 and dim <= HEAD_DIMS[-1],
    "activation": one_of(*ACTIVATIONS),
    "rotary.dim": lambda dim: dim % 2 == 0,
}


def refusal(spec: DecoderSpec, weights: DecoderWeights) -> str | None:
    """Why the kernels cannot compute this model; None where they can."""
    name = "the device's direct path"
    reason = refusal_of(spec, FEATURES, name)
    if reason is not None:
        return reason
    table = weights.embeddings
    expected = spec.dtype if table.scale is None else DType.I8
    if table.weight.dtype is not expected or (table.scale and table.scale.dtype not in WEIGHT_KINDS):
        return f"{name} does not take embeddings in {table.weight.dtype.label}"
    for projection in (weights.head, *(each for layer in weights.layers for each in _projections(layer))):
        if projection is None or not projection.is_settled:
            return f"{name} does not take matrices of GPTQ and AWQ, or experts"
        for matrix in projection.matrices():
            if format_of(matrix, spec.dtype) is None:
                return (
                    f"{name} does not multiply with a {type(matrix).__name__} [{matrix.num_out}, {matrix.num_in}] in "
                    f"{matrix.weight.dtype.label}"
                )
    return None


def modules_of(spec: DecoderSpec, weights: DecoderWeights) -> tuple[str, ...]:
    """The kernels' modules that the model needs."""
    projections = (weights.head, *(each for layer in weights.layers for each in _projections(layer)))
    formats = dict.fromkeys(
        format_of(matrix, spec.dtype) or ""
        for projection in projections
        if projection is not None
        for matrix in projection.matrices()
    )
    return (ROWS, CHOOSE, BLOCKS, attention_module(spec.head_dim), *map(product_module, formats))


def _projections(layer: DecoderLayerWeights) -> tuple[Projection | None, ...]:
    return layer.qkv, layer.output, layer.gate_up, layer.down


class DecoderLaunches:
    """Makes the launches of one model over one workspace and pool. Reads no weights."""

    def __init__(
        self, kernels: Kernels, weights: DecoderWeights, workspace: Workspace, kv: DirectKVStorage
    ) -> None:
        self._kernels = kernels
        self._weights = weights
        self._spec = workspace.spec
        self._workspace = workspace
        self._arrays = workspace.arrays
        self._kv = kv
        self._counts = Array(self._table("counts"), (1,), workspace.arrays.tables.dtype)

    def program(self, key: ProgramKey) -> Program:
        """Stage 0 is the embeddings', stage i + 1 that of layer i."""
        layers = [self._layer(number, key) for number in range(self._spec.num_layers)]
        return Program(self._kernels.driver, [self._embed(key), *layers])

    def head(self, num_logits: int) -> Program:
        """Two stages, for the rows that the tables name, at most `num_logits`: their final norm, and logits."""
        arrays, spec = self._arrays, self._spec
        norm = self._norm(
            self._weights.norm,
            arrays.x,
            arrays.scored,
            num_logits,
            rows=self._table("logit_rows"),
            output=Output.LOGITS,
        )
        products = self._product(
            self._weights.head, arrays.scored, arrays.logits, num_logits, Mode.STORE_WIDE, Output.LOGITS
        )
        assert arrays.logits.shape[1] == spec.vocab_size
        return Program(self._kernels.driver, [[norm], products])

    def _embed(self, key: ProgramKey) -> list[KernelLaunch]:
        arrays, spec, table = self._arrays, self._spec, self._weights.embeddings
        scale = table.scale
        arguments = Embed(
            table=table.weight.array.address,
            table_scale=scale.array.address if scale is not None else 0,
            tokens=self._table("tokens"),
            out=arrays.x.address,
            counts=self._counts.address,
            size=spec.hidden_size,
            group=spec.hidden_size // scale.shape[1] if scale is not None else spec.hidden_size,
            scale_kind=WEIGHT_KINDS[scale.dtype] if scale is not None else 0,
            scale=spec.embedding_scale,
        )
        return [self._kernels.launch(ROWS, "embed", (key.rows,), _THREADS, arguments)]

    def _layer(self, number: int, key: ProgramKey) -> list[KernelLaunch]:
        layer, arrays, rows = self._weights.layers[number], self._arrays, key.rows
        assert layer.attention_norm is not None
        assert layer.mlp_norm is not None
        assert layer.gate_up is not None
        assert layer.down is not None
        spec = self._spec
        gate = Gate(
            product=arrays.inner.address,
            out=arrays.active.address,
            counts=self._counts.address,
            size=spec.intermediate_size,
            kind=ACTIVATIONS[spec.activation.value],
        )
        gate_grid = rows, -(-spec.intermediate_size // _THREADS)
        return [
            self._norm(layer.attention_norm, arrays.x, arrays.normed, rows),
            *self._product(layer.qkv, arrays.normed, arrays.heads, rows),
            self._place_heads(layer, number, rows),
            *self._attention(number, key),
            *self._product(layer.output, arrays.attended, arrays.x, rows, Mode.ADD),
            self._norm(layer.mlp_norm, arrays.x, arrays.normed, rows),
            *self._product(layer.gate_up, arrays.normed, arrays.inner, rows),
            self._kernels.launch(ROWS, "gate", gate_grid, _THREADS, gate),
            *self._product(layer.down, arrays.active, arrays.x, rows, Mode.ADD),
        ]

    def _norm(
        self,
        weight: Tensor,
        x: Array,
        out: Array,
        num_rows: int,
        *,
        rows: int = 0,
        output: Output = Output.ROWS,
    ) -> KernelLaunch:
        arguments = RmsNorm(
            x=x.address,
            weight=weight.array.address,
            out=out.address,
            rows=rows,
            counts=self._counts.address,
            count=output,
            size=self._spec.hidden_size,
            weight_kind=WEIGHT_KINDS[weight.dtype],
            eps=self._spec.norm_eps,
        )
        return self._kernels.launch(ROWS, "rms_norm", (num_rows,), _THREADS, arguments)

    def _product(
        self,
        projection: Projection,
        x: Array,
        out: Array,
        bucket: int,
        mode: Mode = Mode.STORE,
        output: Output = Output.ROWS,
    ) -> list[KernelLaunch]:
        """Matrices of one input write side by side."""
        launches: list[KernelLaunch] = []
        column = 0
        for matrix in projection.matrices():
            launches.append(
                product_launch(
                    self._kernels,
                    matrix,
                    x,
                    out,
                    self._counts,
                    bucket=bucket,
                    column=column,
                    mode=mode,
                    output=output,
                )
            )
            column += matrix.num_out
        assert column == out.shape[1]
        return launches

    def _place_heads(self, layer: DecoderLayerWeights, number: int, rows: int) -> KernelLaunch:
        spec, arrays = self._spec, self._arrays
        keys, values = self._kv.of_layer(number)
        norm, key_norm = layer.query_norm, layer.key_norm
        arguments = PlaceHeads(
            heads=arrays.heads.address,
            cos=arrays.cos.address,
            sin=arrays.sin.address,
            query_norm=norm.array.address if norm is not None else 0,
            key_norm=key_norm.array.address if key_norm is not None else 0,
            keys=keys,
            values=values,
            positions=self._table("positions"),
            slots=self._table("slots"),
            counts=self._counts.address,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            rotary_dim=spec.rotary.dim,
            norm_kind=WEIGHT_KINDS[norm.dtype] if norm is not None else 0,
            eps=spec.norm_eps,
        )
        num_heads = spec.num_heads + 2 * spec.num_kv_heads
        grid = rows, -(-num_heads // _HEADS_PER_BLOCK)
        return self._kernels.launch(ROWS, "place_heads", grid, _HEAD_THREADS, arguments)

    def _attention(self, number: int, key: ProgramKey) -> list[KernelLaunch]:
        spec, arrays = self._spec, self._arrays
        keys, values = self._kv.of_layer(number)
        arguments = Attention(
            heads=arrays.heads.address,
            keys=keys,
            values=values,
            out=arrays.attended.address,
            split_sums=arrays.split_sums.address,
            split_scales=arrays.split_scales.address,
            **{
                name: self._table(name)
                for name in ("items", "merges", "starts", "lengths", "contexts", "table_starts", "blocks")
            },
            counts=self._counts.address,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=self._kv.block_size,
            window=spec.windows[number] or SEES_ALL,
            scale=spec.attention_scale * math.log2(math.e),
        )
        return attention_launches(self._kernels, arguments, key, max_spans=self._workspace.limits.max_spans)

    def _table(self, name: str) -> int:
        return self._arrays.table(self._workspace.offsets[name])
