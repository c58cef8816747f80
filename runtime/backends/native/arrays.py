"""Arguments of the native core from arrays: dtypes, addresses, alignment. No other file takes
addresses.

numpy has no bf16: here uint16 always means bf16. 4-bit integers are packed, two in a byte, and the
caller names their dtype.
"""

from __future__ import annotations

import ctypes
import enum
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

SLAB_ALIGNMENT = 64  # bytes


class NativeDType(enum.IntEnum):
    """`tn_dtype` of core.h."""

    F32 = 0
    BF16 = 1
    F16 = 2
    I8 = 3
    U8 = 4
    I16 = 5
    U4 = 6
    E2M1 = 7
    E8M0 = 8
    E4M3 = 9
    Q4_K = 10
    Q5_K = 11
    Q6_K = 12
    Q4_1 = 13
    Q5_0 = 14
    Q5_1 = 15
    Q2_K = 16
    Q3_K = 17
    IQ4_XS = 18
    IQ4_NL = 19
    NF4 = 20
    FP4 = 21


_DTYPES = {
    np.dtype(np.float32): NativeDType.F32,
    np.dtype(np.uint16): NativeDType.BF16,
    np.dtype(np.float16): NativeDType.F16,
    np.dtype(np.int8): NativeDType.I8,
    np.dtype(np.uint8): NativeDType.U8,
    np.dtype(np.int16): NativeDType.I16,
}

# By their bytes; `loader/format/gguf/blocks.py` has their layouts.
_BLOCKS = {
    144: (NativeDType.Q4_K, 256),
    176: (NativeDType.Q5_K, 256),
    210: (NativeDType.Q6_K, 256),
    20: (NativeDType.Q4_1, 32),
    22: (NativeDType.Q5_0, 32),
    24: (NativeDType.Q5_1, 32),
    84: (NativeDType.Q2_K, 256),
    110: (NativeDType.Q3_K, 256),
    136: (NativeDType.IQ4_XS, 256),
    18: (NativeDType.IQ4_NL, 32),
}


class NativeScratch:
    """Memory of one caller, aligned to 64 bytes, for the core's use during one call. Grows."""

    __slots__ = ("_first", "_memory")

    def __init__(self) -> None:
        self._memory: Array = np.empty(0, np.uint8)
        self._first = 0  # aligned address

    def missing_bytes(self, num_bytes: int) -> int:
        """The memory that `address_of` takes for as many. 0: it is there."""
        needed_bytes = num_bytes + SLAB_ALIGNMENT
        return needed_bytes if needed_bytes > len(self._memory) else 0

    def address_of(self, num_bytes: int) -> int:
        """The address of `num_bytes` bytes, whose content is lost with the next call."""
        if num_bytes + SLAB_ALIGNMENT > len(self._memory):
            self._memory = np.empty(num_bytes + SLAB_ALIGNMENT, np.uint8)
            first = address(self._memory)
            self._first = first + -first % SLAB_ALIGNMENT
        return self._first


def dtype_of(array: Array) -> NativeDType:
    """Raises `ValueError` for a dtype that the core does not have."""
    dtype = _DTYPES.get(array.dtype)
    if dtype is None:
        raise ValueError(f"the native core has no dtype {array.dtype}")
    return dtype


def block_columns(table: Array) -> tuple[NativeDType, int]:
    """(rows, blocks, bytes of a block) uint8 → the dtype of ggml's blocks and the columns of a row. Raises
    `ValueError` for bytes that are no block's.
    """
    dtype, columns = _BLOCKS.get(table.shape[2], (None, 0))
    if dtype is None or table.dtype != np.uint8:
        raise ValueError(f"the native core has no blocks of {table.shape[2]} {table.dtype}")
    return dtype, int(table.shape[1]) * columns


def address(array: Array) -> int:
    """The address of the first element. The caller keeps the array alive until the core is done
    with it.
    """
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
    except (TypeError, ValueError):
        # Read-only, empty or in strides: numpy's own way takes four times as long.
        return int(array.__array_interface__["data"][0])


def address_or_null(array: Array | None) -> int | None:
    return None if array is None else address(array)


def row_stride(array: Array, what: str) -> int:
    """Elements from one row of (rows, columns) to the next. Raises `ValueError` where a row is not contiguous."""
    row_bytes, item_bytes = array.strides[0], array.itemsize
    is_row = array.shape[1] <= 1 or array.strides[1] == item_bytes
    if not is_row or row_bytes % item_bytes or (len(array) > 1 and row_bytes < array.shape[1] * item_bytes):
        raise ValueError(f"{what}: rows must be contiguous and in order, and its strides are {array.strides}")
    return row_bytes // item_bytes


def check_contiguous(array: Array, what: str) -> None:
    """Raises `ValueError` where the core could not read the array as one stretch of aligned elements."""
    if not array.flags.c_contiguous or not array.flags.aligned:
        raise ValueError(f"{what} must be contiguous and aligned")


def to_bf16(values: Array) -> NDArray[np.uint16]:
    """fp32 → bf16, rounded to nearest, ties to even; a NaN stays one."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint16)


def from_bf16(values: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (values.astype(np.uint32) << 16).view(np.float32)
