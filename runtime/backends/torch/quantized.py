"""Products of matrices of 8- or 4-bit integers with scales, and their dequantisation.

`docs/quantize.md`, "The layout", is the specification. Each product uses the dequantised weights, a
stretch of rows at a time, and the input unchanged. Can be built over tensors whose content has not
arrived.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ....loader.format.nibbles import RUN

_SCRATCH_ELEMENTS = 1 << 20  # weights dequantised at a time
# The 4-bit level of the number 0, without zero points.
_MIDDLE_4 = 8
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_ALIGNMENT = 64  # bytes
# Up to this many rows of input, a product without dequantised weights is faster.
_MAX_PACKED_ROWS = 16


class QuantizedLinear:
    """x @ w.T + bias, where w (N, K) is (q - zero) · scale, with a scale for each G-th of a row.

    - `weight`: (N, K) int8, or (N, K / 2) uint8, two numbers of 4 bits in each
    - `scale`: (N, G), bf16 or fp32; `group_size` is K / G
    - `zero`: (N, G), or None, which means 8 with 4 bits and 0 with 8; uint8 with 4 bits. With 8 it
      is int16, and only some GPTQ checkpoints have it
    - `bias`: (N,) of any float dtype, or None
    - `columns`: (K,) int64, the order of x's columns that the others are in; None: unchanged order
    """

    __slots__ = (
        "bias",
        "bits",
        "columns",
        "group_size",
        "num_in",
        "num_out",
        "scale",
        "weight",
        "zero",
    )

    def __init__(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        columns: torch.Tensor | None = None,
    ) -> None:
        self.weight = weight
        self.scale = scale
        self.zero = zero
        self.bias = bias
        self.bits = 4 if weight.dtype == torch.uint8 else 8
        self.num_out = weight.shape[0]
        self.num_in = weight.shape[1] * 8 // self.bits
        self.group_size = self.num_in // scale.shape[1]
        self.columns = columns

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(T, K) bf16, fp16 or fp32 → (T, N) of the same dtype."""
        if self.columns is not None:
            x = x[:, self.columns]
        if self._takes_integers(x):
            scale = self.scale.view(-1).to(x.dtype)
            product: torch.Tensor = torch.ops.aten._weight_int8pack_mm(x, self.weight, scale)
            return product if self.bias is None else product + self.bias.to(x.dtype)
        # On a CPU products in fp16 may take hundreds of times as long, and the weights are fp32
        # anyway.
        own = x.float() if x.dtype == torch.float16 and x.device.type == "cpu" else x
        out = x.new_empty(x.shape[0], self.num_out)
        step = max(1, _SCRATCH_ELEMENTS // self.num_in)
        for begin in range(0, self.num_out, step):
            end = min(begin + step, self.num_out)
            out[:, begin:end] = F.linear(own, self.rows(begin, end).to(own.dtype))
        return out if self.bias is None else out.add_(self.bias.to(out.dtype))

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Rows [begin, end) of w, clipped to its end, (rows, K) fp32."""
        return dequantize(
            self.weight[begin:end],
            self.scale[begin:end],
            self.zero[begin:end] if self.zero is not None else None,
        )

    def _takes_integers(self, x: torch.Tensor) -> bool:
        """True if torch's own product with int8 rows gives the same result, without rounding a
        scale.
        """
        return (
            self.bits == 8
            and self.zero is None
            and self.scale.shape[1] == 1
            and x.shape[0] <= _MAX_PACKED_ROWS
            and x.device.type == "cpu"
            and x.dtype in (self.scale.dtype, torch.float32)
            # ^It reads whole vectors from the beginning of each row, and crashes the process if
            # that is not aligned.
            and self.num_in % _ALIGNMENT == self.weight.data_ptr() % _ALIGNMENT == 0
            and x.is_contiguous()
            and x.data_ptr() % _ALIGNMENT == 0
        )


class Mxfp4Linear:
    """x @ w.T + bias, where w (N, K) is in MXFP4 (`Mxfp4Matrix`): `weight` (N, K / 2) and `scale` (N, K / 32) uint8."""

    __slots__ = ("_values", "bias", "num_in", "num_out", "scale", "weight")

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.scale = scale
        self.bias = bias
        self.num_out = weight.shape[0]
        self.num_in = weight.shape[1] * 2
        self._values = torch.tensor(_E2M1, dtype=torch.float32, device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(T, K) bf16, fp16 or fp32 → (T, N) of the same dtype; the weights' numbers are exact in bf16 and fp32."""
        own = x.float() if x.dtype == torch.float16 else x
        out = own.new_empty(len(x), self.num_out)
        step = max(1, _SCRATCH_ELEMENTS // self.num_in)
        for begin in range(0, self.num_out, step):
            end = min(begin + step, self.num_out)
            out[:, begin:end] = F.linear(own, self.rows(begin, end).to(own.dtype))
        return (out if self.bias is None else out.add_(self.bias.to(out.dtype))).to(x.dtype)

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Rows [begin, end) of w, (rows, K) fp32."""
        packed, scale = self.weight[begin:end], self.scale[begin:end]
        levels = torch.stack([packed & 15, packed >> 4], dim=2).to(torch.int32)
        values = self._values[levels.view(*scale.shape, -1)]
        bits = scale.to(torch.int32) << 23  # 2 ** (scale - 127), the smallest of which is no normal number
        bits = bits.masked_fill_(scale == 0, 0x400000).masked_fill_(scale == 255, 0x7FC00000)
        powers = bits.view(torch.float32)
        return (values * powers.unsqueeze(-1)).view(len(packed), -1)


def dequantize(weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None) -> torch.Tensor:
    """The weights of a `QuantizedLinear`'s integers, (N, K) fp32. Memory: a few times the result."""
    levels = unpack_nibbles(weight) if weight.dtype == torch.uint8 else weight
    grouped = levels.view(*scale.shape, -1).to(torch.float32)
    if zero is not None:
        grouped -= zero.unsqueeze(-1)
    elif weight.dtype == torch.uint8:
        grouped -= _MIDDLE_4
    grouped *= scale.unsqueeze(-1).to(torch.float32)
    return grouped.view(levels.shape)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """(N, K / 2) uint8 → (N, K) uint8, each below 16; K is a multiple of 64."""
    runs = packed.view(len(packed), -1, RUN // 2)
    return torch.stack([runs & 15, runs >> 4], dim=2).view(len(packed), -1)
