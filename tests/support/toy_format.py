"""A toy stored number format: a sign for each weight, and a scale for each row.

    X.signs (N, K) I8, -1 or 1        X.row_scale (N, 1) F32

All that a format needs is this file, its row, and its product in each backend that computes it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tests.support.reference import operations as reference

from teneral.runtime.backends.torch import layers
from teneral.runtime.backends.torch.tensors import to_torch
from teneral.runtime.models.parameters import Parameters
from teneral.runtime.models.projections import StoredFormat
from teneral.runtime.tensors import DType, Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SignMatrix:
    """A `Matrix`: w = signs · scale."""

    weight: Tensor  # (N, K) I8
    scale: Tensor  # (N, 1) F32
    bias: Tensor | None = None

    @property
    def columns(self) -> None:
        return None

    @property
    def num_in(self) -> int:
        return self.weight.shape[1]

    @property
    def num_out(self) -> int:
        return self.weight.shape[0]

    @property
    def kind(self) -> Hashable:
        return SignMatrix

    def joined(self, others: Sequence[SignMatrix]) -> None:
        return None


def _take(parameters: Parameters, name: str, num_in: int, num_out: int, bias: bool) -> SignMatrix:
    signs = parameters.take_as(f"{name}.signs", (num_out, num_in), DType.I8)
    scale = parameters.take_as(f"{name}.row_scale", (num_out, 1), DType.F32)
    return SignMatrix(signs, scale, parameters.take(f"{name}.bias", num_out) if bias else None)


ROW = StoredFormat(lambda parameters, name: f"{name}.signs" in parameters, _take)


def numpy_product(matrix: SignMatrix) -> reference.Floats:
    """The matrix' numbers, for `reference.FLOATS`."""
    numbers: reference.Floats = matrix.weight.array.astype(np.float32) * matrix.scale.array
    return numbers


def torch_product(matrix: SignMatrix, device: torch.device) -> layers.Product:
    """For `layers.PRODUCTS`."""
    bias = None if matrix.bias is None else to_torch(matrix.bias)
    return layers.Linear(to_torch(matrix.weight).float() * to_torch(matrix.scale), bias)


def in_signs(
    tensors: dict[str, torch.Tensor], names: Sequence[str]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The tensors with these matrices in signs; and plain, with the numbers that the signs stand for."""
    toy, plain = dict(tensors), dict(tensors)
    for name in names:
        weight = toy.pop(f"{name}.weight").float()
        signs = torch.where(weight < 0, -1, 1).to(torch.int8)
        scale = weight.abs().mean(1, keepdim=True)
        toy |= {f"{name}.signs": signs, f"{name}.row_scale": scale}
        plain[f"{name}.weight"] = signs.float() * scale
    return toy, plain
