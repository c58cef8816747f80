"""The link to the store as measured, and the request sizes and connection counts that suit it.

A `LinkMeter` is fed with every range that was read and gives a `Link`, a value; the sizes are pure
functions of the plan's state, the link, and the memory. They follow from what a request costs.
Until its first byte comes, a connection carries nothing, so a range should take several times as
long as that; stores charge by the request, too. But what one connection reads alone comes late, so
the ranges of the first parts are small enough for all connections to share them, and towards the
end of a tier that all of the next one follows, and of the load, they shrink with what is left, so
that all connections end together; but not so far that all of them wait for first bytes at once, nor
below what a request costs both sides.

Not thread-safe: the work queue's lock guards it.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

WINDOW_READS = 48  # what is older says little about the link as it is now
MIN_READS = 4
# Of sizes around their mean; ranges that are all of one size do not tell latency from rate.
MIN_SPREAD = 0.1


class Link(NamedTuple):
    """The link that the last reads showed; 0 is unknown."""

    first_byte_s: float = 0.0  # from a request to its answer's first byte
    connection_bytes_per_s: float = 0.0  # of one connection, once its bytes flow


class LinkMeter:
    """Sums up the last reads. Not thread-safe: the work queue's lock guards it."""

    def __init__(self) -> None:
        self._reads: deque[tuple[int, float]] = deque(maxlen=WINDOW_READS)  # bytes, seconds
        self._first_byte_s = 0.0

    def add(self, size_bytes: int, took_s: float) -> None:
        """Count one range that arrived."""
        self._reads.append((size_bytes, max(took_s, 1e-6)))

    def link(self) -> Link:
        """The link as the last reads show it.

        A range takes the time to its first byte and then its size at the connection's rate: the
        line through sizes and times, by least squares, tells the two apart where sizes differ
        enough. The latency can be no longer than the shortest read took.
        """
        num = len(self._reads)
        if num < MIN_READS:
            return Link()
        mean_bytes = sum(size for size, _ in self._reads) / num
        mean_s = sum(took for _, took in self._reads) / num
        variance = sum((size - mean_bytes) ** 2 for size, _ in self._reads) / num
        if variance > (MIN_SPREAD * mean_bytes) ** 2:
            shared = sum((size - mean_bytes) * (took - mean_s) for size, took in self._reads) / num
            self._first_byte_s = mean_s - mean_bytes * shared / variance
        self._first_byte_s = max(0.0, min(self._first_byte_s, *(took for _, took in self._reads)))
        return Link(self._first_byte_s, mean_bytes / max(mean_s - self._first_byte_s, 1e-6))


RANGE_ALIGNMENT_BYTES = 4096  # two readers never write to the same page
MIN_RANGE_BYTES = 256 * 1024  # below this a request costs more than sharing gains
# Nor is a range shorter than this at the link's rate: a request costs 0.3 to 0.6 ms of a core here, and shorter ranges
# of 8 connections would often all wait for their first bytes at once.
MIN_RANGE_S = 4e-3
USUAL_RANGE_BYTES = 4 * 1024 * 1024  # at least, unless a reader waits or the end is near
WORTH = 16  # a range takes this many times as long as its first byte
# Enough for 200 MB/s from anywhere; more only where more turn out to be faster.
FIRST_CONNECTIONS = 8
WIDER = 2
# What twice the connections must bring, or the store, the link or this machine is the limit.
MIN_GAIN = 1.3
MAX_WAIT_SHARE = 0.1  # of the connections' time, waiting for memory, or they are not fed
MIN_LEFT_S = 0.5  # of the load: with less left, finding out costs as much as it brings


class ReadLimits(NamedTuple):
    """Bounds of a load's reads."""

    range_bytes: int  # by a range
    connections: int
    staging_bytes: int  # that ranges may count on
    buffer_bytes: int = 0  # of staging that is taken


class PlanPosition(NamedTuple):
    """The state of the plan when a range is cut."""

    # That a caller waits for, and so all connections share; None: no caller waits.
    awaited_bytes: int | None
    left_bytes: int  # of all parts up to an end, not asked for yet
    is_staged: bool = True  # else it is read straight to where it will stay


def range_bytes(position: PlanPosition, link: Link, width: int, limits: ReadLimits) -> int:
    """The bytes that the next range should take, at least 1: of this part, or of more where that is
    small.
    """
    wanted = max(USUAL_RANGE_BYTES, int(WORTH * link.first_byte_s * link.connection_bytes_per_s))
    least = int(MIN_RANGE_S * width * link.connection_bytes_per_s)
    if position.is_staged:
        # Ranges on their way may fill half of the staging; the other half is for what is being
        # decoded.
        share = limits.staging_bytes // (2 * width) or wanted
        wanted, least = min(wanted, share), min(least, share)
    even = -(-position.left_bytes // width)
    if position.awaited_bytes is not None:
        even = min(even, -(-position.awaited_bytes // width))
    return max(1, min(limits.range_bytes, max(MIN_RANGE_BYTES, least, min(wanted, even))))


def cut(left_bytes: int, most_bytes: int) -> int:
    """The next of as few equal ranges, of whole pages, as `most_bytes` allows; what is left when
    that is less.
    """
    count = max(1, -(-left_bytes // most_bytes))
    even_bytes = -(-left_bytes // count)
    if most_bytes >= RANGE_ALIGNMENT_BYTES:
        even_bytes = min(most_bytes, -(-even_bytes // RANGE_ALIGNMENT_BYTES) * RANGE_ALIGNMENT_BYTES)
    return min(even_bytes, left_bytes)


class Width(NamedTuple):
    """The number of connections that read at the same time, and what is known about other numbers."""

    connections: int
    narrower: int = 0  # the last number that was tried, and its rate; 0: none was
    narrower_bytes_per_s: float = 0.0
    is_settled: bool = False


def first_width(limits: ReadLimits) -> Width:
    connections = min(FIRST_CONNECTIONS, limits.connections)
    return Width(connections, is_settled=connections == limits.connections)


def widen(
    width: Width, rate_bytes_per_s: float, left_bytes: int, limits: ReadLimits, *, is_fed: bool
) -> Width:
    """The width to try next, after `width` gave this rate over a while: more as long as that pays,
    else the last but one.

    Unless `is_fed`, ranges waited for memory: what follows the fetching is the limit now, and
    nothing is tried.
    """
    if width.is_settled:
        return width
    if rate_bytes_per_s < MIN_GAIN * width.narrower_bytes_per_s:
        return Width(width.narrower, is_settled=True)
    if not is_fed:
        return width
    wider = min(WIDER * width.connections, limits.connections)
    if wider == width.connections or left_bytes < MIN_LEFT_S * rate_bytes_per_s:
        return Width(width.connections, is_settled=True)
    return Width(wider, width.connections, rate_bytes_per_s)


READS_A_LOOK = 8  # between two looks at the link: each costs as much as handing out a range does
READS_A_TRIAL = 3  # for each connection, until a number of connections is judged


class LinkStatistics(NamedTuple):
    """Measurements of the link, and the decisions made by them. Sizes in bytes, times in seconds."""

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


class LinkTuner:
    """Sizes ranges and counts connections for one load."""

    def __init__(self, limits: ReadLimits) -> None:
        self._limits = limits
        self._meter = LinkMeter()
        self._link = Link()
        self._num_arrived = self._arrived_bytes = 0
        self._first_began_s, self._last_ended_s = math.inf, -math.inf
        self._width: Width = first_width(limits)
        self._most_connections = self._width.connections
        self._num_to_skip = self._width.connections  # that were asked for at another width
        self._trial: tuple[float, int, int] = (0.0, 0, 0)  # since when, its reads and their bytes
        self._waited_s = 0.0  # since the trial began
        self._sizes = (0, 0, 0, 0)  # ranges handed out: their number, bytes, least and most

    @property
    def connections(self) -> int:
        """The number of connections that may read at the same time."""
        return self._width.connections

    def range_bytes(self, position: PlanPosition) -> int:
        """The most bytes that the next range may take."""
        size_bytes = range_bytes(position, self._link, self.connections, self._limits)
        if position.awaited_bytes is not None and size_bytes < USUAL_RANGE_BYTES:
            # Such ranges say little about a number of connections.
            self._num_to_skip = self.connections
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

    @property
    def rate_bytes_per_s(self) -> float:
        """The tuner's figures; costs next to nothing."""
        took_s = self._last_ended_s - self._first_began_s
        return self._arrived_bytes / max(took_s, 1e-6) if self._num_arrived else 0.0

    def statistics(self) -> LinkStatistics:
        link = self._meter.link()
        num, total, least, most = self._sizes
        return LinkStatistics(
            rate_bytes_per_s=self.rate_bytes_per_s,
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
        self._width = widen(self._width, sofar / took_s, left_bytes, self._limits, is_fed=is_fed)
        self._most_connections = max(self._most_connections, self.connections)
