"""An upper bound of a new request's wait for a place: a number of steps, and the duration of one.

Places may become free sooner, because a sequence may end before its maximum of tokens. This module
ignores preemption for lack of blocks, tenants and locks.
"""

from __future__ import annotations

import heapq
import statistics
from collections import deque
from collections.abc import Collection, Iterable

STEPS_OF_A_MEAN = 16
NUM_MEANS = 5  # of the latest steps
MIN_MEANS = 3  # with fewer, a single slow step could decide


def steps_until_place(running: Collection[int], before: Iterable[int], num_places: int) -> int:
    """The maximum of steps until the request after `before` in the queue gets one of the places; 0:
    at once.

    `running` has the maximum of remaining steps of each running sequence, `before` the maximum of
    steps of each earlier one in the queue. Places are taken in the order of the queue.
    """
    free_after = [*running, *[0] * (num_places - len(running))]
    heapq.heapify(free_after)
    for num_steps in before:
        heapq.heapreplace(free_after, free_after[0] + num_steps)
    return free_after[0]


class StepTimes:
    """The recent duration of a step: the median of the means of consecutive steps. Slow steps that
    recur count, as those with a prompt do, but not a single one in which the process was suspended.
    """

    def __init__(self) -> None:
        self._means_s: deque[float] = deque(maxlen=NUM_MEANS)
        self._sum_s = 0.0
        self._num_summed = 0

    def add(self, took_s: float) -> None:
        self._sum_s += took_s
        self._num_summed += 1
        if self._num_summed == STEPS_OF_A_MEAN:
            self._means_s.append(self._sum_s / STEPS_OF_A_MEAN)
            self._sum_s, self._num_summed = 0.0, 0

    @property
    def step_s(self) -> float | None:
        """The duration; None: too few were measured."""
        return statistics.median(self._means_s) if len(self._means_s) >= MIN_MEANS else None
