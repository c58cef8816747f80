"""A splitter of chunks of bytes into lines of bounded length.

Invariant: the lines do not depend on the chunks, and at most one line of the allowed length is
held. A longer one is skipped, and reported. This module does not know the content of lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

# Some editors write it before the first line.
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Bytes around a line that do not count.
_MARK_BYTES = len(_BYTE_ORDER_MARK) + len(b"\r")


class RawLine(NamedTuple):
    """A line of the input. `data` is without the line end; None: it is longer than allowed."""

    number: int  # from 1, counting blank lines
    start_byte: int
    data: bytes | None

    @property
    def is_blank(self) -> bool:
        return self.data is not None and not self.data.strip()


class LineSplitter:
    """The splitter. Feed it the bytes from `start_byte` on, where line number `first_line` begins,
    and then `finish`.
    """

    def __init__(self, max_line_bytes: int, *, start_byte: int = 0, first_line: int = 1) -> None:
        self._max_line_bytes = max_line_bytes
        self._number = first_line
        self._start_byte = start_byte
        self._next_byte = start_byte
        self._held = bytearray()
        self._is_too_long = False

    @property
    def next_byte(self) -> int:
        """The position of the first byte not fed yet."""
        return self._next_byte

    def feed(self, chunk: bytes) -> Iterator[RawLine]:
        """The lines that end in the chunk. Consume all before feeding the next one."""
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
        """The last line, if it has no line end."""
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
