"""Sizes that kernels are compiled for, and arrays at addresses that they are given: what numba's functions cannot take
as arguments.

A function that is given a `Size` is compiled for its value, as for a dtype; loops over it are unrolled. Numba would
compile one for an argument's value too, but could not keep such code for the next process.
"""

from __future__ import annotations

from typing import Any

import numba
from numba import types
from numba.extending import intrinsic, models, register_model

_COMPILED = {"nogil": True, "error_model": "numpy", "cache": True}


class Size(types.Type):
    """A whole number that the compiler knows."""

    def __init__(self, value: int) -> None:
        self.value = value
        super().__init__(name=f"Size({value})")


register_model(Size)(models.OpaqueModel)


@intrinsic(prefer_literal=True)
def size_of(typing: Any, value: Any) -> Any:
    """The `Size` of a constant."""
    kind = Size(value.literal_value)
    return kind(value), lambda ctx, builder, sig, args: ctx.get_dummy_value()


@intrinsic
def value_of(typing: Any, size: Any) -> Any:
    return types.intp(size), lambda ctx, builder, sig, args: ctx.get_constant(types.intp, sig.args[0].value)


def _pointer_to(kind: Any) -> Any:
    pointer = types.CPointer(kind)

    @intrinsic
    def convert(typing: Any, address: Any) -> Any:
        def generate(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], ctx.get_value_type(pointer))

        return pointer(types.int64), generate

    return convert


_uint8_at, _int8_at, _uint16_at = (_pointer_to(kind) for kind in (types.uint8, types.int8, types.uint16))
_int32_at, _float32_at = _pointer_to(types.int32), _pointer_to(types.float32)


# Arrays over memory that somebody else owns, and keeps for as long as the kernel runs. `shape` is a tuple.


@numba.njit(**_COMPILED)
def uint8s(address: int, shape: Any) -> Any:
    return numba.carray(_uint8_at(address), shape)


@numba.njit(**_COMPILED)
def int8s(address: int, shape: Any) -> Any:
    return numba.carray(_int8_at(address), shape)


@numba.njit(**_COMPILED)
def uint16s(address: int, shape: Any) -> Any:
    return numba.carray(_uint16_at(address), shape)


@numba.njit(**_COMPILED)
def int32s(address: int, shape: Any) -> Any:
    return numba.carray(_int32_at(address), shape)


@numba.njit(**_COMPILED)
def float32s(address: int, shape: Any) -> Any:
    return numba.carray(_float32_at(address), shape)
