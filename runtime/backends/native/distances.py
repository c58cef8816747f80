"""Tables of the distances of two tokens, which attention scores depend on, as the core reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...models.relative_positions import bias_buckets, disentangled_buckets
from ...models.spec import EncoderSpec
from ...tensors import to_float32

if TYPE_CHECKING:
    from ...models.matrices import EncoderWeights
    from .arrays import Array

_SMALLEST_REACH = 127


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
