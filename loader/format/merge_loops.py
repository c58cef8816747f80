"""Merging nibbles into 16-bit floats in one pass over them, compiled by numba: what most drafts of bf16, and what they
are refined by, are made of.

numpy makes a pass for each operation, and takes two and a half times as long. Importing numba would cost a cold start
more than that gains: only a process that waits for its task anyway (a standby) is given these, by `use`. The arithmetic
is that of `float_planes.py`.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from . import float_planes

_COMPILED = {"nogil": True, "error_model": "numpy", "cache": True}
_U1, _U3, _U4, _U7, _U12 = (np.uint16(bits) for bits in (1, 3, 4, 7, 12))
_SIGN, _MANTISSA, _NIBBLE, _MIDDLE = np.uint16(8), np.uint16(7), np.uint16(15), np.uint16(8)


@numba.njit(**_COMPILED)
def first_of_bf16(out: Any, exponents: Any, packed: Any, half: int) -> None:
    """Floats with three mantissa bits: (out (n,) uint16, exponents (n,) uint8, packed (frames · half,) uint8).

    Frames of 2 · `half` elements; n may be one less, in a frame that is the only one.
    """
    for begin in range(0, packed.size, half):
        nibbles = packed[begin : begin + half]
        for upper in range(2):
            start = 2 * begin + upper * half
            floats, powers = out[start : start + half], exponents[start : start + half]
            for place in range(floats.size):
                nibble = np.uint16(nibbles[place]) >> np.uint16(4 * upper) & _NIBBLE
                floats[place] = (
                    np.uint16(powers[place]) << _U7
                    | (nibble & _SIGN) << _U12
                    | (nibble & _MANTISSA) << _U4
                    | _MIDDLE
                )


@numba.njit(**_COMPILED)
def later(out: Any, packed: Any, half: int, keep: int, up: int, fill: int) -> None:
    """Four bits more, shifted `up`: (out (n,) uint16, packed (frames · half,) uint8). Of what is there the bits in
    `keep` stay.
    """
    kept, shift, added = np.uint16(keep), np.uint16(up), np.uint16(fill)
    for begin in range(0, packed.size, half):
        nibbles = packed[begin : begin + half]
        for upper in range(2):
            start = 2 * begin + upper * half
            floats = out[start : start + half]
            for place in range(floats.size):
                nibble = np.uint16(nibbles[place]) >> np.uint16(4 * upper) & _NIBBLE
                floats[place] = floats[place] & kept | nibble << shift | added


def use() -> None:
    """Have `float_planes.merge` take these from now on. Compiles them, in a second, where that was never done."""
    float_planes.one_pass = float_planes.OnePass(first_of_bf16, later)
    words, packed = np.zeros(2, np.uint16), np.zeros(1, np.uint8)
    first_of_bf16(words, np.zeros(2, np.uint8), packed, 1)
    later(words, packed, 1, 0, 0, 0)
