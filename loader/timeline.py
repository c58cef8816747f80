"""The timeline of one instance's life: spans and marks on one clock that starts when the process
did.

Anything may write to it from any thread; it is bounded, cheap (one append under the GIL), and read
as a JSON-ready value. It does not know what the spans mean: `runtime/waterfall/view.py` draws them.

Lanes in use: "process" (interpreter, imports), "manifest", "fetch", "verify", "decode", "device",
"place", "tokenizer", "model", "execute", "request".
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

# An 80-layer model needs about 6,000; beyond the bound new spans are counted, not kept.
MAX_SPANS = 50_000


class Span(NamedTuple):
    """Half-open [start_s, end_s) since process start. A mark has end_s == start_s."""

    lane: str
    name: str
    start_s: float
    end_s: float
    attributes: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """The JSON of `docs/timeline.md`, to the microsecond."""
        return {
            "lane": self.lane,
            "name": self.name,
            "start_s": round(self.start_s, 6),
            "end_s": round(self.end_s, 6),
            **({"attributes": self.attributes} if self.attributes else {}),
        }


class Timeline:
    """Collects spans. Thread-safe; never blocks, never raises for being full."""

    def __init__(self, *, started_at: float | None = None) -> None:
        """`started_at` is on `time.monotonic()`'s clock; by default the moment this process was
        started.
        """
        self.started_at = process_start_s() if started_at is None else started_at
        self.started_unix_s = time.time() - (time.monotonic() - self.started_at)
        self._spans: list[Span] = []
        self._dropped = 0
        self._lock = threading.Lock()

    def now_s(self) -> float:
        """Seconds since process start."""
        return time.monotonic() - self.started_at

    def add(self, lane: str, name: str, start_s: float, end_s: float, **attributes: Any) -> None:
        with self._lock:
            if len(self._spans) >= MAX_SPANS:
                self._dropped += 1
                return
            self._spans.append(Span(lane, name, start_s, end_s, attributes))

    def mark(self, lane: str, name: str, **attributes: Any) -> None:
        now_s = self.now_s()
        self.add(lane, name, now_s, now_s, **attributes)

    @contextmanager
    def span(self, lane: str, name: str, **attributes: Any) -> Iterator[dict[str, Any]]:
        """Time a block; the block may add attributes to the dict that it gets. Written also when
        the block raises.
        """
        start_s = self.now_s()
        try:
            yield attributes
        finally:
            self.add(lane, name, start_s, self.now_s(), **attributes)

    def first(self, lane: str, name: str) -> Span | None:
        return next((span for span in self.spans() if span.lane == lane and span.name == name), None)

    def spans(self, first: int = 0) -> list[Span]:
        """In the order in which they were added, from the one of index `first` on."""
        with self._lock:
            return self._spans[first:]

    def snapshot(self) -> dict[str, Any]:
        """A JSON-ready value; the schema is in `docs/timeline.md`."""
        ordered = sorted(self.spans(), key=lambda span: span.start_s)
        return {**self.head(), "spans": [span.as_json() for span in ordered]}

    def head(self) -> dict[str, Any]:
        """A snapshot's keys without its spans."""
        return {
            "schema": 1,
            "started_unix_s": round(self.started_unix_s, 6),
            "now_s": round(self.now_s(), 6),
            "dropped_spans": self._dropped,
        }


def process_start_s() -> float:
    """When this process was started, on `time.monotonic()`'s clock, to 10 ms (Linux
    `/proc/self/stat`, field 22).

    Elsewhere, or in a sandbox without /proc, now.
    """
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        since_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic()
    age_s = since_boot_s - ticks / os.sysconf("SC_CLK_TCK")
    # In a container that was restored or is on another time namespace the figure can be nonsense.
    return time.monotonic() - age_s if 0 <= age_s < 3600 else time.monotonic()
