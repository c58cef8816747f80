"""The application: the edge, the probes and metrics of every server, and the routes passed to it.

Every server has /livez, /readyz and /health, /ping, /version, /metrics, /timeline and /debug/kv. This module knows
no platform and no API; `handlers/app.py` assembles the whole.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web
from aiohttp.typedefs import Handler as RouteHandler

from ...loader.timeline import Timeline
from ...runtime.metrics import CONTENT_TYPE, Metrics
from ...runtime.state import State
from .edge import EdgeRules, ServerEdge
from .errors import NOT_READY_RETRY_AFTER_S, SERVER_ERROR, ApiError, expected_wait_s, retry_after
from .json_bodies import encode
from .limits import Limits
from .listening import max_files
from .routes import ROUTES
from .service import SERVICE, Service, web_routes
from .web_pages import Hosts, Origins, parse_hosts, parse_origins

if TYPE_CHECKING:
    from ...runtime.config import ServeConfig
    from ...runtime.instance.instance import Instance
    from ..function.calls import FunctionCalls
    from ..function.handler import Handler
    from .key_limits import KeyLimits
    from .keys import ApiKeys
    from .logs import EmfWriter
    from .spans import SpanExport

MAX_READY_WAIT_S = 60.0
READY_POLL_S = 0.01


class HealthRoutes:
    def __init__(
        self, service: Service, *, ping_while_loading: int = 503, calls: FunctionCalls | None = None
    ) -> None:
        """`ping_while_loading` is the status of /ping until requests can be answered; `calls` are
        those of the user's function.
        """
        self._calls = calls
        self._service = service
        self._ping_while_loading = ping_while_loading

    async def livez(self, request: web.Request) -> web.Response:
        """200 while the event loop runs: loading, draining and even a failed load are no reason for
        a restart.
        """
        return web.Response(body=b'{"status":"ok"}', content_type="application/json")

    async def readyz(self, request: web.Request) -> web.Response:
        """200 if a request sent now is processed at once, or with `?when=exact` if every weight is
        exact; else 503.

        Returns the state and the load's progress. `?wait_s=N` delays the answer until it is 200,
        for up to N seconds. /health is the same route, used by most routers.
        """
        wanted = _wanted(request)
        await self._wait_until(wanted, _wait_s(request))
        instance, state = self._service.instance, self._service.state
        is_ready = state in wanted
        report: dict[str, Any] = {
            "state": str(state),
            "model": instance.model_name,
            "progress": instance.progress(),
        }
        if instance.failure is not None:
            report["error"] = instance.failure.message
        return web.Response(
            status=200 if is_ready else 503,
            body=encode(report),
            content_type="application/json",
            headers={} if is_ready else self._retry_after(),
        )

    async def _wait_until(self, wanted: frozenset[State], wait_s: float) -> None:
        """Wait until the state is one of those, or can never become one of them, or for `wait_s`."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait_s
        hopeful = wanted | {State.LOADING, State.PARTIAL}
        while (state := self._service.state) not in wanted and state in hopeful and loop.time() < deadline_s:
            await asyncio.sleep(READY_POLL_S)

    async def ping(self, request: web.Request) -> web.Response:
        """The probe of SageMaker and RunPod's load balancer: 200 once requests can be answered,
        without a body.

        While the instance loads, the platform's own status for that; draining or failed, 503 for
        all.
        """
        state = self._service.state
        if state.can_answer:
            return web.Response(status=200)
        return web.Response(
            status=self._ping_while_loading if state is State.LOADING else 503, headers=self._retry_after()
        )

    def _retry_after(self) -> dict[str, str]:
        instance = self._service.instance
        return retry_after(expected_wait_s(instance.progress()["fraction"], instance.timeline.now_s()))

    async def version(self, request: web.Request) -> web.Response:
        """In vLLM's shape."""
        from ... import __version__

        return web.Response(body=encode({"version": __version__}), content_type="application/json")

    async def metrics(self, request: web.Request) -> web.Response:
        service = self._service
        statistics: dict[str, Any] = {
            **service.instance.statistics(),
            "state": str(service.state),
            "http": {
                "connections": len(service.connections),
                "unsent_bytes": sum(service.connections.unsent_bytes()),
                "in_flight": len(service.in_flight),
                "places_taken": service.in_flight.num_places_taken,
                "waiting_sequences": service.admission.num_waiting,
                "body_bytes": service.admission.body_bytes,
                "answer_bytes": service.admission.answer_bytes,
            },
            **{name: figures() for name, figures in service.figures.items()},
        }
        if self._calls is not None:
            statistics["function"] = self._calls.statistics()
        # In a thread: the first call imports the Prometheus client.
        usage = None if service.key_limits is None else service.key_limits.usage()
        text = await asyncio.to_thread(service.metrics.render, statistics, usage)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    async def timeline(self, request: web.Request) -> web.Response:
        """Every phase of this instance's life so far; `teneral timeline URL` draws it."""
        return web.Response(
            body=encode(self._service.instance.timeline.snapshot()), content_type="application/json"
        )


def _wanted(request: web.Request) -> frozenset[State]:
    """The states of the parameter `?when=`."""
    when = request.query.get("when", "first-layer")
    if when == "exact":
        return frozenset({State.READY})
    if when == "first-layer":
        return frozenset({State.PARTIAL, State.READY})
    raise ApiError(400, "when must be first-layer or exact", param="when")


def _wait_s(request: web.Request) -> float:
    try:
        wait_s = float(request.query.get("wait_s", "0"))
    except ValueError:
        wait_s = -1.0
    if not 0 <= wait_s <= MAX_READY_WAIT_S:
        raise ApiError(400, f"wait_s must be a number from 0 to {MAX_READY_WAIT_S:g}", param="wait_s")
    return wait_s


class DebugRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def kv(self, request: web.Request) -> web.Response:
        """The pool's blocks and chains as `PoolView`; 503 while the model loads."""
        if not self._service.instance.engine.done():
            raise ApiError(
                503,
                "the model is still loading: there is no KV pool yet",
                kind=SERVER_ERROR,
                code="loading",
                headers=retry_after(NOT_READY_RETRY_AFTER_S),
            )
        engine = await self._service.ready(self._service.instance.engine)
        # In a thread: a large pool takes some milliseconds, and the engine's lock.
        view = await asyncio.to_thread(engine.kv_view)
        return web.Response(body=encode(view), content_type="application/json")


def make_application(
    instance: Instance,
    routes: Callable[[Service], Iterable[web.RouteDef]],
    *,
    handler: Handler | None = None,
    limits: Limits | None = None,
    rules: EdgeRules | None = None,
    ping_while_loading: int = 503,
    make_instance: Callable[[], Instance] | None = None,
) -> web.Application:
    """Make the HTTP server of an instance, which may still be loading. The caller closes instance
    and handler.

    `handler` is the user's function for /invoke. `make_instance` makes another instance, not
    started, for unloading and reloading the model.
    """
    make_instance = make_instance or partial(_another, instance.config)
    limits = (limits or Limits()).within_files(max_files())
    spans = _spans(instance.config)
    api_key = instance.config.api_key
    keys: ApiKeys | None = None
    if api_key is not None:
        from .keys import ApiKeys, parse_keys

        keys = ApiKeys(parse_keys(api_key))
    service = Service(
        instance,
        limits,
        Metrics(),
        make_instance=make_instance,
        emf=_emf(instance.config),
        spans=spans,
        key_limits=_key_limits(instance.config, keys),
    )
    named_hosts = parse_hosts(instance.config.allowed_hosts)
    named_origins = parse_origins(instance.config.cors_origin)
    parse_origins(
        instance.config.image_origins, key="image_origins"
    )  # read by the first request that needs it
    hosts = Hosts(named_hosts, is_open=keys is None, origins=named_origins)
    origins = Origins(named_origins, named_hosts)
    app = ServerEdge(service, keys, hosts, origins, rules or EdgeRules()).application()
    app[SERVICE] = service
    if spans is not None:
        app.on_cleanup.append(lambda _: asyncio.to_thread(spans.close))
    calls = None if handler is None else handler.calls
    health = HealthRoutes(service, ping_while_loading=ping_while_loading, calls=calls)
    handlers: dict[str, RouteHandler] = {
        "kv": DebugRoutes(service).kv,
        "invoke": _invoke_route(service, handler),
    }
    app.add_routes(web_routes(ROUTES, lambda name: handlers.get(name) or getattr(health, name)))
    app.add_routes(routes(service))
    return app


def _invoke_route(service: Service, handler: Handler | None) -> RouteHandler:
    if handler is None:
        return _without_function(service)
    # Imports everything that runs functions: servers with only a model do not need it.
    from .invoke import InvokeRoute

    return InvokeRoute(service, handler).post


def _another(config: ServeConfig) -> Instance:
    from ...runtime.instance.instance import Instance  # imported already, for the first instance

    timeline = Timeline(started_at=time.monotonic())  # this process started long before
    return Instance(config, timeline=timeline)


def _spans(config: ServeConfig) -> SpanExport | None:
    if not config.otel:
        return None
    from .spans import SpanExport  # rarely used

    return SpanExport()


def _emf(config: ServeConfig) -> EmfWriter | None:
    if not config.emf:
        return None
    from .logs import EmfWriter  # rarely used

    return EmfWriter(config.served_name)


def _key_limits(config: ServeConfig, keys: ApiKeys | None) -> KeyLimits | None:
    if config.key_limits is None:
        return None
    from .key_limits import make_key_limits  # rarely used

    return make_key_limits(config.key_limits, keys)


def _without_function(service: Service) -> RouteHandler:
    """The route /invoke without a function: an ONNX model answers it; other models need a function."""
    made: list[RouteHandler] = []

    async def post(request: web.Request) -> web.StreamResponse:
        if await service.ready(service.instance.kind) != "onnx":
            raise ApiError(
                404,
                "no function is served here: start the server with --handler module:function",
                code="no_handler",
            )
        if not made:
            # Imports everything that runs functions, which few servers need.
            from ..function.handler import Handler
            from ..plain import handler as plain
            from .invoke import InvokeRoute

            made.append(InvokeRoute(service, Handler(plain)).post)
        return await made[0](request)

    return post
