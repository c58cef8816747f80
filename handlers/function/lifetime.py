"""The lifetime of one request: until its deadline, or until it is cancelled.

All waits of a request go through its `Lifetime`, so that a passed deadline and a disconnected
client end the wait at once, in a thread or on an event loop. It does not know the purpose of a
wait.
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
from .channel import calling_on_loop

T = TypeVar("T")


class Lifetime:
    """A lifetime. Thread-safe. Ends once, for good."""

    def __init__(
        self,
        timeout_s: float | None = None,
        *,
        may_block_loops: bool = False,
        on_tokens: Callable[[int, int], None] = lambda _prompt, _generated: None,
    ) -> None:
        """`timeout_s` counts from now; None is no deadline. With `may_block_loops` a blocking wait is allowed in a
        thread that runs an event loop: in a notebook's cell, which does. `on_tokens` gets the numbers of tokens that
        the model took and gave, by one thread at a time; it must not block or raise.
        """
        self._on_tokens = on_tokens
        self._may_block_loops = may_block_loops
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
        """Run `callback` on `cancel`, in the cancelling thread; at once if it is cancelled already.

        Returns a function that removes the registration. The callback must not block or raise.
        """
        with self._lock:
            key = self._next_key
            self._next_key += 1
            is_over = self._cancelled  # asked again without the lock, both sides might make the call
            if not is_over:
                self._callbacks[key] = callback
        if is_over:
            callback()
        return lambda: self._forget(key)

    def count_tokens(self, num_prompt: int, num_generated: int) -> None:
        """Report the tokens of a call of the model."""
        with self._lock:
            self._on_tokens(num_prompt, num_generated)

    def check(self) -> None:
        """Raise `CancelledError` if the request was cancelled or its deadline has passed."""
        if self._cancelled or self.remaining_s() <= 0:
            raise self.ending()

    def ending(self) -> CancelledError:
        """The error with the reason of the end."""
        if self._cancelled:
            return CancelledError("the request was cancelled")
        return CancelledError("the request's deadline has passed", hint="Request less, or allow more time.")

    def wait(self, future: Future[T]) -> T:
        """Block until the future is done and return its result, or raise its error or
        `CancelledError`.

        The future is not cancelled, because others may wait for it too. Raises `HandlerError` if it
        would block an event loop.
        """
        if not future.done():
            self.refuse_to_block_a_loop()
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
        """The async form of `wait`."""
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

    def refuse_to_block_a_loop(self) -> None:
        """Raise `HandlerError` if this thread runs an event loop that a wait may not block."""
        if not self._may_block_loops:
            refuse_to_block_a_loop()

    def _forget(self, key: int) -> None:
        with self._lock:
            self._callbacks.pop(key, None)


def refuse_to_block_a_loop() -> None:
    """Raise `HandlerError` if the calling thread runs an event loop, where it would block all other
    handlers.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise HandlerError(
        "a blocking call was made from an async handler",
        hint="Await its async form (agenerate, astream, aembed, atokenize), or write the handler with `def`.",
    )
