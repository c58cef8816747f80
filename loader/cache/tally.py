"""What a part cache has done so far: counters, and the immutable value that others read."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """Sizes in bytes. `troubles` are sentences for people: why the cache is not, or no longer, used as it was meant."""

    num_hits: int = 0  # ranges that were read from the disk
    num_misses: int = 0  # ranges that had to come from the store
    read_bytes: int = 0
    num_written: int = 0  # parts
    written_bytes: int = 0
    num_dropped: int = 0  # parts that were not written, because the disk was full, or slower than the load
    num_rejected: int = 0  # parts whose bytes on the disk were wrong
    num_evicted: int = 0  # parts that this process removed to make room
    troubles: tuple[str, ...] = ()


class Tally:
    """Adds up. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._statistics = CacheStatistics()

    def add(self, **amounts: int) -> None:
        """Add to counters, by their names in `CacheStatistics`."""
        with self._lock:
            sums = {name: getattr(self._statistics, name) + amount for name, amount in amounts.items()}
            self._statistics = replace(self._statistics, **sums)

    def add_trouble(self, sentence: str) -> None:
        """Once each."""
        with self._lock:
            if sentence not in self._statistics.troubles:
                self._statistics = replace(self._statistics, troubles=(*self._statistics.troubles, sentence))

    def statistics(self) -> CacheStatistics:
        return self._statistics
