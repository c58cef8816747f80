"""What a model computes in: chosen from what its weights are stored in, and from what the CPU is fast at.

A CPU may have no products in half precision, and what stands in for them takes many times as long. fp32 holds
every bf16 and fp16 number, so computing in it changes none of the weights. The choice is a pure function; only
`CpuDtypes.of_this_machine` looks at a machine. It does not know what a model is.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch

from ...dtypes import DType
from ...models.executor import ComputeDtype

AUTO = "auto"
_X86 = ("x86_64", "amd64", "i386", "i686")


@dataclass(frozen=True, slots=True)
class CpuDtypes:
    """In which of the half precisions products of matrices are faster than in fp32."""

    bfloat16: bool
    float16: bool

    @classmethod
    def of_this_machine(cls) -> CpuDtypes:
        """As torch says it. What a version of torch cannot say is taken for slow, which costs time and no exactness."""
        on_mkldnn = torch.ops.mkldnn
        bfloat16 = _says(on_mkldnn, "_is_mkldnn_bf16_supported")
        if platform.machine().lower() in _X86:
            # There the library also says yes to processors that only convert, whose products take longer than fp32's.
            bfloat16 = bfloat16 and (
                _says(torch.cpu, "_is_avx512_bf16_supported") or _says(torch.cpu, "_is_amx_tile_supported")
            )
        return cls(bfloat16, _says(on_mkldnn, "_is_mkldnn_fp16_supported"))


@dataclass(frozen=True, slots=True)
class ComputePolicy:
    """How to choose: `asked` is AUTO, or the name of one of `parameters.COMPUTE_DTYPES`, which is then taken."""

    cpu: CpuDtypes
    asked: str = AUTO

    @classmethod
    def of_this_machine(cls, asked: str = AUTO) -> ComputePolicy:
        return cls(CpuDtypes.of_this_machine(), asked)

    def choose(self, stored: DType, *, is_quantised: bool) -> ComputeDtype:
        """For a model on this CPU whose weights are stored so; `is_quantised`: those that are no integers."""
        if self.asked != AUTO:
            return ComputeDtype(stored, DType.of_label(self.asked), "it was asked for")
        if stored is DType.F32 or (stored is DType.BF16 and self.cpu.bfloat16):
            return ComputeDtype(stored, stored, "as stored")
        if is_quantised and self.cpu.bfloat16:
            return ComputeDtype(stored, DType.BF16, "its weights are integers, and the CPU has fast bf16")
        if stored is DType.F16 and self.cpu.float16 and not is_quantised:
            return ComputeDtype(stored, stored, "as stored")
        name = "fp16" if stored is DType.F16 and not is_quantised else "bf16"
        return ComputeDtype(stored, DType.F32, f"the CPU has no fast {name}")


def _says(namespace: object, query: str) -> bool:
    """What a query of torch's says that not every version has."""
    asked = getattr(namespace, query, None)
    return asked is not None and bool(asked())
