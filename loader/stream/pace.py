"""How fast a load may go: keeps what its reads showed about the link, and applies `sizing.py` to it.

Not thread-safe: the work queue's lock guards it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .link import Link, LinkMeter
from .sizing import (
    MAX_WAIT_SHARE,
    USUAL_RANGE_BYTES,
    Budget,
    Position,
    Width,
    first_width,
    range_bytes,
    widen,
)

READS_A_LOOK = 8  # between two looks at the link: each costs as much as handing out a range does
READS_A_TRIAL = 3  # for each connection, until a number of connections is judged


class LinkStatistics(NamedTuple):
    """What was measured of the link, and decided by it. Sizes in bytes, times in seconds."""

    rate_bytes_per_s: (
        float  # of all that came from the store, over all connections, from the first request on
    )
    first_byte_s: float
    connection_bytes_per_s: float
    connections: int  # reading in the end
    most_connections: int  # that were tried
    smallest_range_bytes: int
    mean_range_bytes: int
    largest_range_bytes: int


class Pace:
    """Sizes ranges and counts connections for one load."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._meter = LinkMeter()
        self._link = Link()
        self._num_arrived = self._arrived_bytes = 0
        self._first_began_s, self._last_ended_s = math.inf, -math.inf
        self._width: Width = first_width(budget)
        self._most_connections = self._width.connections
        self._num_to_skip = self._width.connections  # that were asked for at another width
        self._trial: tuple[float, int, int] = (0.0, 0, 0)  # since when, its reads and their bytes
        self._waited_s = 0.0  # since the trial began
        self._sizes = (0, 0, 0, 0)  # ranges handed out: their number, bytes, least and most

    @property
    def connections(self) -> int:
        """How many may read at the same time."""
        return self._width.connections

    def range_bytes(self, position: Position) -> int:
        """What the next range may take."""
        size_bytes = range_bytes(position, self._link, self.connections, self._budget)
        if position.awaited_bytes is not None and size_bytes < USUAL_RANGE_BYTES:
            self._num_to_skip = self.connections  # such ranges say little about a number of connections
        return size_bytes

    def waited(self, for_memory_s: float) -> None:
        """A connection stood still because there was no memory for what it would have read."""
        self._waited_s += for_memory_s

    def handed_out(self, size_bytes: int) -> None:
        num, total, least, most = self._sizes
        least = min(least, size_bytes) if num else size_bytes
        self._sizes = (num + 1, total + size_bytes, least, max(most, size_bytes))

    def arrived(self, size_bytes: int, began_s: float, ended_s: float, left_bytes: int) -> None:
        """Count a range that came from the store; `left_bytes` are still to be asked for."""
        self._meter.add(size_bytes, ended_s - began_s)
        self._num_arrived += 1
        self._arrived_bytes += size_bytes
        self._first_began_s = min(self._first_began_s, began_s)
        self._last_ended_s = max(self._last_ended_s, ended_s)
        if self._num_arrived % READS_A_LOOK == 0:
            self._link = self._meter.link()
        if not self._width.is_settled:
            self._judge(size_bytes, ended_s, left_bytes)

    def statistics(self) -> LinkStatistics:
        link = self._meter.link()
        num, total, least, most = self._sizes
        took_s = self._last_ended_s - self._first_began_s
        return LinkStatistics(
            rate_bytes_per_s=self._arrived_bytes / max(took_s, 1e-6) if self._num_arrived else 0.0,
            first_byte_s=link.first_byte_s,
            connection_bytes_per_s=link.connection_bytes_per_s,
            connections=self.connections,
            most_connections=self._most_connections,
            smallest_range_bytes=least,
            mean_range_bytes=total // max(num, 1),
            largest_range_bytes=most,
        )

    def _judge(self, size_bytes: int, ended_s: float, left_bytes: int) -> None:
        """Once this number of connections has shown its rate, settle on it or try another."""
        if self._num_to_skip:
            self._num_to_skip -= 1
            self._trial, self._waited_s = (ended_s, 0, 0), 0.0
            return
        since_s, num, sofar = self._trial
        num, sofar = num + 1, sofar + size_bytes
        self._trial = (since_s, num, sofar)
        if num < READS_A_TRIAL * self.connections:
            return
        took_s = max(ended_s - since_s, 1e-6)
        is_fed = self._waited_s < MAX_WAIT_SHARE * self.connections * took_s
        self._num_to_skip = self.connections
        self._width = widen(self._width, sofar / took_s, left_bytes, self._budget, is_fed=is_fed)
        self._most_connections = max(self._most_connections, self.connections)
