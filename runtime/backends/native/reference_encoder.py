"""Encoders in numpy, by the operations of `reference.py`: as `reference_models.py` has decoders."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...dtypes import DType
from ...models.matrices import EncoderLayerWeights, EncoderWeights, LayerNormWeights, StoredProjection
from ...models.relative_positions import disentangled_buckets
from ...models.rotary import Rotary
from ...models.spec import EncoderSpec
from . import reference
from .distances import DistanceTables
from .operations import check_starts
from .pooling import chosen_rows, normalize, pooled
from .pools import check_ids
from .reference import Floats
from .turns import TurnTable

if TYPE_CHECKING:
    from ...models.executor import TextBatch
    from ...models.matrices import Projection, Tensor


class ReferenceEncoder:
    """An `EncoderExecutor`. Its rows are fp32 arrays."""

    runs_layers_together = False

    def __init__(self, spec: EncoderSpec, weights: EncoderWeights) -> None:
        self._spec = spec
        self._weights = weights
        self._distances = DistanceTables(spec, weights)

    def embed(self, batch: TextBatch) -> Floats:
        spec, weights = self._spec, self._weights
        check_starts(batch.starts, len(batch.tokens))
        x = self._rows_of(weights.words, batch.tokens)
        if weights.types is not None:
            types = np.zeros(1, np.int64) if batch.types is None else batch.types
            x = self._sum(x, self._rows_of(weights.types, types))
        if weights.positions is not None:
            lengths = np.diff(batch.starts)
            places = np.arange(len(batch.tokens)) - np.repeat(batch.starts[:-1], lengths)
            x = self._sum(x, self._rows_of(weights.positions, places + spec.position_offset))
        return self._norm(x, weights.norm)

    def layers(self, batch: TextBatch, first: int, end: int, x: Floats) -> Floats:
        spec = self._spec
        for index, layer in enumerate(self._weights.layers[first:end], first):
            if spec.pre_norm:
                normed = x if layer.attention_norm is None else self._norm(x, layer.attention_norm)
                x = self._sum(x, self._attend(batch, index, normed))
                x = self._sum(x, self._mlp(layer, self._norm(x, layer.mlp_norm)))
            else:
                assert layer.attention_norm is not None
                x = self._norm(self._sum(x, self._attend(batch, index, x)), layer.attention_norm)
                x = self._norm(self._sum(x, self._mlp(layer, x)), layer.mlp_norm)
        return x

    def finish(self, batch: TextBatch, x: Floats) -> Floats:
        spec, weights, starts = self._spec, self._weights, batch.starts
        if weights.final_norm is not None:
            x = self._norm(x, weights.final_norm)
        rows = chosen_rows(starts, spec.pooling)
        result = pooled(x, starts, spec.pooling, DType.F32) if rows is None else x[rows]
        if spec.num_labels:
            assert weights.dense is not None
            assert weights.scores is not None
            dense = _project(reference.rounded(result, spec.dtype), weights.dense, spec.dtype)
            dense = reference.activate(dense, None, spec.head_activation, spec.dtype)
            if weights.head_norm is not None:
                dense = self._norm(dense, weights.head_norm)
            return _project(dense, weights.scores, DType.F32)
        for matrix, layer in zip(weights.sentence, spec.dense, strict=True):
            result = _project(result, StoredProjection((matrix,)), DType.F32)
            if layer.activation is not None:
                result = reference.activate(result, None, layer.activation, DType.F32)
        if spec.normalize:
            normalize(result)
        return result

    def _attend(self, batch: TextBatch, index: int, x: Floats) -> Floats:
        """The attention of x (T, hidden_size) to itself, after the output projection."""
        spec, layer = self._spec, self._weights.layers[index]
        qkv = _project(x, layer.qkv, spec.dtype).reshape(len(x), 3, spec.num_heads, spec.head_dim)
        attended = np.empty_like(qkv[:, 0])
        window = spec.windows[index]
        rotary = spec.rotary if window is None else spec.local_rotary
        positions = self._positions(layer)
        for begin, end in zip(batch.starts[:-1], batch.starts[1:], strict=True):
            queries, keys, values = (qkv[begin:end, part] for part in range(3))
            if rotary is not None:
                queries, keys = (_turned(heads, rotary, spec.dtype) for heads in (queries, keys))
            for place in range(end - begin):
                seen = (0, int(end - begin))
                if window is not None:
                    seen = (max(0, place - window), min(seen[1], place + window + 1))
                attended[begin + place] = reference.attention(
                    queries[place],
                    keys.transpose(1, 0, 2),
                    values.transpose(1, 0, 2),
                    seen,
                    spec.attention_scale,
                    spec.dtype,
                    more=self._of_distances(place, queries[place], keys, positions),
                )
        return _project(attended.reshape(len(x), -1), layer.output, spec.dtype)

    def _of_distances(
        self, place: int, query: Floats, keys: Floats, positions: tuple[Floats, Floats] | None
    ) -> Floats | None:
        """The terms of a row's scaled scores that depend on its distances from all keys: (num_heads, num_keys)."""
        spec, reach = self._spec, len(keys) - 1
        first = reach - place
        if spec.position_bias is not None:
            tables = self._distances.up_to(reach)
            assert tables.bias is not None
            first += tables.reach - reach
            return tables.bias[:, first : first + len(keys)]
        if spec.disentangled is None or positions is None:
            return None
        buckets = disentangled_buckets(spec.disentangled, reach)[first : first + len(keys)]
        its_queries, its_keys = (part[buckets] for part in positions)  # (num_keys, heads, head_dim)
        sums = np.einsum("hd,khd->hk", query, its_keys) + np.einsum("khd,khd->hk", keys, its_queries)
        return np.asarray(sums * np.float32(spec.attention_scale), np.float32)

    def _positions(self, layer: EncoderLayerWeights) -> tuple[Floats, Floats] | None:
        """Queries and keys of disentangled positions, (2 span, heads, head_dim) each."""
        spec, weights = self._spec, self._weights
        if spec.disentangled is None:
            return None
        assert weights.relative is not None
        table = self._rows_of(weights.relative, np.arange(2 * spec.disentangled.span))
        if weights.relative_norm is not None:
            table = self._norm(table, weights.relative_norm)
        rows = _project(table, layer.qkv, spec.dtype).reshape(len(table), 3, spec.num_heads, -1)
        return rows[:, 0], rows[:, 1]

    def _mlp(self, layer: EncoderLayerWeights, x: Floats) -> Floats:
        spec = self._spec
        inner = _project(x, layer.up, spec.dtype)
        gate, up = np.split(inner, 2, axis=1) if spec.gated else (inner, None)
        return _project(reference.activate(gate, up, spec.activation, spec.dtype), layer.down, spec.dtype)

    def _rows_of(self, table: Tensor, numbers: np.ndarray) -> Floats:
        check_ids(numbers, len(table.array), "a token or a position")
        return reference.embed(table, None, numbers, self._spec.dtype)

    def _sum(self, x: Floats, more: Floats) -> Floats:
        return reference.rounded(x + more, self._spec.dtype)

    def _norm(self, x: Floats, norm: LayerNormWeights) -> Floats:
        dtype = self._spec.dtype
        weight = reference.vector(norm.weight, dtype)
        bias = np.zeros_like(weight) if norm.bias is None else reference.vector(norm.bias, dtype)
        return reference.layer_norm(x, weight, bias, self._spec.norm_eps, dtype)


def _turned(heads: Floats, rotary: Rotary, dtype: DType) -> Floats:
    """heads (L, heads, head_dim) by their places, computed in fp32 and rounded once."""
    turns = TurnTable(rotary, dtype).up_to(len(heads))[: len(heads)]
    return reference.turn(heads, turns, dtype, DType.F32)


def _project(x: Floats, projection: Projection, dtype: DType) -> Floats:
    return np.concatenate([reference.product(x, matrix, dtype) for matrix in projection.matrices()], axis=1)
