"""Projections whose matrices are converted from how they are stored: at their first use, and the copies are kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from ..tensors import DType, Tensor, aligned_empty
from ..weights import Gate
from .matrices import DenseMatrix, Matrix


class ConvertedProjection:
    """A `Projection` of matrices that are converted when they are first needed, and kept once they are exact."""

    def __init__(
        self,
        num_in: int,
        num_out: int,
        gate: Gate,
        convert: Callable[[], tuple[Matrix, ...]],
        *,
        may_reorder_columns: bool = False,
        stored: Sequence[Matrix] = (),
    ) -> None:
        """`gate` is that of the tensors that `convert` reads. `stored` are the matrices as they lie, for executors that
        multiply with them so.
        """
        self.stored = tuple(stored)
        self.num_in = num_in
        self.num_out = num_out
        self.may_reorder_columns = may_reorder_columns
        self._convert = convert
        self._gate = gate
        self._converting = threading.Lock()  # so that there is one copy
        self._kept: tuple[Matrix, ...] | None = None

    @property
    def is_settled(self) -> bool:
        return self._kept is not None

    def matrices(self) -> tuple[Matrix, ...]:
        """Blocks for the conversion the first time. Raises `ModelError` for invalid content."""
        if self._kept is not None:
            return self._kept
        with self._converting:
            matrices = self._kept or self._convert()
            if self._gate.opens(0.0):
                self._kept = matrices
            return matrices


def transposed(weights: Sequence[Tensor], biases: Sequence[Tensor | None], gate: Gate) -> ConvertedProjection:
    """Of weights (K, N) with biases (N,), if any, which may be views with strides."""
    num_out = sum(weight.shape[1] for weight in weights)
    return ConvertedProjection(
        weights[0].shape[0], num_out, gate, lambda: tuple(map(_in_rows, weights, biases))
    )


def ones(num: int) -> Tensor:
    """The weight of a norm that has none."""
    return Tensor(DType.F32, np.ones(num, np.float32))


def _in_rows(weight: Tensor, bias: Tensor | None) -> Matrix:
    stored = weight.on_host()
    rows = aligned_empty((stored.shape[1], stored.shape[0]), stored.dtype)
    rows[:] = stored.T
    taken = None if bias is None else Tensor(bias.dtype, np.array(bias.on_host()))
    return DenseMatrix(Tensor(weight.dtype, rows), taken)
