"""Products with weights in formats that torch does not multiply with, and rows of such embeddings: blocks of GGUF
files, MXFP4, codes of bitsandbytes, and fp8.

Some rows at a time become floats. For speed there is the native core; this is for what it does not compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from ....loader.format.gguf.blocks import BlockType

# Weights that are floats at a time; a longer row gets scratch of its own size.
SCRATCH_ELEMENTS = 1 << 20
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class _ExpandedLinear:
    """x @ w.T + bias, of w (N, K) whose `rows` a subclass makes."""

    __slots__ = ("bias", "num_in", "num_out", "weight")

    def __init__(self, weight: torch.Tensor, num_in: int, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self.num_out = weight.shape[0]
        self.num_in = num_in

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(T, K) bf16, fp16 or fp32 → (T, N) of the same dtype."""
        own = x.float() if x.dtype == torch.float16 else x
        out = own.new_empty(len(x), self.num_out)
        step = max(1, SCRATCH_ELEMENTS // self.num_in)
        for begin in range(0, self.num_out, step):
            end = min(begin + step, self.num_out)
            out[:, begin:end] = F.linear(own, self.rows(begin, end).to(own.dtype))
        return (out if self.bias is None else out.add_(self.bias.to(out.dtype))).to(x.dtype)

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Rows [begin, end) of w, (rows, K) fp32."""
        raise NotImplementedError


class BlockLinear(_ExpandedLinear):
    """The product with blocks of a GGUF file (`BlockMatrix`), on a CPU."""

    __slots__ = ("_block",)

    def __init__(self, weight: torch.Tensor, block: BlockType, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight, weight.shape[1] * block.elements, bias)
        self._block = block

    def rows(self, begin: int, end: int) -> torch.Tensor:
        return block_rows(self._block, self.weight[begin:end])


class Mxfp4Linear(_ExpandedLinear):
    """The product with MXFP4 (`Mxfp4Matrix`): `weight` (N, K / 2) and `scale` (N, K / 32) uint8. Its numbers are exact
    in bf16 and fp32.
    """

    __slots__ = ("_values", "scale")

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight, weight.shape[1] * 2, bias)
        self.scale = scale
        self._values = torch.tensor(_E2M1, dtype=torch.float32, device=weight.device)

    def rows(self, begin: int, end: int) -> torch.Tensor:
        packed, scale = self.weight[begin:end], self.scale[begin:end]
        levels = torch.stack([packed & 15, packed >> 4], dim=2).to(torch.int32)
        values = self._values[levels.view(*scale.shape, -1)]
        bits = scale.to(torch.int32) << 23  # 2 ** (scale - 127), the smallest of which is no normal number
        bits = bits.masked_fill_(scale == 0, 0x400000).masked_fill_(scale == 255, 0x7FC00000)
        powers = bits.view(torch.float32)
        return (values * powers.unsqueeze(-1)).view(len(packed), -1)


class CodeLinear(_ExpandedLinear):
    """The product with codes (`CodeMatrix`): `weight` (N, K / 2) uint8, `scale` (N, groups) fp32, 16 `values`."""

    __slots__ = ("_values", "scale")

    def __init__(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor,
        values: Sequence[float],
        bias: torch.Tensor | None = None,
    ) -> None:
        super().__init__(weight, weight.shape[1] * 2, bias)
        self.scale = scale
        self._values = torch.tensor(values, dtype=torch.float32, device=weight.device)

    def rows(self, begin: int, end: int) -> torch.Tensor:
        packed, scale = self.weight[begin:end], self.scale[begin:end]
        codes = torch.stack([packed >> 4, packed & 15], dim=2).to(torch.int32)
        return (self._values[codes.view(*scale.shape, -1)] * scale.unsqueeze(-1)).view(len(packed), -1)


class Float8Linear(_ExpandedLinear):
    """The product with fp8 (`Float8Matrix`): `weight` (N, K) float8_e4m3fn, and a scale for each block."""

    __slots__ = ("_block", "scale")

    def __init__(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor,
        block: tuple[int, int],
        bias: torch.Tensor | None = None,
    ) -> None:
        super().__init__(weight, weight.shape[1], bias)
        self.scale = scale
        self._block = block

    def rows(self, begin: int, end: int) -> torch.Tensor:
        rows, columns = self._block
        device = self.weight.device
        scale = self.scale[torch.arange(begin, end, device=device) // rows].float()
        spread = scale[:, torch.arange(self.num_in, device=device) // columns]
        return self.weight[begin:end].float() * spread


def block_rows(block: BlockType, rows: torch.Tensor) -> torch.Tensor:
    """(N, blocks, bytes of a block) uint8 of a CPU → (N, columns) fp32."""
    numbers = block.to_floats(rows.reshape(-1, block.block_bytes).numpy())
    return torch.from_numpy(numbers).view(len(rows), -1)
