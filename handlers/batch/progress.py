"""The progress of a job: its numbers, counted by its worker, and their display."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from ...loader.tools.progress_bar import StatusLine, format_duration, with_bar


@dataclass(frozen=True, slots=True)
class JobProgress:
    """A snapshot of the progress. Counts of parts and records are the job's, those with the prefix
    `run_` this run's.
    """

    records: int
    # Visible ones, and those computed for parts that are not visible yet.
    records_done: int
    parts: int
    parts_done: int
    run_records: int
    run_failed: int
    run_tokens: int
    run_s: float

    def as_json(self) -> dict[str, Any]:
        rate = self.run_tokens / self.run_s if self.run_s else 0.0
        return {
            "event": "progress",
            "records_done": self.records_done,
            "records": self.records,
            "parts_done": self.parts_done,
            "parts": self.parts,
            "failed": self.run_failed,
            "tokens_per_s": round(rate, 1),
            "elapsed_s": round(self.run_s, 1),
        }


class ProgressMeter:
    """The counters. For the event loop's thread only."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self.records = 0
        self.parts = 0
        self.records_visible = 0
        self.parts_done = 0
        self.records_pending = 0  # of parts in progress
        self.run_records = 0
        self.run_failed = 0
        self.run_tokens = 0

    def part_done(self, num_records: int) -> None:
        """Count a visible part of any worker."""
        self.parts_done += 1
        self.records_visible += num_records

    def record_done(self, *, is_failed: bool, num_tokens: int) -> None:
        self.run_records += 1
        self.run_failed += is_failed
        self.run_tokens += num_tokens
        self.records_pending += 1

    def view(self) -> JobProgress:
        return JobProgress(
            records=self.records,
            records_done=self.records_visible + self.records_pending,
            parts=self.parts,
            parts_done=self.parts_done,
            run_records=self.run_records,
            run_failed=self.run_failed,
            run_tokens=self.run_tokens,
            run_s=time.monotonic() - self._started_s,
        )


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
    return with_bar("batch", share, figures, width=width)


class ProgressLines(StatusLine):
    """The progress of a job: a bar on a terminal, otherwise regular lines of JSON for logs."""

    redraw_s = 0.2
    plain_line_s = 5.0

    def update(self, progress: JobProgress) -> None:
        if self._is_due():
            self._show(render(progress) if self._is_terminal else json.dumps(progress.as_json()))
