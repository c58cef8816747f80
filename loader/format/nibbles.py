"""The layout of 4-bit integers in matrices: `docs/quantize.md`, "The layout", is the norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

RUN = 64  # elements whose nibbles lie in the same 32 bytes


def pack_nibbles(levels: Bytes) -> Bytes:
    """(N, K) uint8, each below 16 → (N, K / 2) uint8; K is a multiple of 64. Of 64 neighbours, byte
    j has number j in its low half and j + 32 in its high one.
    """
    halves = levels.reshape(len(levels), -1, 2, RUN // 2)
    packed: Bytes = halves[:, :, 0] | halves[:, :, 1] << np.uint8(4)
    return packed.reshape(len(levels), -1)


def unpack_nibbles(packed: Bytes) -> Bytes:
    """(N, K / 2) uint8 → (N, K) uint8: the levels that `pack_nibbles` has packed."""
    runs = packed.reshape(len(packed), -1, 1, RUN // 2)
    levels: Bytes = np.concatenate([runs & np.uint8(15), runs >> np.uint8(4)], axis=2)
    return levels.reshape(len(packed), -1)
