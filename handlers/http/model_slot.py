"""The slot of a server's model: its current instance, and its unloading, reloading and switching
while the server runs.

Invariant: there is always an instance to query. One that was never started stands in for a model
that is not loaded, and while it does, `check` refuses work. Changes are serialised, and continue if
their client disconnects. An instance that serves and then ends, ends the server, both the first one
and each reloaded one; one that was unloaded does not, nor one whose load failed. A switch to a
fine-tune of the model keeps its instance, whose weights are the base that differences are added to,
and whose place the fine-tune's instance takes while it loads; where that fails, the one before is
there again. Reasons: docs/decisions/0018 and 0038. This module knows no protocol.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from ...loader.errors import (
    FormatError,
    InsufficientMemoryError,
    NotFoundError,
    TeneralError,
    UsageError,
)
from ...loader.timeline import Timeline
from ...runtime.errors import DrainingError, RequestError, UnloadedError
from ...runtime.state import State
from ..function.channel import calling_on_loop
from .inflight import InFlight, RequestWork, all_ended, finish

if TYPE_CHECKING:
    from ...runtime.instance.instance import Instance
    from ...runtime.metrics import Metrics
    from .logs import EmfWriter

UNLOADED_RETRY_AFTER_S = 60.0  # the model is back only once a client loads it

logger = logging.getLogger("teneral.http")


class ModelSlot:
    """The slot, one per server; used on its event loop only."""

    def __init__(
        self,
        instance: Instance,
        make: Callable[[], Instance],
        in_flight: InFlight,
        *,
        started: Callable[[Instance, bool], object] = lambda instance, is_first: None,
    ) -> None:
        """`make` makes an instance of the same configuration, not started. The caller closes
        `instance`; later ones are closed here. `started` is called with each that begins to load.
        """
        self.instance = instance
        self._started = started
        started(instance, True)
        # Why no model is loaded, which is being switched to, or why a switch failed.
        self.reason = ""
        self._first = instance
        self._base: Instance | None = None  # of the current instance, where that is a fine-tune's
        self._tuned: set[Instance] = set()  # of fine-tunes, open
        self._retiring: asyncio.Task[None] | None = None  # ends the fine-tune from before a switch
        self._make = make
        self._in_flight = in_flight
        # DRAINING, UNLOADED or LOADING; None: the instance's own state.
        self._absence: State | None = None
        self._turn = asyncio.Lock()
        self._changes: set[asyncio.Task[None]] = set()
        # Requests that wait for a change, and that a change must not wait for.
        self._askers: set[RequestWork] = set()
        self._on_end: Callable[[], object] = lambda: None

    @property
    def state(self) -> State:
        state = self._absence or self.instance.state
        # A fine-tune's engine is built within a moment: a request sent now is processed at once.
        return State.PARTIAL if state is State.LOADING and self._base is not None else state

    def check(self) -> None:
        """Raise `UnloadedError` while the model is unloaded on request."""
        if self._absence is not None:
            name = self.instance.model_name
            messages = {State.LOADING: "is being loaded", State.DRAINING: "is being unloaded"}
            error = UnloadedError(f"the model {name!r} {messages.get(self._absence, 'is not loaded')}")
            if self._absence is State.UNLOADED:
                error.retry_after_s = UNLOADED_RETRY_AFTER_S
            raise error

    def watch(self, on_end: Callable[[], object]) -> None:
        """Call `on_end`, on this loop, when a serving instance has ended by itself."""
        self._on_end = on_end
        self._watch(self.instance)

    async def unload(self, work: RequestWork | None, *, drain_timeout_s: float) -> None:
        """Free the model's memory, once running requests have ended or after `drain_timeout_s`.
        Returns when done; at once without a model. `work` is the calling request.
        """
        await self._change(work, self._unload(drain_timeout_s))

    async def load(self, work: RequestWork | None) -> None:
        """Load the model if it is not loaded. Returns once it can answer. Raises the error of its
        load; the model is then unloaded, and the next call tries again.
        """
        await self._change(work, self._load())

    async def switch(self, work: RequestWork | None, address: str, *, drain_timeout_s: float) -> None:
        """Serve the fine-tune at `address`, which is read as differences to the model in memory, or
        that model again. Returns once all of it is exact.

        Requests from then on, and from the time on when its manifest was read, are the fine-tune's;
        running ones end with the instance that has them: another fine-tune's is closed
        `drain_timeout_s` later at the latest. Raises `RequestError` where nothing was changed because the artifact
        cannot be taken up, and the error of its load, after which the model from before serves.
        """
        await self._change(work, self._switch(address, drain_timeout_s))

    async def close(self) -> None:
        """At the end of the server: cancel a running change, and close the instances loaded since
        the first.
        """
        for task in self._changes:
            task.cancel()
        await asyncio.gather(*self._changes, return_exceptions=True)
        for instance in (*self._tuned, self._base or self.instance):
            if instance is not self._first:
                await asyncio.to_thread(instance.close)

    async def _change(self, work: RequestWork | None, change: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._in_turn(change))
        self._changes.add(task)
        task.add_done_callback(self._forget)
        if work is not None:
            self._askers.add(work)
        try:
            await asyncio.shield(task)
        finally:
            if work is not None:
                self._askers.discard(work)

    async def _in_turn(self, change: Coroutine[Any, Any, None]) -> None:
        try:
            async with self._turn:
                await change
        finally:
            change.close()  # if it never started

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._changes.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("a change of the model failed: %s", error)  # the caller may be gone

    async def _unload(self, drain_timeout_s: float) -> None:
        if self._absence is not None:
            return
        self._absence = State.DRAINING
        name = self.instance.model_name
        works = self._in_flight.works - self._askers
        logger.info("unloading %s: %d requests in work, %g s", name, len(works), drain_timeout_s)
        reason = DrainingError(f"the model {name!r} was unloaded while this request was in progress")
        await finish(works, drain_timeout_s, reason)
        await self._take_out(drain_timeout_s, reason="unloaded")

    async def _load(self) -> None:
        if self._absence is None:
            await _can_answer(self.instance)  # it may still be loading, for the first time
            return
        instance = self.instance = self._make()  # now, so that its clock begins with its load
        self._absence, self.reason = State.LOADING, ""
        logger.info("loading %s", instance.model_name)
        self._started(instance, False)
        try:
            await asyncio.to_thread(instance.start)
            await _can_answer(instance)
        except TeneralError as error:
            await self._take_out(0.0, reason=error.message)
            raise
        self._absence = None
        self._watch(instance)

    async def _switch(self, address: str, drain_timeout_s: float) -> None:
        if self._absence is not None:
            raise UnloadedError(
                f"the model {self.instance.model_name!r} is not loaded, so it cannot be a base"
            )
        await self._retired()  # or there would be memory for one fine-tune more
        before, base = self.instance, self._base or self.instance
        if address == before.config.model:
            await _exact(before)
            return
        if address == base.config.model:
            works = self._in_flight.works - self._askers
            self.instance, self._base, self.reason = base, None, ""
            logger.info("switching to %s", address)
        else:
            works = await self._take_up(address, before, base)
        if before is not base:
            self._retiring = asyncio.create_task(self._retire(before, works, drain_timeout_s))
            self._changes.add(self._retiring)
            self._retiring.add_done_callback(self._forget)

    async def _retire(self, tuned: Instance, works: Collection[RequestWork], drain_timeout_s: float) -> None:
        """End a fine-tune's instance when those requests have ended, or with its own after that time."""
        await all_ended(works, drain_timeout_s)
        await self._end_tuned(tuned)

    async def _retired(self) -> None:
        if self._retiring is not None:
            await asyncio.wait([self._retiring])

    async def _take_up(self, address: str, before: Instance, base: Instance) -> frozenset[RequestWork]:
        """Load the fine-tune over its base, and serve it. Returns the requests that may still be
        `before`'s. After an error, `before` serves.
        """
        tuned: Instance | None = None
        try:
            tuned = await asyncio.to_thread(_make_tuned, address, base)
            self._tuned.add(tuned)
            tuned.start()
            await _done(tuned.opening)
        except (UsageError, FormatError, NotFoundError, InsufficientMemoryError) as error:
            await self._end_tuned(tuned)
            raise RequestError(error.message, param="model", hint=error.hint) from error
        except TeneralError:
            await self._end_tuned(tuned)
            raise
        logger.info("switching to %s", address)
        works = self._in_flight.works - self._askers
        self.instance, self._base, self.reason = tuned, base, f"switching to {address}"
        self._started(tuned, False)
        try:
            await _can_answer(tuned)
            await _exact(tuned)
        except TeneralError as error:
            logger.warning("the switch failed, and %s serves again: %s", before.config.model, error)
            self.instance, self._base = before, base if before is not base else None
            self.reason = f"the switch to {address} failed: {error.message}"
            await self._end_tuned(tuned)
            raise
        self.reason = ""
        self._watch(tuned)
        return works

    async def _end_tuned(self, instance: Instance | None) -> None:
        if instance is not None:
            await asyncio.to_thread(_give_back, instance, 0.0)
            self._tuned.discard(instance)

    async def _take_out(self, drain_timeout_s: float, *, reason: str) -> None:
        """Replace the instance by one that was not started, and free its memory."""
        await self._retired()
        instance, self.instance = self.instance, self._make()
        base, self._base = self._base, None
        try:
            await asyncio.to_thread(_give_back, instance, drain_timeout_s)
            self._tuned.discard(instance)
            if base is not None:
                await asyncio.to_thread(_give_back, base, drain_timeout_s)
        finally:
            self._absence, self.reason = State.UNLOADED, reason

    def _watch(self, instance: Instance) -> None:
        def ended() -> None:
            if self.instance is instance and self._absence is None:
                self._on_end()

        call = calling_on_loop(asyncio.get_running_loop(), ended)
        instance.ended.add_done_callback(lambda _: call())


async def _can_answer(instance: Instance) -> None:
    """Wait until it can answer. Raises the error of its load."""
    kind = await _done(instance.kind)
    if kind == "onnx":
        await _done(instance.onnx)
        return
    await _done(instance.tokenizer)
    await _done(instance.engine if kind == "decoder" else instance.embedder)


async def _exact(instance: Instance) -> None:
    """Wait until all of its weights are exact. Raises the error of its load."""
    await _done(instance.exact)


def _make_tuned(address: str, base: Instance) -> Instance:
    """The instance of a fine-tune, not started. Blocks until all of the base is exact. Raises
    `UsageError` for a model that cannot be a base.
    """
    from ...runtime.instance.instance import Instance  # imported already, for the first instance

    config = base.config.replace(model=address, name=base.model_name, base=None)
    weights = base.as_base()
    timeline = Timeline(started_at=time.monotonic())
    return Instance(config, timeline=timeline, base=weights)


async def _done(future: Future[Any]) -> Any:
    # The shield: a caller that stops waiting must not cancel the future of all others.
    return await asyncio.shield(asyncio.wrap_future(future))


def _give_back(instance: Instance, drain_timeout_s: float) -> None:
    """End an instance and free its memory, even if it is still referenced. Blocks."""
    instance.drain(drain_timeout_s)
    instance.close()
    instance.release()
    # A server's start freezes all existing objects for the collector, including parts of the model.
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    _trim_heap()


def _trim_heap() -> None:
    """Return the C library's free memory to the system: tens of megabytes, after computing."""
    import ctypes  # a model is seldom unloaded

    # glibc's: other libraries return memory by themselves, or never.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


STANDBY_MARK = "taken over by a standby"


def count_start(metrics: Metrics, emf: EmfWriter | None, instance: Instance, is_first: bool) -> None:
    """Count this instance's start when it ends. `is_first`: the process's first instance, else it
    is a reload, or a switch to a fine-tune.

    Seconds are those since the start of the process that was asked to serve, or since the reload
    began. An instance that is closed while it loads counts as neither outcome.
    """
    # Acquired by the first future that determines the outcome.
    done = threading.Lock()

    def ended(outcome: str) -> None:
        if done.acquire(blocking=False):
            kind, seconds = _kind(instance, is_first), instance.timeline.now_s()
            metrics.start_ended(kind, outcome, seconds)
            if emf is not None:
                emf.start_ended(kind, outcome, seconds, instance.progress()["fetched_bytes"])

    def can_answer(future: Future[Any]) -> None:
        if future.exception() is None:
            ended("ok")

    instance.engine.add_done_callback(can_answer)
    instance.embedder.add_done_callback(can_answer)
    instance.onnx.add_done_callback(can_answer)
    instance.ended.add_done_callback(lambda future: ended("failed") if future.result() is not None else None)


def _kind(instance: Instance, is_first: bool) -> str:
    if not is_first:
        return "switch" if instance.has_base else "reload"
    spans = instance.timeline.snapshot()["spans"]
    return "standby" if any(span["name"] == STANDBY_MARK for span in spans) else "cold"
