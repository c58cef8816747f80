"""Requests in flight: their places, their deadlines, and the drain.

The header `Deadline-Ms` limits a request to that many milliseconds from the arrival of its head.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager

from aiohttp import web
from msgspec import Struct

from ...loader.errors import TeneralError
from ...runtime.errors import CapacityError, DrainingError
from .errors import SERVER_ERROR, ApiError

CUT_GRACE_S = 0.5  # for ended requests to notify their clients


class RequestWork:
    """One request in progress."""

    def __init__(self, scope: asyncio.Timeout) -> None:
        self.ended = asyncio.Event()
        self.has_place = False  # its body has arrived
        self._scope = scope
        self._reason: TeneralError | None = None

    @property
    def ended_by(self) -> TeneralError | None:
        """The reason if the server ended it; None otherwise: a cancellation is then the client's."""
        return self._reason if self._scope.expired() else None

    @property
    def deadline_s(self) -> float | None:
        """On the event loop's clock; None without one."""
        return self._scope.when()

    def limit(self, seconds: float, reason: TeneralError | None = None) -> None:
        """Limit the request to that much time from now, unless it has less already. `reason` is the
        error at its end; by default, the server's own time limit.
        """
        when_s = asyncio.get_running_loop().time() + seconds
        if self.deadline_s is None or when_s < self.deadline_s:
            self._end_at(when_s, reason or _took_too_long(seconds))

    def end(self, reason: TeneralError) -> None:
        """End it now."""
        if not self._scope.expired():
            self._end_at(asyncio.get_running_loop().time(), reason)

    def _end_at(self, when_s: float, reason: TeneralError) -> None:
        self._reason = reason
        self._scope.reschedule(when_s)


def _took_too_long(seconds: float) -> ApiError:
    return ApiError(
        504,
        f"the request took longer than the {seconds:g} s that this server allows",
        kind=SERVER_ERROR,
        code="request_timeout",
    )


class InFlight:
    """The requests of one server. For the event loop's thread only. `retry_after_s` returns the
    time for refused clients to retry.
    """

    def __init__(self, max_works: int, retry_after_s: Callable[[], float] = lambda: 1.0) -> None:
        self._max_works = max_works
        self._retry_after_s = retry_after_s
        self._works: set[RequestWork] = set()
        self._num_places_taken = 0
        self.draining = False

    def __len__(self) -> int:
        """All requests, including those with incomplete bodies."""
        return len(self._works)

    @property
    def num_places_taken(self) -> int:
        return self._num_places_taken

    def take_place(self, work: RequestWork) -> None:
        """Record that the request's body has arrived. Raises `CapacityError` without a free place.
        Idempotent.
        """
        if not work.has_place:
            self._require_place()
            work.has_place = True
            self._num_places_taken += 1

    @property
    def works(self) -> frozenset[RequestWork]:
        return frozenset(self._works)

    @asynccontextmanager
    async def work(self) -> AsyncIterator[RequestWork]:
        """A context for one request's work, once it has taken a place. Raises `DrainingError` or
        `CapacityError` before anything is started, and the error that ended the work.
        """
        if self.draining:
            raise DrainingError("this instance is shutting down")
        self._require_place()
        work: RequestWork | None = None
        try:
            async with asyncio.timeout(None) as scope:
                work = RequestWork(scope)
                self._works.add(work)
                yield work
        except TimeoutError:
            if work is not None and work.ended_by is not None:
                raise work.ended_by from None
            raise
        finally:
            if work is not None:
                self._works.discard(work)
                self._num_places_taken -= work.has_place
                work.ended.set()

    def _require_place(self) -> None:
        if self._num_places_taken >= self._max_works:
            raise CapacityError(
                f"{self._max_works} requests are in progress, which is the limit",
                retry_after_s=self._retry_after_s(),
            )

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for running ones; end those still running after `timeout_s`.
        Returns True if none was ended.
        """
        self.draining = True
        reason = DrainingError(f"the instance shut down {timeout_s:g} s after it was asked to")
        return await finish(self.works, timeout_s, reason)


async def finish(works: Collection[RequestWork], timeout_s: float, reason: TeneralError) -> bool:
    """Wait for these requests; end those still running after `timeout_s`. Returns True if none was
    ended.
    """
    if await all_ended(works, timeout_s):
        return True
    for work in works:
        work.end(reason)
    # Otherwise their clients do not read; the drain closes the connections.
    await all_ended(works, CUT_GRACE_S)
    return False


async def all_ended(works: Collection[RequestWork], timeout_s: float) -> bool:
    """Wait for these requests; False after `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            for work in works:
                await work.ended.wait()
        return True
    except TimeoutError:
        return False


HEADER = "Deadline-Ms"
MAX_DEADLINE_MS = 86_400_000  # a day, as for --request-timeout-s
_NUMBER = re.compile(r"[0-9]{1,8}")


class Deadline(Struct, frozen=True):
    given_ms: int
    moment_s: float  # on `time.monotonic()`'s clock

    def remaining_s(self) -> float:
        """Negative once it has passed."""
        return self.moment_s - time.monotonic()

    def error(self) -> ApiError:
        """The answer to a caller that may be gone already."""
        return ApiError(
            504,
            f"the deadline of {self.given_ms} ms that the request's {HEADER} gives has passed",
            kind=SERVER_ERROR,
            code="deadline_exceeded",
        )


def deadline_of(request: web.BaseRequest, arrived_s: float) -> Deadline | None:
    """The request's own deadline; None without one. 400 for an invalid one, 504 for one that has
    passed.
    """
    given = request.headers.getall(HEADER, [])
    if not given:
        return None
    if len(given) > 1 or not _NUMBER.fullmatch(given[0]) or int(given[0]) > MAX_DEADLINE_MS:
        raise ApiError(
            400,
            f"{HEADER} must be sent once, as a whole number of milliseconds from 0 to {MAX_DEADLINE_MS}",
            param=HEADER,
        )
    deadline = Deadline(int(given[0]), arrived_s + int(given[0]) / 1000)
    if deadline.remaining_s() <= 0:
        raise deadline.error()
    return deadline
