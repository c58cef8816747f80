"""Decoders in numpy, by the operations of `reference.py`: slow, and needing nothing but numpy.

They take what the native executors take, and stand in for them where there is no library for the processor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...dtypes import DType, from_float32, to_float32
from ...models.adapter import Place
from ...models.decoder_config import LayerRotary
from ...models.matrices import DecoderLayerWeights, DecoderWeights, ExpertWeights
from ...models.spec import DecoderSpec
from ...step.batch import Int64s, SequenceSpan, StepBatch
from . import reference
from .pools import Pool, Spans, check_ids
from .reference import Floats
from .turns import turn_tables

if TYPE_CHECKING:
    from ...models.matrices import Projection, Tensor

    ReferenceStep = tuple[StepBatch, Pool, dict[LayerRotary, Floats]]

Adapt = Callable[[Place, Floats, Floats], Floats]  # of a projection's input and output: the output, adapted


def as_it_is(place: Place, x: Floats, y: Floats) -> Floats:
    """Of rows without adapters."""
    return y


class ReferenceDecoder:
    """An `Executor`, but for making pools. Its rows are fp32 arrays."""

    runs_layers_together = False
    takes_adapters = True
    routes_apart = False

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights) -> None:
        self._spec = spec
        self._weights = weights
        self._turns, self._local_turns = turn_tables(spec)

    def embed(self, batch: StepBatch) -> Floats:
        table = self._weights.embeddings
        check_ids(batch.tokens, len(table.weight.array), "a token")
        spec = self._spec
        return reference.embed(table.weight, table.scale, batch.tokens, spec.dtype, spec.embedding_scale)

    def begin(self, batch: StepBatch, kv: Any) -> ReferenceStep:
        pool = Pool.of(kv)
        Spans(batch.spans, len(batch.tokens), pool)
        check_ids(batch.slots, pool.num_slots, "a slot")
        end = max((span.context_len for span in batch.spans), default=0)
        check_ids(batch.positions, end, "a position")
        turns = {LayerRotary.MAIN: self._turns.up_to(end)[batch.positions]}
        if self._local_turns is not None:
            turns[LayerRotary.LOCAL] = self._local_turns.up_to(end)[batch.positions]
        return batch, pool, turns

    def layers(self, step: ReferenceStep, first: int, end: int, x: Floats) -> Floats:
        spec = self._spec
        for index in range(first, end):
            layer = self._weights.layers[index]
            normed = self._norm(x, layer.attention_norm)
            at = partial(_adapt, step[0], index, spec.dtype)
            attended = self._attend(
                index, step, at(Place.QKV, normed, self._project(normed, layer.qkv, spec.dtype))
            )
            more = at(Place.OUTPUT, attended, self._project(attended, layer.output, spec.dtype))
            x = self._sum(x, self._norm(more, layer.attention_output_norm))
            if not spec.is_parallel:
                normed = self._norm(x, layer.mlp_norm)
            x = self._sum(x, self._norm(self._mlp(layer, normed, at), layer.mlp_output_norm))
        return x

    def _mlp(self, layer: DecoderLayerWeights | ExpertWeights, x: Floats, at: Adapt = as_it_is) -> Floats:
        dtype = self._spec.dtype
        if layer.gate_up is None or layer.down is None:
            assert isinstance(layer, DecoderLayerWeights)
            return self._mixture(layer, x)
        gate, up = np.split(at(Place.GATE_UP, x, self._project(x, layer.gate_up, dtype)), 2, axis=1)
        experts = self._spec.experts
        if experts is not None and experts.swiglu is not None and isinstance(layer, ExpertWeights):
            inner = reference.clamped_swiglu(gate, up, experts.swiglu, dtype)
        else:
            inner = reference.activate(gate, up, self._spec.activation, dtype)
        return at(Place.DOWN, inner, self._project(inner, layer.down, dtype))

    def _mixture(self, layer: DecoderLayerWeights, x: Floats) -> Floats:
        experts, dtype = self._spec.experts, self._spec.dtype
        assert experts is not None
        assert layer.router is not None
        chosen, weights = reference.route(self._project(x, layer.router, dtype), experts, dtype)
        out = np.zeros_like(x)
        for number, expert in enumerate(layer.experts):
            rows, places = np.nonzero(chosen == number)
            if len(rows):
                made = self._mlp(expert, x[rows]) * weights[rows, places][:, None]
                out[rows] = reference.rounded(out[rows] + reference.rounded(made, dtype), dtype)
        return out

    def logits(self, x: Floats, rows: Int64s) -> Floats:
        spec, weights = self._spec, self._weights
        logits = self._project(self._norm(x[rows], weights.norm), weights.head, DType.F32)
        return reference.scale_and_cap(logits, spec.logits_scale, spec.logit_cap)

    def join(self, parts: Sequence[Floats]) -> Floats:
        return np.concatenate(parts)

    def select(self, x: Floats, rows: Int64s) -> Floats:
        return x[rows]

    def _project(self, x: Floats, projection: Projection, dtype: DType) -> Floats:
        return _project(x, projection, dtype)

    def _norm(self, x: Floats, weight: Tensor | None) -> Floats:
        """x itself where there is no such norm."""
        spec = self._spec
        if weight is None:
            return x
        return reference.rms_norm(x, weight, spec.norm_eps, spec.dtype, spec.norm)

    def _sum(self, x: Floats, more: Floats) -> Floats:
        spec = self._spec
        if spec.residual_scale != 1.0:
            more = reference.rounded(more * np.float32(spec.residual_scale), spec.dtype)
        return reference.rounded(x + more, spec.dtype)

    def _attend(self, index: int, step: ReferenceStep, qkv: Floats) -> Floats:
        """Writes the rows' keys and values; qkv (T, …) → (T, num_heads * head_dim)."""
        spec, (batch, pool, turns) = self._spec, step
        heads = qkv.reshape(len(qkv), -1, spec.head_dim)
        ends = (spec.num_heads, spec.num_heads + spec.num_kv_heads)
        queries, keys, values = np.split(heads, ends, axis=1)
        layer = self._weights.layers[index]
        queries = self._norm_heads(queries, layer.query_norm)
        keys = self._norm_heads(keys, layer.key_norm)
        rotary = spec.layer_rotary[index]
        if rotary is not LayerRotary.NONE:
            inner = DType.F32 if spec.wide_rotary else spec.dtype
            queries, keys = (
                reference.turn(each, turns[rotary], spec.dtype, inner, interleaved=spec.rotary.interleaved)
                for each in (queries, keys)
            )
        _write(pool, index, batch.slots, np.stack((keys, values)), spec.dtype)
        out = np.empty_like(queries)
        for span in batch.spans:
            self._attend_span(index, pool, span, queries, out)
        return out.reshape(len(out), -1)

    def _norm_heads(self, heads: Floats, weight: Tensor | None) -> Floats:
        rows = heads.reshape(len(heads), 1, -1) if self._spec.joint_head_norms else heads
        return self._norm(rows, weight).reshape(heads.shape)

    def _attend_span(self, index: int, pool: Pool, span: SequenceSpan, queries: Floats, out: Floats) -> None:
        spec = self._spec
        keys, values = self._keys_and_values(index, pool, span)
        window = spec.windows[index] or span.context_len
        stored = self._weights.layers[index].sinks
        sinks = None if stored is None else to_float32(stored.array, stored.dtype)
        for row in range(span.start, span.start + span.length):
            end = span.context_len - span.length + row - span.start + 1
            seen = (max(0, end - window), end)
            out[row] = reference.attention(
                queries[row],
                keys,
                values,
                seen,
                spec.attention_scale,
                spec.dtype,
                spec.score_cap,
                sinks=sinks,
            )

    def _keys_and_values(self, index: int, pool: Pool, span: SequenceSpan) -> tuple[Floats, Floats]:
        """Those of the span's sequence, (num_kv_heads, context_len, head_dim) each."""
        tokens = np.arange(span.context_len)
        slots = np.array(span.blocks)[tokens // pool.block_size] * pool.block_size + tokens % pool.block_size
        return _read(pool, index, slots, self._spec.dtype)


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


def _adapt(batch: StepBatch, layer: int, dtype: DType, place: Place, x: Floats, y: Floats) -> Floats:
    """y of the projection of x, with what the rows' adapters add to it."""
    for span in batch.spans:
        site = None if span.adapter is None else span.adapter.weights.layers[layer].get(place)
        if site is None:
            continue
        a = to_float32(site.a.array, site.a.dtype)
        for row in range(span.start, span.start + span.length):
            low, first = a @ x[row], 0
            for part in site.parts:
                b = to_float32(part.b.array, part.b.dtype)
                columns = slice(part.first, part.first + part.num_out)
                more = np.float32(part.factor) * (low[first : first + part.rank] @ b)
                y[row, columns] = reference.rounded(y[row, columns] + more, dtype)
                first += part.rank
    return y
