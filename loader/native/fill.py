"""One verified part into elements or planes, by one call of the native core without the GIL: `tn_fill_part`.

The structs of core.h as bytes: a part has up to thousands of segments, and packing is ten times as fast as ctypes.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .frames import DAMAGED, OK, Fault, address
from .library import fields, require_library

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

SCRATCH_BYTES = 8 * 65_536  # TN_FILL_SCRATCH_BYTES
SPARSE_SCRATCH_BYTES = 2 * SCRATCH_BYTES + (2 << 21)  # TN_FILL_SPARSE_BYTES
_ALIGNMENT_BYTES = 64
# offset, size, out, bits, is_coded: `tn_fill_plane`
PLANE = struct.Struct("=qqQii")
# out, base, planes, count, num_values, kind, num_planes, element_bytes, is_first, is_last,
# exponent_bits, mantissa_bits, known_bits: `tn_fill_segment`
SEGMENT = struct.Struct("=QQQqq8i")


class FillKind(enum.IntEnum):
    """`tn_fill_kind` of core.h."""

    WHOLE = 0
    BYTES = 1
    FLOATS = 2
    DIFFERENCES = 3
    PLANES = 4


class PlaneArgs(NamedTuple):
    """A plane: its stretch of the part, where it is decoded to (0: it is merged, or left out), and
    its bits an element.
    """

    offset_bytes: int
    size_bytes: int
    out: int
    bits: int
    is_coded: bool


class SegmentArgs(NamedTuple):
    """A segment: addresses of its elements and of its base's (0: none), and the numbers that core.h describes."""

    out: int
    base: int
    planes: Sequence[PlaneArgs]
    count: int  # type: ignore[assignment]  # shadows a method of tuples that is not used
    num_values: int
    kind: FillKind
    element_bytes: int
    is_first: bool
    is_last: bool
    exponent_bits: int
    mantissa_bits: int
    known_bits: int


class FillArgs(ctypes.Structure):
    """`tn_fill_args` of core.h."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        *fields(ctypes.c_void_p, "stored segments scratch"),
        *fields(ctypes.c_int64, "stored_bytes num_segments scratch_bytes segment plane at fault"),
    )


class Damage(NamedTuple):
    """A fault of a part, and its place: the number of a segment, and of a plane in it (-1: no single one). `at` is
    the byte in that plane; of a raw plane the size that it should have; of bytes that follow frames how many they are.
    """

    fault: Fault
    segment: int
    plane: int
    at: int


class Scratch:
    """Working memory of one thread, 0.5 MiB, used again for every part; 5 MiB once it has met a
    sparse tensor. Not to be shared.
    """

    __slots__ = ("_memory",)

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def take(self, size_bytes: int) -> Bytes:
        """At least `size_bytes` of memory, aligned, with undefined content."""
        if self._memory.size < size_bytes:
            memory = np.empty(size_bytes + _ALIGNMENT_BYTES, np.uint8)
            skipped = -address(memory) % _ALIGNMENT_BYTES
            self._memory = memory[skipped : skipped + size_bytes]
        return self._memory


def fill(stored: Bytes, segments: Sequence[SegmentArgs], scratch: Scratch) -> Damage | None:
    """Decode the part's bytes into the memory that its segments name, which stays the caller's; None if it is sound.
    After damage that memory is undefined. Drops the GIL.
    """
    planes = bytearray(PLANE.size * sum(len(segment.planes) for segment in segments))
    array = bytearray(SEGMENT.size * len(segments))
    first_plane = address_of(planes)
    at = 0
    for number, segment in enumerate(segments):
        out, base, its_planes, count, num_values, kind, *numbers = segment
        place = first_plane + at
        for plane in its_planes:
            PLANE.pack_into(planes, at, *plane)
            at += PLANE.size
        SEGMENT.pack_into(
            array, number * SEGMENT.size, out, base, place, count, num_values, kind, len(its_planes), *numbers
        )
    is_sparse = any(segment.num_values >= 0 for segment in segments)
    memory = scratch.take(SPARSE_SCRATCH_BYTES if is_sparse else SCRATCH_BYTES)
    args = FillArgs(
        size=ctypes.sizeof(FillArgs),
        stored=address(stored),
        segments=address_of(array),
        scratch=address(memory),
        stored_bytes=stored.size,
        num_segments=len(segments),
        scratch_bytes=memory.size,
    )
    status = _function()(ctypes.byref(args))
    assert status in (OK, DAMAGED), f"tn_fill_part refused: {status}"
    return None if status == OK else Damage(Fault(args.fault), args.segment, args.plane, args.at)


def address_of(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)) if memory else 0


@functools.cache
def _function() -> Callable[..., int]:
    loaded = require_library()
    loaded.check_struct("tn_fill_args", FillArgs)
    for name, declared in (("tn_fill_plane", PLANE), ("tn_fill_segment", SEGMENT)):
        loaded.check_size(name, declared.size)
    function: Callable[..., int] = loaded.functions.tn_fill_part
    return function
