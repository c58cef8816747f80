"""Floats → planes: exponents, and fields of 1 to 7 bits packed into bytes, tier by tier.

Fields: a frame of c elements takes h = ceil(c / share) bytes, where 2, 4 or 8 elements share a
byte; byte j holds element j in its lowest bits, element j + h in the next ones, and so on: vectors
of neighbours are shifted alike. Works on batches of the caller's buffers: whole frames, or a single
shorter one. `docs/format.md`, "Packed planes", is the norm; `native/merge.c` is the way back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .encoding import Encoding, FloatFormat, Tier, cut_field
from .manifest import FRAME_ELEMENTS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Words = NDArray[Any]  # the floats' bit patterns: uint16 or uint32


def pack(values: Bytes, bits: int, out: Bytes) -> None:
    """Whole frames of values below 2^bits, or a shorter one, into `out`, ceil(values.size · bits /
    8) bytes.
    """
    share = 8 // bits
    row = min(out.size, FRAME_ELEMENTS // share)
    if values.size != share * out.size:  # a shorter frame: what it lacks is 0
        values = np.concatenate([values, np.zeros(share * out.size - values.size, np.uint8)])
    rows, packed = values.reshape(-1, share, row), out.reshape(-1, row)
    np.copyto(packed, rows[:, 0])
    for place in range(1, share):
        np.bitwise_or(packed, rows[:, place] << np.uint8(place * bits), out=packed)


def word_type(float_format: FloatFormat) -> np.dtype[Any]:
    return np.dtype(f"<u{float_format.bits // 8}")


def split_floats(words: Words, encoding: Encoding, tier: Tier, planes: list[Bytes]) -> None:
    """One tier of a batch of floats into its planes, which have exactly the size that they need."""
    float_format, known = _format_of(encoding), encoding.mantissa_bits(tier)
    before = encoding.bits_before(tier)
    unknown = float_format.mantissa_bits - known
    field = words >> words.dtype.type(unknown)
    if before is None:
        exponents, *planes = planes
        np.copyto(exponents, words >> words.dtype.type(float_format.mantissa_bits), casting="unsafe")
        np.bitwise_and(exponents, np.uint8((1 << float_format.exponent_bits) - 1), out=exponents)
        field &= words.dtype.type((1 << known) - 1)
        field |= words >> words.dtype.type(float_format.bits - 1) << words.dtype.type(known)
        field_bits = 1 + known
    else:
        field_bits = known - before
        field &= words.dtype.type((1 << field_bits) - 1)
    below = field_bits
    for plane, bits in zip(planes, cut_field(field_bits), strict=True):
        below -= bits
        values = (field >> words.dtype.type(below) & words.dtype.type((1 << bits) - 1)).astype(np.uint8)
        pack(values, bits, plane)


def _format_of(encoding: Encoding) -> FloatFormat:
    assert encoding.float_format is not None
    return encoding.float_format
