"""Arrays with their element types, by safetensors' names: the form of weights between the loader
and the backends.

numpy has no bfloat16: BF16 numbers are held as their 16 bits, in uint16. So a type is always passed
together with an array and never inferred from it.
"""

from __future__ import annotations

import enum
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

CPU = "cpu"
ALIGNMENT_BYTES = 64


class DType(enum.StrEnum):
    """The types that models are stored or computed in."""

    BF16 = "BF16"
    F16 = "F16"
    F32 = "F32"
    F64 = "F64"
    I8 = "I8"
    U8 = "U8"
    I16 = "I16"
    U16 = "U16"
    I32 = "I32"
    U32 = "U32"
    I64 = "I64"
    U64 = "U64"
    BOOL = "BOOL"
    F8_E4M3 = "F8_E4M3"
    F8_E5M2 = "F8_E5M2"

    @property
    def numpy(self) -> np.dtype[Any]:
        """The numpy dtype that holds it."""
        return _NUMPY[self]

    @property
    def size_bytes(self) -> int:
        return _NUMPY[self].itemsize

    @property
    def label(self) -> str:
        """The name used by people and config.json: "bfloat16", "float32"."""
        return _LABELS.get(self, self.numpy.name)

    @classmethod
    def of_label(cls, label: str) -> DType:
        """The reverse of `label`. Raises `ValueError` for an unknown name."""
        for dtype in cls:
            if dtype.label == label:
                return dtype
        raise ValueError(label)


_NUMPY: dict[DType, np.dtype[Any]] = {
    DType.BF16: np.dtype(np.uint16),
    DType.F16: np.dtype(np.float16),
    DType.F32: np.dtype(np.float32),
    DType.F64: np.dtype(np.float64),
    DType.I8: np.dtype(np.int8),
    DType.U8: np.dtype(np.uint8),
    DType.I16: np.dtype(np.int16),
    DType.U16: np.dtype(np.uint16),
    DType.I32: np.dtype(np.int32),
    DType.U32: np.dtype(np.uint32),
    DType.I64: np.dtype(np.int64),
    DType.U64: np.dtype(np.uint64),
    DType.BOOL: np.dtype(np.bool_),
    # numpy has only the bits of these, too.
    DType.F8_E4M3: np.dtype(np.uint8),
    DType.F8_E5M2: np.dtype(np.uint8),
}
_LABELS = {DType.BF16: "bfloat16", DType.F8_E4M3: "float8_e4m3fn", DType.F8_E5M2: "float8_e5m2"}


def to_float32(array: npt.NDArray[Any], dtype: DType) -> npt.NDArray[np.float32]:
    """The same numbers in fp32, exactly where `dtype` is BF16, F16 or F32; a new array unless it is F32."""
    if dtype is DType.BF16:
        wide: npt.NDArray[np.float32] = (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return wide
    return array.astype(np.float32, copy=False)


def from_float32(array: npt.NDArray[np.float32], dtype: DType) -> npt.NDArray[Any]:
    """fp32 numbers in `dtype`, rounded to nearest, ties to even; NaN stays NaN."""
    if dtype is not DType.BF16:
        with np.errstate(over="ignore"):
            return array.astype(dtype.numpy, copy=False)
    bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    half: npt.NDArray[np.uint16] = rounded.astype(np.uint16)
    is_nan = np.isnan(array)
    if is_nan.any():
        half[is_nan] = 0x7FC0
    return half


class Tensor(Struct, frozen=True, eq=False):
    """An array and its element type; BF16 is held as uint16. C-contiguous.

    On the host `array` is a numpy array. On a device it is an array of that device's backend
    (`backends/cuda/weights.py`).
    """

    dtype: DType
    array: Any
    device: str = CPU

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @property
    def size_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.size_bytes

    def on_host(self) -> npt.NDArray[Any]:
        """The content as a numpy array; no copy if it is on the host. Blocks."""
        array: npt.NDArray[Any] = self.array
        return array

    def part(self, number: int, rows: tuple[slice, ...] = ()) -> Tensor:
        """One of those along the first dimension, or these of its rows, as a view."""
        return Tensor(self.dtype, self.array[(number, *rows)], self.device)

    def is_at(self, other: Tensor) -> bool:
        """True if both begin at the same address."""
        return _address(self.array) == _address(other.array)

    def stacked_with(self, others: Sequence[Tensor]) -> Tensor | None:
        """This tensor and the others along their first dimension, as a view; None unless they are
        adjacent, in this order, in one allocation.
        """
        arrays = [self.array, *(other.array for other in others)]
        base, end = _owner(self.array), _address(self.array)
        for tensor, array in zip((self, *others), arrays, strict=True):
            if (
                tensor.dtype is not self.dtype
                or array.shape[1:] != self.array.shape[1:]
                or not array.flags.c_contiguous
                or _address(array) != end
                or _owner(array) is not base
            ):
                return None
            end += array.nbytes
        shape = (sum(len(array) for array in arrays), *self.array.shape[1:])
        return Tensor(self.dtype, np.lib.stride_tricks.as_strided(self.array, shape, self.array.strides))


def reserved(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A page-aligned array whose memory the system supplies in small pages, as it is written.

    Large numpy arrays request huge pages. A KV pool is written a few kilobytes at a time in every
    head of every layer: the first prompt would have 200 MB cleared for the 1 MB of a 0.5B model's
    keys and values.
    """
    size_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    if size_bytes == 0:
        return np.empty(shape, dtype)
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)


def aligned_empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An uninitialised array aligned to 64 bytes, as required for matrices."""
    size_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    room = np.empty(size_bytes + ALIGNMENT_BYTES, np.uint8)
    begin = -_address(room) % ALIGNMENT_BYTES
    array: npt.NDArray[Any] = room[begin : begin + size_bytes].view(dtype).reshape(shape)
    return array


def _address(array: npt.NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _owner(array: npt.NDArray[Any]) -> Any:
    """The array, or the buffer, that owns this one's memory."""
    base: Any = array
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    return base
