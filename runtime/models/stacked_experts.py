"""Experts that are stored together, all of a layer's in one tensor for gate and up and one for down: gpt-oss.

In MXFP4 they are used where the loader put them: gate and up are every second row. As floats they are stored with the
inputs first; each is copied into rows at its first use, and the copy is kept, so that such a model takes twice its
size.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from ..errors import ModelError
from ..tensors import DType, Tensor, aligned_empty
from ..weights import ExpertGate, Gate
from .decoder_config import Experts
from .matrices import (
    MXFP4_GROUP,
    DenseMatrix,
    ExpertWeights,
    Matrix,
    Mxfp4Matrix,
    Projection,
    StoredProjection,
)
from .parameters import Parameters


class TransposedProjection:
    """A `Projection` of matrices (num_in, num_out) of the same input."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor], gate: Gate) -> None:
        """`weights` (K, N) and `biases` (N,) may be views with strides; `gate` is that of their tensors."""
        self._weights = tuple(weights)
        self._biases = tuple(biases)
        self._gate = gate
        self._copying = threading.Lock()  # so that there is one copy
        self._kept: tuple[Matrix, ...] | None = None

    @property
    def num_in(self) -> int:
        return self._weights[0].shape[0]

    @property
    def num_out(self) -> int:
        return sum(weight.shape[1] for weight in self._weights)

    @property
    def is_settled(self) -> bool:
        return self._kept is not None

    @property
    def may_reorder_columns(self) -> bool:
        return False

    def matrices(self) -> tuple[Matrix, ...]:
        """Blocks for the copy the first time."""
        if self._kept is not None:
            return self._kept
        with self._copying:
            matrices = self._kept or tuple(map(_in_rows, self._weights, self._biases))
            if self._gate.opens(0.0):
                self._kept = matrices
            return matrices


def _in_rows(weight: Tensor, bias: Tensor) -> Matrix:
    stored = weight.on_host()
    rows = aligned_empty((stored.shape[1], stored.shape[0]), stored.dtype)
    rows[:] = stored.T
    return DenseMatrix(Tensor(weight.dtype, rows), Tensor(bias.dtype, np.array(bias.on_host())))


def take_stacked_experts(
    parameters: Parameters, prefix: str, mixture: Experts, hidden_size: int
) -> tuple[ExpertWeights, ...]:
    """Each expert's matrices, of the tensors `prefix`gate_up_proj… and `prefix`down_proj…. Raises `ModelError`."""
    num, size = mixture.num, mixture.size
    gate_up = _take(parameters, f"{prefix}gate_up_proj", num, hidden_size, 2 * size, alternating=True)
    down = _take(parameters, f"{prefix}down_proj", num, size, hidden_size, alternating=False)
    return tuple(map(ExpertWeights, gate_up, down))


def stacked_gate(parameters: Parameters, prefix: str) -> ExpertGate | None:
    """The gate for some of the experts; None of floats, which are copied, all of a layer together."""
    names = [f"{prefix}{name}_proj_{kind}" for name in ("gate_up", "down") for kind in ("blocks", "scales")]
    return parameters.stacked_expert_gate(names) if all(name in parameters for name in names) else None


def _take(
    parameters: Parameters, name: str, num: int, num_in: int, num_out: int, *, alternating: bool
) -> list[Projection]:
    """A projection for each expert. `alternating` outputs belong to two matrices in turn."""
    bias = parameters.take(f"{name}_bias", num, num_out)
    rows = (slice(0, None, 2), slice(1, None, 2)) if alternating else (slice(None),)
    if f"{name}_blocks" in parameters:
        return _take_mxfp4(parameters, name, bias, (num, num_in, num_out), rows)
    weight = parameters.take(name, num, num_in, num_out)
    gate = parameters.gate_of([name, f"{name}_bias"])
    return [
        TransposedProjection(
            [_view(weight, expert, (slice(None), part)) for part in rows],
            [_view(bias, expert, (part,)) for part in rows],
            gate,
        )
        for expert in range(num)
    ]


def _take_mxfp4(
    parameters: Parameters, name: str, bias: Tensor, shape: tuple[int, int, int], rows: Sequence[slice]
) -> list[Projection]:
    num, num_in, num_out = shape
    if num_in % MXFP4_GROUP:
        raise ModelError(
            f"{parameters.full_name(name)} has {num_in} columns, which are no multiple of MXFP4's {MXFP4_GROUP}"
        )
    blocks = parameters.take_as(
        f"{name}_blocks", (num, num_out, num_in // MXFP4_GROUP, MXFP4_GROUP // 2), DType.U8
    )
    scales = parameters.take_as(f"{name}_scales", (num, num_out, num_in // MXFP4_GROUP), DType.U8)
    packed = Tensor(blocks.dtype, blocks.array.reshape(num, num_out, num_in // 2), blocks.device)
    return [
        StoredProjection(
            tuple(
                Mxfp4Matrix(*(_view(each, expert, (part,)) for each in (packed, scales, bias)))
                for part in rows
            )
        )
        for expert in range(num)
    ]


def _view(tensor: Tensor, expert: int, part: tuple[slice, ...]) -> Tensor:
    return Tensor(tensor.dtype, tensor.array[(expert, *part)], tensor.device)
