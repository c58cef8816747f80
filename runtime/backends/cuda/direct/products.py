"""Matrix products on the device: which kernel multiplies with a matrix, and in which stretches.

A matrix alone decides how its columns are cut, so a row's sums are the same in any batch. The number
of rows decides only which kernel forms them.
"""

from __future__ import annotations

import math
from enum import IntEnum

from .....loader.device.driver.base import KernelLaunch
from ....models.matrices import DenseMatrix, Float8Matrix, IntegerMatrix, Matrix
from ....tensors import DType
from .arguments import Product
from .memory import Array
from .program import Kernels
from .sources import product_module

NUM_STRETCHES = 8
FEW_ROWS = (8, 16, 32, 64)
# Up to this number of rows, each stretch of a matrix has a warp, and the matrix is read once for each 64;
# above, a warp has all stretches. A guess, until it was measured.
MAX_FEW_ROWS = 256
WEIGHT_KINDS = {DType.BF16: 0, DType.F16: 1, DType.F32: 2}
_FEW_THREADS, _MANY_THREADS, _MANY_TILE = 256, 256, 128
_ROWS_OF_FEW = 16
_CHUNK = 32  # columns that the matrix instruction takes at a time
_RUN = 64  # of 4 bits: 32 bytes
_ALIGNMENT_BYTES = 16


class Mode(IntEnum):
    """The destination of a product."""

    STORE = 0
    ADD = 1  # to what is there, after rounding
    STORE_WIDE = 2  # in fp32


class Output(IntEnum):
    """The number among a step's counts that says how many rows a product has."""

    ROWS = 0
    LOGITS = 1


def format_of(matrix: Matrix, dtype: DType) -> str | None:
    """The name in `sources.FORMATS` of the kernels that multiply with this matrix; None: there are
    none.
    """
    if matrix.weight.array.address % _ALIGNMENT_BYTES:
        return None
    if type(matrix) is DenseMatrix:
        is_taken = matrix.weight.dtype is dtype and matrix.num_in % _CHUNK == 0
        return "float" if is_taken else None
    if type(matrix) is Float8Matrix:
        columns = min(matrix.block[1], matrix.num_in)
        is_whole = matrix.num_in % columns == 0 and columns % _CHUNK == 0
        return "fp8" if is_whole and matrix.scale.dtype in WEIGHT_KINDS else None
    if type(matrix) is not IntegerMatrix or matrix.columns is not None:
        return None
    unit = _RUN if matrix.bits == 4 else _CHUNK
    if matrix.num_in % unit or matrix.group_size % _CHUNK or matrix.scale.dtype not in WEIGHT_KINDS:
        return None
    if matrix.bits == 4:
        return "int4"
    return "int8" if matrix.zero is None else None


def stretch_length(num_in: int, *, group_size: int, unit: int = _CHUNK) -> int:
    """The columns of a stretch, of at most `NUM_STRETCHES`: whole groups, where these are short."""
    whole = math.lcm(unit, group_size) if group_size < num_in else unit
    return -(-num_in // (NUM_STRETCHES * whole)) * whole


def product_launch(
    kernels: Kernels,
    matrix: Matrix,
    x: Array,
    out: Array,
    counts: Array,
    *,
    bucket: int,
    column: int = 0,
    mode: Mode = Mode.STORE,
    output: Output = Output.ROWS,
) -> KernelLaunch:
    """out[:, column : column + num_out] = x @ matrix.T + bias, of up to `bucket` rows.

    x (R, num_in) in the model's dtype; out (R, columns), in fp32 for STORE_WIDE. The matrix must be
    one that `format_of` names.
    """
    name = format_of(matrix, kernels.dtype)
    assert name is not None
    assert out.dtype is (DType.F32 if mode is Mode.STORE_WIDE else kernels.dtype)
    scale = zero = None
    group_size, scale_rows = matrix.num_in, 1
    if isinstance(matrix, IntegerMatrix):
        scale, zero, group_size = matrix.scale, matrix.zero, matrix.group_size
    elif isinstance(matrix, Float8Matrix):
        scale, group_size, scale_rows = matrix.scale, min(matrix.block[1], matrix.num_in), matrix.block[0]
    bias = matrix.bias
    arguments = Product(
        weight=matrix.weight.array.address,
        scale=scale.array.address if scale is not None else 0,
        zero=zero.array.address if zero is not None else 0,
        bias=bias.array.address if bias is not None else 0,
        x=x.address,
        out=out.address + column * out.dtype.size_bytes,
        counts=counts.address,
        count=output,
        num_out=matrix.num_out,
        num_in=matrix.num_in,
        length=stretch_length(matrix.num_in, group_size=group_size, unit=_RUN if name == "int4" else _CHUNK),
        group=group_size,
        scale_rows=scale_rows,
        out_stride=out.shape[1],
        scale_kind=WEIGHT_KINDS[scale.dtype] if scale is not None else 0,
        bias_kind=WEIGHT_KINDS[bias.dtype] if bias is not None else 0,
        mode=mode,
    )
    return kernels.launch(product_module(name), *_shape_of(name, bucket, matrix.num_out), arguments)


def _shape_of(name: str, bucket: int, num_out: int) -> tuple[str, tuple[int, int], int]:
    """The kernel for up to `bucket` rows, its grid, and the threads of a block."""
    if bucket > MAX_FEW_ROWS:
        grid = -(-bucket // _MANY_TILE), -(-num_out // _MANY_TILE)
        return f"product_{name}_many", grid, _MANY_THREADS
    rows = next((rows for rows in FEW_ROWS if bucket <= rows), FEW_ROWS[-1])
    return f"product_{name}_{rows}", (-(-bucket // rows), -(-num_out // _ROWS_OF_FEW)), _FEW_THREADS
