"""Threads of user functions: one event loop in a thread, and threads that run one call after another.

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
    """Runs from construction to `close`. A daemon: a coroutine that never ends does not keep the process."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, coroutine: Coroutine[Any, Any, None], ended: Callable[[], object]
    ) -> Callable[[], object]:
        """Start the coroutine on the loop; returns what asks it to stop. `ended` is called on the loop when it has
        ended, also where it was cancelled before its first step. Raises `RuntimeError` once the loop is closed.
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
        """Cancel what runs, give it a moment to clean up, and end the thread. Idempotent; not for the loop's
        own thread.
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
    """Thread-safe. Daemons: a function that never returns does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[
            queue.SimpleQueue[Call | None]
        ] = []  # of each idle thread, its next call; the last one first
        self._lock = threading.Lock()
        self._closed = False

    def run(self, call: Call) -> None:
        """Have it called; returns at once. It must not raise."""
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
                        continue  # somebody has just taken it, and is about to give it a call
                    self._idle.remove(calls)
                return
            if call is None:
                return
            call()
            del call  # what it holds must not wait for the next one
            with self._lock:
                if self._closed or len(self._idle) >= MAX_IDLE:
                    return
                self._idle.append(calls)
