"""Normalisation. Statistics are fp32; results are rounded where transformers rounds, so that tokens
agree.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...models.decoder_config import Norm


class RMSNorm:
    """A norm over the last dimension, of one of the kinds of `Norm`. `weight` is (size,)."""

    __slots__ = ("eps", "kind", "weight")

    def __init__(self, weight: torch.Tensor, eps: float, kind: Norm = Norm.RMS) -> None:
        self.weight = weight
        self.eps = eps
        self.kind = kind

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind is Norm.RMS:
            return unit_rms(x, self.eps).mul_(self.weight.to(x.dtype))
        wide, factor = x.float(), self.weight.float()
        if self.kind is Norm.LAYER:
            wide = wide - wide.mean(-1, keepdim=True)
        elif self.kind is Norm.RMS_PLUS_ONE:
            factor = 1.0 + factor
        return unit_rms(wide, self.eps).mul_(factor).to(x.dtype)


class HeadNorm:
    """Norms of queries and keys, of each head separately or of all heads of a row together."""

    __slots__ = ("is_joint", "keys", "num_heads", "queries")

    def __init__(self, queries: RMSNorm, keys: RMSNorm, num_heads: int, *, is_joint: bool) -> None:
        self.queries = queries
        self.keys = keys
        self.num_heads = num_heads
        self.is_joint = is_joint

    def apply_(self, heads: torch.Tensor) -> None:
        """Normalise in place: (T, num_heads query heads, then the key heads, head_dim)."""
        queries, keys = heads[:, : self.num_heads], heads[:, self.num_heads :]
        if self.queries.kind is Norm.RMS and not self.is_joint:  # one pass for both
            unit = unit_rms(heads, self.queries.eps)
            torch.mul(unit[:, : self.num_heads], self.queries.weight.to(heads.dtype), out=queries)
            torch.mul(unit[:, self.num_heads :], self.keys.weight.to(heads.dtype), out=keys)
            return
        for norm, part in ((self.queries, queries), (self.keys, keys)):
            rows = part.reshape(len(part), 1, -1) if self.is_joint else part
            part.copy_(norm(rows).view(part.shape))


class LayerNorm:
    """(x - mean) / deviation * weight + bias over the last dimension. `weight` and `bias` are (size,); None is 0."""

    __slots__ = ("bias", "eps", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> None:
        self.weight = weight
        self.bias = bias
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, self.weight.shape, self.weight.to(x.dtype), bias, self.eps)


def unit_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x scaled to a root mean square of 1 over its last dimension: a new tensor of x's shape and dtype."""
    wide = x.float()
    # Not mean(): on a CPU it takes as long as everything else together.
    mean_square = (wide * wide).sum(-1, keepdim=True).mul_(1.0 / x.shape[-1])
    return (wide * mean_square.add_(eps).rsqrt_()).to(x.dtype)
