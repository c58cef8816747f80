"""From a text's token states to its embedding."""

from __future__ import annotations

import torch


def pool(states: torch.Tensor, mask: torch.Tensor, mode: str) -> torch.Tensor:
    """states (N, L, hidden), mask (N, L) bool → (N, hidden) fp32. `mode` is "mean" or "cls".

    A row's tokens come first, its padding, where `mask` is False, last.
    """
    if mode == "cls":
        return states[:, 0].float()
    counted = mask.unsqueeze(-1).float()
    return (states.float() * counted).sum(1) / counted.sum(1)
