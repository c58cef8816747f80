"""The way of a handler's values from its own thread or loop to the event loop of whoever asked for them.

At most `CAPACITY` values are on their way: a handler that yields faster than its client reads waits. One
producer and one consumer; when the consumer leaves, the producer's next `put` raises `OutletClosedError`. It
does not look at the values.
"""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import CancelledError, Future
from typing import Any, Self

from .lifetime import calling_on_loop

CAPACITY = 8


class OutletClosedError(Exception):
    """Nobody takes values any more."""


class _End:
    """What stands behind the last value."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Outlet:
    """Made by the consumer, on its event loop. `put`, `put_async`, `finish` and `end` are the producer's, from any
    thread.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._room = asyncio.Semaphore(CAPACITY)
        self._arrived = asyncio.Event()
        self._values: deque[Any] = deque()  # only touched on the consumer's loop
        self._closed = False
        self.is_stream = (
            False  # the producer yields; known by the first value, or the end where there is none
        )

    def put(self, value: Any) -> None:
        """Block until there is room, and hand the value over. Raises `OutletClosedError` when nobody takes
        it.
        """
        try:
            self._send(value).result()
        except (CancelledError, RuntimeError):  # the consumer's loop is ending, or has ended
            raise OutletClosedError from None

    async def put_async(self, value: Any) -> None:
        """As `put`, from another loop than the consumer's."""
        await asyncio.wrap_future(self._send(value))

    def end(self, error: BaseException | None = None) -> None:
        """No value will follow; `error` is raised to the consumer behind the last one. Never waits.

        Without an error the values, even none, are a stream: a single value ends with `finish`.
        """
        self.is_stream = self.is_stream or error is None
        calling_on_loop(self._loop, self._append)(_End(error))

    def finish(self, value: Any) -> None:
        """The one value there is, and its end: once round the consumer's loop instead of twice. Never waits; nobody may
        be there to take it.
        """
        calling_on_loop(self._loop, self._append)(value, _End(None))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        """The next value; behind the last one, the error that the producer ended with."""
        while not self._values:
            self._arrived.clear()
            await self._arrived.wait()
        value = self._values.popleft()
        if isinstance(value, _End):
            raise value.error or StopAsyncIteration()
        self._room.release()
        return value

    def close(self) -> None:
        """Take no more, and wake a producer that waits for room. The consumer's; idempotent."""
        self._closed = True
        self._room.release()

    def _send(self, value: Any) -> Future[None]:
        if self._closed:
            raise OutletClosedError
        handover = self._hand_over(value)
        try:
            return asyncio.run_coroutine_threadsafe(handover, self._loop)
        except RuntimeError:
            handover.close()
            raise

    async def _hand_over(self, value: Any) -> None:
        self.is_stream = True
        await self._room.acquire()
        if self._closed:
            raise OutletClosedError
        self._append(value)

    def _append(self, *values: Any) -> None:
        self._values.extend(values)
        self._arrived.set()
