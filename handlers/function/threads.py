"""Threads of user functions: one event loop in a thread, and threads that run one call after
another.

Both are daemons: a function that never ends does not keep the process alive.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from .lifetime import calling_on_loop

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
        self._idle: list[
            queue.SimpleQueue[Call | None]
            # The next call of each idle thread; the last one first.
        ] = []
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
