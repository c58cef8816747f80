"""The loop of an instance on Lambda: the next invocation, its answer, and again; one worker for each that may run at a
time.

An instance may stand still between two invocations, for hours: what may have gone stale meanwhile is let go before the
next one. It ends on a signal, when the instance has failed, or when the Runtime API is lost. It does not know what
answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from ....loader.errors import TeneralError
from ....runtime.errors import DrainingError
from ...function.lifetime import calling_on_loop
from .invocation import Invocation
from .logs import REQUEST_ID
from .reply import Reply
from .runtime_api import RuntimeApi, RuntimeApiError

logger = logging.getLogger("teneral.lambda")

TRACE_VARIABLE = "_X_AMZN_TRACE_ID"  # where AWS's SDKs and X-Ray's look for the trace
STALE_AFTER_S = 2.0  # without an invocation: connections may have been closed, and the instance frozen
CUT_GRACE_S = 0.3  # for what is ended by force to be told so


class Served(Protocol):
    """The part of `runtime.instance.Instance` that matters here."""

    @property
    def failure(self) -> TeneralError | None: ...

    def quiesce(self) -> None: ...


class InvocationLoop:
    """On the running event loop. `run` it once."""

    def __init__(
        self,
        address: str,
        instance: Served,
        answer: Callable[[Invocation, Reply], Awaitable[None]],
        *,
        num_workers: int = 1,
        drain_timeout_s: float = 1.0,
    ) -> None:
        self._address = address
        self._instance = instance
        self._answer = answer
        self._num_workers = num_workers
        self._drain_timeout_s = drain_timeout_s
        self._waiting: set[asyncio.Task[None]] = set()
        self._num_running = 0
        self._stop = asyncio.Event()
        self.ends_by_s: float | None = None  # on time.monotonic()'s clock, once it was told to stop
        self.request_stop = calling_on_loop(asyncio.get_running_loop(), self._stop.set)  # from any thread

    async def run(self) -> None:
        """Serve until told to stop, then let what runs finish within the drain's time. Raises the instance's failure,
        and `RuntimeApiError` where no invocation can come any more.
        """
        workers = {asyncio.create_task(self._work(), name=f"lambda-{n}") for n in range(self._num_workers)}
        stopped = asyncio.create_task(self._stop.wait())
        with self._ending_on_signals():
            await asyncio.wait({*workers, stopped}, return_when=asyncio.FIRST_COMPLETED)
            self._stop.set()
            self.ends_by_s = time.monotonic() + self._drain_timeout_s
            for worker in self._waiting:
                worker.cancel()
            _, late = await asyncio.wait(workers, timeout=self._drain_timeout_s)
            for worker in late:
                worker.cancel()
            if late:
                await asyncio.wait(late)
        await stopped
        if self._instance.failure is not None:
            raise self._instance.failure
        for worker in workers:
            error = None if worker.cancelled() else worker.exception()
            if error is not None:
                raise error

    async def _work(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        async with RuntimeApi(self._address) as api:
            while not self._stop.is_set():
                waits_since = time.time(), time.monotonic()
                self._waiting.add(task)
                try:
                    answer = await api.next()
                finally:
                    self._waiting.discard(task)
                if max(time.time() - waits_since[0], time.monotonic() - waits_since[1]) > STALE_AFTER_S:
                    self._wake()
                await self._invoke(api, Invocation.of(answer))

    def _wake(self) -> None:
        """The instance may have been frozen. What others use at the moment has not been."""
        if self._num_running == 0:
            self._instance.quiesce()

    async def _invoke(self, api: RuntimeApi, invocation: Invocation) -> None:
        """One invocation, to its end. Raises only what ends the worker."""
        REQUEST_ID.set(invocation.request_id)
        if self._num_workers == 1:  # one environment, one trace; others have `context.trace_id`
            _set_trace(invocation.trace_id)
        reply = Reply(api, invocation)
        self._num_running += 1
        try:
            await self._answer(invocation, reply)
        except asyncio.CancelledError:
            ended = DrainingError("the instance is shutting down")
            with contextlib.suppress(TimeoutError, TeneralError):
                async with asyncio.timeout(CUT_GRACE_S):
                    await reply.fail(ended)
            raise
        except RuntimeApiError:
            raise  # the way itself is broken
        except Exception as error:  # whatever it is, the caller is told, and the next one served
            cause = error.__cause__ or error
            logger.error("the invocation failed: %s", error, exc_info=cause)
            await reply.fail(error)
        finally:
            self._num_running -= 1
            REQUEST_ID.set("")
        if self._instance.failure is not None:
            self._stop.set()  # Lambda makes a new one, which may have more luck

    @contextmanager
    def _ending_on_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT)
        try:
            for number in numbers:
                loop.add_signal_handler(number, self._stop.set)
        except (RuntimeError, ValueError):  # not in the main thread
            yield
            return
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


def _set_trace(trace_id: str | None) -> None:
    if trace_id is None:
        os.environ.pop(TRACE_VARIABLE, None)
    else:
        os.environ[TRACE_VARIABLE] = trace_id
