"""oneDNN's products with bf16 weights over a copy in its own order, as torch reaches them.

F.linear brings bf16 weights into that order at every call; a copy that was packed once spares it. The product is
oneDNN's in both cases, so that every bit of it is the same. The copy takes as much memory as the weights, which stay
where they are. It does not know when it is worth that.

torch reaches these functions for its own compiler (`torch.ops.mkldnn`), and promises nothing about them: where one is
missing, or refuses, there is no packing, and F.linear does it all.
"""

from __future__ import annotations

import torch

from ..models.linear import Linear
from ..models.packed import CannotPackError

BLOCK = 64  # both sides of a matrix are filled up to multiples of no more than that


def can_pack(linear: Linear) -> bool:
    """Whether there is any use in trying."""
    weight = linear.weight
    if weight.dtype is not torch.bfloat16 or weight.device.type != "cpu" or not weight.is_contiguous():
        return False
    ops = torch.ops.mkldnn
    names = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")
    if not torch._C._has_mkldnn or not all(hasattr(ops, name) for name in names):
        return False
    return bool(ops._is_mkldnn_bf16_supported())


def packed_bytes(linear: Linear) -> int:
    """What a packed copy of (out, in) weights takes, at most."""
    num_out, num_in = (-(-size // BLOCK) * BLOCK for size in linear.weight.shape)
    return num_out * num_in * linear.weight.element_size()


class Product:
    """The copy, and the product with it."""

    __slots__ = ("packed",)

    def __init__(self, linear: Linear, *, num_threads: int) -> None:
        """Of weights that are exact by now; computes in torch's threads, however many were asked for. Takes a few ms;
        raises CannotPackError.
        """
        if not can_pack(linear):
            raise CannotPackError("torch packs bf16 weights, on a CPU, where its build has oneDNN")
        try:
            with torch.inference_mode():
                self.packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight, None)
        except RuntimeError as error:
            raise CannotPackError(f"torch could not pack weights: {error}") from error

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x (T, in) bf16 @ weight.T + bias, (T, out). In inference mode."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")
        return product
