"""Access to the hidden states that enter a decoder's head, whatever backend computes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from ..backends.native.reference import rms_norm
from ..models.decoder import Decoder
from ..step.batch import Int64s
from ..tensors import DType, to_float32

Floats = npt.NDArray[np.float32]


class RecordingExecutor:
    """A decoder's executor that keeps the normed inputs of its last head: `states`, (R, hidden_size) fp32."""

    def __init__(self, decoder: Decoder) -> None:
        self.states: Floats
        self._executor = decoder.executor
        self._spec = decoder.spec
        self._norm = decoder.weights.norm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def logits(self, x: Any, rows: Int64s) -> Any:
        """Like `Executor.logits`."""
        spec = self._spec
        self.states = rms_norm(_floats(x)[rows], self._norm, spec.norm_eps, DType.F32, spec.norm)
        return self._executor.logits(x, rows)


@contextmanager
def recorded_states(decoder: Decoder) -> Iterator[RecordingExecutor]:
    """Record the decoder's states inside the context. The decoder must have no other users."""
    own = decoder.executor
    recording = decoder.executor = RecordingExecutor(decoder)
    try:
        yield recording
    finally:
        decoder.executor = own


def _floats(x: Any) -> Floats:
    """An executor's activations: an array of numpy, whose bf16 is uint16, or a tensor of torch."""
    if isinstance(x, np.ndarray):
        return to_float32(x, DType.BF16 if x.dtype == np.uint16 else DType.F32)
    floats: Floats = x.float().numpy()
    return floats
