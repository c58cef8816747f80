"""How much one request asks for, and how many connections ask: pure functions of the plan's state, the link as it
was measured, and the budget.

They follow from what a request costs. Until its first byte comes, a connection carries nothing, so a range should take
several times as long as that; stores charge by the request, too. But what one connection reads alone comes late, so
the ranges of the first parts are small enough for all connections to share them, and towards the end they shrink with
what is left, so that all connections end together; but not below what it costs both sides to speak of a range.
"""

from __future__ import annotations

from typing import NamedTuple

from .link import Link

RANGE_ALIGNMENT_BYTES = 4096  # two readers never write to the same page
MIN_RANGE_BYTES = 256 * 1024  # below this a request costs more than sharing gains, …
MIN_RANGE_S = (
    2e-3  # … or below what the link gives in this while: a request costs 0.3 to 0.6 ms of a core here
)
USUAL_RANGE_BYTES = 4 * 1024 * 1024  # at least, unless somebody waits or the end is near
WORTH = 16  # a range takes so many times as long as its first byte
FIRST_CONNECTIONS = 8  # enough for 200 MB/s from anywhere; more only where more turn out to be faster
WIDER = 2
MIN_GAIN = 1.3  # what twice the connections must bring, or the store, the link or this machine is the limit
MAX_WAIT_SHARE = 0.1  # of the connections' time, waiting for memory, or they are not fed
MIN_LEFT_S = 0.5  # of the load: with less left, finding out costs as much as it brings


class Budget(NamedTuple):
    """What must not be exceeded."""

    range_bytes: int  # by a range
    connections: int
    staging_bytes: int


class Position(NamedTuple):
    """Where the plan stands when a range is to be cut."""

    awaited_bytes: int | None  # that somebody waits for, and so all connections share; None: nobody does
    left_bytes: int  # of all parts, not asked for yet
    is_staged: bool = True  # else it is read straight to where it will stay


def range_bytes(position: Position, link: Link, width: int, budget: Budget) -> int:
    """What the next range should take, at least 1: of this part, or of more where that is small."""
    wanted = max(USUAL_RANGE_BYTES, int(WORTH * link.first_byte_s * link.connection_bytes_per_s))
    least = int(MIN_RANGE_S * width * link.connection_bytes_per_s)
    if position.is_staged:
        # Ranges on their way may fill half of the staging; the other half is for what is being decoded.
        share = budget.staging_bytes // (2 * width) or wanted
        wanted, least = min(wanted, share), min(least, share)
    even = -(-position.left_bytes // width)
    if position.awaited_bytes is not None:
        even = min(even, -(-position.awaited_bytes // width))
    return max(1, min(budget.range_bytes, max(MIN_RANGE_BYTES, least, min(wanted, even))))


def cut(left_bytes: int, most_bytes: int) -> int:
    """The next of as few equal ranges, of whole pages, as `most_bytes` allows; what is left when that is less."""
    count = max(1, -(-left_bytes // most_bytes))
    even_bytes = -(-left_bytes // count)
    if most_bytes >= RANGE_ALIGNMENT_BYTES:
        even_bytes = min(most_bytes, -(-even_bytes // RANGE_ALIGNMENT_BYTES) * RANGE_ALIGNMENT_BYTES)
    return min(even_bytes, left_bytes)


class Width(NamedTuple):
    """How many connections read at the same time, and what is known about other numbers."""

    connections: int
    narrower: int = 0  # the last number that was tried, and its rate; 0: none was
    narrower_bytes_per_s: float = 0.0
    is_settled: bool = False


def first_width(budget: Budget) -> Width:
    connections = min(FIRST_CONNECTIONS, budget.connections)
    return Width(connections, is_settled=connections == budget.connections)


def widen(width: Width, rate_bytes_per_s: float, left_bytes: int, budget: Budget, *, is_fed: bool) -> Width:
    """What to try next, after `width` gave this rate over a while: more as long as that pays, else the last but one.

    Unless `is_fed`, ranges waited for memory: what follows the fetching is the limit now, and nothing is tried.
    """
    if width.is_settled:
        return width
    if rate_bytes_per_s < MIN_GAIN * width.narrower_bytes_per_s:
        return Width(width.narrower, is_settled=True)
    if not is_fed:
        return width
    wider = min(WIDER * width.connections, budget.connections)
    if wider == width.connections or left_bytes < MIN_LEFT_S * rate_bytes_per_s:
        return Width(width.connections, is_settled=True)
    return Width(wider, width.connections, rate_bytes_per_s)
