"""Matrix products: one `Linear`, and several over the same input as one where their weights lie back to back.

A loader that puts q, k and v (or gate and up) next to each other makes the stacked matrix a view of what
arrived: nothing is copied, and nothing can be, since the content may not be there yet. Elsewhere the
products are made one by one.

Which tensors there are decides what a projection is made of: with `X.weight_scale` its weights are integers, with
`X.qweight` those of GPTQ or AWQ (docs/quantize.md). Floats of another dtype than the model computes in are converted
stretch by stretch (`expanded.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ..errors import ModelError
from .converted import take_converted
from .expanded import ExpandedLinear
from .packed import Copy
from .parameters import Parameters
from .quantized import RUN, QuantizedLinear

Projection = Callable[[torch.Tensor], torch.Tensor]  # (T, in) → (T, out)


class Linear:
    """x @ weight.T + bias. `weight` is (out, in), `bias` (out,) or None.

    `packed` computes over a copy of the weights for some numbers of rows, once somebody has made it. To be exchanged
    between steps (`Decoder.between_steps`).
    """

    __slots__ = ("bias", "packed", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.packed: Copy | None = None

    @property
    def num_in(self) -> int:
        return self.weight.shape[1]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is not None and (product := self.packed(x, self.bias)) is not None:
            return product
        return self.in_torch(x)

    def in_torch(self, x: torch.Tensor) -> torch.Tensor:
        """The same without a copy."""
        return F.linear(x, self.weight, self.bias)


class SideBySide:
    """Several products of one input, joined: the same result as one product with the stacked weights."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Projection]) -> None:
        self.parts = tuple(parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


def take_linear(parameters: Parameters, name: str, num_in: int, num_out: int, *, bias: bool) -> Projection:
    """The projection whose tensors are `name`.weight and, with `bias`, `name`.bias."""
    return take_stacked(parameters, [(name, num_out)], num_in, bias=bias)


def take_stacked(
    parameters: Parameters, names_and_sizes: Sequence[tuple[str, int]], num_in: int, *, bias: bool
) -> Projection:
    """One projection to all the (name, num_out), in this order. Raises `ModelError` for what does not fit."""
    if all(f"{name}.qweight" in parameters for name, _ in names_and_sizes):
        return take_converted(parameters, names_and_sizes, num_in, bias=bias)
    parts = [_take_one(parameters, name, num_in, num_out, bias=bias) for name, num_out in names_and_sizes]
    return parts[0] if len(parts) == 1 else _stack(parts) or SideBySide(parts)


def _take_one(parameters: Parameters, name: str, num_in: int, num_out: int, *, bias: bool) -> Projection:
    if f"{name}.qweight" in parameters:
        return take_converted(parameters, [(name, num_out)], num_in, bias=bias)
    if f"{name}.weight_scale" in parameters:
        return _take_quantized(parameters, name, num_in, num_out, bias=bias)
    weight = parameters.take(f"{name}.weight", num_out, num_in)
    own_bias = parameters.take(f"{name}.bias", num_out) if bias else None
    if parameters.expansion is not None:
        return ExpandedLinear(weight, own_bias, expansion=parameters.expansion)
    return Linear(weight, own_bias)


def _take_quantized(
    parameters: Parameters, name: str, num_in: int, num_out: int, *, bias: bool
) -> QuantizedLinear:
    """The shapes of a matrix's pieces must fit each other, so that nothing that is computed with them can fail."""
    full_name = parameters.full_name(name)
    weight, scale = parameters.peek(f"{name}.weight"), parameters.peek(f"{name}.weight_scale")
    is_packed = weight.dtype == torch.uint8
    num_groups = scale.shape[1] if scale.dim() == 2 else 0
    if num_groups < 1 or num_in % num_groups or (is_packed and num_in % RUN):
        raise ModelError(
            f"tensor {full_name}.weight_scale has shape {tuple(scale.shape)}, which does not fit "
            f"{full_name}.weight with {num_in} columns"
        )
    parameters.take_as(
        f"{name}.weight", (num_out, num_in // 2 if is_packed else num_in), torch.int8, torch.uint8
    )
    parameters.take_as(f"{name}.weight_scale", (num_out, num_groups), torch.bfloat16, torch.float32)
    needs_zero = parameters.quantization is not None and not parameters.quantization.symmetric
    zero = None
    if is_packed and (needs_zero or f"{name}.weight_zero" in parameters):
        zero = parameters.take_as(f"{name}.weight_zero", (num_out, num_groups), torch.uint8)
    return QuantizedLinear(weight, scale, zero, parameters.take(f"{name}.bias", num_out) if bias else None)


def _stack(parts: Sequence[Projection]) -> Projection | None:
    """One projection over all their tensors, as views; None unless these lie back to back."""
    joined: Callable[..., Projection]
    first = parts[0]
    if all(isinstance(part, QuantizedLinear) for part in parts):
        joined, kinds = QuantizedLinear, ["weight", "scale", "zero", "bias"]
    elif all(isinstance(part, Linear) for part in parts):
        joined, kinds = Linear, ["weight", "bias"]
    elif isinstance(first, ExpandedLinear) and all(isinstance(part, ExpandedLinear) for part in parts):
        joined, kinds = partial(ExpandedLinear, expansion=first.expansion), ["weight", "bias"]
    else:
        return None
    views: dict[str, Any] = {}
    for kind in kinds:
        tensors = [getattr(part, kind) for part in parts]
        is_there = [tensor is not None for tensor in tensors]
        view = stacked_view(tensors) if all(is_there) else None
        if view is None and any(is_there):
            return None
        views[kind] = view
    return joined(**views)


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
