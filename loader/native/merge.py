"""Frames → planes → elements by the native core: `tn_decode_frames`, `tn_merge`, `tn_interleave`,
`tn_add_differences`, `tn_scatter`.

Importing this loads nothing; the first call does. Frames may be anything. What else it is handed
was checked by `codec.py`: sizes of planes, unused bits, exponents. It does not know encodings.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

from .library import library

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Bytes = NDArray[Any]

_MAX_PLANES = 5  # of a field
_OK, _DAMAGED, _LEFT = 0, 3, 4  # tn_status
_INTERLEAVED = (2, 4, 8)  # bytes an element
_ADDED = (2, 4)


class DecodeFramesArgs(ctypes.Structure):
    """`tn_decode_frames_args` of core.h."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("src", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("src_bytes", ctypes.c_int64),
        ("out_bytes", ctypes.c_int64),
        ("frame_bytes", ctypes.c_int64),
        ("only_quick", ctypes.c_int64),
        ("end", ctypes.c_int64),
    )


class MergeArgs(ctypes.Structure):
    """`tn_merge_args` of core.h."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("out", ctypes.c_void_p),
        ("exponents", ctypes.c_void_p),
        ("planes", ctypes.c_void_p * _MAX_PLANES),
        ("count", ctypes.c_int64),
        ("frame_elements", ctypes.c_int64),
        ("plane_bits", ctypes.c_int32 * _MAX_PLANES),
        ("num_planes", ctypes.c_int32),
        ("word_bytes", ctypes.c_int32),
        ("mantissa_bits", ctypes.c_int32),
        ("known_bits", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


class InterleaveArgs(ctypes.Structure):
    """`tn_interleave_args` of core.h."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("out", ctypes.c_void_p),
        ("planes", ctypes.c_void_p * 8),
        ("count", ctypes.c_int64),
        ("num_planes", ctypes.c_int64),
    )


class ScatterArgs(ctypes.Structure):
    """`tn_scatter_args` of core.h."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("out", ctypes.c_void_p),
        ("mask", ctypes.c_void_p),
        ("signs", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("begin", ctypes.c_int64),
        ("num_before", ctypes.c_int64),
        ("num_values", ctypes.c_int64),
        ("num_signs", ctypes.c_int64),
        ("end", ctypes.c_int64),
        ("num_placed", ctypes.c_int64),
        ("word_bytes", ctypes.c_int32),
        ("keep", ctypes.c_uint32),
        ("has_zero", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


def decode_frames(
    src: Bytes, out: Bytes, frame_bytes: int, *, only_quick: bool = False
) -> tuple[bool, int] | None:
    """Fill `out` with the content of the zstd frames that begin `src`, bytes both; None, and nothing
    written, without a native library, or with `only_quick` where zstd's own decodes them faster.

    Of (True, end): the frames end at byte `end` of `src`, with their padding. Of (False, begin):
    the one that begins there is damaged, and `out` undefined. Drops the GIL.
    """
    function = _decode_frames_function()
    if function is None:
        return None
    args = DecodeFramesArgs(
        size=ctypes.sizeof(DecodeFramesArgs),
        src=_address(src),
        out=_address(out),
        src_bytes=src.size,
        out_bytes=out.size,
        frame_bytes=frame_bytes,
        only_quick=only_quick,
    )
    status = function(ctypes.byref(args))
    assert status in (_OK, _DAMAGED, _LEFT), f"tn_decode_frames refused: {status}"
    return None if status == _LEFT else (status == _OK, int(args.end))


def merge(
    out: Bytes,
    exponents: Bytes | None,
    planes: Sequence[Bytes],
    plane_bits: Sequence[int],
    *,
    frame_elements: int,
    mantissa_bits: int,
    known_bits: int,
) -> bool:
    """Merge a batch of one tier into the floats `out`; False, and nothing written, without a native
    library.

    `out`: (n,) uint16 or uint32. `exponents`: (n,) bytes, None in a later tier. `planes`: the
    field's, highest bits first, of `plane_bits` each. Drops the GIL.
    """
    function = _merge_function()
    if function is None or not out.flags.aligned:
        return False
    args = MergeArgs(
        size=ctypes.sizeof(MergeArgs),
        out=_address(out),
        exponents=None if exponents is None else _address(exponents),
        planes=tuple(map(_address, planes)),
        count=out.size,
        frame_elements=frame_elements,
        plane_bits=tuple(plane_bits),
        num_planes=len(planes),
        word_bytes=out.itemsize,
        mantissa_bits=mantissa_bits,
        known_bits=known_bits,
    )
    status = function(ctypes.byref(args))
    assert status == 0, f"tn_merge refused: {status}"
    return True


def interleave(out: Bytes, planes: Sequence[Bytes]) -> bool:
    """Write elements of `len(planes)` bytes, whose planes these are, into `out`, bytes; False as
    `merge`.
    """
    return len(planes) in _INTERLEAVED and _by_planes(_interleave_function(), out, planes)


def add_differences(out: Bytes, planes: Sequence[Bytes]) -> bool:
    """Add zigzag differences of `len(planes)` bytes, whose planes these are, to the elements in
    `out`, bytes; False as `merge`.
    """
    return len(planes) in _ADDED and _by_planes(_add_differences_function(), out, planes)


def _by_planes(function: Callable[..., int] | None, out: Bytes, planes: Sequence[Bytes]) -> bool:
    if function is None or _address(out) % len(planes):
        return False
    args = InterleaveArgs(
        size=ctypes.sizeof(InterleaveArgs),
        out=_address(out),
        planes=tuple(map(_address, planes)),
        count=planes[0].size,
        num_planes=len(planes),
    )
    status = function(ctypes.byref(args))
    assert status == 0, f"the native core refused planes of elements: {status}"
    return True


def can_scatter(out: Bytes) -> bool:
    """True if the native core is there, and takes the words `out`."""
    return _scatter_function() is not None and bool(out.flags.aligned)


def scatter(
    out: Bytes,
    mask: Bytes | None,
    signs: Bytes | None,
    values: Bytes,
    *,
    begin: int,
    num_before: int,
    num_signs: int,
    keep: int,
) -> ScatterArgs:
    """Put values in their places among the words `out`, from element `begin` on: see core.h. Only
    where `can_scatter` says so. Drops the GIL.
    """
    function = _scatter_function()
    assert function is not None
    args = ScatterArgs(
        size=ctypes.sizeof(ScatterArgs),
        out=_address(out),
        mask=None if mask is None else _address(mask),
        signs=None if signs is None else _address(signs),
        values=_address(values),
        count=out.size,
        begin=begin,
        num_before=num_before,
        num_values=values.size,
        num_signs=num_signs,
        word_bytes=out.itemsize,
        keep=keep,
    )
    status = function(ctypes.byref(args))
    assert status == 0, f"tn_scatter refused: {status}"
    return args


@functools.cache
def _decode_frames_function() -> Callable[..., int] | None:
    return _function("tn_decode_frames", DecodeFramesArgs)


@functools.cache
def _merge_function() -> Callable[..., int] | None:
    return _function("tn_merge", MergeArgs)


@functools.cache
def _interleave_function() -> Callable[..., int] | None:
    return _function("tn_interleave", InterleaveArgs)


@functools.cache
def _add_differences_function() -> Callable[..., int] | None:
    loaded = library()
    if loaded is None:
        return None
    loaded.check_struct("tn_interleave_args", InterleaveArgs)
    function: Callable[..., int] = loaded.functions.tn_add_differences
    return function


@functools.cache
def _scatter_function() -> Callable[..., int] | None:
    return _function("tn_scatter", ScatterArgs)


def _function(name: str, arguments: type[ctypes.Structure]) -> Callable[..., int] | None:
    loaded = library()
    if loaded is None:
        return None
    loaded.check_struct(f"{name}_args", arguments)
    function: Callable[..., int] = getattr(loaded.functions, name)
    return function


def _address(array: Bytes) -> int:
    return int(array.__array_interface__["data"][0])
