"""The native executor of encoders of sound: convolutions as products over neighbouring columns, then an encoder's
layers over one window. And what a decoder's step tells of its attention over the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...models.executor import TextBatch
from ...models.matrices import DenseMatrix, StoredProjection
from ...models.spec import Activation
from ...models.speech import TAPS
from ...tensors import from_float32, to_float32
from .encoder import NativeEncoder
from .operations import ACTIVATIONS

if TYPE_CHECKING:
    from ....loader.native.library import Library
    from ...models.executor import Floats
    from ...models.spec import DecoderSpec, EncoderSpec
    from ...models.speech import SpeechWeights
    from ...step.batch import SequenceSpan
    from .arrays import Array
    from .pools import Pool


class NativeSpeech:
    """A `SpeechExecutor`. One thread at a time."""

    def __init__(self, spec: EncoderSpec, weights: SpeechWeights, library: Library) -> None:
        """Reads no tensor's content."""
        self._spec = spec
        self._weights = weights
        self._encoder = NativeEncoder(spec, weights.encoder, library)

    def working_bytes(self, num_rows: int) -> int:
        return self._encoder.missing_bytes(num_rows)

    def embed(self, window: Floats) -> Array:
        columns = from_float32(np.ascontiguousarray(window.T), self._spec.dtype)
        x = self._convolved(self._weights.second, self._convolved(self._weights.first, columns, 1), 2)
        positions = self._weights.encoder.positions
        assert positions is not None
        return self._encoder.operations.add(x, self._encoder.rows_of(positions, np.arange(len(x))))

    def _convolved(self, matrix: DenseMatrix, columns: Array, stride: int) -> Array:
        """(ceil(T / stride), hidden) of columns (T, channels), which zeros precede and follow; activated."""
        padded = np.pad(columns, ((1, 1), (0, 0)))
        near = np.lib.stride_tricks.sliding_window_view(padded, TAPS, axis=0)[::stride]
        x = self._encoder.product(
            StoredProjection((matrix,)), np.ascontiguousarray(near).reshape(len(near), -1), columns.dtype
        )
        return self._encoder.operations.activate(x, None, x, ACTIVATIONS[Activation.GELU])

    def layers(self, first: int, end: int, x: Array) -> Array:
        starts = np.array([0, len(x)], np.int64)
        return self._encoder.layers(TextBatch(np.zeros(len(x), np.int64), starts), first, end, x)

    def finish(self, x: Array) -> Array:
        final_norm = self._weights.encoder.final_norm
        assert final_norm is not None
        return self._encoder.norm(x, final_norm)


class KeptQueries:
    """The queries of a step's attention over sound, of the layers [first, end), for the spans that keep some."""

    def __init__(self, spec: DecoderSpec, num_rows: int, first: int, end: int) -> None:
        self._spec = spec
        self._first, self._end = first, end
        shape = (end - first, num_rows, spec.num_heads, spec.head_dim)
        self.queries: Array = np.empty(shape, spec.dtype.numpy)

    def give(self, spans: Sequence[SequenceSpan], pool: Pool) -> None:
        """Give them, and the keys that they meet, to the spans' `attention`. The step is done."""
        spec, places = self._spec, self._spec.kv_places()
        for span in spans:
            attention = span.attention
            if attention is None:
                continue
            tokens = np.arange(attention.num_places)
            blocks = np.array(span.blocks, np.int64)[tokens // pool.block_size]
            slots = blocks * pool.block_size + tokens % pool.block_size
            for number, (layer, head) in enumerate(attention.heads):
                if not self._first <= layer < self._end:
                    continue
                at = places[layer].layer, 0, head, slots
                keys = to_float32(pool.data[at], spec.dtype)
                if pool.scales is not None:
                    keys = keys * to_float32(pool.scales[at], spec.dtype)
                rows = self.queries[layer - self._first, span.start : span.start + span.length, head]
                queries = to_float32(rows, spec.dtype) * np.float32(spec.attention_scale)
                attention.add(number, span.context_len - span.length, queries, keys)
