"""The outage clock and the counters of one web source, shared by all of its readers.

An outage begins with a failure after which nothing succeeds, and ends with the next success of any
reader, or when the last reader that waits for the store gives up. Connections that are refused or
break and answers such as 503 belong to one; answers that make no sense, or say for good that
something is missing or denied, do not. The clock decides nothing: `retry.py` does.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

from ...timeline import Timeline
from ..base import Source

MIN_SHOWN_S = 0.5  # a shorter outage is a retry like any other
LANE = "fetch"

Note = Callable[[float, float | None, str], None]  # see `Outage.watch`


@runtime_checkable
class WaitsForStore(Protocol):
    """A source that waits for its store to come back."""

    def on_outage(self, note: Note) -> None:
        """Have each outage of the store noted (`Outage.watch`)."""


class Outage:
    """Thread-safe; never blocks."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._number = 0  # of the outage under way, or of the next one
        self._began_s: float | None = None
        self._reason = ""
        self._is_noted = False
        self._num_waiting = 0
        self._note: Note = lambda began_s, ended_s, reason: None

    def watch(self, note: Note) -> None:
        """Call `note(began_s, ended_s, reason)` for outages that last: with None for the end once
        it is clear that one does, and again when it has ended. Times are on the clock; calls come
        from the reader's thread.
        """
        self._note = note

    def join(self) -> None:
        """A reader begins to wait for the store."""
        with self._lock:
            self._num_waiting += 1

    def leave(self) -> None:
        """It waits no longer. One that gives up leaves the clock to the others: what they wait for
        is the same store.
        """
        with self._lock:
            self._num_waiting -= 1
            is_last = self._num_waiting == 0
        if is_last:
            self.succeeded()

    def failed(self, reason: str) -> tuple[int, float]:
        """A reader failed. The number of the outage, which stays the same until something succeeds,
        and how many seconds it has lasted.
        """
        now_s = self._clock()
        with self._lock:
            if self._began_s is None:
                self._began_s, self._reason, self._is_noted = now_s, reason, False
            number, began_s = self._number, self._began_s
            lasts = now_s - began_s >= MIN_SHOWN_S and not self._is_noted
            self._is_noted = self._is_noted or lasts
        if lasts:
            self._note(began_s, None, reason)
        return number, now_s - began_s

    def left_s(self, patience_s: float) -> float:
        """The rest of `patience_s` in the outage under way: negative when it has lasted
        longer, and infinite without one, or without patience.
        """
        began_s = self._began_s
        if began_s is None or patience_s <= 0:
            return math.inf
        return began_s + patience_s - self._clock()

    def succeeded(self) -> None:
        """A reader got what it asked for."""
        # Nearly always; where another thread has just failed, either order is right.
        if self._began_s is None:
            return
        self.end()

    def end(self) -> None:
        """End the outage: the store answers again, or no reader waits any longer."""
        now_s = self._clock()
        with self._lock:
            began_s, self._began_s = self._began_s, None
            self._number += 1
            is_noted, reason = self._is_noted, self._reason
        if began_s is None or (now_s - began_s < MIN_SHOWN_S and not is_noted):
            return
        # One long pause between two attempts lasts as well as many failures do.
        if not is_noted:
            self._note(began_s, None, reason)
        self._note(began_s, now_s, reason)


def show_outages(source: Source, timeline: Timeline) -> None:
    """Have the timeline show when the source waited for its store: a mark when that begins, and a
    span when it ends.
    """

    def note(began_s: float, ended_s: float | None, reason: str) -> None:
        if ended_s is None:
            timeline.mark(LANE, "the store does not answer", reason=reason)
            return
        origin_s = timeline.started_at
        timeline.add(LANE, "waiting for the store", began_s - origin_s, ended_s - origin_s, reason=reason)

    if isinstance(source, WaitsForStore):
        source.on_outage(note)


class HttpStatistics(NamedTuple):
    """Of one source, since it was opened. `wasted_bytes / received_bytes` tells what its care has
    cost.
    """

    requests: int = 0  # sent, those included that were retries, hedges or redirects
    retries: int = 0  # attempts after a failed one
    received_bytes: int = 0  # of bodies that were wanted, those that came twice included
    connections_opened: int = 0
    hedges: int = 0  # requests made because another one was behind
    hedges_won: int = 0  # … that were sooner
    resumed: int = 0  # answers that began in the middle of a range
    throttled: int = 0  # answers by a busy store
    wasted_bytes: int = 0  # of those received, which had come already


class HttpTally:
    """Thread-safe."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(HttpStatistics._fields, 0)
        self._lock = threading.Lock()

    def add(self, **counts: int) -> None:
        """Add to the counters, by the names of `HttpStatistics`."""
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count

    def counts(self) -> HttpStatistics:
        with self._lock:
            return HttpStatistics(**self._counts)
