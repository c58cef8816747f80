"""A table with a row for each token, of floats, or of int8 with a scale a row."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .parameters import Parameters


class Embeddings:
    """`weight` is (vocab, hidden), of floats, or with `scale`, (vocab, 1), int8. Rows are made in `dtype`."""

    __slots__ = ("dtype", "scale", "weight")

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> None:
        self.weight = weight
        self.scale = scale
        self.dtype = dtype

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """The rows of these tokens, (T,) integers → (T, hidden). Reads no others."""
        rows = F.embedding(tokens, self.weight)
        if self.scale is None:
            return rows.to(self.dtype)
        return (rows.to(torch.float32) * F.embedding(tokens, self.scale).to(torch.float32)).to(self.dtype)


def take_embeddings(
    parameters: Parameters, name: str, vocab_size: int, hidden_size: int, dtype: torch.dtype
) -> Embeddings:
    """The table `name`.weight, whose rows are to be in `dtype`. Raises `ModelError` where it does not fit."""
    if f"{name}.weight_scale" not in parameters:
        return Embeddings(parameters.take(f"{name}.weight", vocab_size, hidden_size), None, dtype)
    weight = parameters.take_as(f"{name}.weight", (vocab_size, hidden_size), torch.int8)
    scale = parameters.take_as(f"{name}.weight_scale", (vocab_size, 1), torch.bfloat16, torch.float32)
    return Embeddings(weight, scale, dtype)
