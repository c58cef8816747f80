"""An encoder's launches, for buckets of rows and texts: its embeddings, each layer, and what it makes of the states.

All texts of a batch are one step, back to back, without padding. Keys and values lie as in a pool, a block a row, so
that attention is the decoder's kernel: a text alone decides its tiles, and what a row gives does not depend on others.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .....loader.device.driver.base import KernelLaunch
from ....models.encoder_weights import EncoderWeights
from ....models.matrices import LayerNormWeights, Tensor
from ....models.spec import EncoderSpec, Pooling
from ....tensors import DType
from .arguments import Attention, Embed, PlaceHeads, PoolRows
from .attention import attention_launches
from .memory import Array, DeviceArena
from .products import WEIGHT_KINDS, Mode, Output, format_of, matrices_of
from .program import Kernels, Program
from .refusals import projections_of_encoder
from .row_launches import HEAD_THREADS, HEADS_PER_BLOCK, SEES_ALL, THREADS, RowLaunches
from .sources import ROWS, attention_module, product_module
from .tables import MANY_PAIRS, TableSizes

_POOLINGS = tuple(Pooling)  # as the kernel numbers them


class EncoderKey(NamedTuple):
    """The batches that a program serves: all that fit."""

    rows: int  # at most
    texts: int  # at most
    many: bool  # items of MANY_PAIRS

    @property
    def num_items(self) -> int:
        """The most items of attention."""
        return self.texts + (self.rows // MANY_PAIRS if self.many else 0)


class EncoderArrays:
    """The arrays of an arena for batches of up to `num_rows` tokens."""

    def __init__(self, arena: DeviceArena, spec: EncoderSpec, num_rows: int) -> None:
        rows, size, dtype = num_rows, spec.hidden_size, spec.dtype
        inner_size = spec.intermediate_size * (2 if spec.gated else 1)
        self.sizes = TableSizes(
            max_rows=rows,
            max_spans=rows,
            max_logits=rows,
            max_items=rows,
            max_blocks=rows,
            max_types=rows if spec.type_vocab_size else 0,
        )
        self.num_rows = rows
        self.tables = arena.take("tables", (self.sizes.offsets["end"],), DType.U32)
        self.x = arena.take("rows", (rows, size), dtype)
        self.embedded = self.x
        if spec.embedding_size is not None:
            self.embedded = arena.take("embeddings", (rows, spec.embedding_size), dtype)
        self.normed = arena.take("normed rows", (rows, size), dtype)
        self.heads = arena.take("heads", (rows, 3 * size), dtype)
        self.keys = arena.take("keys", (rows, size), dtype)
        self.values = arena.take("values", (rows, size), dtype)
        self.attended = arena.take("attended heads", (rows, size), dtype)
        self.inner = arena.take("gate and up", (rows, inner_size), dtype)
        self.active = arena.take("active", (rows, spec.intermediate_size), dtype)
        self.states = arena.take("pooled states", (rows, size), dtype if spec.num_labels else DType.F32)
        self.dense = arena.take("rows of the head", (rows if spec.num_labels else 1, size), dtype)
        self.scores = arena.take("scores", (rows, max(1, spec.num_labels)), DType.F32)
        self.angles: list[tuple[Array, Array]] = []  # of layers without a window, and of those with one
        for rotary, kind in ((spec.rotary, "cosines"), (spec.local_rotary, "local cosines")):
            shape = (rows, 0 if rotary is None else rotary.dim // 2)
            cos = arena.take(kind, shape, DType.F32)
            self.angles.append((cos, arena.take(f"sines of {kind}", shape, DType.F32)))
        self.reach = rows - 1
        num_biased = spec.num_heads if spec.position_bias is not None else 0
        self.bias = arena.take("biases of distances", (num_biased, 2 * rows - 1), DType.F32)

    def table(self, name: str) -> int:
        """The address of one of a batch's tables."""
        return self.tables.address + 4 * self.sizes.offsets[name]


def modules_of_encoder(spec: EncoderSpec, weights: EncoderWeights) -> tuple[str, ...]:
    """The kernels' modules that the model needs."""
    formats = dict.fromkeys(
        format_of(matrix, spec.dtype) or ""
        for projection in projections_of_encoder(weights)
        for matrix in matrices_of(projection)
    )
    return ROWS, attention_module(spec.head_dim), *map(product_module, formats)


class EncoderLaunches(RowLaunches):
    """Makes the launches of one model over its arrays. Reads no weights."""

    def __init__(
        self, kernels: Kernels, spec: EncoderSpec, weights: EncoderWeights, arrays: EncoderArrays
    ) -> None:
        counts = Array(arrays.table("counts"), (1,), arrays.tables.dtype)
        super().__init__(kernels, counts, spec.norm, spec.norm_eps)
        self._spec = spec
        self._weights = weights
        self._arrays = arrays

    def program(self, key: EncoderKey) -> Program:
        """Stage 0 is the embeddings', stage i + 1 that of layer i, and the last one makes the result."""
        layers = [self._layer(number, key) for number in range(self._spec.num_layers)]
        return Program(self._kernels.driver, [self._embed(key.rows), *layers, self._finish(key)])

    def _embed(self, rows: int) -> list[KernelLaunch]:
        arrays, spec, weights = self._arrays, self._spec, self._weights
        size = weights.words.shape[1]
        arguments = Embed(
            table=weights.words.array.address,
            tokens=arrays.table("tokens"),
            out=arrays.embedded.address,
            counts=self._counts.address,
            type_table=_address_of(weights.types),
            types=arrays.table("types"),
            position_table=_address_of(weights.positions),
            positions=arrays.table("positions"),
            size=size,
            group=size,
            table_kind=WEIGHT_KINDS[weights.words.dtype],
            first_position=spec.position_offset,
            scale=1.0,
        )
        launches = [self._kernels.launch(ROWS, "embed", (rows,), THREADS, arguments)]
        if weights.norm is not None:
            launches.append(self._layer_norm(weights.norm, arrays.embedded, arrays.embedded, rows))
        if weights.projection is not None:
            launches += self._product(weights.projection, arrays.embedded, arrays.x, rows)
        return launches

    def _layer(self, number: int, key: EncoderKey) -> list[KernelLaunch]:
        layer, arrays, spec, rows = self._weights.layers[number], self._arrays, self._spec, key.rows
        x, normed = arrays.x, arrays.normed if spec.pre_norm else arrays.x
        to_attention, to_mlp = (
            [] if norm is None else [self._layer_norm(norm, x, normed, rows)]
            for norm in (layer.attention_norm, layer.mlp_norm)
        )
        attention = [
            *self._product(layer.qkv, normed if to_attention else x, arrays.heads, rows),
            self._place_heads(number, rows),
            *self._attention(number, key),
            *self._product(layer.output, arrays.attended, x, rows, Mode.ADD),
        ]
        mlp = [
            *self._product(layer.up, normed, arrays.inner, rows),
            self._gate(arrays.inner, arrays.active, rows, spec.activation, is_open=not spec.gated),
            *self._product(layer.down, arrays.active, x, rows, Mode.ADD),
        ]
        if spec.pre_norm:
            return [*to_attention, *attention, *to_mlp, *mlp]
        return [*attention, *to_attention, *mlp, *to_mlp]

    def _finish(self, key: EncoderKey) -> list[KernelLaunch]:
        """From the states of all rows to a row for each text: its embedding in fp32, or its scores."""
        arrays, spec, weights, texts = self._arrays, self._spec, self._weights, key.texts
        launches: list[KernelLaunch] = []
        if weights.final_norm is not None:
            launches.append(self._layer_norm(weights.final_norm, arrays.x, arrays.x, key.rows))
        pooling = PoolRows(
            x=arrays.x.address,
            out=arrays.states.address,
            starts=arrays.table("starts"),
            lengths=arrays.table("lengths"),
            counts=self._counts.address,
            size=spec.hidden_size,
            kind=_POOLINGS.index(spec.pooling),
            is_narrow=arrays.states.dtype is not DType.F32,
        )
        grid = texts, -(-spec.hidden_size // THREADS)
        launches.append(self._kernels.launch(ROWS, "pool_rows", grid, THREADS, pooling))
        if not spec.num_labels:
            return launches
        assert weights.dense is not None
        assert weights.scores is not None
        dense, of_texts = arrays.dense, Output.LOGITS
        launches += self._product(weights.dense, arrays.states, dense, texts, output=of_texts)
        launches.append(self._gate(dense, dense, texts, spec.head_activation, is_open=True, output=of_texts))
        if weights.head_norm is not None:
            launches.append(self._layer_norm(weights.head_norm, dense, dense, texts, of_texts))
        launches += self._product(weights.scores, dense, arrays.scores, texts, Mode.STORE_WIDE, of_texts)
        return launches

    def _layer_norm(
        self, norm: LayerNormWeights, x: Array, out: Array, num_rows: int, output: Output = Output.ROWS
    ) -> KernelLaunch:
        return self._norm(norm.weight, x, out, num_rows, bias=norm.bias, output=output)

    def _place_heads(self, number: int, rows: int) -> KernelLaunch:
        """Turn queries and keys, and put keys and values in their rows."""
        spec, arrays = self._spec, self._arrays
        is_local = spec.windows[number] is not None
        rotary = spec.local_rotary if is_local else spec.rotary
        cos, sin = arrays.angles[is_local]
        arguments = PlaceHeads(
            heads=arrays.heads.address,
            cos=cos.address if rotary is not None else 0,
            sin=sin.address if rotary is not None else 0,
            keys=arrays.keys.address,
            values=arrays.values.address,
            positions=arrays.table("positions"),
            slots=arrays.table("slots"),
            counts=self._counts.address,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_heads,
            head_dim=spec.head_dim,
            rotary_dim=rotary.dim if rotary is not None else 0,
            wide_turns=True,
        )
        grid = rows, -(-3 * spec.num_heads // HEADS_PER_BLOCK)
        return self._kernels.launch(ROWS, "place_heads", grid, HEAD_THREADS, arguments)

    def _attention(self, number: int, key: EncoderKey) -> list[KernelLaunch]:
        spec, arrays = self._spec, self._arrays
        names = "items", "merges", "starts", "lengths", "contexts", "table_starts", "blocks"
        sides = SEES_ALL if spec.windows[number] is None else spec.windows[number] or 0
        arguments = Attention(
            heads=arrays.heads.address,
            keys=arrays.keys.address,
            values=arrays.values.address,
            out=arrays.attended.address,
            **{name: arrays.table(name) for name in names},
            counts=self._counts.address,
            bias=arrays.bias.address if spec.position_bias is not None else 0,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_heads,
            row_heads=3 * spec.num_heads,
            head_dim=spec.head_dim,
            value_dim=spec.head_dim,
            block_size=1,
            window=sides + 1,
            ahead=sides,
            reach=arrays.reach,
            scale=spec.attention_scale * math.log2(math.e),
        )
        return attention_launches(
            self._kernels, arguments, many=key.many, num_items=key.num_items, num_merges=0
        )


def _address_of(tensor: Tensor | None) -> int:
    return 0 if tensor is None else int(tensor.array.address)
