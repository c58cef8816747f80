"""A decoder's launches: its embeddings, each layer and its head, for buckets of rows."""

from __future__ import annotations

import math

from .....loader.device.driver.base import KernelLaunch
from ....models.adapter import AdapterPlace
from ....models.decoder_config import LayerRotary
from ....models.matrices import DecoderLayerWeights, DecoderWeights, Tensor
from ....models.spec import DecoderSpec
from .adapters import DeviceAdapters
from .arguments import AddRows, Attention, Embed, PlaceHeads, ScaleLogits
from .attention import attention_launches
from .experts import ExpertLaunches, formats_of_experts
from .latent import LatentLaunches
from .memory import Array
from .products import WEIGHT_KINDS, Mode, Output, format_of, matrices_of
from .program import Kernels, Program
from .refusals import NORMS, projections_of
from .row_launches import HEAD_THREADS, HEADS_PER_BLOCK, SEES_ALL, THREADS, RowLaunches
from .sources import BLOCKS, CHOOSE, EXPERTS, LATENT, ROWS, attention_module, product_module
from .storage import DirectPool
from .tables import ProgramKey
from .workspace import Workspace


def modules_of(spec: DecoderSpec, weights: DecoderWeights, *, of_int8: bool = False) -> tuple[str, ...]:
    """The kernels' modules that the model needs, over a pool of floats or of int8."""
    formats = dict.fromkeys(
        format_of(matrix, spec.dtype) or ""
        for projection in projections_of(weights)
        for matrix in matrices_of(projection)
    )
    of_experts = [product_module(each, of_experts=True) for each in formats_of_experts(weights, spec.dtype)]
    has_latents = spec.latent is not None
    return (
        *(ROWS, CHOOSE, BLOCKS, attention_module(spec.head_dim, of_int8=of_int8, of_latents=has_latents)),
        *map(product_module, formats),
        *([LATENT] if has_latents else ()),
        *([EXPERTS, *of_experts] if of_experts else ()),
    )


class DecoderLaunches(RowLaunches):
    """Makes the launches of one model over one workspace and pool. Reads no weights."""

    def __init__(
        self, kernels: Kernels, weights: DecoderWeights, workspace: Workspace, kv: DirectPool
    ) -> None:
        self._weights = weights
        self._spec = spec = workspace.spec
        self._workspace = workspace
        self._arrays = workspace.arrays
        self._kv = kv
        counts = Array(self._table("counts"), (1,), workspace.arrays.tables.dtype)
        super().__init__(kernels, counts, spec.norm, spec.norm_eps)
        self._adds_apart = self._spec.output_norms or self._spec.residual_scale != 1
        self.adapters: DeviceAdapters | None = None  # which programs need whose key `is_adapted`
        self._experts: ExpertLaunches | None = None
        if self._spec.experts is not None and self._arrays.experts is not None:
            self._experts = ExpertLaunches(
                kernels, self._spec, self._spec.experts, weights, self._arrays.experts, self._counts
            )
            self._experts.load(kernels.driver, workspace.device.stream)
        self.latents: LatentLaunches | None = None
        if spec.latent is not None and self._arrays.latents is not None:
            self.latents = LatentLaunches(
                kernels, self._counts, spec, spec.latent, weights, self._arrays.latents
            )
            self.latents.load(kernels.driver, workspace.device.stream)

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
            grid = num_logits, -(-spec.vocab_size // THREADS)
            products.append(self._kernels.launch(ROWS, "scale_logits", grid, THREADS, scaling))
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
            table_kind=WEIGHT_KINDS.get(table.weight.dtype, 0),
            scale=spec.embedding_scale,
        )
        return [self._kernels.launch(ROWS, "embed", (key.rows,), THREADS, arguments)]

    def _layer(self, number: int, key: ProgramKey) -> list[KernelLaunch]:
        layer, arrays, spec = self._weights.layers[number], self._arrays, self._spec
        assert layer.qkv is not None
        to_attention, x = self._input(layer.attention_norm, key.rows)
        to_mlp, y = ([], x) if spec.is_parallel else self._input(layer.mlp_norm, key.rows)
        return [
            *to_attention,
            *self._product(layer.qkv, x, arrays.heads, key.rows),
            *self._adapt(AdapterPlace.QKV, number, x, arrays.heads, key),
            *self._attend(layer, number, key),
            *self._add(AdapterPlace.OUTPUT, number, arrays.attended, key),
            *to_mlp,
            *(self._mixture(number, y, key) if layer.experts else self._mlp(number, y, key)),
        ]

    def _attend(self, layer: DecoderLayerWeights, number: int, key: ProgramKey) -> list[KernelLaunch]:
        """From the projected rows to those that `output` takes."""
        arrays, latents, rows = self._arrays, self.latents, key.rows
        if latents is None:
            return [*self._place_heads(layer, number, rows), *self._attention(number, key)]
        places, tables = self._kv.of_layer(number), (self._table("positions"), self._table("slots"))
        return [
            *latents.before(number, arrays.heads, self._angles(number), places, tables, rows),
            *self._attention(number, key),
            latents.behind(number, arrays.attended, rows),
        ]

    def _mlp(self, number: int, x: Array, key: ProgramKey) -> list[KernelLaunch]:
        launches, active = self._active(number, x, key)
        return [*launches, *self._add(AdapterPlace.DOWN, number, active, key)]

    def _active(self, number: int, x: Array, key: ProgramKey) -> tuple[list[KernelLaunch], Array]:
        """The launches that make the inputs of `down` for all rows, and where they are then."""
        layer, arrays, rows = self._weights.layers[number], self._arrays, key.rows
        assert layer.gate_up is not None
        assert layer.down is not None
        inner = Array(arrays.inner.address, (rows, 2 * layer.down.num_in), arrays.inner.dtype)
        active = Array(arrays.active.address, (rows, layer.down.num_in), arrays.active.dtype)
        launches = [
            *self._product(layer.gate_up, x, inner, rows),
            *self._adapt(AdapterPlace.GATE_UP, number, x, inner, key),
            self._gate(inner, active, rows, self._spec.activation),
        ]
        return launches, active

    def _mixture(self, number: int, x: Array, key: ProgramKey) -> list[KernelLaunch]:
        layer, mixture, rows = self._weights.layers[number], self._experts, key.rows
        assert mixture is not None
        assert layer.router is not None
        arrays, shared = mixture.arrays, list[KernelLaunch]()
        if layer.down is not None:
            shared, active = self._active(number, x, key)
            shared += self._product(layer.down, active, arrays.shared, rows)
            shared += self._adapt(AdapterPlace.DOWN, number, active, arrays.shared, key)
        if layer.shared_gate is not None:
            shared += self._product(layer.shared_gate, x, arrays.shared_gate, rows)
        out = self._arrays.added if self._adds_apart else self._arrays.x
        return [
            *self._product(layer.router, x, arrays.scores, rows, Mode.STORE_WIDE),
            *mixture.up(number, x, rows),
            self._gate(
                arrays.inner,
                arrays.active,
                mixture.num_pairs(rows),
                self._spec.activation,
                output=Output.PAIRS,
            ),
            *shared,
            *mixture.down(number, out, rows, adds=not self._adds_apart),
            *([self._add_rows(layer.mlp_output_norm, rows)] if self._adds_apart else []),
        ]

    def _adapt(
        self, place: AdapterPlace, number: int, x: Array, out: Array, key: ProgramKey
    ) -> list[KernelLaunch]:
        """The rows of `out`, which a projection of x has made, gain what their adapters add."""
        if not key.is_adapted:
            return []
        assert self.adapters is not None
        site = number * len(AdapterPlace) + place
        return self.adapters.launches(
            self._kernels, self._table("adapters"), x, out, self._counts, key.rows, site
        )

    def _input(self, norm: Tensor | None, rows: int) -> tuple[list[KernelLaunch], Array]:
        """The launches that make the input of attention or of the MLP, and where it is then."""
        arrays = self._arrays
        return (
            ([], arrays.x)
            if norm is None
            else ([self._norm(norm, arrays.x, arrays.normed, rows)], arrays.normed)
        )

    def _add(self, place: AdapterPlace, number: int, x: Array, key: ProgramKey) -> list[KernelLaunch]:
        """The rows gain this projection of x, after a norm of its own and scaled, where there are such."""
        layer, added = self._weights.layers[number], self._arrays.added
        is_down = place is AdapterPlace.DOWN
        projection = layer.down if is_down else layer.output
        norm = layer.mlp_output_norm if is_down else layer.attention_output_norm
        assert projection is not None
        if not self._adds_apart and not key.is_adapted:
            return self._product(projection, x, self._arrays.x, key.rows, Mode.ADD)
        return [
            *self._product(projection, x, added, key.rows),
            *self._adapt(place, number, x, added, key),
            self._add_rows(norm, key.rows),
        ]

    def _add_rows(self, norm: Tensor | None, rows: int) -> KernelLaunch:
        """x += norm(added) * scale."""
        arrays, spec = self._arrays, self._spec
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
        return self._kernels.launch(ROWS, "add_rows", (rows,), THREADS, adding)

    def _place_heads(self, layer: DecoderLayerWeights, number: int, rows: int) -> list[KernelLaunch]:
        spec, arrays = self._spec, self._arrays
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
            **self._kv.of_layer(number)._asdict(),
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
        grid = rows, -(-num_heads // HEADS_PER_BLOCK)
        return [*launches, self._kernels.launch(ROWS, "place_heads", grid, HEAD_THREADS, arguments)]

    def _angles(self, number: int) -> tuple[int, int]:
        """The tables of cosines and sines of a layer; zeros: its heads are not rotated."""
        arrays, kind = self._arrays, self._spec.layer_rotary[number]
        if kind is LayerRotary.NONE:
            return 0, 0
        tables = arrays.local_angles if kind is LayerRotary.LOCAL else (arrays.cos, arrays.sin)
        assert tables is not None
        return tables[0].address, tables[1].address

    def _attention(self, number: int, key: ProgramKey) -> list[KernelLaunch]:
        spec, arrays, latents = self._spec, self._arrays, self._arrays.latents
        of_latents = latents is not None
        cap, window, ahead = spec.score_cap or 0.0, spec.windows[number] or SEES_ALL, 0
        if spec.is_bidirectional:  # of tokens to each side
            window, ahead = window + 1, window
        arguments = Attention(
            heads=arrays.heads.address if latents is None else latents.absorbed.address,
            **self._kv.of_layer(number)._asdict(),
            out=arrays.attended.address if latents is None else latents.sums.address,
            split_sums=arrays.split_sums.address,
            split_scales=arrays.split_scales.address,
            **{
                name: self._table(name)
                for name in ("items", "merges", "starts", "lengths", "contexts", "table_starts", "blocks")
            },
            counts=self._counts.address,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            row_heads=spec.num_heads + (0 if of_latents else 2 * spec.num_kv_heads),
            head_dim=spec.head_dim,
            value_dim=arrays.split_sums.shape[-1],
            block_size=self._kv.block_size,
            window=window,
            ahead=ahead,
            scale=spec.attention_scale / cap if cap else spec.attention_scale * math.log2(math.e),
            cap=cap * math.log2(math.e),
        )
        group = spec.num_heads // spec.num_kv_heads
        return attention_launches(
            self._kernels,
            arguments,
            many=key.many,
            num_items=key.num_items(group, self._workspace.limits.max_spans),
            num_merges=key.num_merges(group),
            of_latents=of_latents,
        )

    def _table(self, name: str) -> int:
        return self._arrays.table(self._workspace.offsets[name])
