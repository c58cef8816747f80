"""The channel from threads to an event loop: items in order, with one wake-up of the loop for many.

Waking a loop goes through a socket, which costs a system call and a context switch; an engine step
ends with an event for each of its sequences. So the calls of all channels of one `LoopCalls` are
collected, and the loop is woken once for them.

A full channel has one of two answers: `post` drops the item, because the engine's thread must never
wait for a client; `put` waits for room, because a function that yields faster than its client reads
may. The items are opaque.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class ChannelClosedError(Exception):
    """The consumer has left."""


class LoopCalls:
    """Calls on one event loop, that of the first `bind`, from any thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._posted: deque[Callable[[], None]] = deque()
        self._woken = False

    def bind(self) -> asyncio.AbstractEventLoop:
        """The loop, on which this is called."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    def post(self, call: Callable[[], None]) -> None:
        """Have the loop make the call. Never blocks; does nothing after the loop was closed."""
        self._posted.append(call)
        if not self._woken and self._loop is not None:
            # Two threads may both come here: then the loop is woken twice, which is harmless. The
            # flag is cleared before the deque is emptied, so no call can be missed.
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                self._posted.clear()

    def _deliver(self) -> None:
        self._woken = False
        while self._posted:
            self._posted.popleft()()


class _End:
    """The marker after the last item."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class ThreadToLoopChannel(Generic[T]):
    """A channel. Made by its one consumer, on the event loop. Producers are on any thread; `put`,
    `put_async`, `finish` and `end` are for one producer.
    """

    def __init__(
        self,
        calls: LoopCalls | None = None,
        *,
        max_items: int | None = None,
        on_overflow: Callable[[], None] = lambda: None,
    ) -> None:
        """`max_items` None: unbounded. `on_overflow` is called, once and on the loop, when `post`
        drops an item. Channels may share `calls`.
        """
        self._calls = calls or LoopCalls()
        self._loop = self._calls.bind()
        self._max_items = max_items
        self._on_overflow = on_overflow
        self._overflowed = False
        self._items: deque[T | _End] = deque()  # only used on the loop
        self._arrived = asyncio.Event()
        self._room = None if max_items is None else asyncio.Semaphore(max_items)
        self._closed = False
        # The producer used `put`; known with the first item, or the end without one.
        self.is_stream = False

    # -- for producers ---------------------------------------------------------------------------

    def post(self, item: T) -> None:
        """Pass the item, or drop it if the channel is full, or its loop closed. Never blocks."""
        self._calls.post(lambda: self._append_or_drop(item))

    def put(self, item: T) -> None:
        """Block until there is room, and pass the item. Raises `ChannelClosedError` if the consumer
        has left.
        """
        try:
            self._send(item).result()
        except (CancelledError, RuntimeError):  # the consumer's loop is ending, or has ended
            raise ChannelClosedError from None

    async def put_async(self, item: T) -> None:
        """The async form of `put`, on another loop than the consumer's."""
        await asyncio.wrap_future(self._send(item))

    def end(self, error: BaseException | None = None) -> None:
        """End the items; `error` is raised in the consumer after the last one. Never waits.

        Without an error the items, even none, are a stream: a single one ends with `finish`.
        """
        self.is_stream = self.is_stream or error is None
        self._calls.post(lambda: self._append(_End(error)))

    def finish(self, item: T) -> None:
        """Pass the only item and the end, in one pass of the consumer's loop instead of two. Never
        waits; the consumer may have left.
        """
        self._calls.post(lambda: self._append(item, _End(None)))

    # -- for the consumer ------------------------------------------------------------------------

    async def take(self) -> list[T]:
        """Wait for items, and return all since the last call, at least one. Of a channel that has
        no end.
        """
        await self._wait()
        items, self._items = self._items, deque()
        return list(items)  # type: ignore[arg-type] # no end among them

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        """The next item; after the last one, the producer's error."""
        await self._wait()
        item = self._items.popleft()
        if isinstance(item, _End):
            raise item.error or StopAsyncIteration()
        if self._room is not None:
            self._room.release()
        return item

    def close(self) -> None:
        """Stop consuming, and wake a producer that waits for room. Idempotent."""
        self._closed = True
        if self._room is not None:
            self._room.release()

    async def _wait(self) -> None:
        while not self._items:
            self._arrived.clear()
            await self._arrived.wait()

    def _send(self, item: T) -> Future[None]:
        if self._closed:
            raise ChannelClosedError
        handover = self._hand_over(item)
        try:
            return asyncio.run_coroutine_threadsafe(handover, self._loop)
        except RuntimeError:
            handover.close()
            raise

    async def _hand_over(self, item: T) -> None:
        self.is_stream = True
        if self._room is not None:
            await self._room.acquire()
        if self._closed:
            raise ChannelClosedError
        self._append(item)

    def _append_or_drop(self, item: T) -> None:
        if self._max_items is None or len(self._items) < self._max_items:
            self._append(item)
        elif not self._overflowed:
            self._overflowed = True
            self._on_overflow()

    def _append(self, *items: T | _End) -> None:
        self._items.extend(items)
        self._arrived.set()


def calling_on_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., object]) -> Callable[..., None]:
    """A thread-safe function that calls `function` on `loop`; does nothing once the loop is closed."""

    def call(*args: object) -> None:
        with contextlib.suppress(RuntimeError):  # closed: there is no receiver
            loop.call_soon_threadsafe(function, *args)

    return call
