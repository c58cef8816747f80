"""Who is refused because there is too much to do, and when they may come back.

The queue as a whole has a bound; each tenant that names itself has a smaller one, and so has all batch work together,
so that neither keeps the others out. Places that are free count as room in the queue. And where there is a bound on how
long anybody waits, who would wait longer is refused. Nothing is known here of who waits, but how many, and for how many
steps; the caller serialises access.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from ..errors import CapacityError
from ..step.requests import Priority
from .expected_wait import StepTimes
from .options import EngineOptions

NUM_RECENT_ENDS = 16  # for the estimate of when a place becomes free
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
        """`steps_until_free` tells after how many steps a place is free behind all that wait, at most; None: that is
        not known. `num_waiting` tells how many wait.
        """
        self._options = options
        self._num_waiting = num_waiting
        self._steps_until_free = steps_until_free
        self._recent_ends_s: deque[float] = deque(maxlen=NUM_RECENT_ENDS)
        self._step_times = StepTimes()
        self._step_began_s: float | None = None

    def note_arrival(self) -> None:
        """Somebody comes, and nobody was there: the time since the latest end says nothing of how often one comes."""
        if self._recent_ends_s:
            idle_s = time.monotonic() - self._recent_ends_s[-1]
            self._recent_ends_s = deque(
                (end_s + idle_s for end_s in self._recent_ends_s), maxlen=NUM_RECENT_ENDS
            )

    def note_step(self, *, follows: bool) -> None:
        """A step begins. If it follows the one before without a pause, it is known what that one took, with all that
        had to be done between them.
        """
        now_s = time.monotonic()
        if follows and self._step_began_s is not None:
            self._step_times.add(now_s - self._step_began_s)
        self._step_began_s = now_s

    def note_end(self) -> None:
        self._recent_ends_s.append(time.monotonic())

    def require_room(
        self,
        num_wanted: int,
        *,
        num_running: int,
        num_waiting: int,
        num_of_tenant: int | None,
        num_batch: int | None,
    ) -> None:
        """Raises CapacityError unless so many more sequences can be taken. `num_of_tenant` are those that wait of a
        tenant that names itself, and `num_batch` those that wait of batch work, if these are meant.
        """
        options = self._options
        num_taken = num_running + num_waiting
        if num_taken + num_wanted > options.max_queued + options.max_running:
            raise self._too_many(
                f"{num_taken} requests are running or waiting: that is all that this instance takes",
                hint="Try again later, or run more instances.",
            )
        num_places = max(0, options.max_running - num_running)
        if (
            num_of_tenant is not None
            and num_of_tenant + num_wanted > options.max_queued_of_tenant + num_places
        ):
            raise self._too_many(
                f"{num_of_tenant} requests of this tenant are waiting: that is all that one may have",
                hint="Try again when some of them have ended.",
            )
        if num_batch is not None and num_batch + num_wanted > options.max_queued_batch + num_places:
            raise self._too_many(
                f"{num_batch} requests with the priority {Priority.BATCH} are waiting: that is all that there may be",
                hint="Try again later.",
            )

    def require_soon(self, num_steps: int) -> None:
        """Raises CapacityError where that many steps take longer than anybody is to wait. While it is not known how
        long a step takes, nobody is refused.
        """
        max_wait_s, wait_s = self._options.max_wait_s, self._time_of(num_steps)
        if max_wait_s is not None and wait_s is not None and wait_s > max_wait_s:
            raise CapacityError(
                f"a place is sure to be free only in {wait_s:.1f} s, and nobody is to wait more than {max_wait_s:g} s",
                retry_after_s=_within_bounds(wait_s),
                hint="Try again later, or run more instances.",
            )

    @property
    def retry_after_s(self) -> float:
        """When a place is free behind all that wait, within bounds: by the time between the latest ends, one for each
        of them, but no later than when all that run and wait before must have ended.
        """
        ends_s = self._recent_ends_s
        between_ends_s = (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1) if len(ends_s) > 1 else None
        if between_ends_s is not None:
            between_ends_s *= max(1, self._num_waiting())
        num_steps = self._steps_until_free()
        at_most_s = None if num_steps is None else self._time_of(num_steps)
        return _within_bounds(min((s for s in (between_ends_s, at_most_s) if s is not None), default=0.0))

    def _time_of(self, num_steps: int) -> float | None:
        step_s = self._step_times.step_s
        return None if step_s is None else num_steps * step_s

    def _too_many(self, message: str, *, hint: str) -> CapacityError:
        return CapacityError(message, retry_after_s=self.retry_after_s, hint=hint)


def _within_bounds(seconds: float) -> float:
    return min(max(seconds, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
