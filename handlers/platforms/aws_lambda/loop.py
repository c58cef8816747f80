"""The main loop of an instance on Lambda: request an invocation, answer it, repeat; one worker for
each concurrent one. And SnapStart, which saves this process's memory once everything is loaded, and
continues instances from copies of it.

An instance may be frozen between two invocations, for hours: stale connections are closed before
the next one. The loop ends on a signal, when the instance has failed, or when the Runtime API is
lost. This module does not know how invocations are answered.

State that must be unique is renewed after a restore: seeds of random numbers, connections,
credentials. Ids and the engine's seeds come from the kernel on demand, and need no renewal.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from ....loader.errors import TeneralError
from ....runtime.errors import CancelledError, DrainingError
from ...function.channel import calling_on_loop
from ...lifecycle import HOOKS
from .answers import Reply
from .errors import AFTER_RESTORE, BEFORE_CHECKPOINT, report
from .logs import REQUEST_ID
from .runtime_api import Invocation, RuntimeApi, RuntimeApiError

logger = logging.getLogger("teneral.lambda")

# AWS's SDKs and X-Ray's read the trace from it.
TRACE_VARIABLE = "_X_AMZN_TRACE_ID"
# Without an invocation: connections may have been closed, and the instance frozen.
STALE_AFTER_S = 2.0
# For reporting invocations that are ended by force.
CUT_GRACE_S = 0.3
# AWS's runtime for Python uses the same status.
EXIT_BEFORE = 64
EXIT_AFTER = 65


class Served(Protocol):
    """The part of `runtime.instance.Instance` that is needed here."""

    @property
    def failure(self) -> TeneralError | None: ...

    def quiesce(self) -> None: ...


class InvocationLoop:
    """The loop, on the running event loop. `run` it once."""

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
        # On time.monotonic()'s clock, once it was asked to stop.
        self.ends_by_s: float | None = None
        self.request_stop = calling_on_loop(asyncio.get_running_loop(), self._stop.set)  # from any thread

    async def run(self) -> None:
        """Serve until asked to stop, then drain running invocations within the time limit.

        Raises the instance's failure, and `RuntimeApiError` if no invocation can arrive any more.
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
        """Handle a possible freeze. Connections in use now have not been frozen."""
        if self._num_running == 0:
            self._instance.quiesce()

    async def _invoke(self, api: RuntimeApi, invocation: Invocation) -> None:
        """Process one invocation to its end. Raises only errors that end the worker."""
        REQUEST_ID.set(invocation.request_id)
        # One environment variable holds one trace; others use `context.trace_id`.
        if self._num_workers == 1:
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
            raise  # the connection itself is broken
        except Exception as error:  # any error is reported to the caller, and the next one served
            # The deadline and a shutdown end invocations by design: their traceback would say nothing.
            cause = None if isinstance(error, CancelledError | DrainingError) else error.__cause__ or error
            logger.error("the invocation failed: %s", error, exc_info=cause)
            await reply.fail(error)
        finally:
            self._num_running -= 1
            REQUEST_ID.set("")
        if self._instance.failure is not None:
            self._stop.set()  # Lambda starts a new instance, which may succeed

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


def checkpoint(address: str, instance: Served, *, say: Callable[..., Any] = lambda *_, **__: None) -> int:
    """Have the process saved, and return in a copy of it. Blocks.

    Returns 0, or the exit status if a hook failed. `say` is a logger's `error`.
    """
    try:
        HOOKS.run_before()
        instance.quiesce()
        asyncio.run(_call(address, lambda api: api.restore_next()))
    except Exception as error:  # noqa: BLE001 - the user's hooks
        say("before the checkpoint: %s", error, exc_info=error)
        failure = report(error)
        asyncio.run(_call(address, lambda api: api.init_error(failure.body(), BEFORE_CHECKPOINT)))
        return EXIT_BEFORE
    try:
        seed_anew()
        instance.quiesce()
        HOOKS.run_after()
    except Exception as error:  # noqa: BLE001 - as above
        say("after the restore: %s", error, exc_info=error)
        failure = report(error)
        asyncio.run(_call(address, lambda api: api.restore_error(failure.body(), AFTER_RESTORE)))
        return EXIT_AFTER
    return 0


def seed_anew() -> None:
    """Reseed the random numbers of all loaded libraries that keep a state, differently in every
    copy.
    """
    random.seed(os.urandom(32))
    if "numpy" in sys.modules:
        import numpy as np

        # The legacy generator, which users' code may use.
        np.random.seed(list(os.urandom(32)))
    if "torch" in sys.modules:
        import torch

        torch.seed()
    if "ssl" in sys.modules:
        import ssl

        ssl.RAND_add(os.urandom(32), 32.0)


async def _call(address: str, ask: Callable[[RuntimeApi], Any]) -> None:
    async with RuntimeApi(address) as api:
        await ask(api)
