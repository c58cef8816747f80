"""Event loops in virtual time, one for each simulated process: programs that sleep for hours run in
milliseconds, the same way each time.

A `World` has the only clock that is true. Each loop reads it through a clock of its own, which may
be ahead and run faster or slower. Calls to threads run on the loop, `thread_s` after they were made;
nothing else happens between two events.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable
from typing import Any


class LaterError(Exception):
    """Raised by a call in a thread that blocks: it is called again after `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


class _NoWait(selectors.SelectSelector):
    def select(self, timeout: float | None = None) -> Any:
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop that the world runs, an iteration at a time."""

    def __init__(self, world: World, *, ahead_s: float = 0.0, rate: float = 1.0) -> None:
        self._world = world
        self._ahead_s = ahead_s
        self._rate = rate
        self.thread_s = 0.05  # the time that a call to a thread takes
        self.is_paused = False
        super().__init__(_NoWait())

    def time(self) -> float:
        return self._ahead_s + self._rate * self._world.now_s

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> Any:
        future = self.create_future()

        def call() -> None:
            try:
                result = func(*args)
            except LaterError as later:
                self.call_later(later.seconds, call)
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():  # cancelled; the thread ran on
                    future.set_result(result)

        self.call_later(self.thread_s, call)
        return future

    def run_ready(self) -> None:
        """Run until the loop has nothing to do at this moment."""
        self._iterate()
        while self._ready or self.next_s() <= self._world.now_s:  # type: ignore[attr-defined]
            self._iterate()

    def jump(self, seconds: float) -> None:
        """Set this loop's clock forward."""
        self._ahead_s += seconds

    def next_s(self) -> float:
        """The true time of the next event."""
        times = [handle.when() for handle in self._scheduled if not handle.cancelled()]  # type: ignore[attr-defined]
        return (min(times) - self._ahead_s) / self._rate if times else math.inf

    def _iterate(self) -> None:
        self.call_soon(self.stop)
        self.run_forever()


class World:
    """All loops, and the true time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.loops: list[VirtualLoop] = []

    def loop(self, **clock: float) -> VirtualLoop:
        loop = VirtualLoop(self, **clock)
        self.loops.append(loop)
        return loop

    def close(self, loop: VirtualLoop) -> None:
        self.loops.remove(loop)
        loop.close()

    def advance(self, seconds: float, *, until: Callable[[], bool] = lambda: False) -> None:
        """Run everything that happens in this time, in the order of the true time."""
        end_s = self.now_s + seconds
        self._run_ready()
        while not until():
            next_s = min((loop.next_s() for loop in self.loops if not loop.is_paused), default=math.inf)
            if next_s > end_s:
                break
            self.now_s = max(self.now_s, next_s) + 1e-9  # beyond what rounding takes away
            self._run_ready()
        else:
            return
        self.now_s = max(self.now_s, end_s)

    def _run_ready(self) -> None:
        for loop in self.loops:
            if not loop.is_paused:
                loop.run_ready()
