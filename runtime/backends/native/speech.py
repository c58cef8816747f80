"""The native executor of encoders of sound: convolutions as products over neighbouring columns, then an encoder's
layers over one window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...models.executor import TextBatch
from ...models.matrices import DenseMatrix, StoredProjection
from ...models.spec import Activation
from ...models.speech import TAPS
from ...tensors import from_float32
from .encoder import NativeEncoder
from .operations import ACTIVATIONS

if TYPE_CHECKING:
    from ....loader.native.library import Library
    from ...models.executor import Floats
    from ...models.spec import EncoderSpec
    from ...models.speech import SpeechWeights
    from .arrays import Array


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
