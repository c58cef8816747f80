"""Tables that the core reads: cosines and sines of rotations by position, and the distances of two
tokens, which attention scores depend on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ...models.relative_positions import bias_buckets, disentangled_buckets
from ...models.rotary import Rotary
from ...models.spec import DecoderSpec, EncoderSpec
from ...tensors import DType, from_float32, to_float32

if TYPE_CHECKING:
    from ...models.matrices import EncoderWeights
    from .arrays import Array

Floats = npt.NDArray[np.float32]

_SMALLEST_TABLE = 512  # positions
_SMALLEST_REACH = 127


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


class DistanceTables:
    """Tables by the distance key - query, from -reach to reach. Replaced, not changed, when they grow."""

    __slots__ = ("_spec", "_weights", "bias", "buckets", "reach")

    def __init__(self, spec: EncoderSpec, weights: EncoderWeights) -> None:
        """Reads no tensor's content."""
        self._spec = spec
        self._weights = weights
        self.bias: Array | None = None  # (num_heads, 2 * reach + 1) fp32
        self.buckets: Array | None = None  # (2 * reach + 1,)
        self.reach = 0

    def up_to(self, reach: int) -> DistanceTables:
        """Itself, with at least this reach. Of a position bias it reads the weights."""
        spec = self._spec
        if (self.bias is not None or self.buckets is not None) and reach <= self.reach:
            return self
        if spec.position_bias is not None:
            self.reach = _grown(reach)
            assert self._weights.relative is not None
            table = to_float32(self._weights.relative.array, self._weights.relative.dtype)
            self.bias = np.ascontiguousarray(table[bias_buckets(spec.position_bias, self.reach)].T)
        elif spec.disentangled is not None:
            self.reach = _grown(reach)
            self.buckets = disentangled_buckets(spec.disentangled, self.reach)
        return self


def _grown(reach: int) -> int:
    return int((1 << max(reach, _SMALLEST_REACH).bit_length()) - 1)
