"""Buckets and tables of the distance of two tokens, for attention scores that depend on it.

Tables are by the distance key - query, from -reach to reach. Logarithms are fp32, and rounded as in transformers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..step.batch import Int64s
from ..tensors import to_float32
from .encoder_config import Disentangled, PositionBias

if TYPE_CHECKING:
    from .encoder_weights import EncoderWeights
    from .spec import EncoderSpec

_SMALLEST_REACH = 127


def bias_buckets(bias: PositionBias, reach: int) -> Int64s:
    """(2 · reach + 1,): the bucket of each distance, in [0, num_buckets)."""
    distances = np.arange(-reach, reach + 1)
    half = bias.num_buckets // 2
    exact = half // 2
    sizes = np.abs(distances)
    powers = np.log(np.maximum(sizes, 1).astype(np.float32) / np.float32(exact))
    powers = powers / np.float32(math.log(bias.max_distance / exact)) * np.float32(half - exact)
    grown = np.minimum(exact + powers.astype(np.int64), half - 1)
    buckets = np.where(sizes < exact, sizes, grown) + np.where(distances > 0, half, 0)
    return buckets.astype(np.int64)


def disentangled_buckets(positions: Disentangled, reach: int) -> Int64s:
    """(2 · reach + 1,): the row of the table of positions for each distance, in [0, 2 · span)."""
    distances = np.arange(reach, -reach - 1, -1)  # query - key
    if positions.max_distance is not None:
        middle = positions.span // 2
        sizes = np.where(np.abs(distances) < middle, middle - 1, np.abs(distances))
        powers = np.log((sizes / middle).astype(np.float32))
        largest = np.log(np.float32((positions.max_distance - 1) / middle))
        grown = np.ceil(powers / largest * np.float32(middle - 1)) + middle
        distances = np.where(sizes <= middle, distances, grown * np.sign(distances)).astype(np.int64)
    return np.clip(distances + positions.span, 0, 2 * positions.span - 1).astype(np.int64)


class DistanceTables:
    """Tables by the distance key - query, from -reach to reach. Replaced, not changed, when they grow."""

    __slots__ = ("_spec", "_weights", "bias", "buckets", "reach")

    def __init__(self, spec: EncoderSpec, weights: EncoderWeights) -> None:
        """Reads no tensor's content."""
        self._spec = spec
        self._weights = weights
        self.bias: npt.NDArray[Any] | None = None  # (num_heads, 2 * reach + 1) fp32
        self.buckets: npt.NDArray[Any] | None = None  # (2 * reach + 1,)
        self.reach = 0

    def up_to(self, reach: int) -> DistanceTables:
        """Itself, with at least this reach. Of a position bias it reads the weights."""
        spec = self._spec
        if (self.bias is not None or self.buckets is not None) and reach <= self.reach:
            return self
        if spec.position_bias is not None:
            self.reach = _grown(reach)
            assert self._weights.relative is not None
            table = to_float32(self._weights.relative.on_host(), self._weights.relative.dtype)
            self.bias = np.ascontiguousarray(table[bias_buckets(spec.position_bias, self.reach)].T)
        elif spec.disentangled is not None:
            self.reach = _grown(reach)
            self.buckets = disentangled_buckets(spec.disentangled, self.reach)
        return self


def _grown(reach: int) -> int:
    return int((1 << max(reach, _SMALLEST_REACH).bit_length()) - 1)
