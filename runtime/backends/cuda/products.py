"""Products with one row: by torch, or by a kernel for the shapes in a table.

A table decides, not a measurement: the order of summation depends on it, so two servers with the
same model and device give the same output, and so does a server before and after it records its
steps. `python -m benchmarks.gpu.products` prints the times of both on a device, from which shapes
enter the table. Only plain matrices without a bias use the kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeGuard

import torch

from ..torch.decoder import GatedMLP, TorchExecutor
from ..torch.layers import Linear
from .launch import Launcher
from .variants import PRODUCT_ROWS, Variant, product_variant

ALIGNMENT_BYTES = 16

# (out, in) of the matrices that the kernel multiplies. Empty until a measurement on a device shows
# one for which the kernel is faster.
KERNEL_SHAPES: frozenset[tuple[int, int]] = frozenset()


class RowProducts:
    """The products of one model. Not thread-safe."""

    def __init__(self, launch: Launcher, dtype: str) -> None:
        """`dtype` is Triton's name of it."""
        self._launch = launch
        self._dtype = dtype
        self._variants: dict[tuple[int, bool], Variant] = {}
        self.shapes = KERNEL_SHAPES

    def __call__(self, projection: Any, x: torch.Tensor) -> torch.Tensor:
        """projection(x), in either way."""
        if len(x) == 1 and self._takes(projection):
            out = x.new_empty((1, len(projection.weight)))
            self._run(projection.weight, x, out, out, adds=False)
            return out
        result: torch.Tensor = projection(x)
        return result

    def add_(self, x: torch.Tensor, projection: Any, inner: torch.Tensor) -> torch.Tensor:
        """Compute x += projection(inner). A product that adds by itself saves one kernel."""
        if len(x) == 1 and self._takes(projection):
            self._run(projection.weight, inner, x, x, adds=True)
            return x
        if is_plain(projection):
            return torch.addmm(x, inner, projection.weight.t(), out=x)
        return x.add_(projection(inner))

    def use_for(self, shapes: Iterable[tuple[int, int]]) -> None:
        """Replace the table. For tests and measurements."""
        self.shapes = frozenset(shapes)

    def run(self, matrix: torch.Tensor, row: torch.Tensor, out: torch.Tensor) -> None:
        """Compute out (1, out) = row (1, in) times the matrix, by the kernel."""
        self._run(matrix, row, out, out, adds=False)

    def _takes(self, projection: Any) -> bool:
        return (
            bool(self.shapes)
            and is_plain(projection)
            and _shape(projection.weight) in self.shapes
            and is_aligned(projection.weight)
        )

    def _run(
        self, matrix: torch.Tensor, x: torch.Tensor, added: torch.Tensor, out: torch.Tensor, *, adds: bool
    ) -> None:
        num_out, num_in = matrix.shape
        variant = self._variants.get((num_in, adds))
        if variant is None:
            variant = self._variants[num_in, adds] = product_variant(self._dtype, num_in, adds=adds)
        self._launch(variant, (-(-num_out // PRODUCT_ROWS),), x, matrix, added, out, num_out)


def projections_of(executor: TorchExecutor) -> list[Any]:
    """All projections of a step except experts, which the kernels do not compute."""
    found: list[Any] = []
    for layer in executor.layers_of:
        found += [layer.attention.qkv, layer.attention.output]
        if isinstance(layer.mlp, GatedMLP):
            found += [layer.mlp.gate_up, layer.mlp.down]
    return [*found, executor.head]


def is_plain(projection: Any) -> TypeGuard[Linear]:
    return type(projection) is Linear and projection.bias is None


def _shape(matrix: torch.Tensor) -> tuple[int, int]:
    return matrix.shape[0], matrix.shape[1]


def is_aligned(matrix: torch.Tensor) -> bool:
    """True if all rows are aligned for the kernel. Matrices lie at the loader's addresses."""
    row_bytes = matrix.shape[1] * matrix.element_size()
    return not (matrix.data_ptr() % ALIGNMENT_BYTES or row_bytes % ALIGNMENT_BYTES) and matrix.is_contiguous()
