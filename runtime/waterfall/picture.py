"""The content of a timeline's picture: rows of bars and marks, and the figures above them, as
values.

Both drawings, for a terminal and for a browser, are made from it; `reading.py` makes it. This
module does not know lanes, or how things are drawn.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass


class Kind(enum.StrEnum):
    """The kind of a bar, in the order of the phases of a weight and then of a request."""

    TASK = "task"
    FETCH = "fetch"
    VERIFY = "verify"
    DECODE = "decode"
    PLACE = "place"  # on another device
    EXECUTE = "execute"
    QUEUED = "queued"
    PREFILL = "prefill"
    GENERATE = "generate"


class MarkKind(enum.StrEnum):
    DRAFT = "draft"
    EXACT = "exact"
    FIRST_TOKEN = "first token"  # noqa: S105 - not that kind of token
    LAST_TOKEN = "last token"  # noqa: S105


class Section(enum.StrEnum):
    START = "start"
    WEIGHTS = "weights"
    REQUESTS = "requests"


@dataclass(frozen=True, slots=True)
class Bar:
    """Half-open [start_s, end_s) since process start. `tier` is "draft", "refine" or ""."""

    kind: Kind
    start_s: float
    end_s: float
    title: str
    tier: str = ""
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Mark:
    kind: MarkKind
    at_s: float
    title: str


@dataclass(frozen=True, slots=True)
class Row:
    """`note` is the one figure worth reading at the end of the line."""

    section: Section
    label: str
    bars: tuple[Bar, ...]
    marks: tuple[Mark, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Figures:
    """Moments since process start; None: has not happened. Bytes are 0 when they are not known."""

    first_token_s: float | None = None
    can_answer_s: float | None = None
    exact_s: float | None = None
    stored_bytes: int = 0
    weight_bytes: int = 0
    fetch_s: float = 0.0
    failure: str = ""
    # The tier that the load took first, and why.
    decision: str = ""
    outcome: str = ""  # result of drafting ahead

    @property
    def bytes_per_s(self) -> float:
        return self.stored_bytes / self.fetch_s if self.fetch_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Picture:
    """All of it lies in [0, end_s]. `num_hidden_requests` came later, or were too many."""

    end_s: float
    figures: Figures
    rows: tuple[Row, ...]
    num_hidden_requests: int
    num_dropped_spans: int
    started_unix_s: float


def throughput(picture: Picture, num_bins: int) -> list[float]:
    """Bytes that arrived in each of the equal intervals of [0, end_s], as if each part had arrived
    at a constant rate.
    """
    bins, steps = [0.0] * num_bins, [0.0] * (num_bins + 1)
    width_s = picture.end_s / num_bins
    for row in picture.rows:
        for bar in row.bars:
            if bar.kind is Kind.FETCH and bar.size_bytes:
                _spread(bins, steps, bar, width_s)
    levels = itertools.accumulate(steps[:num_bins])
    noise = 1e-9 * sum(bins)  # what adding and taking away leaves
    return [
        count if (count := alone + level) > noise else 0.0 for alone, level in zip(bins, levels, strict=True)
    ]


def share_rows(rows: Sequence[Row], max_rows: int) -> list[Row]:
    """The rows themselves, or at most `max_rows` in which neighbours were merged."""
    if len(rows) <= max_rows:
        return list(rows)
    per_row = math.ceil(len(rows) / max(1, max_rows))
    shared = []
    for start in range(0, len(rows), per_row):
        together = rows[start : start + per_row]
        first, last = together[0].label, together[-1].label
        prefix = first[: len(first) - len(first.lstrip("abcdefghijklmnopqrstuvwxyz._"))]
        label = first if len(together) == 1 else f"{first}–{last.removeprefix(prefix) if prefix else last}"
        shared.append(
            Row(
                section=together[0].section,
                label=label,
                bars=tuple(bar for row in together for bar in row.bars),
                marks=tuple(mark for row in together for mark in row.marks),
                note=together[-1].note,
            )
        )
    return shared


def tick_step_s(end_s: float, max_ticks: int) -> float:
    """The smallest of …, 0.5, 1, 2, 5, 10, … that divides [0, end_s] into at most `max_ticks`
    pieces.
    """
    rough_s = end_s / max_ticks
    power = 10.0 ** math.floor(math.log10(rough_s))
    return next(step for factor in (1, 2, 5, 10) if (step := factor * power) >= rough_s * (1 - 1e-9))


def format_s(seconds: float) -> str:
    """Like "64 ms", "5.37 s", "2 min 5 s"."""
    if seconds < 0.0995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 99.95:
        return f"{seconds:.2f} s"
    return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


def format_bytes(count: float) -> str:
    """Like "988 MB", decimal as networks and stores count."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit in ("B", "kB", "MB") else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def _spread(bins: list[float], steps: list[float], bar: Bar, width_s: float) -> None:
    """Add a bar's bytes: to `bins` those of the stretches it begins and ends in, to `steps` where the level
    between them rises and falls, so that a long bar costs no more than a short one.
    """
    took_s = bar.end_s - bar.start_s
    first, last = (min(len(bins) - 1, int(at_s / width_s)) for at_s in (bar.start_s, bar.end_s))
    if first == last or took_s <= 0:
        bins[first] += bar.size_bytes
        return
    rate = bar.size_bytes / took_s
    bins[first] += rate * ((first + 1) * width_s - bar.start_s)
    bins[last] += rate * (bar.end_s - last * width_s)
    steps[first + 1] += rate * width_s
    steps[last] -= rate * width_s
