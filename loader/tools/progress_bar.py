"""A progress bar for long transfers: bytes, rate, time left.

`render` is a pure function of numbers; `ProgressBar` prints its lines. `StatusLine` is its part that
knows only the stream.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from typing import Self, TextIO

_BAR_WIDTH = 24
_MIN_RATE_S = 0.5  # a rate over less time means nothing
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


@dataclass(frozen=True, slots=True)
class TransferProgress:
    """The progress of a transfer."""

    done_bytes: int
    total_bytes: int


def format_bytes(size_bytes: float) -> str:
    """A size in decimal units, as stores and networks count them: '12 B', '3.4 MB', '988 MB'."""
    size = float(size_bytes)
    unit = 0
    while size >= 999.5 and unit < len(_UNITS) - 1:
        size /= 1000
        unit += 1
    digits = 1 if unit and size < 99.95 else 0
    return f"{size:.{digits}f} {_UNITS[unit]}"


def format_duration(seconds: float) -> str:
    """'8 s', '3:05 min', '2:10 h'."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"


def render(label: str, done_bytes: int, total_bytes: int, elapsed_s: float, *, width: int = 80) -> str:
    """A transfer's progress in one line of at most `width` characters. A transfer of 0 bytes is
    done.
    """
    share = min(1.0, done_bytes / total_bytes) if total_bytes else 1.0
    figures = f"{share:4.0%}  {format_bytes(done_bytes)} of {format_bytes(total_bytes)}"
    if elapsed_s >= _MIN_RATE_S and done_bytes:
        rate = done_bytes / elapsed_s
        figures += f"  {format_bytes(rate)}/s"
        if done_bytes < total_bytes:
            figures += f"  {format_duration((total_bytes - done_bytes) / rate)} left"
        else:
            figures += f"  in {format_duration(elapsed_s)}"
    return with_bar(label, share, figures, width=width)


def with_bar(label: str, share: float, figures: str, *, width: int) -> str:
    """A line with a bar for a share from 0 to 1, or without it where the terminal is narrow."""
    filled = int(share * _BAR_WIDTH)
    line = f"{label}  {'█' * filled}{'·' * (_BAR_WIDTH - filled)} {figures}"
    return line if len(line) <= width else f"{label}  {figures}"[:width]


class StatusLine:
    """A line on a stream, by default stderr: redrawn on a terminal, and a plain one now and then
    elsewhere. A context manager: leaving it ends the line.

    Used by one thread. Never raises because the stream is closed.
    """

    redraw_s = 0.1
    plain_line_s = 10.0  # so that logs stay short

    def __init__(
        self, *, quiet: bool = False, stream: TextIO | None = None, started_s: float | None = None
    ) -> None:
        """`started_s` is when the work began, on `time.monotonic()`'s clock; None: now."""
        self._is_quiet = quiet
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._printed_s = time.monotonic()
        self._started_s = self._printed_s if started_s is None else started_s
        self._is_line_open = False

    def close(self) -> None:
        """End the line, so that later output starts on its own. Idempotent."""
        if self._is_line_open:
            self._write("\n")
            self._is_line_open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _is_due(self, *, is_last: bool = False) -> bool:
        """True if a line is to be printed now. Cheap: most calls print nothing."""
        now_s = time.monotonic()
        interval_s = self.redraw_s if self._is_terminal else self.plain_line_s
        if self._is_quiet or (not is_last and now_s - self._printed_s < interval_s):
            return False
        self._printed_s = now_s
        return True

    def _show(self, line: str) -> None:
        # "Erase to the end of the line" first: the new line may be shorter than the previous one.
        self._write(f"\r\x1b[K{line}" if self._is_terminal else f"{line}\n")
        self._is_line_open = self._is_terminal

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # the terminal was closed: the work continues
            self._is_quiet = True


class ProgressBar(StatusLine):
    """The progress of a transfer."""

    def __init__(
        self,
        label: str,
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        started_s: float | None = None,
    ) -> None:
        super().__init__(quiet=quiet, stream=stream, started_s=started_s)
        self._label = label

    def update(self, progress: TransferProgress) -> None:
        done_bytes, total_bytes = progress.done_bytes, progress.total_bytes
        if self._is_due(is_last=done_bytes >= total_bytes):
            elapsed_s = self._printed_s - self._started_s
            self._show(render(self._label, done_bytes, total_bytes, elapsed_s, width=self._width_columns()))

    def _width_columns(self) -> int:
        try:
            return (os.get_terminal_size(self._stream.fileno()).columns or 101) - 1  # 0: unknown
        except (OSError, ValueError):
            return 100
