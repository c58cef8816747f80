"""What has been seen of the way to the store: its rate, its latency, and what one connection gets.

A `LinkMeter` is fed with every range that was read; the `Link` that it gives is a value, which `sizing.py` decides by.
It does not know what was read, nor what is decided.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

WINDOW_READS = 48  # what is older says little about the link as it is now
MIN_READS = 4
MIN_SPREAD = 0.1  # of sizes around their mean; ranges that are all of one size do not tell latency from rate


@dataclass(frozen=True, slots=True)
class Link:
    """Bytes a second, and seconds; 0 is unknown. Rates count 10**6 bytes as one MB nowhere: they are bytes."""

    rate_bytes_per_s: float = 0.0  # of all connections together
    first_byte_s: float = 0.0  # from a request to its answer's first byte
    connection_bytes_per_s: float = 0.0  # of one connection, once its bytes flow

    @property
    def is_known(self) -> bool:
        return self.connection_bytes_per_s > 0


class LinkMeter:
    """Sums up the last reads. Not thread-safe: the work queue's lock guards it."""

    def __init__(self) -> None:
        self._reads: deque[tuple[int, float, float]] = deque(maxlen=WINDOW_READS)  # size, began, ended
        self._first_byte_s = 0.0

    def add(self, size_bytes: int, began_s: float, ended_s: float) -> None:
        """Count one range that arrived. The times are on `time.monotonic()`'s clock."""
        self._reads.append((size_bytes, began_s, max(ended_s, began_s + 1e-6)))

    def link(self) -> Link:
        """The link as the last reads show it.

        A range takes the time to its first byte and then its size at the connection's rate: the line through
        sizes and times, by least squares, tells the two apart where sizes differ enough. The latency can be no
        longer than the shortest read took.
        """
        reads = self._reads
        if len(reads) < MIN_READS:
            return Link()
        num = len(reads)
        times = [ended - began for _, began, ended in reads]
        mean_size = sum(size for size, _, _ in reads) / num
        mean_time = sum(times) / num
        variance = sum((size - mean_size) ** 2 for size, _, _ in reads) / num
        if variance > (MIN_SPREAD * mean_size) ** 2:
            shared = (
                sum(
                    (size - mean_size) * (time - mean_time)
                    for (size, _, _), time in zip(reads, times, strict=True)
                )
                / num
            )
            self._first_byte_s = mean_time - mean_size * shared / variance
        self._first_byte_s = max(0.0, min(self._first_byte_s, *times))
        span_s = max(ended for _, _, ended in reads) - min(began for _, began, _ in reads)
        return Link(
            rate_bytes_per_s=num * mean_size / span_s,
            first_byte_s=self._first_byte_s,
            connection_bytes_per_s=mean_size / max(mean_time - self._first_byte_s, 1e-6),
        )
