"""The native executor of encoders and classifiers, over adjacent texts without padding.

Like the decoder's executor (decoder.py) unless stated otherwise.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ...models.encoder_weights import EncoderWeights
from ...models.executor import SIZES, Accepts, Floats, TextBatch, any_of, none_of, one_of, refusal_of
from ...models.fields import Norm
from ...models.matrices import LayerNormWeights, StoredProjection, Tensor
from ...models.pooling import chosen_rows, normalize, pooled
from ...models.relative_positions import DistanceTables
from ...models.rotary import TurnTable
from ...models.spec import Activation, EncoderSpec, Pooling
from ...tensors import DType, from_float32, to_float32
from . import arrays, records
from .operations import ACTIVATIONS, MAX_HEAD_DIM, NORMS, Operations, check_starts
from .pools import check_ids
from .products import Products
from .weights import ProjectionParts, refusal_of_tensors, vector_of

if TYPE_CHECKING:
    from ....loader.native.library import Library
    from ...models.matrices import Projection
    from .arrays import Array

NAME = "native"

IMPLEMENTED: Mapping[str, Accepts] = {
    **SIZES,
    **any_of(
        "gated pre_norm embedding_size embedding_norm final_norm norm_bias qkv_bias output_bias mlp_bias "
        "max_positions position_offset type_vocab_size windows rotary rotary.dim rotary.frequencies "
        "rotary.factor local_rotary local_rotary.dim local_rotary.frequencies local_rotary.factor "
        "position_bias position_bias.num_buckets position_bias.max_distance disentangled disentangled.span "
        "disentangled.max_distance normalize num_labels head_bias head_norm output_norms head_norms "
        "turned_parts is_bounded"
    ),
    **none_of("rotary.interleaved local_rotary.interleaved"),
    "dtype": one_of(DType.BF16, DType.F32),
    "norm": one_of(Norm.LAYER),  # of texts: towers may have RMS norms
    "head_dim": lambda head_dim: head_dim <= MAX_HEAD_DIM,
    "activation": one_of(*ACTIVATIONS),
    "head_activation": one_of(*ACTIVATIONS),
    "pooling": one_of(*Pooling),
    "dense": lambda dense: all(layer.activation in (None, *ACTIVATIONS) for layer in dense),
}


def refusal(spec: EncoderSpec, weights: EncoderWeights) -> str | None:
    """Why the core cannot compute this model; None where it can."""
    return refusal_of(spec, IMPLEMENTED, NAME) or refusal_of_tensors([weights.words])


class NativeEncoder:
    """An `EncoderExecutor`. One thread at a time."""

    name = NAME
    runs_layers_together = True

    def __init__(self, spec: EncoderSpec, weights: EncoderWeights, library: Library) -> None:
        """Reads no tensor's content. `refusal` must have found nothing."""
        self._spec = spec
        self._weights = weights
        self._products = Products(library)
        self.operations = Operations(library)
        self._scratch_bytes = library.functions.tn_encoder_scratch_bytes
        self._scratch_bytes.argtypes = [ctypes.POINTER(records.EncoderRecord), ctypes.c_int64]
        self._scratch_bytes.restype = ctypes.c_int64
        self._scratch = arrays.NativeScratch()
        self._no_bias = Tensor(DType.F32, np.zeros(spec.hidden_size, np.float32))
        self._distances = DistanceTables(spec, weights)
        self._turns = None if spec.rotary is None else TurnTable(spec.rotary, spec.dtype)
        self._local_turns = None if spec.local_rotary is None else TurnTable(spec.local_rotary, spec.dtype)
        self._layers = (records.EncoderLayerRecord * spec.num_layers)()
        self._parts = [self._fill(index) for index in range(spec.num_layers)]
        self._bounds: list[Floats | None] = [None] * spec.num_layers  # once they are read
        self._positions: list[Array | None] = [
            None
        ] * spec.num_layers  # of disentangled positions, once computed
        self._record = records.EncoderRecord(
            layers=self._layers,
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            num_heads=spec.num_heads,
            head_dim=spec.head_dim,
            rotary_dim=0 if spec.rotary is None else spec.rotary.dim,
            norm_eps=spec.norm_eps,
            attention_scale=spec.attention_scale,
            activation=ACTIVATIONS[spec.activation],
            dtype=arrays.dtype_of(np.empty(0, spec.dtype.numpy)),
            pre_norm=spec.pre_norm,
            gated=spec.gated,
            norm=NORMS[spec.norm],
            turned_parts=spec.turned_parts,
            bounded=spec.is_bounded,
        )

    def embed(self, batch: TextBatch) -> Array:
        """norm(word + type + position) of each token, or its projection, (T, hidden_size)."""
        weights, operations = self._weights, self.operations
        check_starts(batch.starts, len(batch.tokens))
        x = self.rows_of(weights.words, batch.tokens)
        if weights.types is not None:
            types = np.zeros(1, np.int64) if batch.types is None else batch.types
            operations.add(x, self.rows_of(weights.types, types))
        if weights.positions is not None:
            places = _places_of(batch) + self._spec.position_offset
            operations.add(x, self.rows_of(weights.positions, places))
        if weights.norm is not None:
            x = self.norm(x, weights.norm)
        return x if weights.projection is None else self.product(weights.projection, x, x.dtype)

    def layers(
        self, batch: TextBatch, first: int, end: int, x: Array, own_turns: Floats | None = None
    ) -> Array:
        """x (T, hidden_size) through the layers [first, end), in place. `own_turns` (T, rotary_dim), cosines and then
        sines, turn each row in place of those of its position.
        """
        spec, num_rows = self._spec, len(batch.tokens)
        check_starts(batch.starts, num_rows)
        if x.shape != (num_rows, spec.hidden_size) or x.dtype != spec.dtype.numpy:
            raise ValueError(f"x is {x.shape} {x.dtype}, and the batch has {num_rows} rows")
        if not 0 <= first <= end <= spec.num_layers:
            raise ValueError(f"there are no layers [{first}, {end})")
        arrays.check_contiguous(x, "x")
        for index in range(first, end):
            if spec.disentangled is not None:
                self._compute_positions(index)
            if spec.is_bounded:
                self._read_bounds(index)
        longest = int(np.diff(batch.starts).max())
        local_turns = None if self._local_turns is None else self._local_turns.up_to(longest)
        if own_turns is None:
            turns, places = None if self._turns is None else self._turns.up_to(longest), _places_of(batch)
        else:
            if own_turns.shape != (num_rows, self._record.rotary_dim) or own_turns.dtype != np.float32:
                raise ValueError(f"{num_rows} rows cannot turn by {own_turns.shape} {own_turns.dtype}")
            arrays.check_contiguous(own_turns, "own_turns")
            turns, places = own_turns, np.arange(num_rows, dtype=np.int64)
        distances = self._distances.up_to(longest - 1)
        num_bytes = self._scratch_bytes_of(num_rows)
        args = records.EncoderStepArgs(
            model=ctypes.pointer(self._record),
            starts=arrays.address(batch.starts),
            turns=arrays.address_or_null(turns),
            local_turns=arrays.address_or_null(local_turns),
            turn=arrays.address(places),
            bias=arrays.address_or_null(distances.bias),
            buckets=arrays.address_or_null(distances.buckets),
            x=arrays.address(x),
            scratch=self._scratch.address_of(num_bytes),
            reach=distances.reach,
            num_texts=len(batch.starts) - 1,
            num_rows=num_rows,
            first=first,
            end=end,
        )
        self.operations.call("tn_encoder_step", args)
        return x

    def missing_bytes(self, num_rows: int) -> int:
        """The memory that `layers` has still to take for `num_rows`, besides x."""
        return self._scratch.missing_bytes(self._scratch_bytes_of(num_rows))

    def _scratch_bytes_of(self, num_rows: int) -> int:
        return int(self._scratch_bytes(ctypes.byref(self._record), num_rows))

    def finish(self, batch: TextBatch, x: Array) -> Floats:
        """(N, spec.num_columns) fp32: pooled states and what comes after them, or a classifier's scores."""
        spec, starts = self._spec, batch.starts
        rows = chosen_rows(starts, spec.pooling)
        if rows is not None:  # of the others nothing is needed
            x, starts = np.ascontiguousarray(x[rows]), np.arange(len(starts), dtype=np.int64)
        if self._weights.final_norm is not None:
            x = self.norm(x, self._weights.final_norm)
        if spec.num_labels and rows is not None:
            return self._scores(x)
        if spec.pooling is Pooling.MEAN:
            result = self.operations.mean(x, starts)
        else:
            result = pooled(x, starts, spec.pooling, spec.dtype)
        if spec.num_labels:
            return self._scores(from_float32(result, spec.dtype))
        for matrix, layer in zip(self._weights.sentence, spec.dense, strict=True):
            result = self.product(StoredProjection((matrix,)), result, result.dtype)
            if layer.activation is not None:
                self._activate(result, layer.activation)
        if spec.normalize:
            normalize(result)
        return result

    def _scores(self, states: Array) -> Floats:
        """states (N, hidden_size) → (N, num_labels), not rounded to the spec's dtype."""
        weights = self._weights
        assert weights.dense is not None
        assert weights.scores is not None
        dense = self.product(weights.dense, states, states.dtype)
        self._activate(dense, self._spec.head_activation)
        if weights.head_norm is not None:
            self.norm(dense, weights.head_norm)
        return self.product(weights.scores, dense, np.dtype(np.float32))

    def _activate(self, rows: Array, activation: Activation) -> None:
        self.operations.activate(rows, None, rows, ACTIVATIONS[activation])

    def product(self, projection: Projection, x: Array, dtype: np.dtype[np.generic]) -> Array:
        """x times all matrices of the projection, side by side."""
        parts = [
            self._products.linear(x, weight, np.empty((len(x), weight.num_out), dtype))
            for weight in ProjectionParts(projection.matrices()).weights
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def norm(self, x: Array, norm: LayerNormWeights) -> Array:
        """In place."""
        bias = (norm.bias or self._no_bias) if self._spec.norm is Norm.LAYER else None
        return self.operations.norm(x, x, norm.weight, bias, self._spec.norm_eps, self._spec.norm)

    def rows_of(self, table: Tensor, numbers: Array) -> Array:
        check_ids(numbers, len(table.array), "a token, a type or a position")
        out = np.empty((len(numbers), table.array.shape[1]), self._spec.dtype.numpy)
        return self.operations.embed(table.array, None, numbers, out)

    def _compute_positions(self, index: int) -> None:
        """Queries and keys of the layer's disentangled positions, by its projections; once, behind its gate."""
        if self._positions[index] is not None:
            return
        spec, weights = self._spec, self._weights
        assert weights.relative is not None
        every = np.arange(len(weights.relative.array), dtype=np.int64)
        table = self.rows_of(weights.relative, every)
        if weights.relative_norm is not None:
            self.norm(table, weights.relative_norm)
        layer = weights.layers[index]
        rows = self.product(layer.position_qk or layer.qkv, table, table.dtype)
        queries, keys = (rows[:, part * spec.hidden_size :][:, : spec.hidden_size] for part in (0, 1))
        both = self._positions[index] = np.stack((queries, keys))  # (2, buckets, hidden_size)
        self._layers[index].position_queries = arrays.address(both)
        self._layers[index].position_keys = arrays.address(both) + both[0].nbytes

    def _read_bounds(self, index: int) -> None:
        """Those of the layer's products, behind its gate: a few numbers, which the core reads at their final size."""
        if self._bounds[index] is not None:
            return
        own = self._weights.layers[index].bounds
        numbers = np.array([to_float32(each.array, each.dtype).item() for each in own], np.float32)
        self._layers[index].bounds = arrays.address(numbers)
        self._bounds[index] = numbers

    def _fill(self, index: int) -> tuple[ProjectionParts, ...]:
        """The layer's record, and what it refers to."""
        layer = self._weights.layers[index]
        parts = tuple(
            ProjectionParts(each.matrices()) for each in (layer.qkv, layer.output, layer.up, layer.down)
        )
        vectors = []
        for norm in (layer.attention_norm, layer.mlp_norm):
            weight, bias = (None, None) if norm is None else (norm.weight, norm.bias or self._no_bias)
            vectors += [vector_of(weight), vector_of(bias)]
        more = ("attention_output_norm", "mlp_output_norm", "query_norm", "key_norm", "value_norm")
        self._layers[index] = records.EncoderLayerRecord(
            *(part.record for part in parts),
            *vectors,
            window=self._spec.windows[index] or 0,
            **{name: vector_of(getattr(layer, name)) for name in more},
        )
        return parts


def _places_of(batch: TextBatch) -> Array:
    """(T,): each token's place in its text."""
    lengths = np.diff(batch.starts)
    return np.arange(len(batch.tokens), dtype=np.int64) - np.repeat(batch.starts[:-1], lengths)
