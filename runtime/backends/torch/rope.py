"""Rotary embeddings in torch: tables of cosines and sines, and the rotation.

A table grows on demand, and is rounded to the compute dtype, as in transformers. Nothing is
computed before the first forward pass: torch's thread pool must not have run in a process that may
still fork.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ...models.rotary import Rotary

Rotation = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]

SMALLEST_TABLE = 512  # positions


class RopeTable:
    """Cosines and sines, (positions, rotary_dim) each. Not thread-safe: one forward pass at a time."""

    def __init__(self, rotary: Rotary, max_context: int, dtype: torch.dtype) -> None:
        self._rotary = rotary
        self._max_context = max_context
        self._dtype = dtype
        self._cos = torch.empty(0)
        self._sin = torch.empty(0)

    def rows(self, positions: torch.Tensor, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) of these positions, all below `end`: (T, 1, rotary_dim) each, to broadcast
        over heads.

        The first half of each sine is negated, as `rotate_` expects.
        """
        if end > len(self._cos) or self._cos.device != positions.device:
            self._grow(end, positions.device)
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The current cosines and sines. Growing replaces them and does not change them."""
        return self._cos, self._sin

    def _grow(self, end: int, device: torch.device) -> None:
        doubled = 1 << (max(end, SMALLEST_TABLE) - 1).bit_length()
        length = max(end, min(doubled, self._max_context))
        cos, sin = (torch.from_numpy(table) for table in self._rotary.tables(0, length))
        self._cos = torch.cat((cos, cos), dim=-1).to(device, self._dtype)
        self._sin = torch.cat((-sin, sin), dim=-1).to(device, self._dtype)


def rotation(*, interleaved: bool, wide: bool) -> Rotation:
    """The function that rotates heads in place: `rotate_` or a variant.

    A wide one rotates in fp32, by cosines and sines in fp32, and rounds once.
    """
    turn = rotate_neighbours_ if interleaved else rotate_
    return partial(_rotate_wide, turn) if wide else turn


def _rotate_wide(turn: Rotation, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    wide = x[..., : cos.shape[-1]].float()
    turn(wide, cos, sin)
    x[..., : cos.shape[-1]] = wide


def rotate_neighbours_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate like `rotate_`, but dimension 2 i pairs with 2 i + 1."""
    size = cos.shape[-1]
    low, high = x[..., 0:size:2], x[..., 1:size:2]
    cos, sin = cos[..., : size // 2], sin[..., size // 2 :]
    turned_low, turned_high = low * cos - high * sin, high * cos + low * sin
    low.copy_(turned_low)
    high.copy_(turned_high)


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate in place the first rotary_dim dimensions of each head of x (T, heads, head_dim).

    `cos` and `sin` are from `RopeTable.rows`. Dimension i pairs with i + rotary_dim / 2, as in the
    checkpoints that transformers writes.
    """
    part = x[..., : cos.shape[-1]]
    crossed = part.roll(cos.shape[-1] // 2, -1).mul_(sin)
    part.mul_(cos).add_(crossed)
