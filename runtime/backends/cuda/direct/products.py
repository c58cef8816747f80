"""Matrix products on the device: which kernel multiplies with a matrix, and in which stretches.

A matrix alone decides how its columns are cut, so a row's sums are the same in any batch. The number
of rows decides only which kernel forms them. The products of all experts of a mixture are one launch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from .....loader.device.driver.base import KernelLaunch
from ....models.converted import ConvertedProjection
from ....models.gptq_awq import GptqAwqMatrix
from ....models.matrices import DenseMatrix, Float8Matrix, IntegerMatrix, Matrix, Projection
from ....models.projections import JoinedProjection
from ....tensors import DType
from .arguments import ExpertProduct, MatrixPart, Product
from .memory import Array
from .program import Kernels
from .sources import product_module

NUM_STRETCHES = 8
FEW_ROWS = (8, 16, 32, 64)
# Up to this number of rows, each stretch of a matrix has a warp, and the matrix is read once for each 64;
# above, a warp has all stretches. A guess, until it was measured.
MAX_FEW_ROWS = 256
WEIGHT_KINDS = {DType.BF16: 0, DType.F16: 1, DType.F32: 2}
PRODUCT_THREADS = 256
_MANY_ROWS, _MANY_EXPERT_ROWS = 128, 64  # of x, that a block has
_OUTS_OF_FEW, _OUTS_OF_MANY = 16, 128  # rows of a matrix that a block has
_CHUNK = 32  # columns that the matrix instruction takes at a time
_RUN = 64  # of 4 bits: 32 bytes
_ALIGNMENT_BYTES = 16
_PACKINGS = {"gptq": "gptq", "awq": "awq", "rows": "packed"}
_ONES = 0x11111111


class Mode(IntEnum):
    """The destination of a product."""

    STORE = 0
    ADD = 1  # to what is there, after rounding
    STORE_WIDE = 2  # in fp32


class Output(IntEnum):
    """The number among a step's counts that says how many rows a product has."""

    ROWS = 0
    LOGITS = 1
    PAIRS = 4  # of a row and an expert that it has chosen


class BlockShape(NamedTuple):
    """A kernel of a format's module, and what a block of it has."""

    name: str
    rows: int  # of x
    outs: int  # rows of the matrix


def kernel_for(num_rows: int, *, of_expert: bool = False) -> BlockShape:
    """For this many rows of x."""
    if num_rows > MAX_FEW_ROWS:
        return BlockShape("many", _MANY_EXPERT_ROWS if of_expert else _MANY_ROWS, _OUTS_OF_MANY)
    rows = next((rows for rows in FEW_ROWS if num_rows <= rows), FEW_ROWS[-1])
    return BlockShape(str(rows), rows, _OUTS_OF_FEW)


class Tiles(NamedTuple):
    """The pairs of rows and experts in tiles, each of one expert: a product has a row of blocks for each."""

    kernel: BlockShape
    num: int  # at most

    @classmethod
    def of(cls, num_pairs: int, num_experts: int) -> Tiles:
        """For up to this many pairs: a tile has as many as an expert, if all had equally many."""
        kernel = kernel_for(-(-num_pairs // num_experts), of_expert=True)
        return cls(kernel, num_pairs // kernel.rows + min(num_experts, num_pairs))


class MatrixLayout(NamedTuple):
    """All that a kernel needs to know of a matrix but its addresses and its number of rows."""

    format: str  # in `sources.FORMATS`
    num_in: int
    group_size: int
    scale_rows: int
    scale_kind: int
    bias_kind: int
    zero_more: int = 0  # added to words of zeros

    def product(self, part: MatrixPart, num_out: int, x: Array, out: Array, counts: Array) -> Product:
        """With this part of a matrix, to the first columns of `out`."""
        unit = _RUN if self.format == "int4" else _CHUNK
        return Product(
            weight=part.weight,
            scale=part.scale,
            zero=part.zero,
            bias=part.bias,
            x=x.address,
            out=out.address,
            counts=counts.address,
            num_out=num_out,
            num_in=self.num_in,
            length=stretch_length(self.num_in, group_size=self.group_size, unit=unit),
            group=self.group_size,
            scale_rows=self.scale_rows,
            zero_more=self.zero_more,
            out_stride=out.shape[1],
            scale_kind=self.scale_kind,
            bias_kind=self.bias_kind,
        )


def matrices_of(projection: Projection) -> tuple[Matrix, ...]:
    """The projection's matrices in their stored form; empty where they would have to be converted."""
    if isinstance(projection, JoinedProjection):
        found = [matrices_of(part) for part in projection.parts]
        return tuple(itertools.chain.from_iterable(found)) if all(found) else ()
    if isinstance(projection, ConvertedProjection):
        return projection.stored
    return projection.matrices()


def format_of(matrix: Matrix, dtype: DType) -> str | None:
    """The name in `sources.FORMATS` of the kernels that multiply with this matrix; None: there are
    none.
    """
    if matrix.weight.array.address % _ALIGNMENT_BYTES:
        return None
    if type(matrix) is DenseMatrix:
        names = {dtype: "float", DType.F32: "wide"}
        return names.get(matrix.weight.dtype) if matrix.num_in % _CHUNK == 0 else None
    if type(matrix) is Float8Matrix:
        columns = min(matrix.block[1], matrix.num_in)
        is_whole = matrix.num_in % columns == 0 and columns % _CHUNK == 0
        return "fp8" if is_whole and matrix.scale.dtype in WEIGHT_KINDS else None
    if type(matrix) is GptqAwqMatrix:
        is_whole = matrix.num_in // matrix.num_groups % _CHUNK == 0 and matrix.num_out % 8 == 0
        is_taken = matrix.bits == 4 and is_whole and not matrix.may_reorder_columns
        is_taken = is_taken and matrix.scales.dtype in WEIGHT_KINDS
        return _PACKINGS[matrix.packing] if is_taken else None
    if type(matrix) is not IntegerMatrix or matrix.columns is not None:
        return None
    unit = _RUN if matrix.bits == 4 else _CHUNK
    if matrix.num_in % unit or matrix.group_size % _CHUNK or matrix.scale.dtype not in WEIGHT_KINDS:
        return None
    if matrix.bits == 4:
        return "int4"
    return "int8" if matrix.zero is None else None


def layout_of(matrix: Matrix, dtype: DType) -> MatrixLayout:
    """Of a matrix that `format_of` names."""
    name = format_of(matrix, dtype)
    assert name is not None
    group_size, scale_rows, scale_kind, zero_more = matrix.num_in, 1, 0, 0
    if isinstance(matrix, IntegerMatrix):
        group_size = matrix.group_size
        scale_kind = WEIGHT_KINDS[matrix.scale.dtype]
    elif isinstance(matrix, Float8Matrix):
        scale_rows, group_size = matrix.block[0], min(matrix.block[1], matrix.num_in)
        scale_kind = WEIGHT_KINDS[matrix.scale.dtype]
    elif isinstance(matrix, GptqAwqMatrix):
        group_size, scale_kind = matrix.num_in // matrix.num_groups, WEIGHT_KINDS[matrix.scales.dtype]
        zero_more = _ONES if matrix.stores_zero_minus_one else 0
    bias_kind = 0 if matrix.bias is None else WEIGHT_KINDS[matrix.bias.dtype]
    return MatrixLayout(name, matrix.num_in, group_size, scale_rows, scale_kind, bias_kind, zero_more)


def parts_of(projection: Projection, num_out: int) -> Iterator[MatrixPart]:
    """The rows of its matrices, `num_out` at a time, whether they lie back to back or not."""
    for matrix in matrices_of(projection):
        for first in range(0, matrix.num_out, num_out):
            yield _part_of(matrix, first)


def _part_of(matrix: Matrix, first: int = 0) -> MatrixPart:
    """From this row on."""
    bias = matrix.bias
    part = MatrixPart(
        weight=matrix.weight.array.row(first), bias=bias.array.row(first) if bias is not None else 0
    )
    if isinstance(matrix, IntegerMatrix):
        part.scale = matrix.scale.array.row(first)
        part.zero = matrix.zero.array.row(first) if matrix.zero is not None else 0
    elif isinstance(matrix, Float8Matrix):
        part.scale = matrix.scale.array.row(first // matrix.block[0])
    elif isinstance(matrix, GptqAwqMatrix):
        assert not first, "rows of words are not one behind the other"
        part.scale = matrix.scales.array.address
        part.zero = matrix.qzeros.array.address if matrix.qzeros is not None else 0
    return part


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
    assert out.dtype is (DType.F32 if mode is Mode.STORE_WIDE else kernels.dtype)
    layout = layout_of(matrix, kernels.dtype)
    arguments = layout.product(_part_of(matrix), matrix.num_out, x, out, counts)
    arguments.out += column * out.dtype.size_bytes
    arguments.count, arguments.mode = output, mode
    module, kernel = product_module(layout.format), kernel_for(bucket)
    grid = -(-bucket // kernel.rows), -(-matrix.num_out // kernel.outs)
    return kernels.launch(module, f"{module}_{kernel.name}", grid, PRODUCT_THREADS, arguments)


def expert_product_launch(
    kernels: Kernels,
    layout: MatrixLayout,
    x: Array,
    out: Array,
    counts: Array,
    tiles: Tiles,
    *,
    parts: int,
    num_parts: int,
    tile_table: int,
    rows: int = 0,
) -> KernelLaunch:
    """out[i] = x[rows[i]] @ matrix.T + bias of the expert of pair i, whose parts write side by side.

    All parts have one layout. `parts` (experts, num_parts), `tile_table` and `rows` (pairs,) are
    addresses; without `rows`, x has a row for each pair.
    """
    num_out = out.shape[1] // num_parts
    each = layout.product(MatrixPart(), num_out, x, out, counts)
    arguments = ExpertProduct(each=each, parts=parts, tiles=tile_table, rows=rows, num_parts=num_parts)
    module, kernel = product_module(layout.format, of_experts=True), tiles.kernel
    grid = tiles.num, num_parts * -(-num_out // kernel.outs)
    return kernels.launch(module, f"{module}_{kernel.name}", grid, PRODUCT_THREADS, arguments)
