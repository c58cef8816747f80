"""Decoders and encoders in numpy, by the operations of `reference.py`: slow, and needing nothing but numpy.

They take what the native executors take, and stand in for them where there is no library for the processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...dtypes import DType, from_float32, to_float32
from ...models.matrices import DecoderWeights, EncoderWeights, LayerNormWeights
from ...models.spec import DecoderSpec, EncoderSpec, Pooling
from ...step.batch import Int64s, SequenceSpan, StepBatch
from . import reference
from .operations import check_starts
from .pools import Pool, Spans, check_ids
from .reference import Floats
from .turns import TurnTable

if TYPE_CHECKING:
    from ...models.executor import TextBatch
    from ...models.matrices import Projection

_SMALLEST_NORM = np.float32(1e-12)


class ReferenceDecoder:
    """An `Executor`, but for making pools. Its rows are fp32 arrays."""

    runs_layers_together = False

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights) -> None:
        self._spec = spec
        self._weights = weights
        self._turns = TurnTable(spec.rotary, spec.dtype)

    def embed(self, batch: StepBatch) -> Floats:
        table = self._weights.embeddings
        check_ids(batch.tokens, len(table.weight.array), "a token")
        return reference.embed(table.weight, table.scale, batch.tokens, self._spec.dtype)

    def begin(self, batch: StepBatch, kv: Any) -> tuple[StepBatch, Pool, Floats]:
        pool = Pool.of(kv)
        Spans(batch.spans, len(batch.tokens), pool)
        check_ids(batch.slots, pool.num_slots, "a slot")
        end = max((span.context_len for span in batch.spans), default=0)
        check_ids(batch.positions, end, "a position")
        return batch, pool, self._turns.up_to(end)[batch.positions]

    def layers(self, step: tuple[StepBatch, Pool, Floats], first: int, end: int, x: Floats) -> Floats:
        spec = self._spec
        for index in range(first, end):
            layer = self._weights.layers[index]
            normed = reference.rms_norm(
                x, reference.vector(layer.attention_norm, spec.dtype), spec.norm_eps, spec.dtype
            )
            attended = self._attend(index, step, _project(normed, layer.qkv, spec.dtype))
            x = self._sum(x, _project(attended, layer.output, spec.dtype))
            normed = reference.rms_norm(
                x, reference.vector(layer.mlp_norm, spec.dtype), spec.norm_eps, spec.dtype
            )
            gate, up = np.split(_project(normed, layer.gate_up, spec.dtype), 2, axis=1)
            inner = reference.activate(gate, up, spec.activation, spec.dtype)
            x = self._sum(x, _project(inner, layer.down, spec.dtype))
        return x

    def logits(self, x: Floats, rows: Int64s) -> Floats:
        spec, weights = self._spec, self._weights
        norm = reference.vector(weights.norm, spec.dtype)
        normed = reference.rms_norm(x[rows], norm, spec.norm_eps, spec.dtype)
        return _project(normed, weights.head, DType.F32)

    def join(self, parts: Sequence[Floats]) -> Floats:
        return np.concatenate(parts)

    def select(self, x: Floats, rows: Int64s) -> Floats:
        return x[rows]

    def _sum(self, x: Floats, more: Floats) -> Floats:
        return reference.rounded(x + more, self._spec.dtype)

    def _attend(self, index: int, step: tuple[StepBatch, Pool, Floats], qkv: Floats) -> Floats:
        """Writes the rows' keys and values; qkv (T, …) → (T, num_heads * head_dim)."""
        spec, (batch, pool, turns) = self._spec, step
        heads = qkv.reshape(len(qkv), -1, spec.head_dim)
        ends = (spec.num_heads, spec.num_heads + spec.num_kv_heads)
        queries, keys, values = np.split(heads, ends, axis=1)
        layer = self._weights.layers[index]
        if layer.query_norm is not None and layer.key_norm is not None:
            norms = [reference.vector(norm, spec.dtype) for norm in (layer.query_norm, layer.key_norm)]
            queries = reference.rms_norm(queries, norms[0], spec.norm_eps, spec.dtype)
            keys = reference.rms_norm(keys, norms[1], spec.norm_eps, spec.dtype)
        queries, keys = (reference.turn(each, turns, spec.dtype) for each in (queries, keys))
        _write(pool, index, batch.slots, np.stack((keys, values)), spec.dtype)
        out = np.empty_like(queries)
        for span in batch.spans:
            self._attend_span(index, pool, span, queries, out)
        return out.reshape(len(out), -1)

    def _attend_span(self, index: int, pool: Pool, span: SequenceSpan, queries: Floats, out: Floats) -> None:
        spec = self._spec
        tokens = np.arange(span.context_len)
        slots = np.array(span.blocks)[tokens // pool.block_size] * pool.block_size + tokens % pool.block_size
        keys, values = _read(pool, index, slots, spec.dtype)
        window = spec.windows[index] or span.context_len
        for row in range(span.start, span.start + span.length):
            end = span.context_len - span.length + row - span.start + 1
            seen = (max(0, end - window), end)
            out[row] = reference.attention(queries[row], keys, values, seen, spec.attention_scale, spec.dtype)


class ReferenceEncoder:
    """An `EncoderExecutor`. Its rows are fp32 arrays."""

    runs_layers_together = False

    def __init__(self, spec: EncoderSpec, weights: EncoderWeights) -> None:
        self._spec = spec
        self._weights = weights

    def embed(self, batch: TextBatch) -> Floats:
        spec, weights = self._spec, self._weights
        check_starts(batch.starts, len(batch.tokens))
        lengths = np.diff(batch.starts)
        positions = np.arange(len(batch.tokens)) - np.repeat(batch.starts[:-1], lengths)
        positions += spec.position_offset
        check_ids(batch.tokens, len(weights.words.array), "a token")
        check_ids(positions, len(weights.positions.array), "a position")
        x = reference.embed(weights.words, None, batch.tokens, spec.dtype)
        for more in (
            reference.embed(weights.types, None, np.zeros(1, np.int64), spec.dtype),
            reference.embed(weights.positions, None, positions, spec.dtype),
        ):
            x = reference.rounded(x + more, spec.dtype)
        return self._norm(x, weights.norm)

    def layers(self, batch: TextBatch, first: int, end: int, x: Floats) -> Floats:
        spec = self._spec
        for layer in self._weights.layers[first:end]:
            qkv = _project(x, layer.qkv, spec.dtype).reshape(len(x), 3, spec.num_heads, spec.head_dim)
            attended = np.empty_like(qkv[:, 0])
            for begin, stop in zip(batch.starts[:-1], batch.starts[1:], strict=True):
                keys, values = (qkv[begin:stop, part].transpose(1, 0, 2) for part in (1, 2))
                for row in range(begin, stop):
                    attended[row] = reference.attention(
                        qkv[row, 0], keys, values, (0, stop - begin), spec.attention_scale, spec.dtype
                    )
            more = _project(attended.reshape(len(x), -1), layer.output, spec.dtype)
            x = self._norm(reference.rounded(x + more, spec.dtype), layer.attention_norm)
            inner = reference.activate(_project(x, layer.up, spec.dtype), None, spec.activation, spec.dtype)
            more = _project(inner, layer.down, spec.dtype)
            x = self._norm(reference.rounded(x + more, spec.dtype), layer.mlp_norm)
        return x

    def finish(self, batch: TextBatch, x: Floats) -> Floats:
        spec, weights = self._spec, self._weights
        if spec.num_labels:
            assert weights.dense is not None
            assert weights.scores is not None
            dense = _project(x[batch.starts[:-1]], weights.dense, spec.dtype)
            return _project(reference.activate(dense, None, None, spec.dtype), weights.scores, DType.F32)
        if spec.pooling is Pooling.CLS:
            pooled = x[batch.starts[:-1]]
        else:
            ranges = zip(batch.starts[:-1], batch.starts[1:], strict=True)
            pooled = np.stack([x[begin:end].sum(0) / np.float32(end - begin) for begin, end in ranges])
        if spec.normalize:
            norms = [max(np.sqrt((row * row).sum()), _SMALLEST_NORM) for row in pooled]
            pooled = pooled / np.array(norms, np.float32)[:, None]
        return pooled

    def _norm(self, x: Floats, norm: LayerNormWeights) -> Floats:
        weight, bias = (reference.vector(each, self._spec.dtype) for each in (norm.weight, norm.bias))
        return reference.layer_norm(x, weight, bias, self._spec.norm_eps, self._spec.dtype)


def _write(pool: Pool, layer: int, slots: Int64s, heads: Floats, dtype: DType) -> None:
    """heads (2, T, num_kv_heads, head_dim): keys, then values."""
    by_head = heads.transpose(0, 2, 1, 3)
    if pool.scales is None:
        pool.data[layer][:, :, slots] = from_float32(by_head, dtype)
        return
    codes, scales = reference.to_codes(by_head, dtype)
    pool.data[layer][:, :, slots] = codes
    pool.scales[layer][:, :, slots] = from_float32(scales, dtype)


def _read(pool: Pool, layer: int, slots: Int64s, dtype: DType) -> tuple[Floats, Floats]:
    """Keys and values, (num_kv_heads, len(slots), head_dim) each."""
    stored = pool.data[layer][:, :, slots]
    if pool.scales is None:
        keys, values = to_float32(stored, dtype)
    else:
        scales = to_float32(pool.scales[layer][:, :, slots], dtype)
        keys, values = reference.of_codes(stored, scales, dtype)
    return keys, values


def _project(x: Floats, projection: Projection, dtype: DType) -> Floats:
    return np.concatenate([reference.product(x, matrix, dtype) for matrix in projection.matrices()], axis=1)
