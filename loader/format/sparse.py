"""Elements of a sparse tensor → its values, a mask of their places, and the signs of zeros.

`docs/format.md`, "Sparse encodings", is the norm. A *value* is an element that is not ±0; a zero is
0.0 or -0.0, and of bytes 0. Masks and signs have a bit an element, eight neighbours a byte. It does
not know planes, codecs or tiers; `native/scatter.c` is the way back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .manifest import FRAME_ELEMENTS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Words = NDArray[Any]  # bit patterns: uint8, uint16 or uint32


class SparseElements(NamedTuple):
    """The elements of a segment, taken apart. `signs` is None for bytes, which have none."""

    mask: Bytes
    signs: Bytes | None
    values: Words  # contiguous


def magnitude_bits(word: np.dtype[Any]) -> int:
    """The bits that a zero of that type has not: of floats all but the sign, of bytes all."""
    return 0xFF if word.itemsize == 1 else (1 << 8 * word.itemsize - 1) - 1


def count_values(words: Words) -> int:
    """The number of elements that are not zero. Takes a frame's memory."""
    magnitude = words.dtype.type(magnitude_bits(words.dtype))
    frames = range(0, words.size, FRAME_ELEMENTS)
    return sum(int(np.count_nonzero(words[start : start + FRAME_ELEMENTS] & magnitude)) for start in frames)


def take_apart(words: Words) -> SparseElements:
    """The mask, signs and values of contiguous words. Takes as much memory again, and half of that."""
    is_value = (words & words.dtype.type(magnitude_bits(words.dtype))) != 0
    signs = None
    if words.itemsize > 1:
        signs = np.packbits(words[~is_value] != 0, bitorder="little")
    return SparseElements(np.packbits(is_value, bitorder="little"), signs, words[is_value])
