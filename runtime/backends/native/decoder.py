"""The native executor of decoders: weights become records of addresses, and a step one call of the core.

Rows are numpy arrays in the spec's dtype. Scratch is made once and grows. What a request's tokens give depends on
nothing that else is in the step (docs/native.md, "Numbers").
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...dtypes import DType
from ...models.executor import Accepts, Floats, any_value, one_of, refusal_of
from ...models.matrices import DecoderWeights
from ...models.spec import DecoderSpec
from ...step.batch import Int64s, StepBatch
from . import arrays, records
from .operations import ACTIVATIONS, MAX_HEAD_DIM, Operations
from .pools import Pool, Spans, check_ids
from .products import Products
from .turns import TurnTable
from .weights import Parts, refusal_of_tensors, vector_of

if TYPE_CHECKING:
    from ....loader.native.library import Library
    from .arrays import Array

NAME = "native"

IMPLEMENTED: Mapping[str, Accepts] = {
    **dict.fromkeys(
        (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "norm_eps",
            "attention_scale",
            "max_context",
            "windows",
            "qkv_bias",
            "output_bias",
            "mlp_bias",
            "head_norms",
            "tied_head",
            "rotary.dim",
            "rotary.frequencies",
            "rotary.factor",
        ),
        any_value,
    ),
    "dtype": one_of(DType.BF16, DType.F32),
    "head_dim": lambda head_dim: head_dim <= MAX_HEAD_DIM,
    "activation": one_of(*ACTIVATIONS),
}


def refusal(spec: DecoderSpec, weights: DecoderWeights) -> str | None:
    """Why the core cannot compute this model; None where it can."""
    return refusal_of(spec, IMPLEMENTED, NAME) or refusal_of_tensors([weights.embeddings.weight])


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What all layers share in one pass. Keeps the arrays whose addresses the core gets."""

    batch: StepBatch
    pool: Pool
    spans: Spans
    turns: Floats  # (positions, rotary_dim)


class NativeDecoder:
    """An `Executor`. One thread at a time."""

    name = NAME
    runs_layers_together = True

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights, library: Library) -> None:
        """Reads no tensor's content. `refusal` must have found nothing."""
        self._spec = spec
        self._weights = weights
        self._products = Products(library)
        self._operations = Operations(library)
        self._scratch_bytes = library.functions.tn_decoder_scratch_bytes
        self._scratch_bytes.argtypes = [ctypes.POINTER(records.Decoder), ctypes.c_int64]
        self._scratch_bytes.restype = ctypes.c_int64
        self._turns = TurnTable(spec.rotary, spec.dtype)
        self._scratch = arrays.Scratch()
        self._layers = (records.DecoderLayer * spec.num_layers)()
        self._parts: dict[int, tuple[Parts, ...]] = {}  # of the layers whose records are there
        self._head: Parts | None = None
        self._record = records.Decoder(
            layers=self._layers,
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            rotary_dim=spec.rotary.dim,
            norm_eps=spec.norm_eps,
            attention_scale=spec.attention_scale,
            activation=ACTIVATIONS[spec.activation],
            dtype=arrays.dtype_of(np.empty(0, spec.dtype.numpy)),
        )

    def embed(self, batch: StepBatch) -> Array:
        """(T, hidden_size): the rows of the batch's tokens."""
        table = self._weights.embeddings
        out = np.empty((len(batch.tokens), self._spec.hidden_size), self._spec.dtype.numpy)
        scale = None if table.scale is None else table.scale.array
        return self._operations.embed(table.weight.array, scale, batch.tokens, out)

    def begin(self, batch: StepBatch, kv: Any) -> Step:
        """Raises `ValueError` for rows, slots or blocks that do not fit."""
        pool = Pool.of(kv)
        spec, num_rows = self._spec, len(batch.tokens)
        shape = (spec.num_layers, spec.num_kv_heads, spec.head_dim)
        if (pool.num_layers, pool.num_kv_heads, pool.head_dim) != shape or not pool.takes(self._record.dtype):
            raise ValueError("the pool of keys and values was made for another model")
        spans = Spans(batch.spans, num_rows, pool)
        check_ids(batch.slots, pool.num_slots, "a slot")
        end = max((span.context_len for span in batch.spans), default=0)
        check_ids(batch.positions, end, "a position")
        if not num_rows == len(batch.positions) == len(batch.slots):
            raise ValueError("tokens, positions and slots must be equally many")
        return Step(batch, pool, spans, self._turns.up_to(end))

    def layers(self, step: Step, first: int, end: int, x: Array) -> Array:
        """x (T, hidden_size) through the layers [first, end), in place."""
        num_rows = len(step.batch.tokens)
        if x.shape != (num_rows, self._spec.hidden_size) or x.dtype != self._spec.dtype.numpy:
            raise ValueError(f"x is {x.shape} {x.dtype}, and the step has {num_rows} rows")
        if not 0 <= first <= end <= self._spec.num_layers:
            raise ValueError(f"there are no layers [{first}, {end})")
        arrays.check_contiguous(x, "x")
        for index in range(first, end):
            if index not in self._parts:
                self._fill(index)
        num_bytes = int(self._scratch_bytes(ctypes.byref(self._record), num_rows))
        args = records.DecoderStepArgs(
            model=ctypes.pointer(self._record),
            kv=ctypes.pointer(step.pool.record),
            spans=step.spans.address,
            turns=arrays.address(step.turns),
            turn=arrays.address(step.batch.positions),
            slots=arrays.address(step.batch.slots),
            x=arrays.address(x),
            scratch=self._scratch.address_of(num_bytes),
            num_spans=step.spans.num,
            num_rows=num_rows,
            first=first,
            end=end,
        )
        if num_rows:
            self._operations.call("tn_decoder_step", args)
        for index in range(first, end):
            self._forget_unsettled(index)
        return x

    def logits(self, x: Array, rows: Int64s) -> Floats:
        """(R, vocab_size) fp32, not rounded to the spec's dtype."""
        chosen = np.ascontiguousarray(x[rows])
        out = np.empty((len(rows), self._spec.vocab_size), np.float32)
        if not len(rows):
            return out
        normed = self._operations.norm(chosen, chosen, self._weights.norm, None, self._spec.norm_eps)
        head = self._head or Parts(self._weights.head.matrices())
        first = 0
        for number, weight in enumerate(head.weights):
            columns = out[:, first : first + weight.num_out]
            self._products.linear(head.input_of(number, normed), weight, columns)
            first += weight.num_out
        if self._weights.head.is_settled:
            self._head = head
        return out

    def join(self, parts: Sequence[Array]) -> Array:
        return np.concatenate(parts)

    def select(self, x: Array, rows: Int64s) -> Array:
        return np.ascontiguousarray(x[rows])

    # ---- records ----

    def _fill(self, index: int) -> None:
        """The layer's record. Its weights are there."""
        layer = self._weights.layers[index]
        projections = (layer.qkv, layer.output, layer.gate_up, layer.down)
        parts = tuple(Parts(projection.matrices()) for projection in projections)
        self._layers[index] = records.DecoderLayer(
            vector_of(layer.attention_norm),
            vector_of(layer.query_norm),
            vector_of(layer.key_norm),
            vector_of(layer.mlp_norm),
            *(part.record for part in parts),
            self._spec.windows[index] or 0,
        )
        self._record.permuted_size = max(self._record.permuted_size, *(part.permuted_size for part in parts))
        self._parts[index] = parts

    def _forget_unsettled(self, index: int) -> None:
        """Converted matrices are made anew until they are exact."""
        layer = self._weights.layers[index]
        projections = (layer.qkv, layer.output, layer.gate_up, layer.down)
        if not all(projection.is_settled for projection in projections):
            del self._parts[index]
