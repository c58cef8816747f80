"""How long who comes now would have to wait for a place, by what is known: so many steps, and how long one takes.

A sequence may end before it has all the tokens that it may have, so this is a bound from above: places may become free
sooner. Nothing is known here of who must begin again for want of blocks, nor of tenants and locks.
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
    """The most steps until whoever stands behind `before` in the queue gets one of the places; 0: there is one at once.

    `running` has the most steps that each one with a place will still take, `before` those that each one ahead in the
    queue will take from when it gets its own. Places are taken in the order of the queue.
    """
    free_after = [*running, *[0] * (num_places - len(running))]
    heapq.heapify(free_after)
    for num_steps in before:
        heapq.heapreplace(free_after, free_after[0] + num_steps)
    return free_after[0]


class StepTimes:
    """How long a step takes lately: the median of the means of steps that followed one another. So the slow steps that
    come again and again count, as those with a prompt do, and a single one in which the process was stopped does not.
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
        """None: too few were measured."""
        return statistics.median(self._means_s) if len(self._means_s) >= MIN_MEANS else None
