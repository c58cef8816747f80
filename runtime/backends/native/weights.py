"""Weights as the core's records of addresses. The arrays behind the addresses are kept; their content may be missing.

It does not know what a layer is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import ModelError
from ...models.matrices import (
    BlockMatrix,
    CodeMatrix,
    DenseMatrix,
    Float8Matrix,
    IntegerMatrix,
    Matrix,
    Mxfp4Matrix,
    Tensor,
    for_format,
)
from . import arrays, records
from .products import Weight

if TYPE_CHECKING:
    from .arrays import Array

_NONE = records.Vector()


class ProjectionParts:
    """A projection's matrices: `record` is what the core reads, `weights` the same one by one."""

    __slots__ = ("_columns", "_parts", "permuted_size", "record", "weights")

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        """Raises `ModelError` for a matrix that the core does not multiply with."""
        self.weights = [_weight_of(matrix) for matrix in matrices]
        self._columns = [_order_of(matrix) for matrix in matrices]
        self._parts = (records.PartRecord * len(matrices))(
            *(
                records.PartRecord(weight.record, arrays.address_or_null(columns))
                for weight, columns in zip(self.weights, self._columns, strict=True)
            )
        )
        num_in = self.weights[0].num_in
        # Inputs of a row that are put into orders of the parts' own.
        self.permuted_size = num_in * sum(columns is not None for columns in self._columns)
        num_out = sum(weight.num_out for weight in self.weights)
        self.record = records.ProjectionRecord(self._parts, len(matrices), num_in, num_out)

    def input_of(self, number: int, x: Array) -> Array:
        """x (T, K) as this one of the matrices takes it."""
        columns = self._columns[number]
        return x if columns is None else np.ascontiguousarray(x[:, columns])


def vector_of(tensor: Tensor | None) -> records.Vector:
    """The record of a norm's weights or biases. The caller keeps the tensor."""
    if tensor is None:
        return _NONE
    arrays.check_contiguous(tensor.array, "a norm's weights")
    return records.Vector(arrays.address(tensor.array), arrays.dtype_of(tensor.array))


def refusal_of_tensors(tensors: Sequence[Tensor]) -> str | None:
    """Why the core cannot read these; None where it can."""
    for tensor in tensors:
        if tensor.device != "cpu":
            return f"native computes on the CPU, and the weights are on {tensor.device}"
    return None


def _weight_of(matrix: Matrix) -> Weight:
    try:
        return for_format(WEIGHTS, matrix, "the native core")(matrix)
    except ValueError as error:
        raise ModelError(
            f"the native backend does not multiply with these weights: {error}",
            hint="Use --backend torch, or pack the model with another --group-size.",
        ) from error


def _of_dense(matrix: DenseMatrix) -> Weight:
    return Weight(matrix.weight.array, bias=_array_of(matrix.bias))


def _of_integers(matrix: IntegerMatrix) -> Weight:
    return Weight(
        matrix.weight.array,
        scale=matrix.scale.array,
        zero=_array_of(matrix.zero),
        bias=_array_of(matrix.bias),
    )


def _of_mxfp4(matrix: Mxfp4Matrix) -> Weight:
    return Weight(matrix.weight.array, scale=matrix.scale.array, bias=_array_of(matrix.bias))


def _of_codes(matrix: CodeMatrix) -> Weight:
    return Weight(
        matrix.weight.array, scale=matrix.scale.array, bias=_array_of(matrix.bias), codes=matrix.codes
    )


def _of_float8(matrix: Float8Matrix) -> Weight:
    return Weight(
        matrix.weight.array,
        scale=matrix.scale.array,
        bias=_array_of(matrix.bias),
        float8_block=matrix.block,
    )


def _of_blocks(matrix: BlockMatrix) -> Weight:
    return Weight(matrix.weight.array, bias=_array_of(matrix.bias))


WEIGHTS: dict[type[Any], Callable[[Any], Weight]] = {
    BlockMatrix: _of_blocks,
    CodeMatrix: _of_codes,
    DenseMatrix: _of_dense,
    Float8Matrix: _of_float8,
    IntegerMatrix: _of_integers,
    Mxfp4Matrix: _of_mxfp4,
}
"""The core's record of each stored format."""


def _array_of(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.array


def _order_of(matrix: Matrix) -> Array | None:
    if matrix.columns is None:
        return None
    columns = np.ascontiguousarray(matrix.columns, dtype=np.int64)
    if columns.shape != (matrix.num_in,) or columns.min() < 0 or columns.max() >= matrix.num_in:
        raise ModelError(f"an order of {matrix.num_in} columns has {columns.shape}, or names others")
    return columns
