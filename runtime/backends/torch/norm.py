"""Normalisation. Statistics are fp32; rounding happens where transformers rounds, so that tokens agree."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class RMSNorm:
    """x / rms(x) * weight over the last dimension. `weight` is (size,)."""

    __slots__ = ("eps", "weight")

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return unit_rms(x, self.eps).mul_(self.weight.to(x.dtype))


class HeadRMSNorm:
    """RMSNorm of every head on its own; queries have one weight, keys another. Both are (head_dim,)."""

    __slots__ = ("eps", "key_weight", "num_heads", "query_weight")

    def __init__(
        self, query_weight: torch.Tensor, key_weight: torch.Tensor, num_heads: int, eps: float
    ) -> None:
        self.query_weight = query_weight
        self.key_weight = key_weight
        self.num_heads = num_heads
        self.eps = eps

    def apply_(self, heads: torch.Tensor) -> None:
        """Normalises in place: (T, num_heads query heads, then the key heads, head_dim)."""
        unit = unit_rms(heads, self.eps)
        queries, keys = unit[:, : self.num_heads], unit[:, self.num_heads :]
        torch.mul(queries, self.query_weight.to(heads.dtype), out=heads[:, : self.num_heads])
        torch.mul(keys, self.key_weight.to(heads.dtype), out=heads[:, self.num_heads :])


class LayerNorm:
    """(x - mean) / deviation * weight + bias over the last dimension. `weight` and `bias` are (size,)."""

    __slots__ = ("bias", "eps", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.bias = bias
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


def unit_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x scaled to a root mean square of 1 over its last dimension: a new tensor of x's shape and dtype."""
    wide = x.float()
    # Not mean(): on CPU it takes as long as all the rest together.
    mean_square = (wide * wide).sum(-1, keepdim=True).mul_(1.0 / x.shape[-1])
    return (wide * mean_square.add_(eps).rsqrt_()).to(x.dtype)
