"""Display of a job's progress: a bar on a terminal, otherwise regular lines of JSON for logs."""

from __future__ import annotations

import json
import sys
import time
from typing import TextIO

from ...loader.tools.progress_bar import format_duration
from .meter import JobProgress

LINE_S = 5.0
REDRAW_S = 0.2
_BAR_WIDTH = 24


def render(progress: JobProgress, *, width: int = 100) -> str:
    """One line of at most `width` characters."""
    if not progress.parts:
        return "batch  reading the input"[:width]
    share = progress.records_done / progress.records if progress.records else 1.0
    figures = f"{share:4.0%}  {progress.records_done:,} of {progress.records:,}"
    if progress.run_failed:
        figures += f"  {progress.run_failed:,} errors"
    if progress.run_s >= 1 and progress.run_records:
        figures += f"  {progress.run_tokens / progress.run_s:,.0f} tokens/s"
        left = progress.records - progress.records_done
        if left > 0:
            figures += f"  {format_duration(left * progress.run_s / progress.run_records)} left"
    filled = int(share * _BAR_WIDTH)
    with_bar = f"batch  {'█' * filled + '·' * (_BAR_WIDTH - filled)} {figures}"
    return with_bar if len(with_bar) <= width else f"batch  {figures}"[:width]


class ProgressLines:
    """Prints progress to a stream, by default stderr. A context manager, which ends the line. Never
    raises for a closed stream.
    """

    def __init__(self, *, quiet: bool = False, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._is_quiet = quiet
        self._is_terminal = self._stream.isatty()
        self._printed_s = time.monotonic()
        self._is_line_open = False

    def update(self, progress: JobProgress) -> None:
        """Show progress. Cheap: most calls print nothing."""
        now_s = time.monotonic()
        if self._is_quiet or now_s - self._printed_s < (REDRAW_S if self._is_terminal else LINE_S):
            return
        self._printed_s = now_s
        if self._is_terminal:
            self._write(f"\r\x1b[K{render(progress)}")
            self._is_line_open = True
        else:
            self._write(json.dumps(progress.as_json()) + "\n")

    def __enter__(self) -> ProgressLines:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_line_open:
            self._write("\n")
            self._is_line_open = False

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # the terminal was closed: the job continues
            self._is_quiet = True
