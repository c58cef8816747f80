"""The native executor of decoders: weights become records of addresses, and a step one call of the core.

Rows are numpy arrays in the spec's dtype. Scratch is made once and grows. What a request's tokens give depends on
nothing that else is in the step (docs/native.md, "Numbers").
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ...errors import ModelError
from ...models.decoder_config import LatentAttention
from ...models.executor import Floats
from ...models.matrices import (
    DecoderLayerWeights,
    DecoderWeights,
    DenseMatrix,
    EmbeddingTable,
    Matrix,
    Projection,
)
from ...models.rotary import query_factors
from ...models.spec import DecoderSpec, rounded
from ...step.batch import Int64s, StepBatch, part_of
from ...tensors import Tensor, from_float32, to_float32
from . import arrays, records
from .decoder_records import layer_record, model_record, turn_tables
from .implemented import NAME, REORDERED
from .operations import Operations
from .pools import Pool, Spans, check_ends, check_ids
from .products import Products, Weight
from .weights import ProjectionParts

if TYPE_CHECKING:
    from ....loader.native.library import Library
    from ...models.layer_inputs_config import LayerInputs
    from .adapters import AdaptedSteps, StepRuns
    from .arrays import Array

WHOLE_LAYERS, UP_TO_ROUTER, FROM_ROUTER_ON, SOURCES = 0, 1, 2, 3  # `tn_half`


class NativeStep(Struct, frozen=True, eq=False):
    """The state that all layers share in one pass. Keeps the arrays alive whose addresses the core gets."""

    batch: StepBatch
    pool: Pool
    spans: Spans
    turns: Floats  # (positions, rotary_dim)
    local_turns: Floats | None
    turn: Int64s  # (T,): each token's row of them
    query_scales: Floats | None  # (T,), of layers that have such
    runs: StepRuns | None  # of rows that have adapters; None: none has
    # Of a step with rows of sources: these alone, whose numbers and the others' come first. `batch` has the others.
    sources: SourceRows | None = None


class SourceRows(NamedTuple):
    """The rows of a step that are an encoder's."""

    step: NativeStep
    own: Int64s
    others: Int64s


class RowsWithInputs(NamedTuple):
    """A step's rows, of models whose layers have inputs of their own; others' are x alone."""

    x: Array  # (T, hidden_size)
    inputs: Array  # (T, num_layers * size)


class NativeDecoder:
    """An `Executor`. One thread at a time."""

    name = NAME
    is_batch_invariant = True
    runs_layers_together = True
    routes_apart = True

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights, library: Library) -> None:
        """Reads no tensor's content. `refusal` must have found nothing."""
        self._spec = spec
        self._weights = weights
        self._library = library
        self.takes_adapters = not spec.source_len
        self._adapted: AdaptedSteps | None = None  # from the first step on that has adapters
        self._products = Products(library)
        self._operations = Operations(library)
        # Of matrices that are converted there would be no rows yet.
        self.scores_in_strips = weights.head.is_settled and len(weights.head.matrices()) == 1
        self._scratch_bytes = library.functions.tn_decoder_scratch_bytes
        self._scratch_bytes.argtypes = [ctypes.POINTER(records.DecoderRecord), ctypes.c_int64]
        self._scratch_bytes.restype = ctypes.c_int64
        self._turns, self._local_turns = turn_tables(spec)
        self._kv_places = spec.kv_places()
        whole = spec.kv_shape(1, 1)
        self._pool_shapes = [
            (each.num_layers, each.num_parts, each.num_kv_heads, each.head_dim) for each in whole.groups
        ]
        self._state_layers = spec.state_layers()
        self._scratch = arrays.NativeScratch()
        self._layers = (records.DecoderLayerRecord * spec.num_layers)()
        self._parts: dict[int, tuple[ProjectionParts, ...]] = {}  # of the layers whose records are there
        self._outer: dict[int, ProjectionParts] = {}  # of projections in no layer
        self._head: ProjectionParts | None = None
        self._pool: tuple[Any, Pool] | None = None  # that of the last step
        self._record = model_record(spec, self._layers)
        self._num_columns = spec.hidden_size * (1 if spec.streams is None else spec.streams.num)  # of x

    def embed(self, batch: StepBatch) -> Array | RowsWithInputs:
        """(T, hidden_size): the rows of the batch's tokens, and of its images."""
        spec = self._spec
        x = self._embedded(self._weights.embeddings, batch.tokens, spec.hidden_size, spec.embedding_scale)
        if self._weights.positions is not None:
            more = np.empty_like(x)
            positions = (
                np.maximum(batch.positions - spec.source_len, 0) if spec.source_len else batch.positions
            )
            x = self._operations.add(
                x, self._operations.embed(self._weights.positions.array, None, positions, more)
            )
        for image in batch.images:
            x[image.rows] = image.values[:, : spec.hidden_size]
        if spec.layer_inputs is None:
            return x
        inputs = self._inputs_of(batch, x, spec.layer_inputs)
        return RowsWithInputs(x if spec.streams is None else self._streams_of(x, spec.streams.num), inputs)

    def _streams_of(self, x: Array, num: int) -> Array:
        """(T, num * hidden_size): x, and its products as large as x."""
        made = np.empty((len(x), num, x.shape[1]), x.dtype)
        made[:, 0] = x
        for number, projection in enumerate(self._weights.stream_inputs, start=1):
            self._product(projection, x, made[:, number])
        return self._operations.match(made).reshape(len(x), -1)

    def _product(self, projection: Projection, x: Array, out: Array) -> None:
        """out (T, N) = the projection of x (T, K)."""
        parts, first = self._outer.get(id(projection)) or ProjectionParts(projection.matrices()), 0
        if projection.is_settled:
            self._outer[id(projection)] = parts
        for number, weight in enumerate(parts.weights):
            self._products.linear(parts.input_of(number, x), weight, out[:, first : first + weight.num_out])
            first += weight.num_out

    def _embedded(self, table: EmbeddingTable, tokens: Int64s, num_columns: int, factor: float) -> Array:
        out = np.empty((len(tokens), num_columns), self._spec.dtype.numpy)
        scale = None if table.scale is None else table.scale.array
        return self._operations.embed(table.weight.array, scale, tokens, out, factor)

    def _inputs_of(self, batch: StepBatch, x: Array, inputs: LayerInputs) -> Array:
        """(T, num_layers * size): the inputs of all layers."""
        spec, weights = self._spec, self._weights
        assert weights.input_embeddings is not None
        assert weights.input_projection is not None
        assert weights.input_norm is not None
        size, num_columns = inputs.size, spec.num_layers * inputs.size
        made = np.empty((len(x), num_columns), x.dtype)
        self._product(weights.input_projection, x, made)
        own, factors = made.reshape(-1, size), (spec.hidden_size**-0.5, 0.5**0.5)
        if inputs.rounds_factors:
            factors = (rounded(factors[0], spec.dtype), rounded(factors[1], spec.dtype))
        self._operations.norm(own, own, weights.input_norm, None, spec.norm_eps, spec.norm, factors[0])
        scale = rounded(size**0.5, spec.dtype)
        tokens = np.where(batch.tokens < inputs.vocab_size, batch.tokens, inputs.default_row)
        for image in batch.images:
            tokens[image.rows] = inputs.default_row
        rows = self._embedded(weights.input_embeddings, tokens, num_columns, scale)
        return self._operations.add(made, rows, factors[1])

    def begin(self, batch: StepBatch, kv: Any) -> NativeStep:
        """Raises `ValueError` for rows, slots or blocks that do not fit."""
        if self._spec.source_len:
            return self._begin_behind_sources(batch, kv)
        return self._begin(batch, kv)

    def _begin_behind_sources(self, batch: StepBatch, kv: Any) -> NativeStep:
        """The rows of sources apart, which are those of images."""
        is_source = batch.positions < self._spec.source_len
        rows = np.concatenate([image.rows for image in batch.images] or [np.empty(0, np.int64)])
        if not np.array_equal(np.sort(rows), np.flatnonzero(is_source)):
            raise ValueError(f"a sequence's first {self._spec.source_len} tokens must be an encoder's rows")
        if not len(rows):
            return self._begin(batch, kv)
        own, others = np.flatnonzero(is_source), np.flatnonzero(~is_source)
        step = self._begin(part_of(batch, others), kv)
        return replace(step, sources=SourceRows(self._begin(part_of(batch, own), kv), own, others))

    def _begin(self, batch: StepBatch, kv: Any) -> NativeStep:
        pool = self._pool_of(kv)
        spec, num_rows = self._spec, len(batch.tokens)
        if pool.shapes != self._pool_shapes or not pool.takes(self._record.dtype):
            raise ValueError("the pool of keys and values was made for another model")
        if pool.states.shape[1] != self._state_layers[-1]:
            raise ValueError("the pool's recurrent states are another model's")
        spans = Spans(batch.spans, num_rows, pool)
        check_ids(batch.slots, pool.num_slots, "a slot")
        end = max((span.context_len for span in batch.spans), default=0)
        check_ids(batch.positions, end, "a position")
        if not num_rows == len(batch.positions) == len(batch.slots):
            raise ValueError("tokens, positions and slots must be equally many")
        if batch.ends is not None:
            check_ends(batch.ends, batch.spans, num_rows)
        local = None if self._local_turns is None else self._local_turns.up_to(end)
        turns, turn = self._turns.up_to(end), batch.positions
        if batch.axes is not None:
            if batch.axes.shape != (3, num_rows) or not spec.rotary_axes:
                raise ValueError(f"the model's {num_rows} tokens cannot turn by positions {batch.axes.shape}")
            check_ids(batch.axes.reshape(-1), end, "a position")
            turns = self._turns.at(batch.axes, spec.rotary_axes, end)
            turn = np.arange(num_rows, dtype=np.int64)
        scaling = spec.query_scaling
        query_scales = None if scaling is None else query_factors(scaling, batch.positions)
        return NativeStep(batch, pool, spans, turns, local, turn, query_scales, self._runs(batch))

    def layers(
        self, step: NativeStep, first: int, end: int, x: Array | RowsWithInputs
    ) -> Array | RowsWithInputs:
        """x (T, hidden_size) through the layers [first, end), in place."""
        if step.sources is not None:
            rows, (sources, own, others) = _x_of(x), step.sources
            self._run(sources, first, end, np.ascontiguousarray(rows[own]), SOURCES)
            through = np.ascontiguousarray(rows[others])
            self._run(step, first, end, through, WHOLE_LAYERS)
            rows[others] = through
            return x
        while step.batch.images and first < min(end, self._spec.num_deep_rows):
            self._run(step, first, first + 1, x, WHOLE_LAYERS)
            first += 1
            self._add_deep_rows(step.batch, first, _x_of(x))
        self._run(step, first, end, x, WHOLE_LAYERS)
        return x

    def _add_deep_rows(self, batch: StepBatch, number: int, x: Array) -> None:
        """Add those behind the first `number` layers."""
        size = self._spec.hidden_size
        for image in batch.images:
            own, more = x[image.rows], image.values[:, number * size : (number + 1) * size]
            x[image.rows] = self._operations.add(own, np.ascontiguousarray(more))

    def route(
        self, step: NativeStep, layer: int, x: Array | RowsWithInputs
    ) -> tuple[Array | RowsWithInputs, Int64s]:
        """x (T, hidden_size) through the layer's attention, in place, and the experts of its rows."""
        experts = self._spec.experts
        assert experts is not None
        chosen = np.empty((len(step.batch.tokens), experts.num_used), np.int64)
        self._run(step, layer, layer + 1, x, UP_TO_ROUTER, chosen)
        return x, chosen

    def experts(self, step: NativeStep, layer: int, x: Array | RowsWithInputs) -> Array | RowsWithInputs:
        """x (T, hidden_size) through the layer's experts, in place. The router chooses again, and the same."""
        self._run(step, layer, layer + 1, x, FROM_ROUTER_ON)
        return x

    def _run(
        self,
        step: NativeStep,
        first: int,
        end: int,
        rows: Array | RowsWithInputs,
        half: int,
        chosen: Int64s | None = None,
    ) -> None:
        num_rows, x = len(step.batch.tokens), _x_of(rows)
        inputs = rows.inputs if isinstance(rows, RowsWithInputs) else None
        own = self._spec.layer_inputs
        expected = None if own is None else (num_rows, self._spec.num_layers * own.size)
        if expected != (None if inputs is None else inputs.shape):
            raise ValueError(f"the layers' inputs must be {expected}")
        if x.shape != (num_rows, self._num_columns) or x.dtype != self._spec.dtype.numpy:
            raise ValueError(f"x is {x.shape} {x.dtype}, and the step has {num_rows} rows")
        if not 0 <= first <= end <= self._spec.num_layers:
            raise ValueError(f"there are no layers [{first}, {end})")
        arrays.check_contiguous(x, "x")
        filled = [self._fill(index) for index in range(first, end) if index not in self._parts]
        kept = None
        if (
            self._spec.source_len
            and half == WHOLE_LAYERS
            and any(each.attention for each in step.batch.spans)
        ):
            from .speech import KeptQueries  # of few requests

            kept = KeptQueries(self._spec, num_rows, first, end)
        num_bytes = int(self._scratch_bytes(ctypes.byref(self._record), num_rows))
        args = records.DecoderStepArgs(
            model=ctypes.pointer(self._record),
            kv=step.pool.records,
            spans=step.spans.address,
            turns=arrays.address(step.turns),
            local_turns=arrays.address_or_null(step.local_turns),
            turn=arrays.address(step.turn),
            slots=arrays.address(step.batch.slots),
            x=arrays.address(x),
            scratch=self._scratch.address_of(num_bytes),
            ends=arrays.address_or_null(step.batch.ends),
            chosen=arrays.address_or_null(chosen),
            query_scales=arrays.address_or_null(step.query_scales),
            layer_inputs=arrays.address_or_null(inputs),
            cross_queries=arrays.address_or_null(None if kept is None else kept.queries),
            num_spans=step.spans.num,
            num_rows=num_rows,
            first=first,
            end=end,
            half=half,
        )
        if step.runs is not None and self._adapted is not None:
            self._adapted.call(args, step.runs, num_rows)
        elif num_rows:
            self._operations.call("tn_decoder_step", args)
        if kept is not None:
            kept.give(step.batch.spans, step.pool)
        del filled  # until here its addresses are in use

    def logits(self, x: Array | RowsWithInputs, rows: Int64s) -> Floats:
        """(R, vocab_size) fp32, not rounded to the spec's dtype."""
        out = np.empty((len(rows), self._spec.vocab_size), np.float32)
        if not len(rows):
            return out
        normed = self._final_norm(x, rows)
        head = self._head or ProjectionParts(self._weights.head.matrices())
        first = 0
        for number, weight in enumerate(head.weights):
            columns = out[:, first : first + weight.num_out]
            self._products.linear(head.input_of(number, normed), weight, columns)
            first += weight.num_out
        if self._weights.head.is_settled:
            self._head = head
        return self._scaled_and_capped(out)

    def states(self, x: Array | RowsWithInputs, rows: Int64s) -> Floats:
        """(R, hidden_size) fp32, of numbers in the spec's dtype."""
        if not len(rows):
            return np.empty((0, self._spec.hidden_size), np.float32)
        return to_float32(self._final_norm(x, rows), self._spec.dtype)

    def strip(self, x: Array | RowsWithInputs, rows: Int64s, first: int, end: int) -> Floats:
        """The columns [first, end) of `logits`, bit for bit, which reads no other rows of the head."""
        out = np.empty((len(rows), end - first), np.float32)
        if not len(rows):
            return out
        self._head = self._head or ProjectionParts(self._weights.head.matrices())
        own = self._head.weights[0].rows(first, end)
        self._products.linear(self._head.input_of(0, self._final_norm(x, rows)), own, out)
        return self._scaled_and_capped(out)

    def _final_norm(self, x: Array | RowsWithInputs, rows: Int64s) -> Array:
        chosen, spec = np.ascontiguousarray(_x_of(x)[rows]), self._spec
        weights = self._weights
        if spec.streams is not None:
            chosen = self._mean_of(chosen.reshape(len(rows), spec.streams.num, spec.hidden_size))
        return self._operations.norm(
            chosen, chosen, weights.norm, weights.norm_bias, spec.norm_eps, spec.norm
        )

    def _mean_of(self, streams: Array) -> Array:
        """(R, hidden_size): the mean of the first of these streams (R, num, hidden_size) and products of the others as
        large as it.
        """
        made = streams.copy()
        for number, projection in enumerate(self._weights.stream_outputs, start=1):
            self._product(projection, streams[:, number], made[:, number])
        mean = np.empty_like(made, shape=(len(made), made.shape[2]))
        self._operations.match(made, mean)
        return mean

    def _scaled_and_capped(self, out: Floats) -> Floats:
        spec = self._spec
        if spec.logits_scale != 1.0 or spec.logit_cap is not None:
            self._operations.scale_and_cap(out, spec.logits_scale, spec.logit_cap)
        return out

    def join(self, parts: Sequence[Array | RowsWithInputs]) -> Array | RowsWithInputs:
        own = [part for part in parts if isinstance(part, RowsWithInputs)]
        x = np.concatenate([_x_of(part) for part in parts])
        return RowsWithInputs(x, np.concatenate([part.inputs for part in own])) if own else x

    def select(self, x: Array | RowsWithInputs, rows: Int64s) -> Array | RowsWithInputs:
        if isinstance(x, RowsWithInputs):
            return RowsWithInputs(*(np.ascontiguousarray(part[rows]) for part in x))
        return np.ascontiguousarray(x[rows])

    # ---- records ----

    def _pool_of(self, kv: Any) -> Pool:
        """The same for all steps of an engine."""
        if self._pool is None or self._pool[0] is not kv:
            self._pool = kv, Pool.of(kv)
        return self._pool[1]

    def _runs(self, batch: StepBatch) -> StepRuns | None:
        if all(span.adapter is None for span in batch.spans):
            return None
        if self._adapted is None:
            from .adapters import AdaptedSteps  # most servers have none

            self._adapted = AdaptedSteps(self._library)
        return self._adapted.runs(batch.spans)

    def _fill(self, index: int) -> tuple[ProjectionParts, ...]:
        """The layer's record, which reads these matrices. Its weights are there.

        The matrices are kept, and the record with them, once they are settled: others are made anew by each step until
        they are exact.
        """
        layer = self._weights.layers[index]
        projections = _projections(layer)
        parts = {name: ProjectionParts(each.matrices()) for name, each in projections.items()}
        if self._spec.latent is not None:
            assert layer.key_value_up is not None
            (up,) = layer.key_value_up.matrices()
            parts["key_up"] = self._transposed(up, parts["value_up"].weights[0], self._spec.latent)
        record = layer_record(
            self._spec, index, layer, parts, self._kv_places[index], self._state_layers[index]
        )
        experts = [
            (ProjectionParts(expert.gate_up.matrices()), ProjectionParts(expert.down.matrices()))
            for expert in layer.experts
        ]
        unordered = (*_of(parts, "router"), *_of(parts, "shared_gate"), *_of(parts, "value_up"))
        if any(part.permuted_size for part in (*itertools.chain(*experts), *unordered)):
            raise ModelError(
                f"layer {index}: {NAME} does not implement {REORDERED}",
                hint="Use --backend torch.",
            )
        if experts:
            record.experts = (records.Expert * len(experts))(
                *(records.Expert(gate_up.record, down.record) for gate_up, down in experts)
            )
        self._layers[index] = record
        self._record.permuted_size = max(
            self._record.permuted_size, *(part.permuted_size for part in parts.values())
        )
        own = (each for name, each in projections.items() if name != "value_up")
        of_experts = itertools.chain(*((expert.gate_up, expert.down) for expert in layer.experts))
        filled = (*parts.values(), *itertools.chain(*experts))
        # A transposed copy does not become exact with what it was made of.
        is_copied = layer.key_value_up is not None
        is_exact = not is_copied or (layer.router_gate or layer.gate).opens(0.0)
        if is_exact and all(each.is_settled for each in (*own, *of_experts)):
            self._parts[index] = filled
        return filled

    def _transposed(self, up: Matrix, weight: Weight, latent: LatentAttention) -> ProjectionParts:
        """Each head's rows for keys, transposed: (num_heads * rank, plain_dim). Floats as they are stored; of other
        numbers what they mean, in the spec's dtype.
        """
        if isinstance(up, DenseMatrix):
            dtype, columns = up.weight.dtype, up.weight.array.T
        else:
            dtype = self._spec.dtype
            wide = np.empty((latent.rank, weight.num_out), np.float32)
            identity = np.eye(latent.rank, dtype=np.float32)
            columns = from_float32(self._products.linear(identity, weight, wide), dtype)
        by_head = columns.reshape(latent.rank, self._spec.num_heads, -1)[:, :, : latent.plain_dim]
        rows = np.ascontiguousarray(by_head.transpose(1, 0, 2)).reshape(-1, latent.plain_dim)
        return ProjectionParts((DenseMatrix(Tensor(dtype, rows)),))


def _x_of(rows: Array | RowsWithInputs) -> Array:
    return rows.x if isinstance(rows, RowsWithInputs) else rows


def _projections(layer: DecoderLayerWeights) -> dict[str, Projection]:
    """Those of the layer, but for its experts', by the record's names."""
    mamba, inputs, laurel, cross = layer.mamba, layer.inputs, layer.laurel, layer.cross
    found = {
        "qkv": layer.qkv,
        "output": layer.output,
        "gate_up": layer.gate_up,
        "down": layer.down,
        "router": layer.router,
        "shared_gate": layer.shared_gate,
        "query_up": layer.query_up,
        "value_up": layer.key_value_up,
        "mamba_in": None if mamba is None else mamba.inputs,
        "mamba_out": None if mamba is None else mamba.output,
        "input_gate": None if inputs is None else inputs.gate,
        "input_up": None if inputs is None else inputs.up,
        "laurel_down": None if laurel is None else laurel.down,
        "laurel_up": None if laurel is None else laurel.up,
        **({} if cross is None else {"cross_query": cross.query, "cross_keys": cross.keys}),
        **({} if cross is None else {"cross_output": cross.output}),
    }
    return {name: projection for name, projection in found.items() if projection is not None}


def _of(parts: Mapping[str, ProjectionParts], name: str) -> list[ProjectionParts]:
    return [parts[name]] if name in parts else []
