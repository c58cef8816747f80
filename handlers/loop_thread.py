"""One event loop in one thread, for coroutines that must not run on the caller's loop."""

from __future__ import annotations

import asyncio
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
