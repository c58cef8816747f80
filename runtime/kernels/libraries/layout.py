"""Integer weights as other libraries lay them out: which they take, and 4-bit numbers in the order of their columns."""

from __future__ import annotations

import importlib.util

import numpy as np
import torch

from ...models.quantized import QuantizedLinear

RUN_BYTES = 32  # that hold 64 columns: byte j the columns j and j + 32 of them


def in_column_order(weight: torch.Tensor) -> torch.Tensor:
    """(N, K / 2) uint8 of a `QuantizedLinear` → the same numbers, column 2j in the low four bits of byte j of a row and
    column 2j + 1 in its high ones: (N, K / 2) uint8, new memory. Takes as much again while it works.
    """
    runs = weight.contiguous().numpy().view("<u2").reshape(-1, RUN_BYTES // 2)  # each of bytes 2j and 2j + 1
    out = np.empty((len(runs), 2, RUN_BYTES // 2), np.uint8)
    low = runs & 0x0F0F
    np.bitwise_or(low, low >> 4, out=out[:, 0], casting="unsafe")
    high = np.right_shift(runs, 4, out=low)
    high &= 0x0F0F
    np.bitwise_or(high, high >> 4, out=out[:, 1], casting="unsafe")
    return torch.from_numpy(out.reshape(tuple(weight.shape)))


def pairs(levels: torch.Tensor) -> torch.Tensor:
    """(…, n) uint8, each below 16 → (…, ceil(n / 2)) uint8: number 2j in the low four bits of byte j, number 2j + 1 in
    its high ones, or 0 where there is none.
    """
    if levels.shape[-1] % 2:
        levels = torch.nn.functional.pad(levels, (0, 1))
    return levels[..., 0::2] | levels[..., 1::2] << 4


def largest_block(weight: QuantizedLinear, sizes: tuple[int, ...]) -> int | None:
    """The largest of these numbers of columns that has one scale throughout and divides a row; None if none does."""
    return next((size for size in sorted(sizes, reverse=True) if weight.group_size % size == 0), None)


def is_for(weight: QuantizedLinear, block_sizes: tuple[int, ...], *, package: str) -> bool:
    """Whether a library that takes these blocks might compute with it, and its package is here; imports nothing. Its
    numbers must be those of docs/quantize.md, on the CPU: of 8 bits without zeros, or of 4 bits.
    """
    if weight.weight.device.type != "cpu":
        return False
    is_plain = weight.zero is None or (weight.bits == 4 and weight.zero.dtype is torch.uint8)
    return (
        is_plain
        and largest_block(weight, block_sizes) is not None
        and importlib.util.find_spec(package) is not None
    )
