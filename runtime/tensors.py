"""Arrays with their element types: the form of weights between the loader and the backends."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .dtypes import DType

CPU = "cpu"
ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
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
