"""Projections out of a model's tensors: several matrices of one input as one, where their weights lie back to back.

A loader that puts q, k and v (or gate and up) next to each other makes the stacked matrix a view of what
arrived: nothing is copied, and nothing can be, since the content may not be there yet.

Which tensors there are decides what a projection is made of (`FORMATS`): with `X.weight_scale` its weights are
integers or fp8, with `X.qweight` those of GPTQ or AWQ, with `X.weight_packed` those of compressed-tensors, with
`X.weight.absmax` or `X.SCB` those of bitsandbytes (docs/quantize.md); three dimensions are blocks of a GGUF file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from ...loader.format.nibbles import RUN
from ..errors import ModelError
from ..tensors import DType
from .matrices import (
    MXFP4_GROUP,
    BlockMatrix,
    DenseMatrix,
    EmbeddingTable,
    Float8Matrix,
    IntegerMatrix,
    Matrix,
    Mxfp4Matrix,
    Projection,
    StoredProjection,
)
from .parameters import COMPUTE_DTYPES, Parameters

_SCALE_DTYPES = (DType.BF16, DType.F16, DType.F32)
_GPTQ_AWQ, _BITSANDBYTES = "gptq or awq", "bitsandbytes"
_FLOAT8_SCALES = ("scale_inv", "scale")  # both are multiplied with, whatever the first is called


class StoredFormat(NamedTuple):
    """A stored number format: whether a matrix is in it, by its tensors, and how it is taken."""

    is_stored: Callable[[Parameters, str], bool]
    take: Callable[[Parameters, str, int, int, bool], Matrix]  # name, num_in, num_out, with a bias


class JoinedProjection(Struct, frozen=True, eq=False):
    """Projections of different kinds, side by side: some matrices are of GPTQ or AWQ, and others are not."""

    parts: tuple[Projection, ...]

    @property
    def num_in(self) -> int:
        return self.parts[0].num_in

    @property
    def num_out(self) -> int:
        return sum(part.num_out for part in self.parts)

    @property
    def is_settled(self) -> bool:
        return all(part.is_settled for part in self.parts)

    @property
    def may_reorder_columns(self) -> bool:
        return any(part.may_reorder_columns for part in self.parts)

    def matrices(self) -> tuple[Matrix, ...]:
        return tuple(matrix for part in self.parts for matrix in part.matrices())


def take_linear(parameters: Parameters, name: str, num_in: int, num_out: int, *, bias: bool) -> Projection:
    """The projection whose tensors are `name`.weight and, with `bias`, `name`.bias."""
    return take_stacked(parameters, [(name, num_out)], num_in, bias=bias)


def take_stacked(
    parameters: Parameters, names_and_sizes: Sequence[tuple[str, int]], num_in: int, *, bias: bool
) -> Projection:
    """One projection to all the (name, num_out), in this order. Raises `ModelError` for what does not fit."""
    tools = {_tool_of(parameters, name) for name, _ in names_and_sizes}
    if tools == {_GPTQ_AWQ}:
        from .gptq_awq import take_gptq_awq  # few models have such matrices

        return take_gptq_awq(parameters, names_and_sizes, num_in, bias=bias)
    if tools == {_BITSANDBYTES}:
        from .bitsandbytes import take_bitsandbytes  # likewise

        return take_bitsandbytes(parameters, names_and_sizes, num_in, bias=bias)
    if tools != {None}:
        return JoinedProjection(
            tuple(take_linear(parameters, name, num_in, size, bias=bias) for name, size in names_and_sizes)
        )
    if parameters.quantization is not None and parameters.quantization.is_ternary and parameters.prefix:
        from .ternary import take_ternary  # few models have such matrices

        return take_ternary(parameters, names_and_sizes, num_in, bias=bias)
    if parameters.inputs_first and _is_float(parameters, names_and_sizes[0][0]):
        return _take_transposed(parameters, names_and_sizes, num_in, bias=bias)
    parts = [_take_one(parameters, name, num_in, num_out, bias=bias) for name, num_out in names_and_sizes]
    runs = [list(run) for _, run in groupby(parts, lambda part: part.kind)]
    return StoredProjection(tuple(matrix for run in runs for matrix in _joined_or_all(run)))


def take_qkv(parameters: Parameters, names_and_sizes: Sequence[tuple[str, int]], num_in: int) -> Projection:
    """Queries, keys and values, or the last two, of which keys alone have no bias."""
    key, _ = names_and_sizes[-2]
    return JoinedProjection(
        tuple(take_linear(parameters, name, num_in, size, bias=name != key) for name, size in names_and_sizes)
    )


def _tool_of(parameters: Parameters, name: str) -> str | None:
    """The tool whose tensors a matrix is made of; None where it is in one of `FORMATS`."""
    if any(f"{name}.{kind}" in parameters for kind in ("qweight", "weight_packed")):
        return _GPTQ_AWQ
    is_theirs = any(f"{name}.{kind}" in parameters for kind in ("weight.absmax", "SCB"))
    return _BITSANDBYTES if is_theirs else None


def _is_float(parameters: Parameters, name: str) -> bool:
    return parameters.peek(f"{name}.weight").dtype in COMPUTE_DTYPES


def _take_transposed(
    parameters: Parameters, names_and_sizes: Sequence[tuple[str, int]], num_in: int, *, bias: bool
) -> Projection:
    from .converted import transposed  # few models have such matrices

    names = [name for name, _ in names_and_sizes]
    return transposed(
        [parameters.take(f"{name}.weight", num_in, size) for name, size in names_and_sizes],
        [parameters.take(f"{name}.bias", size) if bias else None for name, size in names_and_sizes],
        parameters.gate_of([f"{name}.{kind}" for name in names for kind in ("weight", "bias")]),
    )


def take_embeddings(parameters: Parameters, name: str, vocab_size: int, hidden_size: int) -> EmbeddingTable:
    """The table `name`.weight. Raises `ModelError` where it does not fit."""
    if _is_blocks(parameters, name):
        table = _take_blocks(parameters, name, hidden_size, vocab_size, False)
        return EmbeddingTable(table.weight, block=table.block)
    if f"{name}.weight_scale" not in parameters:
        return EmbeddingTable(parameters.take(f"{name}.weight", vocab_size, hidden_size))
    weight = parameters.take_as(f"{name}.weight", (vocab_size, hidden_size), DType.I8)
    num_groups = _num_groups(parameters, name, hidden_size)
    scale = parameters.take_as(f"{name}.weight_scale", (vocab_size, num_groups), *_SCALE_DTYPES)
    return EmbeddingTable(weight, scale)


def _take_one(parameters: Parameters, name: str, num_in: int, num_out: int, *, bias: bool) -> Matrix:
    take = next(each.take for each in FORMATS if each.is_stored(parameters, name))
    return take(parameters, name, num_in, num_out, bias)


def _take_dense(parameters: Parameters, name: str, num_in: int, num_out: int, bias: bool) -> DenseMatrix:
    weight = parameters.take(f"{name}.weight", num_out, num_in)
    return DenseMatrix(weight, parameters.take(f"{name}.bias", num_out) if bias else None)


def _is_blocks(parameters: Parameters, name: str) -> bool:
    weight = f"{name}.weight"
    if weight not in parameters:
        return False
    tensor = parameters.peek(weight)
    return tensor.dtype is DType.U8 and len(tensor.shape) == 3


def _take_blocks(parameters: Parameters, name: str, num_in: int, num_out: int, bias: bool) -> BlockMatrix:
    from ...loader.format.gguf.blocks import block_of_bytes  # most models have none

    shape = parameters.peek(f"{name}.weight").shape
    block = block_of_bytes(shape[2])
    if block is None or num_in % block.elements:
        raise ModelError(
            f"tensor {parameters.full_name(name)}.weight has shape {shape}, which are no blocks of {num_in} columns",
            hint="Pack the GGUF file again, with --dequantize where other programs are to read it.",
        )
    blocks = (num_out, num_in // block.elements, block.block_bytes)
    weight = parameters.take_as(f"{name}.weight", blocks, DType.U8)
    return BlockMatrix(weight, block, parameters.take(f"{name}.bias", num_out) if bias else None)


def _is_float8(parameters: Parameters, name: str) -> bool:
    weight = f"{name}.weight"
    is_stored = weight in parameters and parameters.peek(weight).dtype is DType.F8_E4M3
    return is_stored and any(f"{weight}_{kind}" in parameters for kind in _FLOAT8_SCALES)


def _take_float8(parameters: Parameters, name: str, num_in: int, num_out: int, bias: bool) -> Float8Matrix:
    kind = next(kind for kind in _FLOAT8_SCALES if f"{name}.weight_{kind}" in parameters)
    scale_name = f"{name}.weight_{kind}"
    shape = parameters.peek(scale_name).shape
    sides = (*shape, 1)[:2] if len(shape) == 1 else shape or (1, 1)
    block = _float8_block(parameters, sides, num_in, num_out)
    if block is None:
        raise ModelError(
            f"tensor {parameters.full_name(scale_name)} has shape {shape}, which does not fit weights of "
            f"({num_out}, {num_in}) in blocks of {getattr(parameters.quantization, 'block', None)}"
        )
    weight = parameters.take_as(f"{name}.weight", (num_out, num_in), DType.F8_E4M3)
    stored = parameters.take_as(scale_name, shape, *_SCALE_DTYPES)
    scale = replace(stored, array=stored.array.reshape(sides))
    return Float8Matrix(weight, scale, block, parameters.take(f"{name}.bias", num_out) if bias else None)


def _float8_block(
    parameters: Parameters, sides: tuple[int, ...], num_in: int, num_out: int
) -> tuple[int, int] | None:
    """The rows and columns that share one of (rows, columns) scales; None where they fit nothing."""
    block = parameters.quantization.block if parameters.quantization is not None else None
    if block is not None and sides == (-(-num_out // block[0]), -(-num_in // block[1])):
        return block
    if sides == (1, 1):
        return num_out, num_in
    is_in_groups = len(sides) == 2 and sides[0] == num_out and sides[1] > 0 and num_in % sides[1] == 0
    return (1, num_in // sides[1]) if is_in_groups else None


def _has_scales(parameters: Parameters, name: str) -> bool:
    return f"{name}.weight_scale" in parameters


def _is_mxfp4(parameters: Parameters, name: str) -> bool:
    return _has_scales(parameters, name) and parameters.peek(f"{name}.weight_scale").dtype is DType.U8


def _take_mxfp4(parameters: Parameters, name: str, num_in: int, num_out: int, bias: bool) -> Mxfp4Matrix:
    num_groups = _num_groups(parameters, name, num_in)
    if num_groups * MXFP4_GROUP != num_in:
        raise ModelError(
            f"{parameters.full_name(name)} has {num_groups} scales for {num_in} columns, and MXFP4 needs one "
            f"for each {MXFP4_GROUP}"
        )
    weight = parameters.take_as(f"{name}.weight", (num_out, num_in // 2), DType.U8)
    scale = parameters.take_as(f"{name}.weight_scale", (num_out, num_groups), DType.U8)
    return Mxfp4Matrix(weight, scale, parameters.take(f"{name}.bias", num_out) if bias else None)


def _take_integers(parameters: Parameters, name: str, num_in: int, num_out: int, bias: bool) -> IntegerMatrix:
    """The shapes of a matrix's pieces must fit each other, so that nothing that is computed with them can fail."""
    weight, scale = parameters.peek(f"{name}.weight"), parameters.peek(f"{name}.weight_scale")
    is_packed = weight.dtype is DType.U8
    num_groups = _num_groups(parameters, name, num_in, unit=RUN if is_packed else 1)
    parameters.take_as(f"{name}.weight", (num_out, num_in // 2 if is_packed else num_in), DType.I8, DType.U8)
    parameters.take_as(f"{name}.weight_scale", (num_out, num_groups), *_SCALE_DTYPES)
    needs_zero = parameters.quantization is not None and not parameters.quantization.symmetric
    zero = None
    if is_packed and (needs_zero or f"{name}.weight_zero" in parameters):
        zero = parameters.take_as(f"{name}.weight_zero", (num_out, num_groups), DType.U8)
    return IntegerMatrix(weight, scale, zero, parameters.take(f"{name}.bias", num_out) if bias else None)


def _num_groups(parameters: Parameters, name: str, columns: int, *, unit: int = 1) -> int:
    """Of a row of `name`, by its scales. `unit` must divide the columns."""
    shape = parameters.peek(f"{name}.weight_scale").shape
    num_groups = shape[1] if len(shape) == 2 else 0
    if num_groups < 1 or columns % num_groups or columns % unit:
        full_name = parameters.full_name(name)
        raise ModelError(
            f"tensor {full_name}.weight_scale has shape {shape}, which does not fit "
            f"{full_name}.weight with {columns} columns"
        )
    return num_groups


def _joined_or_all(run: Sequence[Matrix]) -> Sequence[Matrix]:
    whole = run[0].joined(run[1:]) if len(run) > 1 else None
    return run if whole is None else (whole,)


FORMATS: tuple[StoredFormat, ...] = (
    StoredFormat(_is_blocks, _take_blocks),
    StoredFormat(_is_float8, _take_float8),
    StoredFormat(_is_mxfp4, _take_mxfp4),
    StoredFormat(_has_scales, _take_integers),
    StoredFormat(lambda parameters, name: True, _take_dense),
)
"""The stored number formats; the first that a matrix is in counts."""
