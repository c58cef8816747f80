"""The machine's load, and the bounds that scale with it.

A bound on waiting exists to end a hang, so it must never end a test that the machine merely computes slowly. Bounds are
written for a quiet machine and stretched by how many tasks share a core.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

MAX_SLOWDOWN = 20.0  # a hang still ends, on any machine
WATCH_STEP_S = 0.01
MIN_PATIENCE = 4.0  # load rises later than bounds are made, and is averaged over a minute


def slowdown() -> float:
    """How many times longer computing takes than on a quiet machine: tasks a core, over the last minutes."""
    return min(MAX_SLOWDOWN, max(1.0, max(os.getloadavg()[:2]) / (os.cpu_count() or 1)))


def patience_s(quiet_s: float) -> float:
    """How long to wait for something that takes less than `quiet_s` on a quiet machine."""
    return quiet_s * max(MIN_PATIENCE, 2 * slowdown())


@contextmanager
def longest_standstill() -> Iterator[list[float]]:
    """The longest time in seconds, in a list of one, that a thread of this process was late in waking up: the machine
    stood still, or another thread kept Python's lock. Final once the context ends.
    """
    longest_s, ended = [0.0], threading.Event()

    def watch() -> None:
        before_s, is_over = time.monotonic(), False
        while not is_over:
            is_over = ended.wait(WATCH_STEP_S)
            now_s = time.monotonic()
            longest_s[0], before_s = max(longest_s[0], now_s - before_s - WATCH_STEP_S), now_s

    thread = threading.Thread(target=watch, name="standstill")
    thread.start()
    try:
        yield longest_s
    finally:
        ended.set()
        thread.join()
