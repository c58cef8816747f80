"""Admission control: the refusal of requests beyond the bounds, and the time to retry.

The whole queue is bounded; each named tenant has a smaller bound, and so has all batch work
together, so that neither can exclude the others. Free places count as room in the queue. And if
waiting times are bounded, requests that would wait longer are refused. This module knows only
numbers of requests and steps; the caller serialises access.

A request's wait for a place has an upper bound: a number of steps times the duration of one. Places
may become free sooner, because a sequence may end before its maximum of tokens. The bound ignores
preemption for lack of blocks, and tenants.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable

from ..errors import CapacityError
from ..step.requests import Priority
from .options import EngineOptions

# For the estimate of when a place becomes free.
NUM_RECENT_ENDS = 16
MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 1.0, 120.0


class Capacity:
    """The bounds of one engine."""

    def __init__(
        self,
        options: EngineOptions,
        *,
        steps_until_free: Callable[[], int | None] = lambda: None,
        num_waiting: Callable[[], int] = lambda: 0,
    ) -> None:
        """`steps_until_free` returns an upper bound of the steps until a place is free after all
        waiting requests; None: unknown. `num_waiting` returns their number.
        """
        self._options = options
        self._num_waiting = num_waiting
        self._steps_until_free = steps_until_free
        self.recent_ends_s: deque[float] = deque(maxlen=NUM_RECENT_ENDS)
        self.step_times = StepTimes()
        self._step_began_s: float | None = None

    def note_arrival(self) -> None:
        """Record an arrival at an idle engine: the time since the last end is then meaningless as
        an interval.
        """
        if self.recent_ends_s:
            idle_s = time.monotonic() - self.recent_ends_s[-1]
            self.recent_ends_s = deque(
                (end_s + idle_s for end_s in self.recent_ends_s), maxlen=NUM_RECENT_ENDS
            )

    def note_step(self, *, follows: bool) -> None:
        """Record the beginning of a step. If it follows the previous one without a pause, that
        one's duration is known, including the work between them.
        """
        now_s = time.monotonic()
        if follows and self._step_began_s is not None:
            self.step_times.add(now_s - self._step_began_s)
        self._step_began_s = now_s

    def note_end(self) -> None:
        self.recent_ends_s.append(time.monotonic())

    def require_room(
        self,
        num_wanted: int,
        *,
        num_running: int,
        num_waiting: int,
        num_of_tenant: int | None,
        num_batch: int | None,
    ) -> None:
        """Raise CapacityError unless `num_wanted` more sequences fit.

        `num_of_tenant` is the number of waiting sequences of a named tenant, `num_batch` that of
        batch work; None: not applicable.
        """
        options = self._options
        num_taken = num_running + num_waiting
        if num_taken + num_wanted > options.max_queued + options.max_running:
            raise self._too_many(
                f"{num_taken} requests are running or waiting, which is the limit of this instance",
                hint="Try again later, or run more instances.",
            )
        num_places = max(0, options.max_running - num_running)
        if (
            num_of_tenant is not None
            and num_of_tenant + num_wanted > options.max_queued_of_tenant + num_places
        ):
            raise self._too_many(
                f"{num_of_tenant} requests of this tenant are waiting, which is the limit of a tenant",
                hint="Try again when some of them have ended.",
            )
        if num_batch is not None and num_batch + num_wanted > options.max_queued_batch + num_places:
            raise self._too_many(
                f"{num_batch} requests with the priority {Priority.BATCH} are waiting, which is the limit",
                hint="Try again later.",
            )

    def require_soon(self, num_steps: int) -> None:
        """Raise CapacityError if that many steps take longer than the maximum wait. While the
        duration of a step is unknown, no request is refused.
        """
        max_wait_s, wait_s = self._options.max_wait_s, self._time_of(num_steps)
        if max_wait_s is not None and wait_s is not None and wait_s > max_wait_s:
            raise CapacityError(
                f"a place may only be free in {wait_s:.1f} s, longer than the maximum wait of {max_wait_s:g} s",
                retry_after_s=_within_bounds(wait_s),
                hint="Try again later, or run more instances.",
            )

    @property
    def retry_after_s(self) -> float:
        """The bounded estimate of when a place is free after all waiting requests: from the
        intervals between the latest ends, one for each of them, but no later than the end of all
        earlier requests.
        """
        ends_s = self.recent_ends_s
        between_ends_s = (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1) if len(ends_s) > 1 else None
        if between_ends_s is not None:
            between_ends_s *= max(1, self._num_waiting())
        num_steps = self._steps_until_free()
        at_most_s = None if num_steps is None else self._time_of(num_steps)
        return _within_bounds(min((s for s in (between_ends_s, at_most_s) if s is not None), default=0.0))

    def _time_of(self, num_steps: int) -> float | None:
        step_s = self.step_times.step_s
        return None if step_s is None else num_steps * step_s

    def _too_many(self, message: str, *, hint: str) -> CapacityError:
        return CapacityError(message, retry_after_s=self.retry_after_s, hint=hint)


def _within_bounds(seconds: float) -> float:
    return min(max(seconds, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)


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
        if len(self._means_s) < MIN_MEANS:
            return None
        # The median. The standard library's comes with fractions, for which a start would wait.
        ordered = sorted(self._means_s)
        middle = len(ordered) // 2
        return (ordered[middle] + ordered[-1 - middle]) / 2
