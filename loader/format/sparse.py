"""Elements of a sparse tensor ↔ its values, a mask that says where they belong, and the signs of zeros.

`docs/format.md`, "Sparse encodings", is the norm. A *value* is an element that is not ±0; a zero is
0.0 or -0.0, and of bytes 0. Masks and signs have a bit an element, eight neighbours a byte. Values
are placed batch by batch, by the native core where there is one, else by numpy, which writes the
same. Works on buffers of the caller's; it does not know planes, codecs or tiers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..native import merge as native
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
    """How many elements are not zero. Takes a frame's memory."""
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


def has_bits_behind(plane: Bytes, num_bits: int) -> bool:
    """True if bits behind the last one are set, in the last byte of a mask or of signs."""
    return num_bits % 8 != 0 and bool(plane[-1] >> num_bits % 8)


class Scatter:
    """Places the values of one segment in the words `out`, from the first element to the last.

    With a `mask`, of the first tier: elements without a value become zeros, of which `signs` says
    which are negative; None: none is. Without one, of a later tier: elements that are not zeros get
    the bits of a value in place of all but `keep`. Whatever the mask holds, nothing outside `out`
    is written.
    """

    def __init__(
        self,
        out: Words,
        mask: Bytes | None = None,
        signs: Bytes | None = None,
        *,
        num_signs: int = 0,
        keep: int = 0,
    ) -> None:
        self._out, self._mask, self._signs, self._keep = out, mask, signs, keep
        self._num_signs = num_signs
        self._is_native = native.can_scatter(out)
        self._next = 0  # the first element, or of numpy's way the first frame, that is not done
        self._num_placed = 0
        self._places = np.empty(0, np.int64)  # of numpy's way: of the frame's values that are to come
        self._num_zeros = 0  # likewise, before the next frame
        self.has_zero = False  # a value has become a zero

    def put(self, values: Words) -> bool:
        """Place the next values, contiguous. False where there are fewer elements that want one."""
        if self._is_native:
            return self._put_native(values)
        at = 0
        while at < values.size:
            if not self._places.size and not self._open_frame():
                return False
            places = self._places[: values.size - at]
            found = values[at : at + places.size]
            if self._mask is None:
                found = self._out[places] & self._out.dtype.type(self._keep) | found
            magnitude = self._out.dtype.type(magnitude_bits(self._out.dtype))
            self.has_zero |= bool(((found & magnitude) == 0).any())
            self._out[places] = found
            self._places = self._places[places.size :]
            at += places.size
        return True

    def finish(self) -> bool:
        """Write the zeros behind the last value. False where an element there wants a value."""
        if self._is_native:
            self._put_native(self._out[:0])
            return self._next == self._out.size
        while not self._places.size:
            if not self._open_frame():
                return True
        return False

    def _put_native(self, values: Words) -> bool:
        done = native.scatter(
            self._out,
            self._mask,
            self._signs,
            values,
            begin=self._next,
            num_before=self._num_placed,
            num_signs=self._num_signs,
            keep=self._keep,
        )
        self._next = done.end
        self._num_placed += done.num_placed
        self.has_zero |= bool(done.has_zero)
        return bool(done.num_placed == values.size)

    def _open_frame(self) -> bool:
        """Find the places of the next frame's values, and write its zeros; False behind the last."""
        begin, end = self._next, min(self._next + FRAME_ELEMENTS, self._out.size)
        if begin == end:
            return False
        frame = self._out[begin:end]
        if self._mask is None:
            is_value = (frame & frame.dtype.type(magnitude_bits(frame.dtype))) != 0
        else:
            bits = np.unpackbits(self._mask[begin // 8 : -(-end // 8)], bitorder="little")
            is_value = bits[: end - begin] != 0
            frame[~is_value] = self._zeros(int(frame.size - is_value.sum()), frame.dtype)
        self._places = begin + np.flatnonzero(is_value)
        self._next = end
        return True

    def _zeros(self, count: int, word: np.dtype[Any]) -> Words:
        """The next zeros. There are no signs behind the last: then the mask is wrong, too."""
        found = np.zeros(count, word)
        if self._signs is not None:
            first = self._num_zeros // 8
            bits = np.unpackbits(self._signs[first : -(-(self._num_zeros + count) // 8)], bitorder="little")
            bits = bits[self._num_zeros - 8 * first : self._num_signs - 8 * first][:count]
            found[: bits.size] = bits.astype(word) << word.type(8 * word.itemsize - 1)
            self._num_zeros += count
        return found
