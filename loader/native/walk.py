"""The tables by which a device decodes and merges a stored part: one call of the native core, `tn_walk_part`, without
the GIL.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .fill import address_of
from .frames import DAMAGED, OK, address
from .library import fields, require_library

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

# offset, size, room, bits, is_coded: `tn_walk_plane`
PLANE = struct.Struct("=qqqii")
# entries, planes, out, count, num_planes, element_bytes, exponent_bits, is_flat: `tn_walk_segment`
SEGMENT = struct.Struct("=QQqq4i")
# What is written.
ENTRY_BYTES = {"tn_coded_frame": 24, "tn_merged_frame": 48, "tn_copied_bytes": 16}


class PlaneWalk(NamedTuple):
    """A plane: its stretch of the part, where its decoded bytes go in the image (unused where it is raw), and its bits
    an element (0: all of it).
    """

    offset_bytes: int
    size_bytes: int
    room_bytes: int
    bits: int
    is_coded: bool


class SegmentWalk(NamedTuple):
    """A segment; `entries_bytes` is where its first entry goes in the tables, `out_bytes` where its elements go in the
    weights. The bytes of its first plane have at most `exponent_bits`.
    """

    entries_bytes: int
    out_bytes: int
    planes: Sequence[PlaneWalk]
    num_elements: int
    element_bytes: int
    exponent_bits: int
    is_flat: bool


class WalkArgs(ctypes.Structure):
    """`tn_walk_args` of core.h."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        *fields(ctypes.c_void_p, "stored segments frames"),
        *fields(ctypes.c_int64, "stored_bytes num_segments num_frames"),
    )


def walk_part(
    stored: Bytes, segments: Sequence[SegmentWalk], tables: Bytes, *, frames_bytes: int, num_frames: int
) -> bool:
    """Write the segments' entries, and from `frames_bytes` on those of `num_frames` frames, into the tables, which are
    contiguous and at a multiple of 8 bytes.

    False, with the tables undefined, where the part's bytes, which may be any, are not what the manifest says, or have
    frames with sequences. Nothing is decoded. Drops the GIL.
    """
    planes = bytearray(PLANE.size * sum(len(segment.planes) for segment in segments))
    array = bytearray(SEGMENT.size * len(segments))
    first_table, first_plane, at = address(tables), address_of(planes), 0
    for number, segment in enumerate(segments):
        entries, out, its_planes, *numbers = segment
        place = first_plane + at
        for plane in its_planes:
            PLANE.pack_into(planes, at, *plane)
            at += PLANE.size
        count, *sizes = numbers
        SEGMENT.pack_into(
            array, number * SEGMENT.size, first_table + entries, place, out, count, len(its_planes), *sizes
        )
    args = WalkArgs(
        size=ctypes.sizeof(WalkArgs),
        stored=address(stored),
        segments=address_of(array),
        frames=first_table + frames_bytes,
        stored_bytes=stored.size,
        num_segments=len(segments),
        num_frames=num_frames,
    )
    status = _function()(ctypes.byref(args))
    assert status in (OK, DAMAGED), f"tn_walk_part refused: {status}"
    return status == OK


@functools.cache
def _function() -> Callable[..., int]:
    loaded = require_library()
    loaded.check_struct("tn_walk_args", WalkArgs)
    packed = {"tn_walk_plane": PLANE.size, "tn_walk_segment": SEGMENT.size}
    for name, size in {**packed, **ENTRY_BYTES}.items():
        loaded.check_size(name, size)
    function: Callable[..., int] = loaded.functions.tn_walk_part
    return function
