"""The parts that all routes share, and each request's own record."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from aiohttp import web

from ...loader.errors import TeneralError
from ...runtime.errors import AdapterNotFoundError, ModelError, RequestError
from ...runtime.state import State
from ...runtime.step.requests import FirstToken, Priority
from .admission import Admission
from .connections import Connections
from .errors import SERVER_ERROR, ApiError, as_api_error, expected_wait_s
from .inflight import Deadline, InFlight, Work
from .limits import MAX_HEAD_BYTES, Limits
from .mailbox import Bridge
from .model_slot import ModelSlot, count_start

if TYPE_CHECKING:
    from ...runtime.engine.engine import EngineStatistics
    from ...runtime.instance import Instance
    from ...runtime.metrics import Metrics
    from ...runtime.text.tokenizer import TextTokenizer

logger = logging.getLogger("teneral.http")

T = TypeVar("T")


@dataclass(slots=True)
class Call:
    """One HTTP request, from its arrival. `work` is there while the route's handler runs, for POST routes, and so is
    `deadline`, if the caller gave one.
    """

    request_id: str
    arrived_s: float = field(default_factory=time.monotonic)
    work: Work | None = None
    deadline: Deadline | None = None
    trace_id: str = ""  # of the caller's trace, where it sent a W3C traceparent
    prompt_tokens: int = 0
    generated_tokens: int = 0
    first_token_s: float | None = None  # since the arrival
    error_status: int | None = None  # of the error that the client was told, which may be an item of a stream

    def age_s(self) -> float:
        return time.monotonic() - self.arrived_s

    @property
    def ended_by(self) -> TeneralError | None:
        """Why this side ended the work; None when it did not: a cancellation is the client's then."""
        return None if self.work is None else self.work.ended_by

    def limit(self, seconds: float) -> None:
        """Give the rest of the work so much time."""
        if self.work is not None:
            self.work.limit(seconds)

    def time_left_s(self, limit_s: float) -> float:
        """For work that may take so long from now: that, or less where the caller waits no longer."""
        return limit_s if self.deadline is None else max(0.0, min(limit_s, self.deadline.remaining_s()))

    def overdue(self, error: TeneralError) -> ApiError:
        """`error`, which is that time was up, as the client is told it."""
        if self.deadline is not None and self.deadline.remaining_s() <= 0:
            return self.deadline.error()
        return ApiError(504, error.message, kind=SERVER_ERROR, code="request_timeout")

    def explain(self, error: Exception) -> ApiError:
        """The client's part of an exception; the log has the rest."""
        told = as_api_error(error)
        self.error_status = told.status
        if not isinstance(error, TeneralError | web.HTTPException | web.RequestPayloadError):
            logger.error("request %s failed", self.request_id, exc_info=error)
        elif told.status >= 500:
            logger.warning("request %s: %d %s", self.request_id, told.status, error)
        return told


# Each request is handled in a task of its own, so this is the request's. (aiohttp's own place for such things
# changed its keys' type between the versions that are supported.)
CALL: ContextVar[Call] = ContextVar("call")


class Service:
    """The instance behind the routes, with the bounds in front of it. One per application; used on its event
    loop only.
    """

    def __init__(
        self, instance: Instance, limits: Limits, metrics: Metrics, *, make_instance: Callable[[], Instance]
    ) -> None:
        """`make_instance` gives another of the same configuration, for when this one is unloaded and loaded again."""
        self.limits = limits
        self.metrics = metrics
        self.admission = Admission(limits, self._num_in_engine, self._retry_after_s, self._body_is_there)
        self.in_flight = InFlight(limits.max_in_flight, self._retry_after_s)
        self.slot = ModelSlot(instance, make_instance, self.in_flight, started=partial(count_start, metrics))
        self.connections = Connections(
            max_connections=limits.max_connections,
            max_head_bytes=MAX_HEAD_BYTES,
            head_timeout_s=limits.head_timeout_s,
            write_stall_s=limits.write_stall_s,
            retry_after_s=self._retry_after_s,
        )
        self.bridge = Bridge()
        self.text_threads = TextThreads()

    @property
    def instance(self) -> Instance:
        """The one that serves now: ask for it anew after waiting for anything."""
        return self.slot.instance

    @property
    def state(self) -> State:
        """The instance's, except that the instance of a server which drains still works."""
        state = self.slot.state
        return State.DRAINING if self.in_flight.draining and state is not State.FAILED else state

    @property
    def first_token(self) -> FirstToken:
        """For requests that do not say it."""
        return FirstToken(self.instance.config.first_token)

    @property
    def max_context(self) -> int | None:
        """Tokens that the engine has room for, of a prompt; None while it is not there."""
        engine = self.instance.engine
        return engine.result().max_context if engine.done() and engine.exception() is None else None

    async def tokenizer(self) -> TextTokenizer:
        return await self.ready(self.instance.tokenizer)

    async def ready(self, future: Future[T]) -> T:
        """One of the instance's parts; waits while it loads, however long.

        Raises the instance's failure, or `RequestError` when this model is not of the kind that has the part.
        """
        try:
            if not future.done():
                # The shield: a client that gives up must not cancel what all others wait for too.
                await asyncio.shield(asyncio.wrap_future(future))
            return future.result()
        except ModelError as error:
            if error is self.instance.failure:
                raise
            raise RequestError(error.message, param="model", hint=error.hint) from error

    async def context_tokens(self) -> int:
        """Tokens that the model has room for here; waits until it is known."""
        try:
            return (await self.ready(self.instance.engine)).max_context
        except RequestError:  # it generates nothing
            return (await self.ready(self.instance.embedder)).max_tokens

    def require_room(self, queue_name: str, priority: Priority, num_sequences: int) -> None:
        """Raises `CapacityError` where the engine would, before anything is done for the request. One that is still
        loading says so when it gets the request.
        """
        if self.instance.engine.done() and self.instance.engine.exception() is None:
            self.instance.engine.result().require_room(queue_name, priority, num_sequences)

    def check_model(self, name: str | None) -> None:
        """Raises 404 for another model than the one served; a request need not name one."""
        if name is not None and name != self.instance.model_name:
            raise ApiError(
                404,
                f"the model {name[:200]!r} does not exist here; this server has {self.instance.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def adapter_of(self, name: str | None, lora: str | None = None) -> str:
        """The adapter that a generation's `model` and `lora` name, '' for the base. Raises 404 for another model, and
        for an adapter that cannot be here.
        """
        base, registry = self.instance.model_name, self.instance.adapters
        adapter = lora or ""
        if name is not None and name != base:
            if name.startswith(f"{base}:"):
                adapter = name[len(base) + 1 :]
            elif registry is not None and registry.is_registered(name):
                adapter = name
            else:
                self.check_model(name)
            if lora and lora != adapter:
                raise RequestError(f"lora is {lora[:200]!r}, but model names {adapter[:200]!r}", param="lora")
        if not adapter and (name is None or name == base):
            return ""
        config = self.instance.config
        if registry is not None:
            registry.check(adapter)
        elif not adapter:
            raise AdapterNotFoundError(f"{str(name)[:200]!r} names no adapter", param="model")
        elif config.adapters is None and not config.model_control:
            raise AdapterNotFoundError(
                "this server has no adapters", param="model", hint="Start it with --adapters."
            )
        return adapter

    def answering_as(self, name: str | None, lora: str | None = None) -> str:
        """The model's name in an answer to such a generation. Raises as `adapter_of`."""
        adapter = self.adapter_of(name, lora)
        base = self.instance.model_name
        if not adapter:
            return base
        return name if name is not None and name != base else f"{base}:{adapter}"

    def load_comment(self) -> str:
        """A sign of life for a stream that has nothing to say yet."""
        progress = self.instance.progress()
        fraction = progress.get("fraction", 1.0)
        if fraction >= 1:
            return "working"
        comment = f"loading {100 * fraction:.0f} %"
        forecast = self.instance.forecast()
        if forecast is None:
            return comment
        rate, left_s = forecast.rate_bytes_per_s / 1e6, forecast.first_token_s
        return f"{comment}, {rate:.{0 if rate >= 10 else 1}f} MB/s, first token in about {max(1, round(left_s))} s"

    def _body_is_there(self, request: web.Request) -> None:
        """Only now does the request take a place, which may be gone: `CapacityError`."""
        self.connections.body_is_there(request.protocol)
        call = CALL.get(None)
        if call is not None and call.work is not None:
            self.in_flight.take_place(call.work)

    def _num_in_engine(self) -> int:
        statistics = self._engine_statistics()
        return 0 if statistics is None else statistics.running + statistics.queued

    def _retry_after_s(self) -> float:
        """For who is refused: by how often places become free, or while there is none to have, by the load so far."""
        statistics = self._engine_statistics()
        if statistics is not None:
            return statistics.retry_after_s
        return expected_wait_s(self.instance.progress()["fraction"], self.instance.timeline.now_s())

    def _engine_statistics(self) -> EngineStatistics | None:
        future = self.instance.engine
        if not future.done() or future.exception() is not None:
            return None
        return future.result().statistics()


SERVICE = web.AppKey("service", Service)  # the application's key for it


P = ParamSpec("P")

LONG_BYTES = 32 << 10  # of a body: what it holds takes 10 ms and more to tokenise
MAX_SHORT, MAX_LONG = 8, 2  # threads; the tokenizer works on fewer texts at a time


class TextThreads:
    """Used on the event loop. Threads start when they are needed, and end with the process."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(MAX_SHORT, "teneral-text")
        self._long = ThreadPoolExecutor(MAX_LONG, "teneral-long-text")

    async def run(self, body_bytes: int, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Returns or raises as `function` does. `body_bytes` is the length of what it looks at."""
        threads = self._long if body_bytes > LONG_BYTES else self._short
        call = functools.partial(function, *args, **options)
        return await asyncio.get_running_loop().run_in_executor(threads, call)
