"""The rotations of queries and keys: cosines and sines by position, in the form that the core
reads.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...models.rotary import Rotary
from ...models.spec import DecoderSpec
from ...tensors import DType, from_float32, to_float32

Floats = npt.NDArray[np.float32]

_SMALLEST_TABLE = 512  # positions


class TurnTable:
    """Cosines and sines of all positions so far, (positions, rotary_dim) fp32: cosines, then sines, rounded to `dtype`.
    Replaced, not changed, when it grows."""

    def __init__(self, rotary: Rotary, dtype: DType) -> None:
        self._rotary = rotary
        self._dtype = dtype
        self._table: Floats = np.empty((0, rotary.dim), np.float32)

    def up_to(self, end: int) -> Floats:
        """The table with at least `end` positions."""
        if end > len(self._table):
            length = 1 << (max(end, _SMALLEST_TABLE) - 1).bit_length()
            more = np.concatenate(self._rotary.tables(len(self._table), length), axis=1)
            rounded = to_float32(from_float32(more, self._dtype), self._dtype)
            self._table = np.concatenate((self._table, rounded))
        return self._table


def turn_tables(spec: DecoderSpec) -> tuple[TurnTable, TurnTable | None]:
    """A decoder's main table, and the local one where it has one."""
    dtype = DType.F32 if spec.wide_rotary else spec.dtype
    local = spec.local_rotary
    return TurnTable(spec.rotary, dtype), None if local is None else TurnTable(local, dtype)
