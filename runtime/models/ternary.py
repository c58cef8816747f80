"""Ternary weights of BitNet b1.58 → as `IntegerMatrix` has them, in 4 bits: -s, 0 or s, of one number s a matrix.

Stored packed, byte (r, k) has column k of the rows r, r + R, r + 2 R and r + 3 R of a matrix of 4 R rows, from the low
bits on, each number plus 1. Stored as floats, s is the mean of their sizes, and each is rounded to the nearest one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...loader.format.nibbles import RUN, pack_nibbles
from ..errors import ModelError
from ..tensors import DType, Tensor, from_float32, to_float32
from .converted import ConvertedProjection
from .gptq_awq import GROUP_SIZES
from .matrices import IntegerMatrix
from .parameters import COMPUTE_DTYPES, Parameters

_ROWS_A_BYTE = 4
_MIN_MEAN = 1e-5  # of floats' sizes, as transformers has it


def take_ternary(
    parameters: Parameters, names_and_sizes: Sequence[tuple[str, int]], num_in: int, *, bias: bool
) -> ConvertedProjection:
    """One projection to all the (name, num_out), of the tensors `name`.weight and, packed, `name`.weight_scale. Raises
    `ModelError`.
    """
    config = parameters.quantization
    assert config is not None
    if bias:
        raise ModelError(
            f"{parameters.full_name(names_and_sizes[0][0])} has a bias, which ternary weights cannot have",
            hint="Give a BitNet model without attention_bias and mlp_bias.",
        )
    taken: list[tuple[str, Tensor, Tensor | None]] = []
    for name, num_out in names_and_sizes:
        full_name = parameters.full_name(name)
        if config.is_online:
            taken.append((full_name, parameters.take(f"{name}.weight", num_out, num_in), None))
            continue
        if num_out % _ROWS_A_BYTE:
            raise ModelError(f"{full_name} has {num_out} rows, which do not fill bytes of {_ROWS_A_BYTE}")
        shape = (num_out // _ROWS_A_BYTE, num_in)
        packed = parameters.take_as(f"{name}.weight", shape, DType.U8)
        scale = parameters.take_as(f"{name}.weight_scale", (1,), *COMPUTE_DTYPES)
        taken.append((full_name, packed, scale))
    return ConvertedProjection(
        num_in,
        sum(size for _, size in names_and_sizes),
        parameters.gate_of(
            [f"{name}.{kind}" for name, _ in names_and_sizes for kind in ("weight", "weight_scale")]
        ),
        lambda: tuple(
            _of_floats(weight)
            if scale is None
            else _of_packed(name, weight, scale, divides=config.divides_by_scale)
            for name, weight, scale in taken
        ),
    )


def _of_packed(name: str, packed: Tensor, scale: Tensor, *, divides: bool) -> IntegerMatrix:
    stored = packed.on_host()
    if (stored & (stored >> 1) & 0x55).any():
        raise ModelError(f"tensor {name}.weight has codes of no ternary weight", hint="The file is damaged.")
    size = float(to_float32(scale.on_host(), scale.dtype)[0])
    if not np.isfinite(size) or (divides and size == 0.0):
        raise ModelError(f"tensor {name}.weight_scale is {size}, which weights cannot be scaled with")
    codes = np.concatenate([stored >> (2 * part) & np.uint8(3) for part in range(_ROWS_A_BYTE)])
    return _matrix(codes.view(np.int8) - np.int8(1), np.float32(1.0 / size if divides else size))


def _of_floats(weight: Tensor) -> IntegerMatrix:
    numbers = to_float32(weight.on_host(), weight.dtype)
    factor = np.float32(1.0) / np.maximum(np.abs(numbers).mean(dtype=np.float32), np.float32(_MIN_MEAN))
    levels = np.clip(np.rint(numbers * factor), -1, 1).astype(np.int8)
    size = np.array([np.float32(1.0) / factor], np.float32)
    return _matrix(levels, to_float32(from_float32(size, weight.dtype), weight.dtype)[0])


def _matrix(levels: npt.NDArray[np.int8], size: np.float32) -> IntegerMatrix:
    """levels (N, K), each -1, 0 or 1."""
    num_out, num_in = levels.shape
    group = next((group for group in GROUP_SIZES if num_in % group == 0), num_in)
    scale = Tensor(DType.F32, np.full((num_out, num_in // group), size, np.float32))
    if num_in % RUN:
        return IntegerMatrix(Tensor(DType.I8, levels), scale)
    return IntegerMatrix(Tensor(DType.U8, pack_nibbles((levels + np.int8(8)).view(np.uint8))), scale)
