"""The native executor of decoders: weights become records of addresses, and a step one call of the core.

Rows are numpy arrays in the spec's dtype. Scratch is made once and grows. What a request's tokens give depends on
nothing that else is in the step (docs/native.md, "Numbers").
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from ...errors import ModelError
from ...models.decoder_config import ExpertShares
from ...models.executor import SIZES, Accepts, Floats, any_value, one_of, refusal_of
from ...models.matrices import DecoderWeights, refusal_of_formats
from ...models.spec import DecoderSpec
from ...step.batch import Int64s, StepBatch
from ...tensors import DType, to_float32
from . import arrays, records
from .operations import ACTIVATIONS, MAX_CONVOLUTION, MAX_HEAD_DIM, NORMS, ROTARIES, Operations
from .pools import Pool, Spans, check_ids
from .products import Products
from .tables import turn_tables
from .weights import WEIGHTS, ProjectionParts, refusal_of_tensors, vector_of

if TYPE_CHECKING:
    from ....loader.native.library import Library
    from .adapters import AdaptedSteps, StepRuns
    from .arrays import Array

NAME = "native"
WHOLE_LAYERS, UP_TO_ROUTER, FROM_ROUTER_ON = 0, 1, 2  # `tn_half`

_REORDERED = "experts with columns in an order of their own (GPTQ's desc_act)"

IMPLEMENTED: Mapping[str, Accepts] = {
    **SIZES,
    **dict.fromkeys(
        (
            "num_kv_heads",
            "input_norms",
            "output_norms",
            "score_cap",
            "logit_cap",
            "embedding_scale",
            "residual_scale",
            "logits_scale",
            "local_rotary",
            "local_rotary.frequencies",
            "local_rotary.factor",
            "wide_rotary",
            "joint_head_norms",
            "is_parallel",
            "experts",
            "experts.num",
            "experts.num_used",
            "experts.size",
            "experts.layers",
            "experts.sum_to_1",
            "experts.rounds_weights",
            "experts.has_bias",
            "experts.swiglu",
            "experts.swiglu.alpha",
            "experts.swiglu.limit",
            "experts.shares",
            "experts.wide_scores",
            "experts.has_correction",
            "experts.num_groups",
            "experts.num_groups_used",
            "experts.sum_eps",
            "experts.factor",
            "experts.shared_size",
            "convolutions",
            "convolutions.layers",
            "convolutions.has_bias",
            "sinks",
            "rotary.interleaved",
            "max_context",
            "windows",
            "qkv_bias",
            "output_bias",
            "mlp_bias",
            "head_norms",
            "tied_head",
            "takes_images",
            "rotary.dim",
            "rotary.frequencies",
            "rotary.factor",
        ),
        any_value,
    ),
    "dtype": one_of(DType.BF16, DType.F32),
    "head_dim": lambda head_dim: head_dim <= MAX_HEAD_DIM,
    "activation": one_of(*ACTIVATIONS),
    "norm": one_of(*NORMS),
    "convolutions.size": lambda size: size <= MAX_CONVOLUTION,
    "layer_rotary": lambda rotaries: set(rotaries) <= set(ROTARIES),
}


def refusal(spec: DecoderSpec, weights: DecoderWeights) -> str | None:
    """Why the core cannot compute this model; None where it can."""
    return (
        refusal_of_spec(spec)
        or refusal_of_tensors([weights.embeddings.weight])
        or refusal_of_formats(weights, WEIGHTS, NAME)
        or (f"{NAME} does not implement {_REORDERED}" if _may_reorder_experts(weights) else None)
    )


def _may_reorder_experts(weights: DecoderWeights) -> bool:
    mixtures = [layer for layer in weights.layers if layer.experts]
    experts = itertools.chain(*(layer.experts for layer in mixtures))
    products = itertools.chain(
        (layer.router for layer in mixtures), *((expert.gate_up, expert.down) for expert in experts)
    )
    return any(each is not None and each.may_reorder_columns for each in products)


def refusal_of_spec(spec: DecoderSpec) -> str | None:
    """Likewise, whatever its weights are."""
    as_the_main_one = {
        "local_rotary.dim": one_of(spec.rotary.dim),
        "local_rotary.interleaved": one_of(spec.rotary.interleaved),
    }
    return refusal_of(spec, {**IMPLEMENTED, **as_the_main_one}, NAME)


class NativeStep(Struct, frozen=True, eq=False):
    """The state that all layers share in one pass. Keeps the arrays alive whose addresses the core gets."""

    batch: StepBatch
    pool: Pool
    spans: Spans
    turns: Floats  # (positions, rotary_dim)
    local_turns: Floats | None
    runs: StepRuns | None  # of rows that have adapters; None: none has


class NativeDecoder:
    """An `Executor`. One thread at a time."""

    name = NAME
    is_batch_invariant = True
    runs_layers_together = True
    takes_adapters = True
    routes_apart = True

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights, library: Library) -> None:
        """Reads no tensor's content. `refusal` must have found nothing."""
        self._spec = spec
        self._weights = weights
        self._library = library
        self._adapted: AdaptedSteps | None = None  # from the first step on that has adapters
        self._products = Products(library)
        self._operations = Operations(library)
        # Of matrices that are converted there would be no rows yet.
        self.scores_in_strips = weights.head.is_settled and len(weights.head.matrices()) == 1
        self._scratch_bytes = library.functions.tn_decoder_scratch_bytes
        self._scratch_bytes.argtypes = [ctypes.POINTER(records.DecoderRecord), ctypes.c_int64]
        self._scratch_bytes.restype = ctypes.c_int64
        self._turns, self._local_turns = turn_tables(spec)
        self._kv_layers = spec.kv_layers()
        self._scratch = arrays.NativeScratch()
        self._layers = (records.DecoderLayerRecord * spec.num_layers)()
        self._parts: dict[int, tuple[ProjectionParts, ...]] = {}  # of the layers whose records are there
        self._head: ProjectionParts | None = None
        self._pool: tuple[Any, Pool] | None = None  # that of the last step
        self._record = records.DecoderRecord(
            layers=self._layers,
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            rotary_dim=spec.rotary.dim,
            norm_eps=spec.norm_eps,
            attention_scale=spec.attention_scale,
            score_cap=spec.score_cap or 0.0,
            residual_scale=spec.residual_scale,
            activation=ACTIVATIONS[spec.activation],
            dtype=arrays.dtype_of(np.empty(0, spec.dtype.numpy)),
            norm=NORMS[spec.norm],
            joint_norms=spec.joint_head_norms,
            wide_turns=spec.wide_rotary,
            interleaved=spec.rotary.interleaved,
            parallel=spec.is_parallel,
            convolution_size=0 if spec.convolutions is None else spec.convolutions.size,
            **_mixture(spec),
        )

    def embed(self, batch: StepBatch) -> Array:
        """(T, hidden_size): the rows of the batch's tokens, and of its images."""
        table = self._weights.embeddings
        out = np.empty((len(batch.tokens), self._spec.hidden_size), self._spec.dtype.numpy)
        scale = None if table.scale is None else table.scale.array
        factor = self._spec.embedding_scale
        x = self._operations.embed(table.weight.array, scale, batch.tokens, out, factor)
        for image in batch.images:
            x[image.rows] = image.values
        return x

    def begin(self, batch: StepBatch, kv: Any) -> NativeStep:
        """Raises `ValueError` for rows, slots or blocks that do not fit."""
        pool = self._pool_of(kv)
        spec, num_rows = self._spec, len(batch.tokens)
        shape = (self._kv_layers[-1], spec.num_kv_heads, spec.head_dim)
        if (pool.num_layers, pool.num_kv_heads, pool.head_dim) != shape or not pool.takes(self._record.dtype):
            raise ValueError("the pool of keys and values was made for another model")
        spans = Spans(batch.spans, num_rows, pool)
        check_ids(batch.slots, pool.num_slots, "a slot")
        end = max((span.context_len for span in batch.spans), default=0)
        check_ids(batch.positions, end, "a position")
        if not num_rows == len(batch.positions) == len(batch.slots):
            raise ValueError("tokens, positions and slots must be equally many")
        local = None if self._local_turns is None else self._local_turns.up_to(end)
        return NativeStep(batch, pool, spans, self._turns.up_to(end), local, self._runs(batch))

    def layers(self, step: NativeStep, first: int, end: int, x: Array) -> Array:
        """x (T, hidden_size) through the layers [first, end), in place."""
        self._run(step, first, end, x, WHOLE_LAYERS)
        return x

    def route(self, step: NativeStep, layer: int, x: Array) -> tuple[Array, Int64s]:
        """x (T, hidden_size) through the layer's attention, in place, and the experts of its rows."""
        experts = self._spec.experts
        assert experts is not None
        chosen = np.empty((len(step.batch.tokens), experts.num_used), np.int64)
        self._run(step, layer, layer + 1, x, UP_TO_ROUTER, chosen)
        return x, chosen

    def experts(self, step: NativeStep, layer: int, x: Array) -> Array:
        """x (T, hidden_size) through the layer's experts, in place. The router chooses again, and the same."""
        self._run(step, layer, layer + 1, x, FROM_ROUTER_ON)
        return x

    def _run(
        self, step: NativeStep, first: int, end: int, x: Array, half: int, chosen: Int64s | None = None
    ) -> None:
        num_rows = len(step.batch.tokens)
        if x.shape != (num_rows, self._spec.hidden_size) or x.dtype != self._spec.dtype.numpy:
            raise ValueError(f"x is {x.shape} {x.dtype}, and the step has {num_rows} rows")
        if not 0 <= first <= end <= self._spec.num_layers:
            raise ValueError(f"there are no layers [{first}, {end})")
        arrays.check_contiguous(x, "x")
        filled = [self._fill(index) for index in range(first, end) if index not in self._parts]
        num_bytes = int(self._scratch_bytes(ctypes.byref(self._record), num_rows))
        args = records.DecoderStepArgs(
            model=ctypes.pointer(self._record),
            kv=ctypes.pointer(step.pool.record),
            spans=step.spans.address,
            turns=arrays.address(step.turns),
            local_turns=arrays.address_or_null(step.local_turns),
            turn=arrays.address(step.batch.positions),
            slots=arrays.address(step.batch.slots),
            x=arrays.address(x),
            scratch=self._scratch.address_of(num_bytes),
            chosen=arrays.address_or_null(chosen),
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
        del filled  # until here its addresses are in use

    def logits(self, x: Array, rows: Int64s) -> Floats:
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

    def states(self, x: Array, rows: Int64s) -> Floats:
        """(R, hidden_size) fp32, of numbers in the spec's dtype."""
        if not len(rows):
            return np.empty((0, self._spec.hidden_size), np.float32)
        return to_float32(self._final_norm(x, rows), self._spec.dtype)

    def strip(self, x: Array, rows: Int64s, first: int, end: int) -> Floats:
        """The columns [first, end) of `logits`, bit for bit, which reads no other rows of the head."""
        out = np.empty((len(rows), end - first), np.float32)
        if not len(rows):
            return out
        self._head = self._head or ProjectionParts(self._weights.head.matrices())
        own = self._head.weights[0].rows(first, end)
        self._products.linear(self._head.input_of(0, self._final_norm(x, rows)), own, out)
        return self._scaled_and_capped(out)

    def _final_norm(self, x: Array, rows: Int64s) -> Array:
        chosen, spec = np.ascontiguousarray(x[rows]), self._spec
        return self._operations.norm(chosen, chosen, self._weights.norm, None, spec.norm_eps, spec.norm)

    def _scaled_and_capped(self, out: Floats) -> Floats:
        spec = self._spec
        if spec.logits_scale != 1.0 or spec.logit_cap is not None:
            self._operations.scale_and_cap(out, spec.logits_scale, spec.logit_cap)
        return out

    def join(self, parts: Sequence[Array]) -> Array:
        return np.concatenate(parts)

    def select(self, x: Array, rows: Int64s) -> Array:
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
        parts = {
            name: ProjectionParts(projection.matrices())
            for name, projection in (
                ("qkv", layer.qkv),
                ("output", layer.output),
                ("gate_up", layer.gate_up),
                ("down", layer.down),
                ("router", layer.router),
            )
            if projection is not None
        }
        record = records.DecoderLayerRecord(
            attention_norm=vector_of(layer.attention_norm),
            query_norm=vector_of(layer.query_norm),
            key_norm=vector_of(layer.key_norm),
            attention_output_norm=vector_of(layer.attention_output_norm),
            mlp_norm=vector_of(layer.mlp_norm),
            mlp_output_norm=vector_of(layer.mlp_output_norm),
            sinks=vector_of(layer.sinks),
            correction=vector_of(layer.correction),
            convolution=vector_of(layer.convolution),
            convolution_bias=vector_of(layer.convolution_bias),
            kv_layer=self._kv_layers[index],
            window=self._spec.windows[index] or 0,
            rotary=ROTARIES[self._spec.layer_rotary[index]],
            **{name: part.record for name, part in parts.items()},
        )
        experts = [
            (ProjectionParts(expert.gate_up.matrices()), ProjectionParts(expert.down.matrices()))
            for expert in layer.experts
        ]
        if any(part.permuted_size for part in (*itertools.chain(*experts), *_of(parts, "router"))):
            raise ModelError(
                f"layer {index}: {NAME} does not implement {_REORDERED}",
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
        own = (layer.qkv, layer.output, layer.gate_up, layer.down, layer.router)
        of_experts = itertools.chain(*((expert.gate_up, expert.down) for expert in layer.experts))
        filled = (*parts.values(), *itertools.chain(*experts))
        if all(each.is_settled for each in (*own, *of_experts) if each is not None):
            self._parts[index] = filled
        return filled


def _of(parts: Mapping[str, ProjectionParts], name: str) -> list[ProjectionParts]:
    return [parts[name]] if name in parts else []


def _mixture(spec: DecoderSpec) -> dict[str, float]:
    """Fields of the record about experts."""
    experts = spec.experts
    if experts is None:
        return {}
    return {
        "num_experts": experts.num,
        "num_experts_used": experts.num_used,
        "expert_size": experts.size,
        "shared_size": experts.shared_size,
        "num_expert_groups": experts.num_groups,
        "num_expert_groups_used": experts.num_groups_used,
        "expert_sigmoid": experts.shares is ExpertShares.SIGMOID,
        "expert_scores_wide": experts.wide_scores,
        "expert_sum_eps": experts.sum_eps,
        "expert_factor": experts.factor,
        "expert_weights_sum_to_1": experts.sum_to_1,
        "expert_weights_rounded": experts.rounds_weights,
        "swiglu_alpha": 0.0 if experts.swiglu is None else experts.swiglu.alpha,
        "swiglu_limit": 0.0 if experts.swiglu is None else experts.swiglu.limit,
    }
