"""The running calls of a user's function, each counted until its thread or coroutine has ended, and
the threads that run them.

A disconnected client and a passed deadline end a request at once, but not a plain function: Python
cannot end a thread. Such a call is abandoned and still counts, so that functions that hang never
accumulate without bound: beyond the bound new calls are refused.

Coroutines run on one event loop in a thread; plain functions on threads that run one call after
another. All are daemons: a function that never ends does not keep the process alive.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from msgspec import Struct, field

from ...runtime.errors import HandlerBusyError
from .channel import calling_on_loop

JOIN_TIMEOUT_S = 5.0


class LoopThread:
    """An event loop in a daemon thread, from construction to `close`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, coroutine: Coroutine[Any, Any, None], ended: Callable[[], object]
    ) -> Callable[[], object]:
        """Start the coroutine on the loop; returns a function that cancels it.

        `ended` is called on the loop when it has ended, even if it was cancelled before its first
        step. Raises `RuntimeError` once the loop is closed.
        """
        task: asyncio.Task[None] | None = None

        def start() -> None:
            nonlocal task
            task = self._loop.create_task(coroutine)
            task.add_done_callback(lambda _: ended())

        def stop() -> None:
            if task is not None:
                task.cancel()

        try:
            self._loop.call_soon_threadsafe(start)
        except RuntimeError:
            coroutine.close()
            raise
        return calling_on_loop(self._loop, stop)

    def close(self) -> None:
        """Cancel running coroutines, give them a moment to clean up, and end the thread.
        Idempotent; not for the loop's own thread.
        """
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(JOIN_TIMEOUT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()


IDLE_S = 30.0
MAX_IDLE = 32

Call = Callable[[], object]


class CallThreads:
    """Reused daemon threads for calls. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        # The next call of each idle thread; the last one first.
        self._idle: list[queue.SimpleQueue[Call | None]] = []
        self._lock = threading.Lock()
        self._closed = False

    def run(self, call: Call) -> None:
        """Run the call in a thread; returns at once. It must not raise."""
        with self._lock:
            calls = self._idle.pop() if self._idle else None
        if calls is None:
            calls = queue.SimpleQueue()
            threading.Thread(target=self._work, args=(calls,), name=self._name, daemon=True).start()
        calls.put(call)

    def close(self) -> None:
        """End the idle threads, and each of the others when it is done. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for calls in idle:
            calls.put(None)

    def _work(self, calls: queue.SimpleQueue[Call | None]) -> None:
        while True:
            try:
                call = calls.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    if calls not in self._idle:
                        continue  # it was taken concurrently, and is about to get a call
                    self._idle.remove(calls)
                return
            if call is None:
                return
            call()
            # Release its references before waiting for the next call.
            del call
            with self._lock:
                if self._closed or len(self._idle) >= MAX_IDLE:
                    return
                self._idle.append(calls)


# The default of a server's running requests.
DEFAULT_MAX_CALLS = 352
# A function that checks `context.cancelled` has ended by then.
LOG_AFTER_S = 1.0
# Between log lines of refusals.
LOG_EVERY_S = 10.0
MAX_NAMED = 8
# The end of a function that hangs is unknown.
RETRY_AFTER_S = 5.0

logger = logging.getLogger("teneral.handler")


class FunctionInvocation(Struct, eq=False):
    """One call of the function."""

    request_id: str
    started_s: float = field(default_factory=time.monotonic)
    abandoned_s: float | None = None  # when its client left
    is_logged: bool = False  # it is in the log


class CallStatistics(NamedTuple):
    calls: int  # running
    abandoned_calls: int  # running although their clients left
    max_calls: int
    refused_calls_total: int


class FunctionCalls:
    """The calls of one function. Thread-safe."""

    def __init__(self, name: str, max_calls: int = DEFAULT_MAX_CALLS) -> None:
        """`name` is the function's, for logs."""
        self.max_calls = max_calls
        self._name = name
        self._lock = threading.Lock()
        self._calls: dict[FunctionInvocation, None] = {}  # the oldest first
        self._num_refused = 0
        self._logged_s = float("-inf")

    def begin(self, request_id: str) -> FunctionInvocation:
        """Count a new call. Raises `HandlerBusyError` at the bound."""
        with self._lock:
            if len(self._calls) < self.max_calls:
                call = FunctionInvocation(request_id)
                self._calls[call] = None
                return call
            self._num_refused += 1
            is_logged = time.monotonic() - self._logged_s < LOG_EVERY_S
            if not is_logged:
                self._logged_s = time.monotonic()
        if not is_logged:
            logger.warning("calls of %s are refused: %s", self._name, self.describe())
        raise HandlerBusyError(
            f"{self.max_calls} calls of {self._name} have not ended, which is the limit",
            retry_after_s=RETRY_AFTER_S,
            hint="Have the function end when context.cancelled is set or its deadline passes.",
        )

    def end(self, call: FunctionInvocation) -> None:
        """Count the end of the call's function. Idempotent."""
        with self._lock:
            is_logged = call in self._calls and call.is_logged
            self._calls.pop(call, None)
        if is_logged and call.abandoned_s is not None:
            logger.info(
                "request %s: %s has ended, %.1f s after its reader left",
                call.request_id,
                self._name,
                time.monotonic() - call.abandoned_s,
            )

    def abandon(self, call: FunctionInvocation) -> None:
        """Mark a call whose client left, on a running event loop. If it goes on, this is logged
        soon.
        """
        with self._lock:
            if call not in self._calls:
                return
            call.abandoned_s = time.monotonic()
        asyncio.get_running_loop().call_later(LOG_AFTER_S, self._tell, call)

    def statistics(self) -> CallStatistics:
        with self._lock:
            num_abandoned = sum(call.abandoned_s is not None for call in self._calls)
            return CallStatistics(len(self._calls), num_abandoned, self.max_calls, self._num_refused)

    def describe(self) -> str:
        """The number of running calls, and the requests of the oldest abandoned ones."""
        now_s = time.monotonic()
        with self._lock:
            num_calls = len(self._calls)
            abandoned = [call for call in self._calls if call.abandoned_s is not None]
        named = ", ".join(
            f"{call.request_id} ({now_s - call.started_s:.0f} s)" for call in abandoned[:MAX_NAMED]
        )
        more = f" and {len(abandoned) - MAX_NAMED} more" if len(abandoned) > MAX_NAMED else ""
        left = f"; {len(abandoned)} go on although their readers left: {named}{more}" if abandoned else ""
        return f"{num_calls} of {self.max_calls} run{left}"

    def _tell(self, call: FunctionInvocation) -> None:
        with self._lock:
            if call not in self._calls:
                return
            call.is_logged = True
        logger.warning(
            "request %s: %s goes on although its reader left; %s",
            call.request_id,
            self._name,
            self.describe(),
        )
