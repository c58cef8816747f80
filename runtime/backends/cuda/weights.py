"""Weights in a device's memory: torch tensors over the buffers that a load fills, as `Tensor`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch

from ....loader.load.base import PlacedLoad
from ...tensors import DType, Tensor
from ...weights import StreamedWeights
from ..torch.tensors import TORCH_DTYPES, stacked_view


class DeviceTensor(Tensor, frozen=True, eq=False):
    """A tensor on a device. `array` is a torch tensor, bf16 in torch's own dtype."""

    def on_host(self) -> npt.NDArray[Any]:
        copy: torch.Tensor = self.array.cpu()
        bits = copy.view(torch.uint16) if self.dtype is DType.BF16 else copy
        array: npt.NDArray[Any] = bits.numpy()
        return array

    def is_at(self, other: Tensor) -> bool:
        return bool(self.array.data_ptr() == other.array.data_ptr())

    def stacked_with(self, others: Sequence[Tensor]) -> Tensor | None:
        whole = stacked_view([self.array, *(other.array for other in others)])
        return None if whole is None else DeviceTensor(self.dtype, whole, self.device)


class DeviceWeights(StreamedWeights):
    """`StreamedWeights` over slabs in a device's memory."""

    def __init__(self, load: PlacedLoad) -> None:
        super().__init__(load)
        self._device_load = load
        self._device_slabs: dict[int, torch.Tensor] = {}

    def _view(self, group: int, begin: int, end: int, dtype: DType, shape: tuple[int, ...]) -> Tensor:
        if group not in self._device_slabs:
            self._device_slabs[group] = torch.utils.dlpack.from_dlpack(self._device_load.device_slab(group))
        slab = self._device_slabs[group]
        own = slab[begin:end].view(TORCH_DTYPES[dtype.value]).view(shape)
        return DeviceTensor(dtype, own, str(slab.device))
