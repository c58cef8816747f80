"""The channel from the engine's thread to the event loop: events into mailboxes, with one wake-up
for many.

Waking a loop goes through a socket, which costs a system call and a context switch; an engine step
ends with an event for each of its sequences. So events are collected, and the loop is woken once
for all of them. The items are opaque.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Items for one reader, in order. For the event loop's thread only; `Bridge` fills it from
    other threads.

    Beyond `max_items` an item is dropped and `on_overflow` called, once; None: unbounded.
    """

    def __init__(self, max_items: int | None, on_overflow: Callable[[], None]) -> None:
        self._items: list[T] = []
        self._max_items = max_items
        self._on_overflow = on_overflow
        self._overflowed = False
        self._filled = asyncio.Event()

    def put(self, item: T) -> None:
        if self._max_items is not None and len(self._items) >= self._max_items:
            if not self._overflowed:
                self._overflowed = True
                self._on_overflow()
            return
        self._items.append(item)
        self._filled.set()

    async def take(self) -> list[T]:
        """Wait for items, and return all since the last call, at least one."""
        await self._filled.wait()
        self._filled.clear()
        items, self._items = self._items, []
        return items


class Bridge:
    """A channel from any thread to mailboxes of one event loop: that of the first `open`."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._posted: deque[Callable[[], None]] = deque()
        self._woken = False

    def open(
        self, max_items: int | None, on_overflow: Callable[[], None]
    ) -> tuple[Mailbox[T], Callable[[T], None]]:
        """Open a mailbox. Returns it and the function that posts to it: callable from any thread,
        never blocking.

        Items posted after the loop was closed are dropped: there is no reader.
        """
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        mailbox: Mailbox[T] = Mailbox(max_items, on_overflow)
        return mailbox, lambda item: self._post(lambda: mailbox.put(item))

    def _post(self, put: Callable[[], None]) -> None:
        self._posted.append(put)
        if not self._woken and self._loop is not None:
            # Two threads may both come here: then the loop is woken twice, which is harmless. The
            # flag is cleared before the deque is emptied, so no item can be missed.
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                self._posted.clear()

    def _deliver(self) -> None:
        self._woken = False
        while self._posted:
            self._posted.popleft()()
