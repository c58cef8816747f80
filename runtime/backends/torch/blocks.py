"""Products with weights that lie in blocks of a GGUF file, and rows of such embeddings, on a CPU.

Some rows at a time become floats. For speed there is the native core; this is for what it does not compute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from ....loader.format.gguf.blocks import BlockType

SCRATCH_ELEMENTS = 1 << 20  # weights that are floats at a time


class BlockLinear:
    """x @ w.T + bias, where w (N, K) lies in blocks of a GGUF file (`BlockMatrix`), on a CPU."""

    __slots__ = ("_block", "bias", "num_in", "num_out", "weight")

    def __init__(self, weight: torch.Tensor, block: BlockType, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.num_out = weight.shape[0]
        self.num_in = weight.shape[1] * block.elements
        self._block = block

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
        return block_rows(self._block, self.weight[begin:end])


def block_rows(block: BlockType, rows: torch.Tensor) -> torch.Tensor:
    """(N, blocks, bytes of a block) uint8 of a CPU → (N, columns) fp32."""
    numbers = block.to_floats(rows.reshape(-1, block.block_bytes).numpy())
    return torch.from_numpy(numbers).view(len(rows), -1)
