"""Runs of zstd frames, checked and decoded by the native core, and made: `tn_decode_frames`, `tn_encode_frames`.

Frames may be anything: nothing outside of the memory that is given is read or written. A frame
that is not exactly as `docs/format.md`, "Frames", has it raises `IntegrityError`, which says where.
"""

from __future__ import annotations

import ctypes
import enum
import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import IntegrityError
from .library import fields, require_library

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

OK, DAMAGED = 0, 3  # tn_status


class Fault(enum.IntEnum):
    """`tn_fault` of core.h."""

    FRAME_ABSENT = 1
    FRAME_KIND = 2
    FRAME_SIZE = 3
    FRAME_BLOCKS = 4
    FRAME_CUT = 5
    FRAME_PADDING = 6
    FRAME_CONTENT = 7
    FRAMES_FOLLOWED = 8
    RAW_SIZE = 9
    UNUSED_BITS = 10
    EXPONENT_BITS = 11
    MASK_COUNT = 12
    TIER_COUNT = 13
    ZERO_VALUE = 14


# By the fault: what is wrong with a run of frames at byte `at`.
_MESSAGES = {
    Fault.FRAME_ABSENT: "there is no zstd frame at byte {at}",
    Fault.FRAME_KIND: "the zstd frame at byte {at} has no content size, or a window, checksum or dictionary",
    Fault.FRAME_SIZE: "the zstd frame at byte {at} declares another size than it should",
    Fault.FRAME_BLOCKS: "the zstd frame at byte {at} has too many blocks, or one of an unknown type",
    Fault.FRAME_CUT: "its bytes end within the zstd frame at byte {at}, or within its padding",
    Fault.FRAME_PADDING: "the padding at byte {at} is not the shortest skippable frame of zeros",
    Fault.FRAME_CONTENT: "the zstd frame at byte {at} cannot be decoded",
    Fault.FRAMES_FOLLOWED: "{at} bytes follow the last zstd frame",
}


class DecodeFramesArgs(ctypes.Structure):
    """`tn_decode_frames_args` of core.h."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        *fields(ctypes.c_void_p, "src out extents"),
        *fields(ctypes.c_int64, "src_bytes out_bytes frame_bytes end fault"),
    )


class EncodeFramesArgs(ctypes.Structure):
    """`tn_encode_frames_args` of core.h."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        *fields(ctypes.c_void_p, "src out"),
        *fields(ctypes.c_int64, "src_bytes out_bytes frame_bytes end"),
    )


def encoded_bound(size_bytes: int, frame_bytes: int) -> int:
    """The room that `size_bytes` in frames need at most."""
    return _encode_functions()[0](size_bytes, frame_bytes)


def encode_frames(data: memoryview | Bytes, frame_bytes: int) -> memoryview:
    """Frames of literals alone, each with `frame_bytes` of the data but for a shorter last one. Without the GIL."""
    src = np.frombuffer(data, np.uint8)
    out = np.empty(encoded_bound(src.size, frame_bytes), np.uint8)
    args = EncodeFramesArgs(
        size=ctypes.sizeof(EncodeFramesArgs),
        src=address(src),
        out=address(out),
        src_bytes=src.size,
        out_bytes=out.size,
        frame_bytes=frame_bytes,
    )
    status = _encode_functions()[1](ctypes.byref(args))
    assert status == OK, f"tn_encode_frames refused: {status}"
    return out[: args.end].data


def decode_frames(src: memoryview | Bytes, out: Bytes, frame_bytes: int, *, where: str = "") -> None:
    """Fill `out`, contiguous bytes, from frames of `frame_bytes` each, but for a shorter last one, which are
    all of `src`. Without the GIL. `where` names them in errors; after one, `out` is undefined.
    """
    _run(np.frombuffer(src, np.uint8), address(out), None, out.size, frame_bytes, where)


def find_frames(
    src: memoryview | Bytes, size_bytes: int, frame_bytes: int, *, where: str = ""
) -> NDArray[np.int64]:
    """The begin and end of each frame in `src`, (num_frames, 2), without its padding. Headers and
    paddings are checked, and nothing is decoded. `size_bytes` is what the frames hold.
    """
    extents = np.empty((-(-size_bytes // frame_bytes), 2), np.int64)
    _run(np.frombuffer(src, np.uint8), None, address(extents), size_bytes, frame_bytes, where)
    return extents


def damaged(fault: Fault, at: int, where: str) -> IntegrityError:
    """The error for a fault of a run of frames."""
    message = _MESSAGES[fault].format(at=at)
    return IntegrityError(f"{where}: {message}" if where else message, where=where)


def address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _run(
    src: Bytes, out: int | None, extents: int | None, out_bytes: int, frame_bytes: int, where: str
) -> None:
    args = DecodeFramesArgs(
        size=ctypes.sizeof(DecodeFramesArgs),
        src=address(src),
        out=out,
        extents=extents,
        src_bytes=src.size,
        out_bytes=out_bytes,
        frame_bytes=frame_bytes,
    )
    status = _function()(ctypes.byref(args))
    assert status in (OK, DAMAGED), f"tn_decode_frames refused: {status}"
    if status == DAMAGED:
        raise damaged(Fault(args.fault), args.end, where)
    if args.end != src.size:
        raise damaged(Fault.FRAMES_FOLLOWED, src.size - args.end, where)


@functools.cache
def _function() -> Callable[..., int]:
    loaded = require_library()
    loaded.check_struct("tn_decode_frames_args", DecodeFramesArgs)
    function: Callable[..., int] = loaded.functions.tn_decode_frames
    return function


@functools.cache
def _encode_functions() -> tuple[Callable[..., int], Callable[..., int]]:
    """The bound of the frames' bytes, and what makes them."""
    loaded = require_library()
    loaded.check_struct("tn_encode_frames_args", EncodeFramesArgs)
    bound: Callable[..., int] = loaded.functions.tn_encoded_bound
    bound.restype, bound.argtypes = ctypes.c_int64, (ctypes.c_int64, ctypes.c_int64)  # type: ignore[attr-defined]
    encode: Callable[..., int] = loaded.functions.tn_encode_frames
    return bound, encode
