"""Whose copies of weights there are to compute with, and whether such a product says what torch's says.

Three libraries, behind one interface: oneDNN, for bf16, whose result is torch's to the bit; ONNX Runtime and OpenVINO,
for integers, which round the inputs to 8 bits as well. What a copy gains, and whether there is room for it, is not
known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import torch

from ..models.linear import Linear
from ..models.packed import Compute
from ..models.quantized import QuantizedLinear
from . import onednn
from .choice import LinearBackend
from .libraries import onnx_runtime, openvino

MAX_ERROR = 0.02  # of a row of a result: the length of what differs, of its own length


class Library(Protocol):
    """A module that has products over copies."""

    @property
    def Product(self) -> Callable[..., Compute]:
        """(linear, num_threads=…): makes the copy. Raises CannotPackError, and whatever else a library raises."""

    def can_pack(self, linear: Any, /) -> bool:
        """Whether it is installed and has products with such weights. Cheap: it imports nothing."""

    def packed_bytes(self, linear: Any, /) -> int:
        """What a copy takes at most."""


Libraries = Mapping[LinearBackend, Library]

EXACT: Libraries = MappingProxyType(
    {LinearBackend.ONEDNN: onednn}
)  # of plain matrices; computes in torch's threads
ROUNDING: Libraries = (
    MappingProxyType(  # of integers; with threads of their own, as whoever makes a copy has them
        {LinearBackend.ONNX_RUNTIME: onnx_runtime, LinearBackend.OPENVINO: openvino}
    )
)


def libraries_for(
    linear: Linear | QuantizedLinear, *, exact: Libraries = EXACT, rounding: Libraries = ROUNDING
) -> Libraries:
    """Those that have copies of such weights here."""
    libraries = exact if isinstance(linear, Linear) else rounding
    return {backend: library for backend, library in libraries.items() if library.can_pack(linear)}


@torch.inference_mode()
def objection(
    linear: Linear | QuantizedLinear, compute: Compute, sizes: Iterable[int], dtype: torch.dtype
) -> str | None:
    """What speaks against a product over a copy, in words, after products of so many rows of this dtype; None where
    they are what they must be. Raises what the library raises.

    Rows are of different lengths, so that one which is rounded by the measure of another shows.
    """
    generator = torch.Generator().manual_seed(0)
    for num_rows in sizes:
        x = torch.randn(num_rows, linear.num_in, generator=generator)
        x *= torch.exp2(torch.arange(num_rows) % 9 - 4.0)[:, None]
        x = x.to(dtype)
        if isinstance(linear, Linear):
            if not torch.equal(compute(x, linear.bias), linear.in_torch(x)):
                return f"with {num_rows} rows it differs from torch's product"
            continue
        bare = QuantizedLinear(linear.weight, linear.scale, linear.zero)
        bare.expand = linear.expand
        for bias, expected in ((None, bare.in_torch(x)), (linear.bias, linear.in_torch(x))):
            error = _relative_error(compute(x, bias), expected)
            if not error <= MAX_ERROR:
                return f"with {num_rows} rows it is {error:.1%} off, and may be {MAX_ERROR:.0%}"
    return None


def _relative_error(product: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the row that is farthest off; NaN where there is one in it, infinite for another shape or dtype."""
    if product.shape != expected.shape or product.dtype != expected.dtype:
        return float("inf")
    off = (product.float() - expected.float()).norm(dim=1)
    length = expected.float().norm(dim=1)
    return float(torch.where(off == 0, off, off / length).max())
