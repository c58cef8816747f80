"""Experts that are stored together, all of a layer's in one tensor for gate and up and one for down: gpt-oss,
Qwen3.5, Granite 4.

In MXFP4 they are used where the loader put them: gate and up are every second row. As floats gpt-oss has them with the
inputs first; each is copied into rows at its first use, and the copy is kept, so that such a model takes twice its
size. Those of Qwen3.5 and Granite are rows, first those of the gate, and used where they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ModelError
from ..tensors import DType, Tensor
from ..weights import ExpertGate
from .converted import transposed
from .experts_config import Experts
from .matrices import (
    MXFP4_GROUP,
    DenseMatrix,
    ExpertWeights,
    Mxfp4Matrix,
    Projection,
    StoredProjection,
)
from .parameters import Parameters


def take_stacked_experts(
    parameters: Parameters, names: tuple[str, str], mixture: Experts, hidden_size: int, *, in_rows: bool
) -> tuple[ExpertWeights, ...]:
    """Each expert's matrices, of the tensors with these names, for gate and up and for down; `in_rows`: of floats,
    with the outputs first. Raises `ModelError`.
    """
    num, size = mixture.num, mixture.size
    if in_rows:
        gate_up = _take_rows(parameters, names[0], (num, 2 * size, hidden_size))
        down = _take_rows(parameters, names[1], (num, hidden_size, size))
        return tuple(map(ExpertWeights, gate_up, down))
    gate_up = _take(parameters, names[0], num, hidden_size, 2 * size, alternating=True)
    down = _take(parameters, names[1], num, size, hidden_size, alternating=False)
    return tuple(map(ExpertWeights, gate_up, down))


def stacked_gate(parameters: Parameters, names: tuple[str, str], *, in_rows: bool) -> ExpertGate | None:
    """The gate for some of the experts; None of floats that are copied, all of a layer together."""
    kinds = ("",) if in_rows else ("_blocks", "_scales")
    both = [f"{name}{kind}" for name in names for kind in kinds]
    return parameters.stacked_expert_gate(both) if all(name in parameters for name in both) else None


def _take_rows(parameters: Parameters, name: str, shape: tuple[int, int, int]) -> list[Projection]:
    weight = parameters.take(name, *shape)
    return [StoredProjection((DenseMatrix(_view(weight, expert, ())),)) for expert in range(shape[0])]


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
        transposed(
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
