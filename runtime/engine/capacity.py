"""Who is refused because there is too much to do, and when they may come back.

The queue as a whole has a bound; each tenant that names itself has a smaller one, and so has all batch work together,
so that neither keeps the others out. Places that are free count as room in the queue. Nothing is known here of who
waits, but how many; the caller serialises access.
"""

from __future__ import annotations

import time
from collections import deque

from ..errors import CapacityError
from .options import EngineOptions
from .requests import Priority

NUM_RECENT_ENDS = 16  # for the estimate of when a place becomes free
MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 1.0, 30.0


class Capacity:
    """The bounds of one engine."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._recent_ends_s: deque[float] = deque(maxlen=NUM_RECENT_ENDS)

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

    @property
    def retry_after_s(self) -> float:
        """When a place becomes free, by the time between the latest ends, within bounds."""
        ends_s = self._recent_ends_s
        between_ends_s = (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1) if len(ends_s) > 1 else 0.0
        return min(max(between_ends_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)

    def _too_many(self, message: str, *, hint: str) -> CapacityError:
        return CapacityError(message, retry_after_s=self.retry_after_s, hint=hint)
