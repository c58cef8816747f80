"""Holding bytes back so that they leave at a steady rate, over all connections that share a pacer."""

from __future__ import annotations

import threading
import time

SLICE_BYTES = 128 * 1024  # what is sent between two waits
MAX_CREDIT_S = 0.005  # what a sender that woke up late may catch up on; a longer pause is lost


class Pacer:
    """Gives out sending time, one slice behind another, on a clock that all its callers share."""

    def __init__(self, rate_mb_s: float) -> None:
        """`rate_mb_s` is in 10**6 bytes a second."""
        self._bytes_per_s = rate_mb_s * 1e6
        self._free_at_s = 0.0
        self._lock = threading.Lock()

    def wait(self, num_bytes: int) -> None:
        """Return when these bytes may have crossed a link of this rate."""
        with self._lock:
            start_s = max(self._free_at_s, time.monotonic() - MAX_CREDIT_S)
            self._free_at_s = start_s + num_bytes / self._bytes_per_s
            due_s = self._free_at_s
        delay_s = due_s - time.monotonic()
        if delay_s > 0:
            time.sleep(delay_s)
