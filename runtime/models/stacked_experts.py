"""Experts that are stored together, all of a layer's in one tensor for gate and up and one for down.

gpt-oss has biases, and gate and up are every second output; in MXFP4 they are used where the loader put them. Others
have first all outputs of the gate. Floats with the outputs first, as Qwen3.5 and Granite 4 have them, are rows, and
used where they are. Those with the inputs first (gpt-oss, Qwen3-VL) are copied into rows, each expert at its first
use, and the copies are kept, so that such a model takes twice its size.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

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
    parameters: Parameters, both: tuple[str, str], mixture: Experts, hidden_size: int, *, is_alternating: bool
) -> tuple[ExpertWeights, ...]:
    """Each expert's matrices, of the tensors with these names, for gate and up and for down. Raises `ModelError`."""
    num, size = mixture.num, mixture.size
    gate_up, down = both
    if is_alternating:
        of_gate_up = _take_alternating(parameters, gate_up, num, hidden_size, 2 * size, alternating=True)
        of_down = _take_alternating(parameters, down, num, size, hidden_size, alternating=False)
    elif _are_rows(parameters, both, mixture, hidden_size):
        of_gate_up = _take_rows(parameters, gate_up, (num, 2 * size, hidden_size))
        of_down = _take_rows(parameters, down, (num, hidden_size, size))
    else:
        of_gate_up = _take_columns(parameters, gate_up, (num, hidden_size, 2 * size))
        of_down = _take_columns(parameters, down, (num, size, hidden_size))
    return tuple(map(ExpertWeights, of_gate_up, of_down))


def stacked_gate(
    parameters: Parameters, both: tuple[str, str], mixture: Experts, hidden_size: int, *, is_alternating: bool
) -> ExpertGate | None:
    """The gate for some of the experts; None of floats that are copied, all of a layer together."""
    if not is_alternating and not _are_rows(parameters, both, mixture, hidden_size):
        return None
    kinds = ("_blocks", "_scales") if is_alternating else ("",)
    names = [f"{name}{kind}" for name in both for kind in kinds]
    return parameters.stacked_expert_gate(names) if all(name in parameters for name in names) else None


def _are_rows(parameters: Parameters, both: tuple[str, str], mixture: Experts, hidden_size: int) -> bool:
    """True if more of the two tensors have the outputs first than the inputs. Of squares the other one tells it, and
    where one is wrong, the error is to name that one.
    """
    found = [parameters.peek(name).shape if name in parameters else () for name in both]
    num, size = mixture.num, mixture.size
    rows = ((num, 2 * size, hidden_size), (num, hidden_size, size))
    columns = ((num, hidden_size, 2 * size), (num, size, hidden_size))
    return sum(map(tuple.__eq__, found, rows)) > sum(map(tuple.__eq__, found, columns))


def _take_columns(parameters: Parameters, name: str, shape: tuple[int, int, int]) -> list[Projection]:
    """Of (experts, inputs, outputs)."""
    weight, gate = parameters.take(name, *shape), parameters.gate_of([name])
    return [transposed([weight.part(expert)], [None], gate) for expert in range(shape[0])]


def _take_rows(parameters: Parameters, name: str, shape: tuple[int, int, int]) -> list[Projection]:
    weight = parameters.take(name, *shape)
    return [StoredProjection((DenseMatrix(weight.part(expert)),)) for expert in range(shape[0])]


def _take_alternating(
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
            [weight.part(expert, (slice(None), part)) for part in rows],
            [bias.part(expert, (part,)) for part in rows],
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
    packed = replace(blocks, array=blocks.array.reshape((num, num_out, num_in // 2)))
    return [
        StoredProjection(
            tuple(
                Mxfp4Matrix(*(each.part(expert, (part,)) for each in (packed, scales, bias))) for part in rows
            )
        )
        for expert in range(num)
    ]
