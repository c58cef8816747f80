"""A Linear's weights once more, in the order in which oneDNN multiplies with them.

F.linear brings bf16 weights into that order at every call; a copy that was packed once spares it. The product is
oneDNN's in both cases, so that every bit of it is the same: `agrees` proves it on the processor at hand. The copy takes
as much memory as the weights, which stay where they are. It does not know when it is worth that.

torch reaches these functions for its own compiler (`torch.ops.mkldnn`), and promises nothing about them: where one is
missing, or refuses, there is no packing, and F.linear does it all.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F

BLOCK = 64  # both sides of a matrix are filled up to multiples of no more than that


class CannotPackError(Exception):
    """This torch, or this processor, has no packed weights of such a kind; F.linear goes on computing them."""


def packed_bytes(weight: torch.Tensor) -> int:
    """What a packed copy of (out, in) weights takes, at most."""
    num_out, num_in = (-(-size // BLOCK) * BLOCK for size in weight.shape)
    return num_out * num_in * weight.element_size()


def can_pack(weight: torch.Tensor) -> bool:
    """Whether there is any use in trying."""
    if weight.dtype is not torch.bfloat16 or weight.device.type != "cpu" or not weight.is_contiguous():
        return False
    ops = torch.ops.mkldnn
    names = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")
    if not torch._C._has_mkldnn or not all(hasattr(ops, name) for name in names):
        return False
    return bool(ops._is_mkldnn_bf16_supported())


class PackedWeight:
    """The copy, and for how many rows it is used: for none at first."""

    __slots__ = ("_packed", "_table")

    def __init__(self, weight: torch.Tensor) -> None:
        """(out, in) bf16, exact by now. Takes a few ms; raises CannotPackError."""
        if not can_pack(weight):
            raise CannotPackError("torch packs bf16 weights, on a CPU, where its build has oneDNN")
        try:
            with torch.inference_mode():
                self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        except RuntimeError as error:
            raise CannotPackError(f"torch could not pack weights: {error}") from error
        self._table = bytes(1)

    def use_for(self, table: bytes) -> None:
        """Be used for as many rows as this table has 1 at; its last item stands for all numbers beyond it."""
        self._table = table

    def takes(self, num_rows: int) -> bool:
        table = self._table
        return bool(table[min(num_rows, len(table) - 1)])

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x (T, in) @ weight.T + bias, (T, out). In inference mode."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return product

    @torch.inference_mode()
    def agrees(self, weight: torch.Tensor, bias: torch.Tensor | None, sizes: Iterable[int]) -> bool:
        """Whether the products of so many rows are those of F.linear, to the bit."""
        generator = torch.Generator().manual_seed(0)
        for num_rows in sizes:
            x = torch.randn(num_rows, weight.shape[1], generator=generator).to(weight.dtype)
            try:
                if not torch.equal(self(x, bias), F.linear(x, weight, bias)):
                    return False
            except RuntimeError:  # of a torch that calls it otherwise
                return False
        return True
