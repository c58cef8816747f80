"""Weights on a device as `Tensor`: addresses over the slabs that a load fills.

A gate opens when the device has queued the last part behind it: here later work of the device's
stream is then ordered behind it, and what replaces values in use behind that stream's work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from .....loader.load.base import PlacedLoad
from ....errors import ModelError
from ....tensors import DType, Tensor
from ....weights import StreamedWeights
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

    def part(self, number: int, rows: tuple[slice, ...] = ()) -> Tensor:
        """Raises `ModelError` for rows that do not lie back to back."""
        if rows:
            raise ModelError(
                "the device's direct path does not take experts whose gates and ups alternate",
                hint="Choose another --backend.",
            )
        array = Array(self.array.row(number), self.shape[1:], self.dtype)
        return DirectTensor(self.dtype, array, self.device, self.owner)

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


class LoadOnStream:
    """A `PlacedLoad` for one stream, in place of the one that its caller names."""

    device_name = "direct"  # no device of torch's, whose streams are torch's

    def __init__(self, load: PlacedLoad, stream: int) -> None:
        self._load = load
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._load, name)

    def order_after(self, groups: Iterable[int], stream: int) -> None:
        self._load.order_after(groups, self._stream)

    def reading(self, group: int, stream: int = 0) -> AbstractContextManager[None]:
        return self._load.reading(group, self._stream)


class DirectWeights(StreamedWeights):
    """`StreamedWeights` over slabs in a device's memory, read on its stream."""

    def __init__(self, load: PlacedLoad, device: DirectDevice) -> None:
        super().__init__(cast("PlacedLoad", LoadOnStream(load, device.stream)))
        self._placed = load
        self._device = device
        self._device_slabs: dict[int, Any] = {}  # which keep the memory

    def _view(self, group: int, begin: int, end: int, dtype: DType, shape: tuple[int, ...]) -> Tensor:
        if group not in self._device_slabs:
            self._device_slabs[group] = self._placed.device_slab(group)
        return tensor_at(self._device, address_of(self._device_slabs[group]) + begin, shape, dtype)


def address_of(array: Any) -> int:
    """Of an array on a device (or, in tests, on the host)."""
    interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    address: int = interface["data"][0]
    return address
