"""How long a caller still waits, as it says itself: the header `Deadline-Ms`, in milliseconds from when the request's
head is here.

A duration, not a moment: clocks of two machines differ. What it limits is the whole request: the wait for its body, for
weights, for a place in the engine, and its work. Nothing is known here of how a request is ended.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from aiohttp import web

from .errors import SERVER_ERROR, ApiError

HEADER = "Deadline-Ms"
MAX_DEADLINE_MS = 86_400_000  # a day, as for --request-timeout-s
_NUMBER = re.compile(r"[0-9]{1,8}")


@dataclass(frozen=True, slots=True)
class Deadline:
    given_ms: int
    moment_s: float  # on `time.monotonic()`'s clock

    def remaining_s(self) -> float:
        """Below 0 when it has passed."""
        return self.moment_s - time.monotonic()

    def error(self) -> ApiError:
        """What a caller is told that may be gone already."""
        return ApiError(
            504,
            f"the deadline of {self.given_ms} ms that the request's {HEADER} gives has passed",
            kind=SERVER_ERROR,
            code="deadline_exceeded",
        )


def deadline_of(request: web.BaseRequest, arrived_s: float) -> Deadline | None:
    """The request's own; None where it gives none. 400 for one that cannot be meant, 504 for one that has passed."""
    given = request.headers.getall(HEADER, [])
    if not given:
        return None
    if len(given) > 1 or not _NUMBER.fullmatch(given[0]) or int(given[0]) > MAX_DEADLINE_MS:
        raise ApiError(
            400,
            f"{HEADER} must be given once, as a whole number of milliseconds from 0 to {MAX_DEADLINE_MS}",
            param=HEADER,
        )
    deadline = Deadline(int(given[0]), arrived_s + int(given[0]) / 1000)
    if deadline.remaining_s() <= 0:
        raise deadline.error()
    return deadline
