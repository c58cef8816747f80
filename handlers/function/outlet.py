"""The channel of a handler's values from its own thread or loop to the consumer's event loop.

At most `CAPACITY` values are queued: a handler that yields faster than its client reads waits. One
producer and one consumer; when the consumer leaves, the producer's next `put` raises
`OutletClosedError`. The values are opaque.
"""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import CancelledError, Future
from typing import Any, Self

from .lifetime import calling_on_loop

CAPACITY = 8


class OutletClosedError(Exception):
    """The consumer has left."""


class _End:
    """The marker after the last value."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Outlet:
    """A channel. Made by the consumer, on its event loop. The producer calls `put`, `put_async`,
    `finish` and `end`, from any thread.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._room = asyncio.Semaphore(CAPACITY)
        self._arrived = asyncio.Event()
        self._values: deque[Any] = deque()  # only used on the consumer's loop
        self._closed = False
        self.is_stream = (
            # The producer yields; known with the first value, or the end without one.
            False
        )

    def put(self, value: Any) -> None:
        """Block until there is room, and pass the value. Raises `OutletClosedError` if the consumer
        has left.
        """
        try:
            self._send(value).result()
        except (CancelledError, RuntimeError):  # the consumer's loop is ending, or has ended
            raise OutletClosedError from None

    async def put_async(self, value: Any) -> None:
        """The async form of `put`, on another loop than the consumer's."""
        await asyncio.wrap_future(self._send(value))

    def end(self, error: BaseException | None = None) -> None:
        """End the values; `error` is raised in the consumer after the last one. Never waits.

        Without an error the values, even none, are a stream: a single value ends with `finish`.
        """
        self.is_stream = self.is_stream or error is None
        calling_on_loop(self._loop, self._append)(_End(error))

    def finish(self, value: Any) -> None:
        """Pass the only value and the end, in one pass of the consumer's loop instead of two. Never
        waits; the consumer may have left.
        """
        calling_on_loop(self._loop, self._append)(value, _End(None))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        """The next value; after the last one, the producer's error."""
        while not self._values:
            self._arrived.clear()
            await self._arrived.wait()
        value = self._values.popleft()
        if isinstance(value, _End):
            raise value.error or StopAsyncIteration()
        self._room.release()
        return value

    def close(self) -> None:
        """Stop consuming, and wake a producer that waits for room. For the consumer; idempotent."""
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
