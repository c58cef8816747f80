"""One tier of floats into its planes by the native core, without the GIL: `tn_split`."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

from .frames import OK, address
from .library import require_library

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

MAX_PLANES = 6


class SplitArgs(ctypes.Structure):
    """`tn_split_args` of core.h."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("words", ctypes.c_void_p),
        ("planes", ctypes.c_void_p * MAX_PLANES),
        ("count", ctypes.c_int64),
        ("plane_bits", ctypes.c_int32 * MAX_PLANES),
        ("num_planes", ctypes.c_int32),
        ("word_bytes", ctypes.c_int32),
        ("has_exponents", ctypes.c_int32),
        ("field_bits", ctypes.c_int32),
        ("mantissa_bits", ctypes.c_int32),
        ("known_bits", ctypes.c_int32),
    )


def split(
    words: NDArray[Any],
    planes: Sequence[NDArray[Any]],
    plane_bits: Sequence[int],
    *,
    has_exponents: bool,
    field_bits: int,
    mantissa_bits: int,
    known_bits: int,
) -> None:
    """Write one tier of the floats `words`, (n,) uint16 or uint32, contiguous, into its planes,
    bytes of exactly the size that they need. The field has `field_bits`; of the mantissa,
    `known_bits` are known with this tier.
    """
    args = SplitArgs(
        size=ctypes.sizeof(SplitArgs),
        words=address(words),
        planes=tuple(map(address, planes)),
        count=words.size,
        plane_bits=tuple(plane_bits),
        num_planes=len(planes),
        word_bytes=words.itemsize,
        has_exponents=has_exponents,
        field_bits=field_bits,
        mantissa_bits=mantissa_bits,
        known_bits=known_bits,
    )
    status = _function()(ctypes.byref(args))
    assert status == OK, f"tn_split refused: {status}"


@functools.cache
def _function() -> Callable[..., int]:
    loaded = require_library()
    loaded.check_struct("tn_split_args", SplitArgs)
    function: Callable[..., int] = loaded.functions.tn_split
    return function
