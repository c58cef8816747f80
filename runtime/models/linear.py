"""Matrix products: one `Linear`, and several over the same input as one where their weights lie back to back.

A loader that puts q, k and v (or gate and up) next to each other makes the stacked matrix a view of what
arrived: nothing is copied, and nothing can be, since the content may not be there yet. Elsewhere the
products are made one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from .parameters import Parameters

Projection = Callable[[torch.Tensor], torch.Tensor]  # (T, in) → (T, out)


class Linear:
    """x @ weight.T + bias. `weight` is (out, in), `bias` (out,) or None."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class SideBySide:
    """Several products of one input, joined: the same result as one product with the stacked weights."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = tuple(parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


def take_linear(parameters: Parameters, name: str, num_in: int, num_out: int, *, bias: bool) -> Linear:
    """The projection whose tensors are `name`.weight and, with `bias`, `name`.bias."""
    return Linear(
        parameters.take(f"{name}.weight", num_out, num_in),
        parameters.take(f"{name}.bias", num_out) if bias else None,
    )


def take_stacked(
    parameters: Parameters, names_and_sizes: Sequence[tuple[str, int]], num_in: int, *, bias: bool
) -> Projection:
    """One projection to all the (name, num_out), in this order."""
    parts = [take_linear(parameters, name, num_in, num_out, bias=bias) for name, num_out in names_and_sizes]
    weight = stacked_view([part.weight for part in parts])
    biases = [part.bias for part in parts if part.bias is not None]
    stacked_bias = stacked_view(biases) if biases else None
    if weight is None or (biases and stacked_bias is None):
        return SideBySide(parts)
    return Linear(weight, stacked_bias)


def stacked_view(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensors joined along their first dimension, as a view.

    None unless they lie back to back, in this order, in one storage.
    """
    first = tensors[0]
    storage = first.untyped_storage().data_ptr()
    end = first.storage_offset()
    for tensor in tensors:
        if (
            tensor.untyped_storage().data_ptr() != storage
            or tensor.storage_offset() != end
            or tensor.dtype != first.dtype
            or tensor.shape[1:] != first.shape[1:]
            or not tensor.is_contiguous()
        ):
            return None
        end += tensor.numel()
    rows = sum(tensor.shape[0] for tensor in tensors)
    return first.as_strided((rows, *first.shape[1:]), first.stride())
