"""The choice of a model's compute dtype, from the dtype of its weights and the CPU's capabilities.

A CPU may have no products in half precision, and their emulation takes many times as long. fp32
holds every bf16 and fp16 number, so computing in it changes none of the weights. The choice is a
pure function; only `CpuDtypes.of_this_machine` inspects a machine. This module knows nothing of
models.
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
            # ^The library also reports support on processors that only convert, whose products take
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
