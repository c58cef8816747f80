"""Going easy on a store that says it is busy: all threads of a source together, not each for itself.

One refusal among many good answers halves the requests that may be under way at a time (once for all that
were sent before it), and the number grows again with every round of successes. A second refusal before
anything succeeded, or a wish of the store, makes everybody wait, longer after each such round. Decides when;
knows no requests.
"""

from __future__ import annotations

import math
import threading
import time

FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 5.0
MAX_RETRY_AFTER_S = 20.0


class Throttle:
    """Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._under_way = 0
        self._usual = 0  # attempts that were under way when the store was first busy
        self._limit = math.inf
        self._not_before_s = 0.0  # on time.monotonic()'s clock
        self._reduced_s = -math.inf
        self._refusals = 0  # since the last success
        self._rounds = 0  # of requests that were refused since then
        self._closed = False

    @property
    def limit(self) -> float:
        """How many attempts may be under way at a time; infinite while the store was not busy."""
        return self._limit

    @property
    def is_pausing(self) -> bool:
        return time.monotonic() < self._not_before_s

    def enter(self) -> bool:
        """Wait for one's turn, without the GIL; False when closed. Whoever was let in must `leave`."""
        with self._changed:
            while not self._closed:
                pause_s = self._not_before_s - time.monotonic()
                if pause_s <= 0 and self._under_way < self._limit:
                    self._under_way += 1
                    return True
                self._changed.wait(pause_s if pause_s > 0 else None)
            return False

    def leave(self) -> None:
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()

    def succeeded(self) -> None:
        with self._changed:
            self._refusals = self._rounds = 0
            if self._limit < math.inf:
                self._limit += 1 / self._limit
                if self._limit >= self._usual:
                    self._limit = math.inf
                self._changed.notify_all()

    def refused(self, *, asked_s: float, wish_s: float | None) -> None:
        """The store was too busy for what was asked at `asked_s`, and wishes to be left alone for `wish_s`."""
        with self._changed:
            now_s = time.monotonic()
            self._refusals += 1
            if asked_s > self._reduced_s:
                self._rounds += 1
                self._usual = max(self._usual, self._under_way)
                self._limit = max(1, min(self._limit, self._under_way) // 2)
                self._reduced_s = now_s
            if self._refusals > 1 or wish_s is not None:
                self._not_before_s = max(self._not_before_s, now_s + pause_s(self._rounds, wish_s))

    def close(self) -> None:
        """Let everybody go."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def pause_s(failed: int, retry_after_s: float | None, chance: float | None = None) -> float:
    """How long to wait before the next attempt, after `failed` of them; `chance` in [0, 1) is for tests.

    Full jitter: many containers that started together must not come back together. The server's own wish is
    honoured within a bound, and not undercut.
    """
    if chance is None:
        import random  # only after a failure

        chance = random.uniform(0, 1)  # noqa: S311 - spreads pauses, keeps no secret
    pause = chance * min(MAX_PAUSE_S, FIRST_PAUSE_S * (1 << failed))
    return pause if retry_after_s is None else min(max(0.0, retry_after_s), MAX_RETRY_AFTER_S) + pause
