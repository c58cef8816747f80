"""When the part cache stands aside: it must never make a load slower than the store alone would.

Pure but for its locks: nothing here looks at a disk or a clock.
"""

from __future__ import annotations

import threading

PLACES = 4  # reads from the disk at the same time: enough for the queue of an SSD
WAIT_S = 0.1  # for a place, on a fast disk
FAST_BYTES_S = 100e6  # one reader's rate; a disk that gives less is no better than a network
FAST_GRACE_S = 0.05  # beyond that, for a thread that has to wait for its CPU
CRAWL_BYTES_S = 20e6  # one reader's rate; below it, a read is given up
CRAWL_GRACE_S = 0.25
WRITER_SHARE = 0.25  # of the cores that the load leaves idle: what writing beside it may take
MIN_IDLE_CORES = 0.1  # assumed at least, so that something is written even so
MAX_REST_S = 1.0


class ReadGate:
    """Few threads read from the disk at a time.

    On a fast disk the others wait for their turn, which comes in a moment. On a slow one they are sent to the store, so
    that disk and store bring parts side by side, and the load has at least the store's rate.
    """

    def __init__(self) -> None:
        self._places = threading.BoundedSemaphore(PLACES)
        self._slow = False

    def enter(self) -> bool:
        """Whether the caller may read from the disk now; it must `leave` then."""
        if self._places.acquire(blocking=False):
            return True
        return not self._slow and self._places.acquire(timeout=WAIT_S)

    def leave(self) -> None:
        """Give the place back."""
        self._places.release()

    def note(self, size_bytes: int, elapsed_s: float) -> None:
        """So much was read in that time. The latest such note says what the disk is like."""
        self._slow = elapsed_s > FAST_GRACE_S + size_bytes / FAST_BYTES_S


def is_crawling(size_bytes: int, elapsed_s: float) -> bool:
    """Whether a read of `size_bytes` that is not done after so long is not worth waiting for."""
    return elapsed_s > CRAWL_GRACE_S + size_bytes / CRAWL_BYTES_S


def rest_s(cpu_s: float, delay_s: float, elapsed_s: float, idle_cores: float) -> float:
    """How long a writer rests that used `cpu_s` of CPU time in `elapsed_s`, to keep to its share of the idle cores.

    `idle_cores` is what its own process leaves. Others' use of them shows in `delay_s`, for which the writer was
    ready to run and had to wait; then it takes less, by the square.
    """
    if cpu_s <= 0:
        return 0.0
    left = max(MIN_IDLE_CORES, idle_cores) * (cpu_s / (cpu_s + delay_s)) ** 2
    return min(MAX_REST_S, max(0.0, cpu_s / (WRITER_SHARE * left) - elapsed_s))
