"""The native executor of encoders and classifiers, over texts that lie back to back, without padding.

As the decoder's (decoder.py) in everything that is not said here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ...dtypes import DType, to_float32
from ...models.executor import Accepts, Floats, TextBatch, any_value, one_of, refusal_of
from ...models.matrices import EncoderWeights, Tensor
from ...models.spec import EncoderSpec, Pooling
from . import arrays, records
from .operations import ACTIVATIONS, MAX_HEAD_DIM, TANH, Operations, check_starts
from .pools import check_ids
from .products import Products
from .weights import Parts, refusal_of_tensors, vector_of

if TYPE_CHECKING:
    from ....loader.native.library import Library
    from ...models.matrices import Projection
    from .arrays import Array

NAME = "native"
_SMALLEST_NORM = np.float32(1e-12)  # of an embedding that is divided by it

IMPLEMENTED: Mapping[str, Accepts] = {
    **dict.fromkeys(
        (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "norm_eps",
            "attention_scale",
            "max_positions",
            "type_vocab_size",
            "position_offset",
            "normalize",
            "num_labels",
        ),
        any_value,
    ),
    "dtype": one_of(DType.BF16, DType.F32),
    "head_dim": lambda head_dim: head_dim <= MAX_HEAD_DIM,
    "activation": one_of(*ACTIVATIONS),
    "pooling": one_of(Pooling.MEAN, Pooling.CLS),
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
        self._operations = Operations(library)
        self._scratch_bytes = library.functions.tn_encoder_scratch_bytes
        self._scratch_bytes.argtypes = [ctypes.POINTER(records.Encoder), ctypes.c_int64]
        self._scratch_bytes.restype = ctypes.c_int64
        self._scratch = arrays.Scratch()
        self._layers = (records.EncoderLayer * spec.num_layers)()
        self._parts = [self._fill(index) for index in range(spec.num_layers)]
        self._record = records.Encoder(
            layers=self._layers,
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            num_heads=spec.num_heads,
            head_dim=spec.head_dim,
            norm_eps=spec.norm_eps,
            attention_scale=spec.attention_scale,
            activation=ACTIVATIONS[spec.activation],
            dtype=arrays.dtype_of(np.empty(0, spec.dtype.numpy)),
        )

    def embed(self, batch: TextBatch) -> Array:
        """norm(word + position + type 0) of each token, (T, hidden_size)."""
        weights, operations = self._weights, self._operations
        check_starts(batch.starts, len(batch.tokens))
        lengths = np.diff(batch.starts)
        in_text = np.arange(len(batch.tokens), dtype=np.int64) - np.repeat(batch.starts[:-1], lengths)
        x = self._rows_of(weights.words, batch.tokens)
        operations.add(x, self._rows_of(weights.types, np.zeros(1, np.int64)))
        operations.add(x, self._rows_of(weights.positions, in_text + self._spec.position_offset))
        norm = weights.norm
        return operations.norm(x, x, norm.weight, norm.bias, self._spec.norm_eps)

    def layers(self, batch: TextBatch, first: int, end: int, x: Array) -> Array:
        """x (T, hidden_size) through the layers [first, end), in place."""
        spec, num_rows = self._spec, len(batch.tokens)
        check_starts(batch.starts, num_rows)
        if x.shape != (num_rows, spec.hidden_size) or x.dtype != spec.dtype.numpy:
            raise ValueError(f"x is {x.shape} {x.dtype}, and the batch has {num_rows} rows")
        if not 0 <= first <= end <= spec.num_layers:
            raise ValueError(f"there are no layers [{first}, {end})")
        arrays.check_contiguous(x, "x")
        num_bytes = int(self._scratch_bytes(ctypes.byref(self._record), num_rows))
        args = records.EncoderStepArgs(
            model=ctypes.pointer(self._record),
            starts=arrays.address(batch.starts),
            x=arrays.address(x),
            scratch=self._scratch.address_of(num_bytes),
            num_texts=len(batch.starts) - 1,
            num_rows=num_rows,
            first=first,
            end=end,
        )
        self._operations.call("tn_encoder_step", args)
        return x

    def finish(self, batch: TextBatch, x: Array) -> Floats:
        """(N, spec.num_columns) fp32: pooled and normalised states, or a classifier's scores."""
        firsts = batch.starts[:-1]
        if self._spec.num_labels:
            return self._scores(np.ascontiguousarray(x[firsts]))
        if self._spec.pooling is Pooling.MEAN:
            pooled = self._operations.mean(x, batch.starts)
        else:
            pooled = np.array(to_float32(x[firsts], self._spec.dtype))
        if self._spec.normalize:
            for number, row in enumerate(pooled):  # one by one: a sum must not depend on how many there are
                pooled[number] = row / max(np.sqrt((row * row).sum()), _SMALLEST_NORM)
        return pooled

    def _scores(self, states: Array) -> Floats:
        """states (N, hidden_size) → (N, num_labels), not rounded to the spec's dtype."""
        assert self._weights.dense is not None
        assert self._weights.scores is not None
        dense = self._product(self._weights.dense, states, states.dtype)
        self._operations.activate(dense, None, dense, TANH)
        return self._product(self._weights.scores, dense, np.dtype(np.float32))

    def _product(self, projection: Projection, x: Array, dtype: np.dtype[np.generic]) -> Array:
        (weight,) = Parts(projection.matrices()).weights
        return self._products.linear(x, weight, np.empty((len(x), weight.num_out), dtype))

    def _rows_of(self, table: Tensor, numbers: Array) -> Array:
        check_ids(numbers, len(table.array), "a token or a position")
        out = np.empty((len(numbers), self._spec.hidden_size), self._spec.dtype.numpy)
        return self._operations.embed(table.array, None, numbers, out)

    def _fill(self, index: int) -> tuple[Parts, ...]:
        """The layer's record, and what it refers to."""
        layer = self._weights.layers[index]
        parts = tuple(Parts(each.matrices()) for each in (layer.qkv, layer.output, layer.up, layer.down))
        self._layers[index] = records.EncoderLayer(
            *(part.record for part in parts),
            vector_of(layer.attention_norm.weight),
            vector_of(layer.attention_norm.bias),
            vector_of(layer.mlp_norm.weight),
            vector_of(layer.mlp_norm.bias),
        )
        return parts
