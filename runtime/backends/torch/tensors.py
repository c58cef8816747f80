"""torch tensors over numpy's memory, without copies and with torch's own bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...dtypes import DType
from ...tensors import Tensor

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def torch_dtype(dtype: DType) -> torch.dtype:
    return TORCH_DTYPES[dtype.value]


def to_torch(tensor: Tensor) -> torch.Tensor:
    """The same memory, in torch's dtype."""
    if isinstance(tensor.array, torch.Tensor):
        return tensor.array
    return array_to_torch(tensor.array, tensor.dtype)


def array_to_torch(array: npt.NDArray[Any], dtype: DType) -> torch.Tensor:
    """The same memory as a tensor. It must be writable, although it is not written."""
    shared = torch.from_numpy(array)
    own = torch_dtype(dtype)
    return shared if shared.dtype is own else shared.view(own)


def to_numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The tensor on the host, bf16 as uint16. Shares the tensor's memory if that is contiguous host
    memory.
    """
    host = tensor.detach().cpu().contiguous()
    held_as = torch_dtype_in_numpy(host.dtype)
    shared: npt.NDArray[Any] = (host.view(held_as) if held_as is not host.dtype else host).numpy()
    return shared


def torch_dtype_in_numpy(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a tensor's numpy form: itself, or that of its bits."""
    if dtype is torch.bfloat16:
        return torch.uint16
    return torch.uint8 if dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else dtype


def from_torch(tensor: torch.Tensor) -> Tensor:
    """A `Tensor` on the host, over the same memory where `to_numpy` shares it."""
    return Tensor(dtype_of(tensor.dtype), to_numpy(tensor))


def dtype_of(dtype: torch.dtype) -> DType:
    """The `DType` of a torch dtype. Raises `KeyError` for one that models are not stored in."""
    return DType[next(name for name, own in TORCH_DTYPES.items() if own is dtype)]


def int64s(numbers: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """A step's integers, on the device that computes it."""
    return torch.from_numpy(numbers).to(device)


def stacked_view(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensors joined along their first dimension, as a view.

    None unless they lie back to back, in this order, in one storage.
    """
    first = tensors[0]
    storage = first.untyped_storage().data_ptr()
    end = first.storage_offset()
    for tensor in tensors:
        if (
            tensor.untyped_storage().data_ptr() != storage
            or tensor.storage_offset() != end
            or tensor.dtype != first.dtype
            or tensor.shape[1:] != first.shape[1:]
            or not tensor.is_contiguous()
        ):
            return None
        end += tensor.numel()
    rows = sum(tensor.shape[0] for tensor in tensors)
    return first.as_strided((rows, *first.shape[1:]), first.stride())
