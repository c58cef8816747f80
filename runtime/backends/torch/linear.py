"""Products of a model's projections in torch, over weights at the loader's addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from ...models.matrices import DenseMatrix, IntegerMatrix, Matrix, Projection
from ...tensors import Tensor
from .quantized import QuantizedLinear
from .tensors import to_torch

Product = Callable[[torch.Tensor], torch.Tensor]  # (T, in) → (T, out)

# Weights that exist twice at a time; a longer row gets scratch of its own size.
SCRATCH_ELEMENTS = 1 << 20


class Linear:
    """x @ weight.T + bias. `weight` is (out, in), `bias` (out,) or None.

    Weights of another dtype than x are multiplied in fp32, a stretch of rows at a time, so that
    none of them is rounded.
    """

    __slots__ = ("bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    @property
    def num_in(self) -> int:
        return self.weight.shape[1]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is self.weight.dtype:
            return F.linear(x, self.weight, self.bias)
        return self.in_float32(x).to(x.dtype)

    def in_float32(self, x: torch.Tensor) -> torch.Tensor:
        """The product in fp32, unrounded."""
        wide = x.float()
        num_out, num_in = self.weight.shape
        out = wide.new_empty(*x.shape[:-1], num_out)
        step = max(1, SCRATCH_ELEMENTS // num_in)
        for begin in range(0, num_out, step):
            out[..., begin : begin + step] = F.linear(wide, self.weight[begin : begin + step].float())
        return out if self.bias is None else out.add_(self.bias.float())


class SideBySide:
    """Several products of one input, concatenated: the same result as one product with the stacked
    weights.
    """

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Product]) -> None:
        self.parts = tuple(parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


class LateProduct:
    """A projection whose matrices are converted at the first use."""

    __slots__ = ("_device", "_kept", "_projection")

    def __init__(self, projection: Projection, device: torch.device) -> None:
        self._projection = projection
        self._device = device
        self._kept: Product | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._kept is not None:
            return self._kept(x)
        product = _product_over(self._projection.matrices(), self._device)
        if self._projection.is_settled:
            self._kept = product
        return product(x)


def product_of(projection: Projection, device: torch.device) -> Product:
    """The product that computes this projection on the weights' device."""
    if projection.is_settled:
        return _product_over(projection.matrices(), device)
    return LateProduct(projection, device)


def _product_over(matrices: Sequence[Matrix], device: torch.device) -> Product:
    parts = [_product(matrix, device) for matrix in matrices]
    return parts[0] if len(parts) == 1 else SideBySide(parts)


def _product(matrix: Matrix, device: torch.device) -> Product:
    if isinstance(matrix, DenseMatrix):
        return Linear(to_torch(matrix.weight), _there(matrix.bias, device))
    assert isinstance(matrix, IntegerMatrix)
    columns = None if matrix.columns is None else torch.from_numpy(matrix.columns).to(device)
    return QuantizedLinear(
        to_torch(matrix.weight).to(device),
        to_torch(matrix.scale).to(device),
        _there(matrix.zero, device),
        _there(matrix.bias, device),
        columns,
    )


def _there(tensor: Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if tensor is None else to_torch(tensor).to(device)
