"""Fields of 1 to 7 bits ↔ planes in which 2, 4 or 8 elements share a byte.

A frame of c elements takes h = ceil(c / share) bytes; byte j holds element j in its lowest bits, element j + h in
the next ones, and so on. So a frame is unpacked by a few shifts of whole rows, eight bytes at a time: what a shift
moves across the bytes of such a lane, a mask takes away. Works on buffers of the caller's, without the GIL.
`docs/format.md`, "Packed planes", is the norm. It does not know what the bits mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .manifest import FRAME_ELEMENTS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

_LANE = np.dtype("<u8")
_EACH_BYTE = 0x0101010101010101


def pack(values: Bytes, bits: int, out: Bytes) -> None:
    """Whole frames of values below 2^bits, or a shorter one, into `out`, ceil(values.size · bits / 8) bytes."""
    share = 8 // bits
    row = min(out.size, FRAME_ELEMENTS // share)
    if values.size != share * out.size:  # a shorter frame: what it lacks is 0
        values = np.concatenate([values, np.zeros(share * out.size - values.size, np.uint8)])
    rows, packed = values.reshape(-1, share, row), out.reshape(-1, row)
    np.copyto(packed, rows[:, 0])
    for place in range(1, share):
        np.bitwise_or(packed, rows[:, place] << np.uint8(place * bits), out=packed)


def unpack(plane: Bytes, bits: int, out: Bytes, *, up: int = 0) -> None:
    """The values of whole frames, or of a shorter one, each shifted `up`, into the front of `out`: one a byte.

    `out` must have room for 8 / bits values a byte of the plane, also where the frame has fewer elements.
    """
    share = 8 // bits
    row = min(plane.size, FRAME_ELEMENTS // share)
    lane = _LANE if row % _LANE.itemsize == 0 else plane.dtype
    packed = plane.view(lane).reshape(-1, 1, row // lane.itemsize)
    rows = out[: share * plane.size].view(lane).reshape(-1, share, row // lane.itemsize)
    shifts = np.arange(0, 8, bits, dtype=lane).reshape(share, 1)
    np.right_shift(packed, shifts, out=rows)
    np.bitwise_and(rows, in_each_byte((1 << bits) - 1, lane), out=rows)
    if up:
        np.left_shift(rows, lane.type(up), out=rows)


def has_unused_bits(plane: Bytes, bits: int, count: int) -> bool:
    """Whether bits behind the last of `count` elements are not 0: those of the last frame, where it is shorter."""
    share, rest = 8 // bits, count % FRAME_ELEMENTS
    if rest % share == 0:
        return False
    row = -(-rest // share)
    full, more = divmod(rest, row)  # rows of elements, and elements of the row behind these
    frame = plane[plane.size - row :]
    above = (frame[:more] >> (full + 1) * bits).any() if full + 1 < share else False
    return bool(above or (frame[more:] >> full * bits).any())


def as_lanes(*arrays: Bytes) -> tuple[NDArray[Any], ...]:
    """Views of arrays of one size, whose bytes are worked on alike: eight bytes a lane where that goes."""
    lane = _LANE if arrays[0].size % _LANE.itemsize == 0 else arrays[0].dtype
    return tuple(array.view(lane) for array in arrays)


def in_each_byte(value: int, lane: np.dtype[Any]) -> Any:
    """A lane that holds the value in each of its bytes."""
    return lane.type(value * _EACH_BYTE & (1 << 8 * lane.itemsize) - 1)
