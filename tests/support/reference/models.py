"""Decoders and encoders in numpy, by `operations.py`: what the tests of the native executors compare with.

They take what these take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.support.reference import operations as reference
from tests.support.reference.operations import Floats

from teneral.runtime.backends.native.decoder_records import turn_tables
from teneral.runtime.backends.native.operations import check_starts
from teneral.runtime.backends.native.pools import Pool, Spans, check_ids
from teneral.runtime.models.adapter import AdapterPlace
from teneral.runtime.models.decoder_config import LayerRotary
from teneral.runtime.models.encoder_weights import EncoderLayerWeights, EncoderWeights
from teneral.runtime.models.matrices import (
    DecoderLayerWeights,
    DecoderWeights,
    ExpertWeights,
    LayerNormWeights,
    StoredProjection,
)
from teneral.runtime.models.pooling import chosen_rows, normalize, pooled
from teneral.runtime.models.relative_positions import DistanceTables, disentangled_buckets
from teneral.runtime.models.rotary import Rotary, TurnTable, query_factors
from teneral.runtime.models.spec import DecoderSpec, EncoderSpec
from teneral.runtime.step.batch import Int64s, SequenceSpan, StepBatch
from teneral.runtime.tensors import DType, to_float32

if TYPE_CHECKING:
    from teneral.runtime.models.executor import TextBatch
    from teneral.runtime.models.matrices import Projection, Tensor

    ReferenceStep = tuple[StepBatch, Pool, dict[LayerRotary, Floats]]

Adapt = Callable[
    [AdapterPlace, Floats, Floats], Floats
]  # of a projection's input and output: the output, adapted


def as_it_is(place: AdapterPlace, x: Floats, y: Floats) -> Floats:
    """Of rows without adapters."""
    return y


class ReferenceDecoder:
    """An `Executor`, but for making pools. Its rows are fp32 arrays."""

    name = "numpy"
    is_batch_invariant = False
    runs_layers_together = False
    takes_adapters = True
    routes_apart = False
    scores_in_strips = False

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights) -> None:
        self._spec = spec
        self._weights = weights
        self._turns, self._local_turns = turn_tables(spec)
        self._kv_layers = spec.kv_layers()

    def embed(self, batch: StepBatch) -> Floats:
        table = self._weights.embeddings
        check_ids(batch.tokens, len(table.weight.array), "a token")
        spec = self._spec
        rows = reference.embed(
            table.weight, table.scale, batch.tokens, spec.dtype, spec.embedding_scale, table.block
        )
        if self._weights.positions is None:
            return rows
        more = reference.embed(self._weights.positions, None, batch.positions, spec.dtype)
        return reference.rounded(rows + more, spec.dtype)

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
            assert layer.qkv is not None
            assert layer.output is not None
            normed = self._input(self._norm(x, layer.attention_norm, layer.attention_norm_bias))
            at = partial(_adapt, step[0], index, spec.dtype)
            qkv = at(AdapterPlace.QKV, normed, self._project(normed, layer.qkv, spec.dtype))
            attended = self._input(
                self._norm(self._mixer(index)(index, step, qkv), layer.attention_inner_norm)
            )
            more = at(AdapterPlace.OUTPUT, attended, self._project(attended, layer.output, spec.dtype))
            before, x = x, self._sum(x, self._norm(more, layer.attention_output_norm))
            if not spec.is_parallel or spec.parallel_norms:
                own = before if spec.is_parallel else x
                normed = self._input(self._norm(own, layer.mlp_norm, layer.mlp_norm_bias))
            x = self._sum(x, self._norm(self._mlp(layer, normed, at), layer.mlp_output_norm))
        return x

    def _mlp(self, layer: DecoderLayerWeights | ExpertWeights, x: Floats, at: Adapt = as_it_is) -> Floats:
        dtype = self._spec.dtype
        if isinstance(layer, DecoderLayerWeights) and layer.experts:
            made = self._mixture(layer, x)
            if layer.gate_up is None or layer.down is None:
                return made
            shared = self._mlp(ExpertWeights(layer.gate_up, layer.down), x, at)
            if layer.shared_gate is not None:
                gate = reference.rounded(reference.sigmoid(self._project(x, layer.shared_gate, dtype)), dtype)
                shared = reference.rounded(shared * gate, dtype)
            return reference.rounded(made + shared, dtype)
        assert layer.gate_up is not None
        assert layer.down is not None
        inner = at(AdapterPlace.GATE_UP, x, self._project(x, layer.gate_up, dtype))
        gate, up = np.split(inner, 2, axis=1) if self._spec.gated_mlp else (inner, None)
        experts = self._spec.experts
        if up is not None and experts and experts.swiglu and isinstance(layer, ExpertWeights):
            inner = reference.clamped_swiglu(gate, up, experts.swiglu, dtype)
        else:
            inner = reference.activate(gate, up, self._spec.activation, dtype)
        if isinstance(layer, DecoderLayerWeights):
            inner = self._input(self._norm(inner, layer.mlp_inner_norm))
        return at(AdapterPlace.DOWN, inner, self._project(inner, layer.down, dtype))

    def _mixture(self, layer: DecoderLayerWeights, x: Floats) -> Floats:
        experts, dtype = self._spec.experts, self._spec.dtype
        assert experts is not None
        assert layer.router is not None
        scores = self._project(x, layer.router, DType.F32 if experts.wide_scores else dtype)
        correction = None if layer.correction is None else reference.vector(layer.correction, DType.F32)
        chosen, weights = reference.route(scores, experts, dtype, correction)
        out = np.zeros_like(x)
        for number, expert in enumerate(layer.experts):
            rows, places = np.nonzero(chosen == number)
            if len(rows):
                own = weights[rows, places][:, None]
                if experts.weighs_inputs:
                    made = self._mlp(expert, reference.rounded(x[rows] * own, dtype))
                else:
                    made = self._mlp(expert, x[rows]) * own
                out[rows] = reference.rounded(out[rows] + reference.rounded(made, dtype), dtype)
        return out

    def logits(self, x: Floats, rows: Int64s) -> Floats:
        spec, weights = self._spec, self._weights
        logits = self._project(self._norm(x[rows], weights.norm, weights.norm_bias), weights.head, DType.F32)
        return reference.scale_and_cap(logits, spec.logits_scale, spec.logit_cap)

    def states(self, x: Floats, rows: Int64s) -> Floats:
        return self._norm(x[rows], self._weights.norm, self._weights.norm_bias)

    def join(self, parts: Sequence[Floats]) -> Floats:
        return np.concatenate(parts)

    def select(self, x: Floats, rows: Int64s) -> Floats:
        return x[rows]

    def _project(self, x: Floats, projection: Projection, dtype: DType) -> Floats:
        return _project(x, projection, dtype)

    def _norm(self, x: Floats, weight: Tensor | None, bias: Tensor | None = None) -> Floats:
        """x itself where there is no such norm."""
        spec = self._spec
        if weight is None:
            return x
        return reference.norm(x, weight, spec.norm_eps, spec.dtype, spec.norm, bias)

    def _input(self, x: Floats) -> Floats:
        """Of a layer's projection."""
        return reference.rounded_to_codes(x, self._spec.dtype) if self._spec.rounds_inputs else x

    def _sum(self, x: Floats, more: Floats) -> Floats:
        spec = self._spec
        if spec.residual_scale != 1.0:
            more = reference.rounded(more * np.float32(spec.residual_scale), spec.dtype)
        return reference.rounded(x + more, spec.dtype)

    def _mixer(self, index: int) -> Callable[[int, ReferenceStep, Floats], Floats]:
        if self._weights.layers[index].convolution is not None:
            return self._convolve
        return self._attend if self._spec.latent is None else self._attend_latents

    def _attend_latents(self, index: int, step: ReferenceStep, down: Floats) -> Floats:
        """Writes the rows' latents; down (T, …) of `qkv` → (T, num_heads * value_dim)."""
        spec, layer, (batch, pool, turns) = self._spec, self._weights.layers[index], step
        latent, dtype = spec.latent, spec.dtype
        assert latent is not None
        assert layer.key_norm is not None
        assert layer.key_value_up is not None
        num = down.shape[1] - spec.head_dim
        queries, latents, keys = np.split(down, (num, num + latent.rank), axis=1)
        latents = reference.norm(latents, layer.key_norm, latent.norm_eps, dtype, spec.norm)
        if layer.query_up is not None and layer.query_norm is not None:
            low = reference.norm(queries, layer.query_norm, latent.norm_eps, dtype, spec.norm)
            queries = self._project(low, layer.query_up, dtype)
        queries = queries.reshape(len(down), spec.num_heads, -1)
        inner = DType.F32 if spec.wide_rotary else dtype
        turned, keys = (
            reference.turn(each, turns[LayerRotary.MAIN], dtype, inner, interleaved=spec.rotary.interleaved)
            for each in (queries[:, :, latent.plain_dim :], keys[:, None])
        )
        stored = np.concatenate((latents[:, None], keys), axis=2)
        reference.write(pool, self._kv_layers[index], batch.slots, stored[None], dtype)
        identity = np.eye(latent.rank, dtype=np.float32)
        ups = _project(identity, layer.key_value_up, DType.F32).T.reshape(spec.num_heads, -1, latent.rank)
        plain, to_keys = (
            queries[:, :, : latent.plain_dim],
            reference.rounded(ups[:, : latent.plain_dim], dtype),
        )
        absorbed = reference.rounded(np.einsum("thd,hdr->thr", plain, to_keys), dtype)
        queries = np.concatenate((absorbed, turned), axis=2)
        out = np.empty_like(queries)
        for span in batch.spans:
            self._attend_span(index, pool, span, queries, out)
        values = np.einsum("thr,hdr->thd", out[:, :, : latent.rank], ups[:, latent.plain_dim :])
        return reference.rounded(values, dtype).reshape(len(out), -1)

    def _attend(self, index: int, step: ReferenceStep, qkv: Floats) -> Floats:
        """Writes the rows' keys and values; qkv (T, …) → (T, num_heads * head_dim)."""
        spec, (batch, pool, turns) = self._spec, step
        heads = qkv.reshape(len(qkv), -1, spec.head_dim)
        if spec.interleaved_qkv:
            heads = heads.reshape(len(qkv), -1, 3, spec.head_dim).swapaxes(1, 2).reshape(heads.shape)
        ends = (spec.num_heads, spec.num_heads + spec.num_kv_heads)
        queries, keys, values = np.split(heads, ends, axis=1)
        layer = self._weights.layers[index]
        if not spec.late_head_norms:
            queries = self._norm_heads(queries, layer.query_norm)
            keys = self._norm_heads(keys, layer.key_norm)
        rotary = spec.layer_rotary[index]
        if rotary is not LayerRotary.NONE:
            inner = DType.F32 if spec.wide_rotary else spec.dtype
            queries, keys = (
                reference.turn(each, turns[rotary], spec.dtype, inner, interleaved=spec.rotary.interleaved)
                for each in (queries, keys)
            )
        if spec.late_head_norms:
            queries = self._norm_heads(queries, layer.query_norm)
            keys = self._norm_heads(keys, layer.key_norm)
        if spec.query_scaling is not None and spec.scales_queries(index):
            factors = query_factors(spec.query_scaling, batch.positions)[:, None, None]
            queries = reference.rounded(queries * factors, spec.dtype)
        reference.write(pool, self._kv_layers[index], batch.slots, np.stack((keys, values)), spec.dtype)
        out = np.empty_like(queries)
        for span in batch.spans:
            self._attend_span(index, pool, span, queries, out)
        return out.reshape(len(out), -1)

    def _convolve(self, index: int, step: ReferenceStep, thirds: Floats) -> Floats:
        """Writes b · x of the rows' thirds b, c, x into the pool; thirds (T, 3 hidden_size) → (T, hidden_size)."""
        spec, (batch, pool, _) = self._spec, step
        layer, first, num = self._weights.layers[index], self._kv_layers[index], spec.hidden_size
        assert layer.convolution is not None
        taps = reference.vector(layer.convolution, spec.dtype)[:, 0].T  # (size, hidden_size)
        b, c, x = np.split(thirds, 3, axis=1)
        num_kept = self._kv_layers[index + 1] - first
        kept = np.zeros((len(x), num_kept * 2 * spec.num_kv_heads * spec.head_dim), np.float32)
        kept[:, :num] = reference.rounded(b * x, spec.dtype)
        heads = kept.reshape(len(x), num_kept, 2, spec.num_kv_heads, spec.head_dim)
        for number in range(num_kept):
            reference.write(
                pool, first + number, batch.slots, heads[:, number].transpose(1, 0, 2, 3), spec.dtype
            )
        out = (
            np.zeros_like(c)
            if layer.convolution_bias is None
            else np.tile(reference.vector(layer.convolution_bias, spec.dtype), (len(c), 1))
        )
        for span in batch.spans:
            own = slice(span.start, span.start + span.length)
            found = [
                np.stack(self._keys_and_values(first + number, pool, span)) for number in range(num_kept)
            ]  # (2, kv_heads, context_len, head_dim) each
            seen = np.concatenate(found).transpose(2, 0, 1, 3).reshape(span.context_len, -1)[:, :num]
            seen = np.pad(seen, ((len(taps) - 1, 0), (0, 0)))
            for number, tap in enumerate(taps):
                end = span.context_len + number
                out[own] += tap * seen[end - span.length : end]
        return reference.rounded(c * reference.rounded(out, spec.dtype), spec.dtype)

    def _norm_heads(self, heads: Floats, weight: Tensor | None) -> Floats:
        rows = heads.reshape(len(heads), 1, -1) if self._spec.joint_head_norms else heads
        return self._norm(rows, weight).reshape(heads.shape)

    def _attend_span(self, index: int, pool: Pool, span: SequenceSpan, queries: Floats, out: Floats) -> None:
        spec = self._spec
        keys, values = self._keys_and_values(self._kv_layers[index], pool, span)
        window = spec.windows[index] or span.context_len
        stored = self._weights.layers[index].sinks
        sinks = None if stored is None else to_float32(stored.array, stored.dtype)
        for row in range(span.start, span.start + span.length):
            end = span.context_len - span.length + row - span.start + 1
            seen = (spec.first_key(index, end - 1), end)
            if spec.is_bidirectional:
                seen = (max(0, end - 1 - window), min(span.context_len, end + window))
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

    def _keys_and_values(self, kv_layer: int, pool: Pool, span: SequenceSpan) -> tuple[Floats, Floats]:
        """Those of the span's sequence, (num_kv_heads, context_len, head_dim) each."""
        tokens = np.arange(span.context_len)
        slots = np.array(span.blocks)[tokens // pool.block_size] * pool.block_size + tokens % pool.block_size
        return reference.read(pool, kv_layer, slots, self._spec.dtype)


def _project(x: Floats, projection: Projection, dtype: DType) -> Floats:
    return np.concatenate([reference.product(x, matrix, dtype) for matrix in projection.matrices()], axis=1)


def _adapt(batch: StepBatch, layer: int, dtype: DType, place: AdapterPlace, x: Floats, y: Floats) -> Floats:
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


class ReferenceEncoder:
    """An `EncoderExecutor`. Its rows are fp32 arrays."""

    name = "numpy"
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
        if weights.norm is not None:
            x = self._norm(x, weights.norm)
        return x if weights.projection is None else _project(x, weights.projection, spec.dtype)

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
        rows = _project(table, layer.position_qk or layer.qkv, spec.dtype)
        rows = rows.reshape(len(table), -1, spec.num_heads, spec.head_dim)
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
