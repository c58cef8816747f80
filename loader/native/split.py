"""Floats into the planes of all their tiers by the native core, without the GIL: `tn_split`."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .frames import OK, address, encoded_bound
from .library import fields, require_library

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

FRAME_ELEMENTS = 65_536  # TN_FRAME_ELEMENTS of core.h, and the manifest's, which knows no native code


class Cut(NamedTuple):
    """The bits of each word that a plane has: those of `mask` behind the lowest `mantissa_down`, and
    of `sign` behind `sign_down`, together `bits` of 8, 4, 2 or 1.
    """

    bits: int
    mantissa_down: int
    mask: int
    sign_down: int = 0
    sign: int = 0
    is_exponents: bool = False


class SplitPlane(ctypes.Structure):
    """`tn_split_plane` of core.h."""

    _fields_ = (
        ("out", ctypes.c_void_p),
        ("out_bytes", ctypes.c_int64),
        ("end", ctypes.c_int64),
        ("mask", ctypes.c_uint32),
        ("sign", ctypes.c_uint32),
        ("mantissa_down", ctypes.c_int32),
        ("sign_down", ctypes.c_int32),
        ("bits", ctypes.c_int32),
        ("is_coded", ctypes.c_int32),
    )


class SplitArgs(ctypes.Structure):
    """`tn_split_args` of core.h."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("words", ctypes.c_void_p),
        ("planes", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        *fields(ctypes.c_int32, "num_planes word_bytes"),
    )


def room_bytes(count: int, cuts: Sequence[Cut]) -> int:
    """The room that `split` needs at most, for the planes of `count` words."""
    return sum(_plane_room(count, cut, is_coded=True) for cut in cuts)


def split(
    words: NDArray[Any],
    cuts: Sequence[Cut],
    *,
    coded: Sequence[bool] | None = None,
    room: Bytes | None = None,
) -> list[Bytes]:
    """The planes of the floats `words`, (n,) uint16 or uint32, contiguous: for each, bytes, or where
    `coded` says so frames of literals alone. They are views of `room`, or of fresh memory.
    """
    is_coded = coded or (False,) * len(cuts)
    sizes = [_plane_room(words.size, cut, is_coded=own) for cut, own in zip(cuts, is_coded, strict=True)]
    room = np.empty(sum(sizes), np.uint8) if room is None else room
    outs: list[Bytes] = []
    for size_bytes in sizes:
        outs.append(room[:size_bytes])
        room = room[size_bytes:]
    planes = (SplitPlane * len(cuts))(
        *(
            SplitPlane(
                out=address(out),
                out_bytes=out.size,
                mask=cut.mask,
                sign=cut.sign,
                mantissa_down=cut.mantissa_down,
                sign_down=cut.sign_down,
                bits=cut.bits,
                is_coded=own,
            )
            for cut, own, out in zip(cuts, is_coded, outs, strict=True)
        )
    )
    args = SplitArgs(
        size=ctypes.sizeof(SplitArgs),
        words=address(words),
        planes=ctypes.addressof(planes),
        count=words.size,
        num_planes=len(cuts),
        word_bytes=words.itemsize,
    )
    status = _function()(ctypes.byref(args))
    assert status == OK, f"tn_split refused: {status}"
    return [out[: plane.end] for out, plane in zip(outs, planes, strict=True)]


def _plane_room(count: int, cut: Cut, *, is_coded: bool) -> int:
    size_bytes = -(-count * cut.bits // 8)
    return encoded_bound(size_bytes, FRAME_ELEMENTS * cut.bits // 8) if is_coded else size_bytes


@functools.cache
def _function() -> Callable[..., int]:
    loaded = require_library()
    loaded.check_struct("tn_split_plane", SplitPlane)
    loaded.check_struct("tn_split_args", SplitArgs)
    function: Callable[..., int] = loaded.functions.tn_split
    return function
