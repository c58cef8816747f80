"""Weights on a device as `Tensor`: addresses over the slabs that a load fills."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ....tensors import DType, Tensor
from .device import DirectDevice
from .memory import Array


class DirectTensor(Tensor, frozen=True, eq=False):
    """A tensor on a device; `array` is an `Array`."""

    owner: DirectDevice | None = None

    def on_host(self) -> npt.NDArray[Any]:
        """A copy, once the stream's work is done. Blocks."""
        assert self.owner is not None
        numbers = np.empty(self.shape, self.dtype.numpy)
        self.owner.read(self.array, numbers.ctypes.data)
        return numbers

    def is_at(self, other: Tensor) -> bool:
        return bool(self.array.address == other.array.address)

    def stacked_with(self, others: Sequence[Tensor]) -> Tensor | None:
        end = self.array.end
        for other in others:
            is_alike = other.dtype is self.dtype and other.shape[1:] == self.shape[1:]
            if not is_alike or other.array.address != end:
                return None
            end = other.array.end
        shape = (sum(tensor.shape[0] for tensor in (self, *others)), *self.shape[1:])
        return DirectTensor(self.dtype, Array(self.array.address, shape, self.dtype), self.device, self.owner)


def tensor_at(device: DirectDevice, address: int, shape: tuple[int, ...], dtype: DType) -> DirectTensor:
    """The numbers at an address, which the caller keeps alive."""
    return DirectTensor(dtype, Array(address, shape, dtype), device.name, device)
