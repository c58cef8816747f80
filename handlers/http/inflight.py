"""The requests that are being worked on, so that a shutdown can wait for them, and end them when it can wait
no longer.

Ending a request is a timeout that comes early: inside it, the code sees `asyncio.CancelledError` at its next
await, exactly as when its client goes away, and `Work.ended_by` tells the two apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ...loader.errors import TeneralError
from ...runtime.errors import CapacityError, DrainingError
from .errors import SERVER_ERROR, ApiError

CUT_GRACE_S = 0.5  # for the requests that were ended to tell their clients


class Work:
    """One request being worked on."""

    def __init__(self, scope: asyncio.Timeout) -> None:
        self._scope = scope
        self._reason: TeneralError | None = None

    @property
    def ended_by(self) -> TeneralError | None:
        """Why it was ended from here; None while it was not: a cancellation is the client's then."""
        return self._reason if self._scope.expired() else None

    @property
    def deadline_s(self) -> float | None:
        """On the event loop's clock; None while there is none."""
        return self._scope.when()

    def limit(self, seconds: float) -> None:
        """Give the request so much time from now. Does nothing once it was ended."""
        if self._reason is None:
            reason = ApiError(
                504,
                f"the request took longer than the {seconds:g} s that this server allows",
                kind=SERVER_ERROR,
                code="request_timeout",
            )
            self._end_at(asyncio.get_running_loop().time() + seconds, reason)

    def end(self, reason: TeneralError) -> None:
        """End it now."""
        if not self._scope.expired():
            self._end_at(asyncio.get_running_loop().time(), reason)

    def _end_at(self, when_s: float, reason: TeneralError) -> None:
        self._reason = reason
        self._scope.reschedule(when_s)


class InFlight:
    """All works of one server. Lives in the event loop's thread only."""

    def __init__(self, max_works: int) -> None:
        self._max_works = max_works
        self._works: set[Work] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    def __len__(self) -> int:
        return len(self._works)

    @property
    def works(self) -> frozenset[Work]:
        return frozenset(self._works)

    @asynccontextmanager
    async def work(self) -> AsyncIterator[Work]:
        """Do one request's work in here. Raises `DrainingError` or `CapacityError` before anything was begun,
        and whatever ended the work.
        """
        if self.draining:
            raise DrainingError("this instance is shutting down")
        if len(self._works) >= self._max_works:
            raise CapacityError(
                f"{self._max_works} requests are being worked on, which is as many as are allowed"
            )
        work: Work | None = None
        try:
            async with asyncio.timeout(None) as scope:
                work = Work(scope)
                self._works.add(work)
                self._idle.clear()
                yield work
        except TimeoutError:
            if work is not None and work.ended_by is not None:
                raise work.ended_by from None
            raise
        finally:
            if work is not None:
                self._works.discard(work)
            if not self._works:
                self._idle.set()

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new and wait for what runs; end what still runs after `timeout_s`. True when nothing
        was ended.
        """
        self.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
            return True
        except TimeoutError:
            pass
        for work in self.works:
            work.end(DrainingError(f"the instance shut down {timeout_s:g} s after it was told to"))
        try:
            async with asyncio.timeout(CUT_GRACE_S):
                await self._idle.wait()
        except TimeoutError:
            pass  # their clients take nothing; the connections are closed under them
        return False
