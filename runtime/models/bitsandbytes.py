"""Matrices as bitsandbytes stores them: codes of 4 bits, which stay where they lie, with their scales as fp32; and
integers of 8 bits.

`X.weight` has the codes of one row after another, two a byte, and `X.weight.absmax` the largest size in each block of
64 columns or more. Double quantisation has that as a number of 8 bits: of `X.weight.nested_quant_map`, times
`nested_absmax` of its own block, plus an offset. The offset and the sizes of blocks are in JSON, as the bytes of
`X.weight.quant_state.bitsandbytes__nf4` or `…__fp4`. Of 8 bits, `X.SCB` is the largest size in each row. Shapes are
checked when a projection is made, content by its first use.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from ..errors import ModelError
from ..tensors import DType, Tensor
from .converted import ConvertedProjection
from .fields import Fields
from .matrices import CodeMatrix, IntegerMatrix, Matrix
from .parameters import Parameters

# What codes mean, by their kind: quantiles of a normal distribution, and floats of 4 bits over the largest.
CODES: dict[str, tuple[float, ...]] = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "fp4": tuple(sign * size / 12 for sign in (1, -1) for size in (0, 0.0625, 8, 12, 4, 6, 2, 3)),
}
BLOCK_SIZES = (64, 128, 256, 512, 1024, 2048, 4096)  # columns that share a scale
_MAX_STATE_BYTES = 4_096
_LARGEST = np.float32(127)  # of 8 bits, which stands for a row's largest size
_MAP_ERROR = 1e-5  # of a table's numbers, which are of at most 1

Floats = npt.NDArray[np.float32]


class _StoredCodes(Struct, frozen=True):
    """The tensors of one matrix (num_out, num_in) of 4 bits, called `name`."""

    name: str
    codes: str  # a key of CODES
    weight: Tensor  # (num_out, num_in / 2) U8
    absmax: Tensor  # (blocks,) F32, or U8 with `nested_map`
    quant_map: Tensor  # (16,) F32
    state: Tensor  # the bytes of a JSON object
    nested_absmax: Tensor | None  # (blocks of blocks,) F32
    nested_map: Tensor | None  # (256,) F32
    bias: Tensor | None


class _StoredIntegers(Struct, frozen=True):
    """Likewise of 8 bits."""

    name: str
    weight: Tensor  # (num_out, num_in) I8
    largest: Tensor  # (num_out,) F32
    form: Tensor | None  # () or (1,) U8
    bias: Tensor | None


def take_bitsandbytes(
    parameters: Parameters, names_and_sizes: Sequence[tuple[str, int]], num_in: int, *, bias: bool
) -> ConvertedProjection:
    """One projection to all the (name, num_out). Raises `ModelError` for what does not fit."""
    config = parameters.quantization
    first = len(parameters.taken)
    stored: list[_StoredCodes | _StoredIntegers] = []
    for name, num_out in names_and_sizes:
        if config is None or config.method != "bitsandbytes":
            raise ModelError(
                f"the matrix {parameters.full_name(name)} is of bitsandbytes, but config.json does not say so",
                hint="Do they belong to the same model? Towers of images must not be quantised.",
            )
        take = _take_integers if f"{name}.SCB" in parameters else _take_codes
        stored.append(take(parameters, name, num_out, num_in, bias=bias))
    taken = [name.removeprefix(parameters.prefix) for name in parameters.taken[first:]]
    return ConvertedProjection(
        num_in,
        sum(size for _, size in names_and_sizes),
        parameters.gate_of(taken),
        lambda: tuple(map(_converted, stored)),
    )


def _take_codes(parameters: Parameters, name: str, num_out: int, num_in: int, *, bias: bool) -> _StoredCodes:
    full_name, base = parameters.full_name(name), f"{name}.weight"
    codes = next(
        (each for each in CODES if f"{base}.quant_state.bitsandbytes__{each}" in parameters),
        None,
    )
    if codes is None:
        raise ModelError(
            f"tensor {full_name}.weight.absmax is there, but no …quant_state.bitsandbytes__nf4 or …__fp4 with it"
        )
    state_name = f"{base}.quant_state.bitsandbytes__{codes}"
    state_bytes = math.prod(parameters.peek(state_name).shape)
    if not 0 < state_bytes <= _MAX_STATE_BYTES:
        raise ModelError(
            f"tensor {parameters.full_name(state_name)} has {state_bytes} bytes, but may have 1 to {_MAX_STATE_BYTES}"
        )
    num_blocks = math.prod(parameters.peek(f"{base}.absmax").shape)
    block = num_out * num_in // num_blocks if num_blocks else 0
    if block not in BLOCK_SIZES or num_in % block or block * num_blocks != num_out * num_in:
        raise ModelError(
            f"tensor {full_name}.weight.absmax has {num_blocks} numbers, which are no scales of whole blocks "
            f"in rows of {num_in} columns",
            hint=f"Blocks of {', '.join(map(str, BLOCK_SIZES))} columns that divide the rows are supported.",
        )
    weight = parameters.take_as(base, (num_out * num_in // 2, 1), DType.U8)
    absmax = parameters.take_as(f"{base}.absmax", (num_blocks,), DType.U8, DType.F32)
    nested_absmax = nested_map = None
    if absmax.dtype is DType.U8:
        shape = parameters.peek(f"{base}.nested_absmax").shape
        nested_absmax = parameters.take_as(f"{base}.nested_absmax", (math.prod(shape),), DType.F32)
        nested_map = parameters.take_as(f"{base}.nested_quant_map", (256,), DType.F32)
    return _StoredCodes(
        full_name,
        codes,
        replace(weight, array=weight.array.reshape((num_out, num_in // 2))),
        absmax,
        parameters.take_as(f"{base}.quant_map", (16,), DType.F32),
        parameters.take_as(state_name, (state_bytes,), DType.U8),
        nested_absmax,
        nested_map,
        _take_bias(parameters, name, num_out, bias=bias),
    )


def _take_integers(
    parameters: Parameters, name: str, num_out: int, num_in: int, *, bias: bool
) -> _StoredIntegers:
    form = f"{name}.weight_format"
    shape = parameters.peek(form).shape if form in parameters else ()
    return _StoredIntegers(
        parameters.full_name(name),
        parameters.take_as(f"{name}.weight", (num_out, num_in), DType.I8),
        parameters.take_as(f"{name}.SCB", (num_out,), DType.F32),
        parameters.take_as(form, shape if shape == () else (1,), DType.U8) if form in parameters else None,
        _take_bias(parameters, name, num_out, bias=bias),
    )


def _take_bias(parameters: Parameters, name: str, num_out: int, *, bias: bool) -> Tensor | None:
    return parameters.take(f"{name}.bias", num_out) if bias else None


def _converted(stored: _StoredCodes | _StoredIntegers) -> Matrix:
    if isinstance(stored, _StoredCodes):
        scales = Tensor(DType.F32, scales_of(stored))
        return CodeMatrix(stored.weight, scales, stored.codes, CODES[stored.codes], stored.bias)
    if stored.form is not None and stored.form.on_host().any():
        raise ModelError(
            f"tensor {stored.name}.weight_format says that columns are in another order than one after another",
            hint="Save the model with a newer bitsandbytes.",
        )
    largest = stored.largest.on_host()
    _check_finite(largest, f"{stored.name}.SCB")
    scale = Tensor(DType.F32, np.ascontiguousarray(largest[:, None] / _LARGEST))
    return IntegerMatrix(stored.weight, scale, None, stored.bias)


def scales_of(stored: _StoredCodes) -> Floats:
    """(num_out, blocks of a row) fp32. Raises `ModelError` for content that is not what bitsandbytes writes."""
    num_out, num_in = stored.weight.shape[0], 2 * stored.weight.shape[1]
    num_blocks = stored.absmax.shape[0]
    state = _state_of(stored)
    if state.get("shape") != [num_out, num_in]:
        raise state.wrong("shape", f"but config.json asks for [{num_out}, {num_in}]")
    block = num_out * num_in // num_blocks
    state.integer("blocksize", low=block, high=block)
    if not np.allclose(stored.quant_map.on_host(), CODES[stored.codes], rtol=0, atol=_MAP_ERROR):
        raise ModelError(f"tensor {stored.name}.weight.quant_map is not the table of {stored.codes}")
    absmax = stored.absmax.on_host()
    if stored.nested_absmax is not None and stored.nested_map is not None:
        size = state.integer("nested_blocksize", low=1, high=1 << 20)
        offset = np.float32(state.number("nested_offset", low=-3e38, high=3e38))
        largest = stored.nested_absmax.on_host()
        if len(largest) != -(-num_blocks // size):
            raise ModelError(
                f"tensor {stored.name}.weight.nested_absmax has {len(largest)} numbers, "
                f"for {num_blocks} in blocks of {size}"
            )
        absmax = stored.nested_map.on_host()[absmax] * largest.repeat(size)[:num_blocks] + offset
    _check_finite(absmax, f"{stored.name}.weight.absmax")
    scales: Floats = np.ascontiguousarray(absmax, np.float32).reshape(num_out, -1)
    return scales


def _state_of(stored: _StoredCodes) -> Fields:
    file = f"{stored.name}.weight.quant_state.bitsandbytes__{stored.codes}"
    try:
        parsed = json.loads(stored.state.on_host().tobytes())
    except (ValueError, RecursionError) as error:
        raise ModelError(f"tensor {file} holds no JSON: {error}") from error
    state = Fields(parsed, file=f"tensor {file}")
    state.choice("quant_type", (stored.codes,))
    return state


def _check_finite(numbers: Floats, name: str) -> None:
    if not np.isfinite(numbers).all():
        raise ModelError(f"tensor {name} means scales that are not finite")
