"""From the states of a text's tokens to one row, in numpy. A text's row does not depend on other texts."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ..step.batch import Int64s
from ..tensors import DType, to_float32
from .spec import Activation, Pooling

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    import numpy.typing as npt

    from .matrices import DenseMatrix

    Array = npt.NDArray[Any]
    Floats = npt.NDArray[np.float32]

# Of layers behind an embedding that are computed on the host.
HOST_ACTIVATIONS = (Activation.TANH, Activation.RELU)
_SMALLEST_NORM = np.float32(1e-12)  # of an embedding that is divided by it


def chosen_rows(starts: Int64s, pooling: Pooling) -> Int64s | None:
    """The row of each text that is all of its result; None where all of its rows count."""
    match pooling:
        case Pooling.CLS:
            return starts[:-1]
        case Pooling.LAST:
            return starts[1:] - 1
        case _:
            return None


def pooled(x: Array, starts: Int64s, pooling: Pooling, dtype: DType) -> Floats:
    """x (T, columns) in `dtype` → (N, columns) fp32."""
    rows = chosen_rows(starts, pooling)
    if rows is not None:
        return np.array(to_float32(x[rows], dtype))
    out = np.empty((len(starts) - 1, x.shape[1]), np.float32)
    for text, (begin, end) in enumerate(pairwise(starts)):
        states = to_float32(x[begin:end], dtype)
        count = np.float32(len(states))
        match pooling:
            case Pooling.MAX:
                out[text] = states.max(0)
            case Pooling.MEAN_SQRT:
                out[text] = states.sum(0) / np.sqrt(count)
            case Pooling.WEIGHTED_MEAN:
                weights = np.arange(1, len(states) + 1, dtype=np.float32)
                out[text] = (states * weights[:, None]).sum(0) / weights.sum()
            case _:
                out[text] = states.sum(0) / count
    return out


def normalize(rows: Floats) -> None:
    """Scales each row to unit length, in place."""
    for number, row in enumerate(rows):  # one by one: a sum must not depend on how many there are
        rows[number] = row / max(np.sqrt((row * row).sum()), _SMALLEST_NORM)


def through(matrix: DenseMatrix, rows: Floats) -> Floats:
    """rows (N, num_in) → (N, num_out) fp32, one by one: a row's bits must not depend on the others."""
    weight = to_float32(matrix.weight.on_host(), matrix.weight.dtype)
    out: npt.NDArray[np.float32] = np.stack([weight @ row for row in rows])
    if matrix.bias is not None:
        out += to_float32(matrix.bias.on_host(), matrix.bias.dtype)
    return out


def through_dense(matrices: Sequence[DenseMatrix], activations: Sequence[str | None], rows: Floats) -> Floats:
    """Embeddings through the layers behind them, whose activations are none or among `HOST_ACTIVATIONS`."""
    for matrix, activation in zip(matrices, activations, strict=True):
        rows = through(matrix, rows)
        if activation == Activation.TANH:
            np.tanh(rows, out=rows)
        elif activation == Activation.RELU:
            np.maximum(rows, 0, out=rows)
    return rows
