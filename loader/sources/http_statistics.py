"""What a web source has done so far, counted."""

from __future__ import annotations

import threading
from typing import NamedTuple


class HttpStatistics(NamedTuple):
    """Of one source, since it was opened. `wasted_bytes / received_bytes` tells what its care has cost."""

    requests: int = 0  # sent, those included that were retries, hedges or redirects
    retries: int = 0  # attempts after a failed one
    received_bytes: int = 0  # of bodies that were wanted, those that came twice included
    connections_opened: int = 0
    hedges: int = 0  # requests made because another one was behind
    hedges_won: int = 0  # … that were sooner
    resumed: int = 0  # answers that began in the middle of a range
    throttled: int = 0  # answers that said the store is busy
    wasted_bytes: int = 0  # of those received, which had come already


class Tally:
    """Thread-safe."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(HttpStatistics._fields, 0)
        self._lock = threading.Lock()

    def add(self, **counts: int) -> None:
        """Count so many more, by the names of `HttpStatistics`."""
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count

    def counts(self) -> HttpStatistics:
        with self._lock:
            return HttpStatistics(**self._counts)
