"""How long one request may go on: until its deadline, or until somebody cancels it.

Everything that waits on behalf of a request waits through its `Lifetime`, so that a passed deadline and a
client that went away end the wait at once, in a thread as on an event loop. It does not know what is being
waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from ...runtime.errors import CancelledError, HandlerError

T = TypeVar("T")


class Lifetime:
    """Thread-safe. Ends once, for good."""

    def __init__(self, timeout_s: float | None = None) -> None:
        """`timeout_s` counts from now; None is no deadline."""
        self.deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._cancelled = False
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._next_key = 0
        self._lock = threading.Lock()

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def remaining_s(self) -> float:
        """Seconds until the deadline, never below 0; infinity without one."""
        return math.inf if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def cancel(self) -> None:
        """End it now: runs every callback once, in this thread. Idempotent."""
        with self._lock:
            self._cancelled = True
            callbacks = list(self._callbacks.values())
            self._callbacks.clear()
        for callback in callbacks:
            callback()

    def on_cancel(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have `callback` run on `cancel`, from whichever thread cancels; at once when that was before.

        Returns a function that takes the registration back. The callback must not block or raise.
        """
        with self._lock:
            key = self._next_key
            self._next_key += 1
            if not self._cancelled:
                self._callbacks[key] = callback
        if self._cancelled:
            callback()
        return lambda: self._forget(key)

    def check(self) -> None:
        """Raises `CancelledError` when the request was cancelled or its deadline has passed."""
        if self._cancelled or self.remaining_s() <= 0:
            raise self.ending()

    def ending(self) -> CancelledError:
        """The error that says why the request has ended."""
        if self._cancelled:
            return CancelledError("the request was cancelled")
        return CancelledError(
            "the request's deadline has passed", hint="Ask for less, or allow it more time."
        )

    def wait(self, future: Future[T]) -> T:
        """Block until the future is done and return its result, or raise its error or `CancelledError`.

        The future goes on: others may wait for it too. Raises `HandlerError` when it would block an event
        loop.
        """
        if not future.done():
            refuse_to_block_a_loop()
            woken = threading.Event()
            future.add_done_callback(lambda _: woken.set())
            forget = self.on_cancel(woken.set)
            try:
                woken.wait(min(self.remaining_s(), threading.TIMEOUT_MAX))
            finally:
                forget()
            if not future.done():
                raise self.ending()
        return future.result()

    async def wait_async(self, future: Future[T]) -> T:
        """As `wait`, without blocking the running loop."""
        if not future.done():
            woken = asyncio.Event()
            wake = calling_on_loop(asyncio.get_running_loop(), woken.set)
            future.add_done_callback(lambda _: wake())
            forget = self.on_cancel(wake)
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.remaining_s()):
                        await woken.wait()
            finally:
                forget()
            if not future.done():
                raise self.ending()
        return future.result()

    def _forget(self, key: int) -> None:
        with self._lock:
            self._callbacks.pop(key, None)


def calling_on_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., object]) -> Callable[..., None]:
    """A function that any thread may call to have `function` called on `loop`; does nothing once the loop is
    closed.
    """

    def call(*args: object) -> None:
        with contextlib.suppress(RuntimeError):  # closed: nobody is left there to be told
            loop.call_soon_threadsafe(function, *args)

    return call


def refuse_to_block_a_loop() -> None:
    """Raises `HandlerError` when the calling thread runs an event loop: every other handler on it would stand
    still.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise HandlerError(
        "a blocking call was made from an async handler",
        hint="Await its async form (agenerate, astream, aembed, atokenize), or write the handler with `def`.",
    )
