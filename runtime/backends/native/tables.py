"""Tables that the core reads: cosines and sines of rotations by position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ...models.rotary import Rotary
from ...models.spec import DecoderSpec
from ...tensors import DType, from_float32, to_float32

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...step.batch import Int64s

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

    def at(self, axes: Int64s, of: Sequence[int], end: int) -> Floats:
        """(T, rotary_dim): the rows of tokens whose positions are `axes` (3, T), below `end`; number i turns by its
        position on the axis of[i].
        """
        table, half = self.up_to(end), len(of)
        rows = np.empty((axes.shape[1], 2 * half), np.float32)
        for axis, positions in enumerate(axes):
            columns = np.flatnonzero(np.equal(of, axis))
            columns = np.concatenate((columns, columns + half))
            rows[:, columns] = table[positions[:, None], columns]
        return rows


def turn_tables(spec: DecoderSpec) -> tuple[TurnTable, TurnTable | None]:
    """A decoder's main table, and the local one where it has one."""
    dtype = DType.F32 if spec.wide_rotary else spec.dtype
    local = spec.local_rotary
    return TurnTable(spec.rotary, dtype), None if local is None else TurnTable(local, dtype)
