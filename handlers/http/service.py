"""The state shared by all routes, the record of each request, routes with JSON bodies, and route handlers whose module
is imported by their first request, and not during a cold start.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Generic, ParamSpec, TypeVar, cast

from aiohttp import web
from msgspec import Struct, field

from ...loader.errors import TeneralError
from ...runtime.errors import AdapterNotFoundError, ModelError, RequestError
from ...runtime.state import State
from ...runtime.step.requests import FirstToken, Priority
from ..function.channel import LoopCalls
from .admission import Admission
from .connections import Connections
from .errors import SERVER_ERROR, ApiError, as_api_error, expected_wait_s
from .inflight import Deadline, InFlight, RequestWork
from .json_bodies import JsonDecoder
from .limits import Limits
from .model_slot import ModelSlot, count_start
from .routes import SSE, Route

if TYPE_CHECKING:
    from aiohttp.typedefs import Handler as RouteHandler

    from ...loader.timeline import Timeline
    from ...runtime.engine.embedder import Embedder
    from ...runtime.engine.engine import EngineStatistics
    from ...runtime.instance.instance import Instance
    from ...runtime.metrics import Metrics
    from ...runtime.text.tokenizer import TextTokenizer
    from .key_limits import KeyLimits
    from .logs import EmfWriter
    from .spans import SpanExport, TraceParent

# A pool sends this header with a request to learn its number of tokens: the response has it in a header of the same
# name, and in a comment at the end of a stream of events. Both are as 12+34: of the prompt, and generated.
TOKENS_HEADER = "x-teneral-tokens"
logger = logging.getLogger("teneral.http")

T = TypeVar("T")


class HttpCall(Struct):
    """One HTTP request, from its arrival. `work` is set while the route's handler runs, for POST
    routes, and so is `deadline`, if the caller sent one.
    """

    request_id: str
    model: str = ""  # at a pool's port: the requested one, or "unknown"
    arrived_s: float = field(default_factory=time.monotonic)
    work: RequestWork | None = None
    deadline: Deadline | None = None
    parent: TraceParent | None = None  # the caller's span, if it sent a W3C traceparent
    load: Timeline | None = None  # of the load under way when it came
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in the KV pool
    generated_tokens: int = 0
    tells_tokens: bool = False  # the request has `TOKENS_HEADER`
    key_place: int = 0  # of its API key in the setting, where keys have limits; 0: it is not counted
    first_step_s: float | None = None  # of its first sequence that ended, on the clock of time.monotonic
    first_token_s: float | None = None  # since the arrival
    # Of the error sent to the client, which may be an item of a stream.
    error_status: int | None = None

    @property
    def trace_id(self) -> str:
        """Of the caller's trace; '' without one."""
        return "" if self.parent is None else self.parent.trace_id

    @property
    def tokens(self) -> str:
        """`prompt+generated`, the value of the header `TOKENS_HEADER`."""
        return f"{self.prompt_tokens}+{self.generated_tokens}"

    @property
    def comment(self) -> str:
        """The comment at the end of a stream; '' for none."""
        return f"tokens {self.tokens}" if self.tells_tokens else ""

    def add_tokens(self, num_prompt: int, num_generated: int) -> None:
        """Count the tokens of a function's call of its model."""
        self.prompt_tokens += num_prompt
        self.generated_tokens += num_generated

    def age_s(self) -> float:
        return time.monotonic() - self.arrived_s

    @property
    def ended_by(self) -> TeneralError | None:
        """The reason if the server ended the work; None otherwise: a cancellation is then the
        client's.
        """
        return None if self.work is None else self.work.ended_by

    def limit(self, seconds: float) -> None:
        """Limit the rest of the work to that much time."""
        if self.work is not None:
            self.work.limit(seconds)

    def time_left_s(self, limit_s: float) -> float:
        """The time limit of work from now: `limit_s`, or less with an earlier deadline."""
        return limit_s if self.deadline is None else max(0.0, min(limit_s, self.deadline.remaining_s()))

    def overdue(self, error: TeneralError) -> ApiError:
        """The time-out `error` as it is reported to the client."""
        if self.deadline is not None and self.deadline.remaining_s() <= 0:
            return self.deadline.error()
        return ApiError(504, error.message, kind=SERVER_ERROR, code="request_timeout")

    def explain(
        self, error: Exception, failure: ApiError | None = None, logger: logging.Logger = logger
    ) -> ApiError:
        """The client's view of an exception, `failure` or the usual one; the log has the rest."""
        failure = failure or as_api_error(error)
        self.error_status = failure.status
        if not isinstance(error, TeneralError | web.HTTPException | web.RequestPayloadError):
            logger.error("request %s failed", self.request_id, exc_info=error)
        elif failure.status >= 500:
            logger.warning("request %s: %d %s", self.request_id, failure.status, error)
        return failure


# Each request is handled in a task of its own, so this is the request's. (aiohttp's own place for
# it changed its key type between the supported versions.)
CALL: ContextVar[HttpCall] = ContextVar("call")


class Service:
    """The instance of the routes, and the bounds in front of it. One per application; used on its
    event loop only.
    """

    def __init__(
        self,
        instance: Instance,
        limits: Limits,
        metrics: Metrics,
        *,
        make_instance: Callable[[], Instance],
        emf: EmfWriter | None = None,
        spans: SpanExport | None = None,
        key_limits: KeyLimits | None = None,
    ) -> None:
        """`make_instance` makes another of the same configuration, to reload an unloaded model."""
        self.limits = limits
        self.metrics = metrics
        self.emf = emf
        self.spans = spans
        self.key_limits = key_limits
        self.admission = Admission(limits, self._num_in_engine, self._retry_after_s, self._body_is_there)
        self.in_flight = InFlight(limits.max_in_flight, self._retry_after_s)
        self.slot = ModelSlot(
            instance, make_instance, self.in_flight, started=partial(count_start, metrics, emf)
        )
        self.connections = Connections(limits, self._retry_after_s)
        self.loop_calls = LoopCalls()
        self.text_threads = TextThreads()
        # More figures for metrics, by the name of what they are of.
        self.figures: dict[str, Callable[[], Mapping[str, float]]] = {}
        self._shared: dict[Callable[[Service], object], object] = {}

    def shared(self, make: Callable[[Service], T]) -> T:
        """An object that several routes of an API share, made by the first of them that needs it."""
        if make not in self._shared:
            self._shared[make] = make(self)
        return cast(T, self._shared[make])

    @property
    def instance(self) -> Instance:
        """The current instance: read it again after every wait."""
        return self.slot.instance

    @property
    def state(self) -> State:
        """The instance's state, except that a draining server's instance still works."""
        state = self.slot.state
        return State.DRAINING if self.in_flight.draining and state is not State.FAILED else state

    @property
    def first_token(self) -> FirstToken:
        """The default of requests."""
        return FirstToken(self.instance.config.first_token)

    async def tokenizer(self) -> TextTokenizer:
        return await self.ready(self.instance.tokenizer)

    async def encoder(self) -> tuple[TextTokenizer, Embedder]:
        """The tokenizer and the embedder of one instance, even if another takes its place. Raises as `ready`."""
        instance = self.instance
        return await self.ready(instance.tokenizer, instance), await self.ready(instance.embedder, instance)

    async def ready(self, future: Future[T], instance: Instance | None = None) -> T:
        """Wait for one of the parts of an instance, the current one, while it loads, without a time limit.

        Raises the instance's failure, or `RequestError` if this kind of model does not have the
        part.
        """
        instance = instance or self.instance
        try:
            if not future.done():
                if future is not instance.text_settings:  # which need no model
                    instance.full_speed.set()
                # The shield: a client that stops waiting must not cancel the future of all others.
                await asyncio.shield(asyncio.wrap_future(future))
            return future.result()
        except ModelError as error:
            if error is instance.failure:
                raise
            raise RequestError(error.message, param="model", hint=error.hint) from error

    async def context_tokens(self) -> int:
        """The model's maximum of tokens here; waits until it is known."""
        instance = self.instance
        try:
            return (await self.ready(instance.engine, instance)).max_context
        except RequestError:  # it does not generate
            return (await self.ready(instance.embedder, instance)).max_tokens

    def require_room(self, queue_name: str, priority: Priority, num_sequences: int) -> None:
        """Raise `CapacityError` if the engine would, before any work for the request. A loading one
        raises it when it gets the request.
        """
        if self.instance.engine.done() and self.instance.engine.exception() is None:
            self.instance.engine.result().require_room(queue_name, priority, num_sequences)

    def check_model(self, name: str | None) -> None:
        """Raise 404 for another model than the served one; a request need not name one."""
        if name is not None and name != self.instance.model_name:
            raise ApiError(
                404,
                f"the model {name[:200]!r} does not exist here; this server has {self.instance.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def adapter_of(self, name: str | None, lora: str | None = None) -> str:
        """The adapter in a generation's `model` and `lora`, '' for the base. Raises 404 for another
        model, and for an impossible adapter.
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
            raise AdapterNotFoundError(f"{str(name)[:200]!r} is not an adapter", param="model")
        elif config.adapters is None and not config.model_control:
            raise AdapterNotFoundError(
                "this server has no adapters", param="model", hint="Start it with --adapters."
            )
        return adapter

    def answering_as(self, name: str | None, lora: str | None = None) -> str:
        """The model's name in the answer to such a generation. Raises the errors of `adapter_of`."""
        adapter = self.adapter_of(name, lora)
        base = self.instance.model_name
        if not adapter:
            return base
        return name if name is not None and name != base else f"{base}:{adapter}"

    def load_comment(self) -> str:
        """The text of a keep-alive while a stream has no items yet."""
        progress = self.instance.progress()
        fraction = progress.get("fraction", 1.0)
        if fraction >= 1:
            return "working"
        comment = f"loading {100 * fraction:.0f} %"
        forecast = self.instance.forecast()
        if forecast is None:
            return comment
        rate, left_s = forecast.rate_bytes_per_s / 1e6, forecast.first_token_s
        when = f"{'within' if forecast.is_upper_bound else 'in'} about {max(1, round(left_s))} s"
        return f"{comment}, {rate:.{0 if rate >= 10 else 1}f} MB/s, first token {when}"

    def _body_is_there(self, request: web.Request) -> None:
        """Record a request's body: only now does the request take a place, which may be gone:
        `CapacityError`.
        """
        self.connections.body_is_there(request.protocol)
        call = CALL.get(None)
        if call is not None and call.work is not None:
            self.in_flight.take_place(call.work)

    def _num_in_engine(self) -> int:
        statistics = self._engine_statistics()
        return 0 if statistics is None else statistics.running + statistics.queued

    def _retry_after_s(self) -> float:
        """The time for a refused client to retry: by the rate at which places become free, or while
        loading, by the load so far.
        """
        statistics = self._engine_statistics()
        if statistics is not None:
            return statistics.retry_after_s
        return expected_wait_s(self.instance.progress()["fraction"], self.instance.timeline.now_s())

    def _engine_statistics(self) -> EngineStatistics | None:
        future = self.instance.engine
        if not future.done() or future.exception() is not None:
            return None
        return future.result().statistics()


def max_context_of(instance: Instance) -> int | None:
    """Its engine's maximum of prompt tokens; None while that is not loaded."""
    engine = instance.engine
    return engine.result().max_context if engine.done() and engine.exception() is None else None


SERVICE = web.AppKey("service", Service)  # the application's key for it


P = ParamSpec("P")

# Of a body: tokenising its content takes 10 ms or more.
LONG_BYTES = 32 << 10
MAX_SHORT, MAX_LONG = 8, 2  # threads; the tokenizer works on fewer texts at a time


class TextThreads:
    """The threads for texts. Used on the event loop. Threads start on demand, and end with the
    process.
    """

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(MAX_SHORT, "teneral-text")
        self._long = ThreadPoolExecutor(MAX_LONG, "teneral-long-text")

    async def run(self, body_bytes: int, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Run `function` in a thread. `body_bytes` is the length of its input."""
        threads = self._long if body_bytes > LONG_BYTES else self._short
        call = functools.partial(function, *args, **options)
        return await asyncio.get_running_loop().run_in_executor(threads, call)


class BodyRoute(ABC, Generic[T]):
    """A POST route whose JSON body is a value of type `kind`."""

    kind: type[T]

    def __init__(self, service: Service) -> None:
        self._service = service
        self._decoder = JsonDecoder(self.kind)

    async def post(self, request: web.Request) -> web.StreamResponse:
        async with self._service.admission.body(request) as data:
            return await self.answer(request, data)

    async def answer(self, request: web.Request, data: bytes | bytearray) -> web.StreamResponse:
        """Answer a POST whose body was read already."""
        return await self._answer(request, self._decoder.decode(data), len(data))

    @abstractmethod
    async def _answer(self, request: web.Request, body: T, body_bytes: int) -> web.StreamResponse: ...


def web_routes(routes: Iterable[Route], handler_of: Callable[[str], RouteHandler]) -> Iterator[web.RouteDef]:
    """The routes for aiohttp; `handler_of` makes the handler of a route by its name in the table."""
    for route in routes:
        if route.method == "GET":
            # A stream is no answer to HEAD.
            yield web.get(route.path, handler_of(route.handler), allow_head=route.media != (SSE,))
        else:
            yield web.route(route.method, route.path, handler_of(route.handler))


def later(service: Service, address: str) -> RouteHandler:
    """A handler that calls the method at ".module:Class.method", below `handlers`, of an object made from the
    service. Its first request imports the module.
    """
    made: list[object] = []
    module, _, where = address.partition(":")
    kind, _, method = where.partition(".")

    async def handle(request: web.Request) -> web.StreamResponse:
        if not made:
            package = __package__.rpartition(".")[0]
            made.append(getattr(import_module(module, package), kind)(service))
        response: web.StreamResponse = await getattr(made[0], method)(request)
        return response

    return handle
