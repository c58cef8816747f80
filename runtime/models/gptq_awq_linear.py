"""Projections whose weights come as GPTQ or AWQ store them: converted when they are first needed, and then kept.

The loaded tensors stay in place, in addition to one converted copy. No copy is kept before the tensors are exact,
since it would not become exact with them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from ..dtypes import DType, from_float32, to_float32
from ..errors import ModelError
from ..tensors import Tensor, aligned_empty
from ..weights import Gate
from .gptq_awq import ConvertedMatrix, GptqAwqMatrix, convert
from .matrices import IntegerMatrix
from .parameters import Parameters
from .quantization_config import QuantizationConfig

_ZEROS = {np.dtype(np.uint8): DType.U8, np.dtype(np.int16): DType.I16}


class GptqAwqProjection:
    """Several matrices of the same input, one below the other: a `Projection`."""

    def __init__(
        self, matrices: Sequence[GptqAwqMatrix], biases: Sequence[Tensor | None], gate: Gate
    ) -> None:
        """`gate` is that of the matrices' tensors."""
        self._matrices = tuple(matrices)
        self._biases = tuple(biases)
        self._gate = gate
        self._converting = threading.Lock()  # so that there is one copy
        self._kept: tuple[IntegerMatrix, ...] | None = None

    @property
    def num_in(self) -> int:
        return self._matrices[0].num_in

    @property
    def num_out(self) -> int:
        return sum(matrix.num_out for matrix in self._matrices)

    @property
    def is_settled(self) -> bool:
        return self._kept is not None

    @property
    def may_reorder_columns(self) -> bool:
        return any(matrix.may_reorder_columns for matrix in self._matrices)

    def matrices(self) -> tuple[IntegerMatrix, ...]:
        """Blocks for the conversion the first time. Raises `ModelError` for invalid content."""
        if self._kept is not None:
            return self._kept
        with self._converting:
            matrices = self._kept or self._convert()
            if self._gate.opens(0.0):
                self._kept = matrices
            return matrices

    def _convert(self) -> tuple[IntegerMatrix, ...]:
        found = [convert(matrix) for matrix in self._matrices]
        if len(found) > 1 and _can_join(found):
            found, biases = [_joined(found)], [_joined_biases(self._matrices, self._biases)]
        else:
            biases = list(self._biases)
        return tuple(map(_as_matrix, found, biases))


def _as_matrix(converted: ConvertedMatrix, bias: Tensor | None) -> IntegerMatrix:
    weight, zero = converted.weight, converted.zero
    return IntegerMatrix(
        Tensor(DType.U8 if weight.dtype == np.uint8 else DType.I8, weight),
        Tensor(DType.F32, converted.scale),
        None if zero is None else Tensor(_ZEROS[zero.dtype], zero),
        bias,
        converted.columns,
    )


def _can_join(found: Sequence[ConvertedMatrix]) -> bool:
    """True if they are of one kind, with their columns in one order, as q, k and v have them."""
    first = found[0]

    def is_alike(other: ConvertedMatrix) -> bool:
        if first.columns is None or other.columns is None:
            is_ordered_alike = first.columns is other.columns
        else:
            is_ordered_alike = np.array_equal(first.columns, other.columns)
        return (
            is_ordered_alike
            and (first.zero is None) == (other.zero is None)
            and first.weight.dtype == other.weight.dtype
            and first.scale.shape[1] == other.scale.shape[1]
        )

    return all(map(is_alike, found[1:]))


def _joined(found: Sequence[ConvertedMatrix]) -> ConvertedMatrix:
    zeros = [one.zero for one in found if one.zero is not None]
    num_out = sum(len(one.weight) for one in found)
    weight = aligned_empty((num_out, found[0].weight.shape[1]), found[0].weight.dtype)
    return ConvertedMatrix(
        np.concatenate([one.weight for one in found], out=weight),
        np.concatenate([one.scale for one in found]),
        np.concatenate(zeros) if zeros else None,
        found[0].columns,
    )


def _joined_biases(matrices: Sequence[GptqAwqMatrix], biases: Sequence[Tensor | None]) -> Tensor | None:
    there = [bias for bias in biases if bias is not None]
    if not there:
        return None
    dtype = there[0].dtype if len({bias.dtype for bias in there}) == 1 else DType.F32
    parts = [
        np.zeros(matrix.num_out, np.float32) if bias is None else to_float32(bias.on_host(), bias.dtype)
        for matrix, bias in zip(matrices, biases, strict=True)
    ]
    return Tensor(dtype, from_float32(np.concatenate(parts), dtype))


def take_gptq_awq(
    parameters: Parameters, names_and_sizes: Sequence[tuple[str, int]], num_in: int, *, bias: bool
) -> GptqAwqProjection:
    """One projection to all the (name, num_out), whose tensors are `name`.qweight and so on. A bias that is there
    counts even if the model has none without being quantised: some tools write it. Raises `ModelError`.
    """
    matrices = [_take_matrix(parameters, name, num_in, num_out) for name, num_out in names_and_sizes]
    biases = [
        parameters.take(f"{name}.bias", num_out) if bias or f"{name}.bias" in parameters else None
        for name, num_out in names_and_sizes
    ]
    kinds = ("qweight", "qzeros", "scales", "g_idx")
    gate = parameters.gate_of([f"{name}.{kind}" for name, _ in names_and_sizes for kind in kinds])
    return GptqAwqProjection(matrices, biases, gate)


def _take_matrix(parameters: Parameters, name: str, num_in: int, num_out: int) -> GptqAwqMatrix:
    config = parameters.quantization
    full_name = parameters.full_name(name)
    if config is None or config.method not in ("gptq", "awq"):
        raise ModelError(
            f"tensor {full_name}.qweight is there, but config.json does not say that the model is of GPTQ or AWQ",
            hint="Do the config.json and the weights belong to the same model?",
        )
    is_awq = config.method == "awq"
    per_word = 32 // config.bits
    num_groups = _num_groups(config, full_name, num_in)
    packed = num_out if is_awq else num_in
    if packed % per_word or num_out % per_word:
        raise ModelError(f"{full_name} of shape ({num_out}, {num_in}) does not fill whole words of 32 bits")
    shape = (num_in, num_out // per_word) if is_awq else (num_in // per_word, num_out)
    order_name = f"{name}.g_idx"
    return GptqAwqMatrix(
        full_name,
        parameters.take_as(f"{name}.qweight", shape, DType.I32),
        parameters.take_as(f"{name}.qzeros", (num_groups, num_out // per_word), DType.I32),
        parameters.take_as(f"{name}.scales", (num_groups, num_out), DType.F16, DType.BF16, DType.F32),
        parameters.take_as(order_name, (num_in,), DType.I32)
        if not is_awq and order_name in parameters
        else None,
        config.bits,
        is_awq,
        config.stores_zero_minus_one,
        config.reorders_columns,
    )


def _num_groups(config: QuantizationConfig, name: str, num_in: int) -> int:
    group_size = config.group_size or num_in
    if num_in % group_size:
        raise ModelError(
            f"{name} has {num_in} columns, which are no multiple of the group_size {group_size} of config.json"
        )
    return num_in // group_size
