"""What has been seen of the way to the store: its latency, and what one connection gets.

A `LinkMeter` is fed with every range that was read; the `Link` that it gives is a value, which `sizing.py` decides by.
It does not know what was read, nor what is decided.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

WINDOW_READS = 48  # what is older says little about the link as it is now
MIN_READS = 4
MIN_SPREAD = 0.1  # of sizes around their mean; ranges that are all of one size do not tell latency from rate


class Link(NamedTuple):
    """As the last reads showed it; 0 is unknown."""

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

        A range takes the time to its first byte and then its size at the connection's rate: the line through
        sizes and times, by least squares, tells the two apart where sizes differ enough. The latency can be no
        longer than the shortest read took.
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
