"""A progress bar for long transfers: bytes, rate, time left.

`render` is a pure function of numbers; `ProgressBar` prints its lines: one that is redrawn on a
terminal, and a plain one now and then where stderr goes to a file. Knows nothing of what is
transferred.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from typing import TextIO

_BAR_WIDTH = 24
_REDRAW_S = 0.1
_PLAIN_LINE_S = 10.0  # so that logs stay short
_MIN_RATE_S = 0.5  # a rate over less time says nothing yet
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


@dataclass(frozen=True, slots=True)
class TransferProgress:
    """How far a transfer is."""

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
    """One line of at most `width` characters that says how far a transfer is. Of 0 bytes, it is
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
    filled = int(share * _BAR_WIDTH)
    bar = "█" * filled + "·" * (_BAR_WIDTH - filled)
    with_bar = f"{label}  {bar} {figures}"
    return with_bar if len(with_bar) <= width else f"{label}  {figures}"[:width]


class ProgressBar:
    """Prints progress to a stream, by default stderr. A context manager: leaving it ends the line.

    Used by one thread. Never raises because the stream is gone.
    """

    def __init__(self, label: str, *, quiet: bool = False, stream: TextIO | None = None) -> None:
        self._label = label
        self._is_quiet = quiet
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._started_s = time.monotonic()
        self._printed_s = self._started_s
        self._is_line_open = False

    def update(self, progress: TransferProgress) -> None:
        """Say how far it is. Cheap: most calls print nothing."""
        now_s = time.monotonic()
        is_done = progress.done_bytes >= progress.total_bytes
        interval_s = _REDRAW_S if self._is_terminal else _PLAIN_LINE_S
        if self._is_quiet or (not is_done and now_s - self._printed_s < interval_s):
            return
        self._printed_s = now_s
        line = render(
            self._label,
            progress.done_bytes,
            progress.total_bytes,
            now_s - self._started_s,
            width=self._width_columns(),
        )
        # "Erase to the end of the line" first: the new line may be shorter than the one that it
        # replaces.
        self._write(f"\r\x1b[K{line}" if self._is_terminal else f"{line}\n")
        self._is_line_open = self._is_terminal

    def close(self) -> None:
        """End the line, so that what is printed next starts on its own. Idempotent."""
        if self._is_line_open:
            self._write("\n")
            self._is_line_open = False

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _width_columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns - 1
        except (OSError, ValueError):
            return 100

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # the terminal was closed: the transfer goes on
            self._is_quiet = True
