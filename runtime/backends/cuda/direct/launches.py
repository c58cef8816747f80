"""A decoder's launches: its embeddings, each layer and its head, for buckets of rows."""

from __future__ import annotations

import math

from .....loader.device.driver.base import KernelLaunch
from ....models.decoder_config import LayerRotary, Norm
from ....models.executor import Accepts, any_value, one_of, refusal_of
from ....models.matrices import DecoderLayerWeights, DecoderWeights, Projection, Tensor
from ....models.spec import DecoderSpec
from ....tensors import DType
from ..implemented import IMPLEMENTED
from .arguments import AddRows, Attention, Embed, Gate, NormRows, PlaceHeads, ScaleLogits
from .attention import attention_launches
from .memory import Array
from .products import WEIGHT_KINDS, Mode, Output, format_of, product_launch
from .program import Kernels, Program
from .sources import BLOCKS, CHOOSE, DTYPES, HEAD_DIMS, ROWS, attention_module, product_module
from .storage import DirectKVStorage
from .tables import ProgramKey
from .workspace import Workspace

SEES_ALL = 1 << 30  # a window that no context reaches
NORMS = (Norm.RMS, Norm.RMS_WIDE, Norm.RMS_PLUS_ONE, Norm.LAYER)  # as the kernels number them
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}
_THREADS = 256
_HEAD_THREADS, _HEADS_PER_BLOCK = 128, 4
_EIGHT = 8  # numbers that are read at once

FEATURES: dict[str, Accepts] = {
    **IMPLEMENTED,
    "dtype": one_of(*DTYPES),
    "norm": one_of(*NORMS),
    **dict.fromkeys(
        (
            *("input_norms", "output_norms", "is_parallel", "residual_scale", "logits_scale", "score_cap"),
            *(
                "logit_cap",
                "rotary.interleaved",
                "local_rotary",
                "local_rotary.frequencies",
                "local_rotary.factor",
            ),
            *("layer_rotary", "wide_rotary", "joint_head_norms"),
        ),
        any_value,
    ),
    "head_dim": lambda dim: dim % _EIGHT == 0 and dim <= HEAD_DIMS[-1],
    "activation": one_of(*ACTIVATIONS),
    "rotary.dim": lambda dim: dim % 2 == 0,
}


def refusal(spec: DecoderSpec, weights: DecoderWeights) -> str | None:
    """Why the kernels cannot compute this model; None where they can."""
    name = "the device's direct path"
    of_local = {
        "local_rotary.dim": one_of(spec.rotary.dim),
        "local_rotary.interleaved": one_of(spec.rotary.interleaved),
    }
    reason = refusal_of(spec, FEATURES | of_local, name)
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
        assert arrays.logits.shape[1] == spec.vocab_size
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
        if spec.logits_scale != 1 or spec.logit_cap is not None:
            scaling = ScaleLogits(
                logits=arrays.logits.address,
                counts=self._counts.address,
                size=spec.vocab_size,
                scale=spec.logits_scale,
                cap=spec.logit_cap or 0,
            )
            grid = num_logits, -(-spec.vocab_size // _THREADS)
            products.append(self._kernels.launch(ROWS, "scale_logits", grid, _THREADS, scaling))
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
        layer, arrays, rows, spec = self._weights.layers[number], self._arrays, key.rows, self._spec
        assert layer.qkv is not None
        assert layer.output is not None
        assert layer.gate_up is not None
        assert layer.down is not None
        to_attention, x = self._input(layer.attention_norm, rows)
        to_mlp, y = ([], x) if spec.is_parallel else self._input(layer.mlp_norm, rows)
        gate = Gate(
            product=arrays.inner.address,
            out=arrays.active.address,
            counts=self._counts.address,
            size=spec.intermediate_size,
            kind=ACTIVATIONS[spec.activation.value],
        )
        gate_grid = rows, -(-spec.intermediate_size // _THREADS)
        return [
            *to_attention,
            *self._product(layer.qkv, x, arrays.heads, rows),
            *self._place_heads(layer, number, rows),
            *self._attention(number, key),
            *self._add(layer.output, arrays.attended, layer.attention_output_norm, rows),
            *to_mlp,
            *self._product(layer.gate_up, y, arrays.inner, rows),
            self._kernels.launch(ROWS, "gate", gate_grid, _THREADS, gate),
            *self._add(layer.down, arrays.active, layer.mlp_output_norm, rows),
        ]

    def _input(self, norm: Tensor | None, rows: int) -> tuple[list[KernelLaunch], Array]:
        """The launches that make the input of attention or of the MLP, and where it is then."""
        arrays = self._arrays
        return (
            ([], arrays.x)
            if norm is None
            else ([self._norm(norm, arrays.x, arrays.normed, rows)], arrays.normed)
        )

    def _add(
        self, projection: Projection, inputs: Array, norm: Tensor | None, rows: int
    ) -> list[KernelLaunch]:
        """x += projection(inputs), after a norm of its own and scaled, where there are such."""
        arrays, spec = self._arrays, self._spec
        if arrays.added is None:
            return self._product(projection, inputs, arrays.x, rows, Mode.ADD)
        adding = AddRows(
            x=arrays.x.address,
            more=arrays.added.address,
            weight=norm.array.address if norm is not None else 0,
            counts=self._counts.address,
            size=spec.hidden_size,
            weight_kind=WEIGHT_KINDS[norm.dtype] if norm is not None else 0,
            kind=NORMS.index(spec.norm),
            eps=spec.norm_eps,
            scale=spec.residual_scale,
        )
        return [
            *self._product(projection, inputs, arrays.added, rows),
            self._kernels.launch(ROWS, "add_rows", (rows,), _THREADS, adding),
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
        arguments = NormRows(
            x=x.address,
            weight=weight.array.address,
            out=out.address,
            rows=rows,
            counts=self._counts.address,
            count=output,
            size=weight.shape[0],
            x_stride=x.shape[1],
            out_stride=out.shape[1],
            weight_kind=WEIGHT_KINDS[weight.dtype],
            kind=NORMS.index(self._spec.norm),
            eps=self._spec.norm_eps,
        )
        return self._kernels.launch(ROWS, "norm_rows", (num_rows,), _THREADS, arguments)

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

    def _place_heads(self, layer: DecoderLayerWeights, number: int, rows: int) -> list[KernelLaunch]:
        spec, arrays = self._spec, self._arrays
        keys, values = self._kv.of_layer(number)
        norm, key_norm = layer.query_norm, layer.key_norm
        launches: list[KernelLaunch] = []
        if spec.joint_head_norms and norm is not None and key_norm is not None:
            heads, query_size = arrays.heads, spec.num_heads * spec.head_dim
            of_keys = Array(heads.address + query_size * heads.dtype.size_bytes, heads.shape, heads.dtype)
            launches = [self._norm(norm, heads, heads, rows), self._norm(key_norm, of_keys, of_keys, rows)]
            norm = key_norm = None
        angles = self._angles(number)
        arguments = PlaceHeads(
            heads=arrays.heads.address,
            cos=angles[0],
            sin=angles[1],
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
            weight_kind=WEIGHT_KINDS[norm.dtype] if norm is not None else 0,
            kind=NORMS.index(spec.norm),
            interleaved=spec.rotary.interleaved,
            wide_turns=spec.wide_rotary,
            eps=spec.norm_eps,
        )
        num_heads = spec.num_heads + 2 * spec.num_kv_heads
        grid = rows, -(-num_heads // _HEADS_PER_BLOCK)
        return [*launches, self._kernels.launch(ROWS, "place_heads", grid, _HEAD_THREADS, arguments)]

    def _angles(self, number: int) -> tuple[int, int]:
        """The tables of cosines and sines of a layer; zeros: its heads are not rotated."""
        arrays, kind = self._arrays, self._spec.layer_rotary[number]
        if kind is LayerRotary.NONE:
            return 0, 0
        tables = arrays.local_angles if kind is LayerRotary.LOCAL else (arrays.cos, arrays.sin)
        assert tables is not None
        return tables[0].address, tables[1].address

    def _attention(self, number: int, key: ProgramKey) -> list[KernelLaunch]:
        spec, arrays = self._spec, self._arrays
        keys, values = self._kv.of_layer(number)
        cap = spec.score_cap or 0.0
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
            scale=spec.attention_scale / cap if cap else spec.attention_scale * math.log2(math.e),
            cap=cap * math.log2(math.e),
        )
        return attention_launches(self._kernels, arguments, key, max_spans=self._workspace.limits.max_spans)

    def _table(self, name: str) -> int:
        return self._arrays.table(self._workspace.offsets[name])
