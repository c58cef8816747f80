"""Bytes in chunks of any size → lines, of bounded length.

Invariant: however the bytes are cut into chunks, the lines are the same, and no more than one line of the allowed
length is held. A longer one is passed over, and told of. It does not know what lines say.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # what some editors write before the first line
_MARK_BYTES = len(_BYTE_ORDER_MARK) + len(b"\r")  # that may stand around a line and do not count


class RawLine(NamedTuple):
    """A line of the input. `data` is without the line's end; None: it is longer than allowed."""

    number: int  # from 1, blank ones count
    start_byte: int
    data: bytes | None

    @property
    def is_blank(self) -> bool:
        return self.data is not None and not self.data.strip()


class LineSplitter:
    """Feed it the bytes from `start_byte` on, where line number `first_line` begins, and then `finish`."""

    def __init__(self, max_line_bytes: int, *, start_byte: int = 0, first_line: int = 1) -> None:
        self._max_line_bytes = max_line_bytes
        self._number = first_line
        self._start_byte = start_byte
        self._next_byte = start_byte
        self._held = bytearray()
        self._is_too_long = False

    @property
    def next_byte(self) -> int:
        """Where the bytes begin that were not fed yet."""
        return self._next_byte

    def feed(self, chunk: bytes) -> Iterator[RawLine]:
        """The lines that end in the chunk. Consume it all before the next one is fed."""
        position = 0
        base = self._next_byte
        while (end := chunk.find(b"\n", position)) >= 0:
            self._hold(chunk, position, end)
            self._next_byte = base + end + 1
            yield self._end_line()
            position = end + 1
        self._hold(chunk, position, len(chunk))
        self._next_byte = base + len(chunk)

    def finish(self) -> Iterator[RawLine]:
        """The last line, where no line's end stands behind it."""
        if self._next_byte > self._start_byte:
            yield self._end_line()

    def _hold(self, chunk: bytes, start: int, end: int) -> None:
        if self._is_too_long or len(self._held) + end - start > self._max_line_bytes + _MARK_BYTES:
            self._is_too_long = True
            self._held.clear()
        else:
            self._held += chunk[start:end]

    def _end_line(self) -> RawLine:
        data: bytes | None = None
        if not self._is_too_long:
            data = bytes(self._held).removesuffix(b"\r")
            if self._number == 1:
                data = data.removeprefix(_BYTE_ORDER_MARK)
            if len(data) > self._max_line_bytes:
                data = None
        line = RawLine(self._number, self._start_byte, data)
        self._number += 1
        self._start_byte = self._next_byte
        self._held.clear()
        self._is_too_long = False
        return line
