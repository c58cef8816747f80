"""torch tensors over numpy's memory, without copies, and the choice of a model's compute dtype.

The dtype follows from that of the weights and the CPU's capabilities. A CPU may have no products in
half precision, and their emulation takes many times as long. fp32 holds every bf16 and fp16 number,
so computing in it changes none of the weights. The choice is a pure function; only
`CpuDtypes.of_this_machine` inspects a machine. This module knows nothing of models.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...models.executor import ComputeDtype
from ...tensors import DType, Tensor

AUTO = "auto"
_X86 = ("x86_64", "amd64", "i386", "i686")


@dataclass(frozen=True, slots=True)
class CpuDtypes:
    """The half precisions in which matrix products are faster than in fp32."""

    bfloat16: bool
    float16: bool

    @classmethod
    def of_this_machine(cls) -> CpuDtypes:
        """The dtypes that torch reports. Versions of torch without the query count as slow, which
        costs time but no accuracy.
        """
        on_mkldnn = torch.ops.mkldnn
        bfloat16 = _query(on_mkldnn, "_is_mkldnn_bf16_supported")
        if platform.machine().lower() in _X86:
            # The library also reports support on processors that only convert, whose products take
            # longer than fp32's.
            bfloat16 = bfloat16 and (
                _query(torch.cpu, "_is_avx512_bf16_supported") or _query(torch.cpu, "_is_amx_tile_supported")
            )
        return cls(bfloat16, _query(on_mkldnn, "_is_mkldnn_fp16_supported"))


@dataclass(frozen=True, slots=True)
class ComputePolicy:
    """A policy: `asked` is AUTO, or one of `parameters.COMPUTE_DTYPES`, which then overrides the
    choice.
    """

    cpu: CpuDtypes
    asked: str = AUTO

    @classmethod
    def of_this_machine(cls, asked: str = AUTO) -> ComputePolicy:
        return cls(CpuDtypes.of_this_machine(), asked)

    def choose(self, stored: DType, *, is_quantised: bool) -> ComputeDtype:
        """Choose for a model on this CPU with weights in `stored`.

        With `is_quantised`, that is the dtype of its non-integer weights.
        """
        if self.asked != AUTO:
            return ComputeDtype(stored, DType.of_label(self.asked), "it was requested")
        if stored is DType.F32 or (stored is DType.BF16 and self.cpu.bfloat16):
            return ComputeDtype(stored, stored, "as stored")
        if is_quantised and self.cpu.bfloat16:
            return ComputeDtype(stored, DType.BF16, "its weights are integers and the CPU has fast bf16")
        if stored is DType.F16 and self.cpu.float16 and not is_quantised:
            return ComputeDtype(stored, stored, "as stored")
        name = "fp16" if stored is DType.F16 and not is_quantised else "bf16"
        return ComputeDtype(stored, DType.F32, f"the CPU has no fast {name}")


def _query(namespace: object, query: str) -> bool:
    """The result of a query of torch that not every version has; False without it."""
    asked = getattr(namespace, query, None)
    return asked is not None and bool(asked())


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
