"""The matrix products of a decoder on a device: torch's, or a kernel's.

Single rows are multiplied by a kernel from Hopper on, where it is 1.04 to 1.75 times as fast as torch
for the matrices of usual models (`python -m benchmarks.gpu.products`). Few rows are multiplied with
integers by a kernel that reads them as they lie; torch would write them out as floats first.

The architecture, the matrix and the number of rows decide, not a measurement: the order of summation
depends on it, so two servers with the same model and device give the same output, and so does a
server before and after it records its steps.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, TypeGuard

import torch

from ..torch.decoder import TorchExecutor
from ..torch.layers import LateProduct, Linear, QuantizedLinear, SideBySide
from ..torch.mlp import GatedMLP
from .launch import Launcher, LaunchError
from .variants import INTEGER_ROWS, Variant, integer_variant, product_rows, product_variant, short_name

logger = logging.getLogger(__name__)

ALIGNMENT_BYTES = 16
# Of x, by the kernels for integers, which read the matrix for each 64 of them; torch writes it out
# once. Estimated from the times of 64 rows, and of a step of 128 by torch.
MAX_INTEGER_ROWS = 512
# From which on the kernel multiplies single rows, as 10 · major + minor.
MIN_ROW_ARCHITECTURE = 90


class CudaProducts:
    """The products of one model. Not thread-safe."""

    def __init__(self, launch: Launcher, dtype: str, *, rows_by_kernel: bool) -> None:
        """`dtype` is Triton's name of it. Without `rows_by_kernel` torch multiplies single rows."""
        self._launch = launch
        self._dtype = dtype
        self._variants: dict[tuple[int, bool], Variant] = {}
        self.rows_by_kernel = rows_by_kernel
        # By what decides them; None: torch computes these products.
        self._integer_kernels: dict[tuple[Any, ...], Variant | None] = {}

    def prepare_integers(self, executor: TorchExecutor) -> None:
        """Load or compile the kernels for the model's matrices of integers, as far as these are
        known.
        """
        for matrix in _matrices(executor):
            if type(matrix) is QuantizedLinear:
                for num_rows in INTEGER_ROWS:
                    self._integer_kernel(matrix, num_rows)

    def __call__(self, projection: Any, x: torch.Tensor) -> torch.Tensor:
        """projection(x), in either way."""
        if type(projection) is LateProduct:
            projection = projection.product()
        if type(projection) is QuantizedLinear:
            return self._by_integers(projection, x)
        if type(projection) is SideBySide:
            return torch.cat([self(part, x) for part in projection.parts], dim=-1)
        if len(x) == 1 and self._takes_row(projection, x):
            out = x.new_empty((1, len(projection.weight)))
            bias = projection.bias
            self._run(projection.weight, x, out if bias is None else bias, out, adds=bias is not None)
            return out
        result: torch.Tensor = projection(x)
        return result

    def add_(self, x: torch.Tensor, projection: Any, inner: torch.Tensor) -> torch.Tensor:
        """Compute x += projection(inner). A product that adds by itself saves one kernel."""
        if len(x) == 1 and self._takes_row(projection, inner) and projection.bias is None:
            self._run(projection.weight, inner, x, x, adds=True)
            return x
        if is_plain(projection) and projection.weight.dtype is x.dtype:
            return torch.addmm(x, inner, projection.weight.t(), out=x)
        return x.add_(self(projection, inner))

    def run(self, matrix: torch.Tensor, row: torch.Tensor, out: torch.Tensor) -> None:
        """Compute out (1, out) = row (1, in) times the matrix, by the kernel."""
        self._run(matrix, row, out, out, adds=False)

    def _takes_row(self, projection: Any, row: torch.Tensor) -> bool:
        """True if the kernel computes this row's product: all in its dtype, which some checkpoints mix."""
        return (
            self.rows_by_kernel
            and type(projection) is Linear
            and is_aligned(projection.weight)
            and all(
                each is None or (each.dtype is row.dtype and each.data_ptr() % ALIGNMENT_BYTES == 0)
                for each in (projection.weight, projection.bias)
            )
        )

    def _run(
        self, matrix: torch.Tensor, x: torch.Tensor, added: torch.Tensor, out: torch.Tensor, *, adds: bool
    ) -> None:
        num_out, num_in = matrix.shape
        variant = self._variants.get((num_in, adds))
        if variant is None:
            variant = self._variants[num_in, adds] = product_variant(self._dtype, num_in, adds=adds)
        self._launch(variant, (-(-num_out // product_rows(num_in)),), x, matrix, added, out, num_out)

    def _integer_kernel(self, matrix: QuantizedLinear, num_rows: int) -> Variant | None:
        """The kernel for these many rows, loaded or compiled; None: torch computes them."""
        rows = next(rows for rows in INTEGER_ROWS if num_rows <= rows)
        has_zero = matrix.zero is not None
        shape = (matrix.bits, matrix.num_in, matrix.num_out, matrix.group_size)
        key = (rows, *shape, matrix.scale.dtype, has_zero, is_aligned(matrix.weight))
        if key not in self._integer_kernels:
            self._integer_kernels[key] = self._find_integer_kernel(matrix, rows)
        return self._integer_kernels[key]

    def _find_integer_kernel(self, matrix: QuantizedLinear, rows: int) -> Variant | None:
        has_zero = matrix.zero is not None
        # Zero points of 8 bits are in few GPTQ checkpoints only.
        if not is_aligned(matrix.weight) or (matrix.bits == 8 and has_zero):
            return None
        variant = integer_variant(
            self._dtype,
            short_name(matrix.scale.dtype),
            bits=matrix.bits,
            num_rows=rows,
            num_in=matrix.num_in,
            num_out=matrix.num_out,
            group_size=matrix.group_size,
            has_zero=has_zero,
        )
        try:
            self._launch.prepare([] if variant is None else [variant])
        except LaunchError as error:
            logger.warning("torch computes products with integers, slowly: %s", error)
            return None
        return variant

    def _by_integers(self, projection: QuantizedLinear, x: torch.Tensor) -> torch.Tensor:
        num_rows, most = len(x), INTEGER_ROWS[-1]
        if num_rows > MAX_INTEGER_ROWS:
            return projection(x)
        variant = self._integer_kernel(projection, min(num_rows, most))
        if variant is None:
            return projection(x)
        if projection.columns is not None:
            x = x[:, projection.columns]
        num_out = projection.num_out
        out = x.new_empty((num_rows, num_out))
        zeros: list[torch.Tensor] = []
        if projection.bits == 4:  # without zero points the kernel does not read them
            zeros = [projection.weight if projection.zero is None else projection.zero]
        grid = (-(-num_out // dict(variant.constants)["COLUMNS"]),)
        for first in range(0, num_rows, most):
            some, theirs = x[first : first + most], out[first : first + most]
            matrix = (projection.weight, projection.scale, *zeros)
            self._launch(variant, grid, some, *matrix, theirs, len(some), num_out)
        return out if projection.bias is None else out.add_(projection.bias.to(out.dtype))


def is_plain(projection: Any) -> TypeGuard[Linear]:
    return type(projection) is Linear and projection.bias is None


def is_aligned(matrix: torch.Tensor) -> bool:
    """True if all rows are aligned for the kernel. Matrices lie at the loader's addresses."""
    row_bytes = matrix.shape[1] * matrix.element_size()
    return not (matrix.data_ptr() % ALIGNMENT_BYTES or row_bytes % ALIGNMENT_BYTES) and matrix.is_contiguous()


def _matrices(executor: TorchExecutor) -> Iterable[Any]:
    projections = [executor.head]
    for layer in executor.layers_of:
        projections += [layer.attention.qkv, layer.attention.output]
        if isinstance(layer.mlp, GatedMLP):
            projections += [layer.mlp.gate_up, layer.mlp.down]
    for each in projections:
        yield from each.parts if isinstance(each, SideBySide) else (each,)
