"""The application: the edge, the routes of every server, and the routes passed to it.

Knows no platform and no API; `handlers/app.py` assembles the whole.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.typedefs import Handler as RouteHandler

from ...loader.timeline import Timeline
from ...runtime.metrics import Metrics
from .edge import EdgeRules, Origins, edge, parse_origins, stamp
from .errors import ApiError
from .health import DebugRoutes, HealthRoutes
from .keys import ApiKeys, parse_keys
from .limits import Limits
from .service import SERVICE, Service
from .sockets import max_files

if TYPE_CHECKING:
    from ...runtime.config import ServeConfig
    from ...runtime.instance import Instance
    from ..function.handler import Handler
    from .emf import EmfWriter
    from .spans import SpanExport


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
    service = Service(
        instance, limits, Metrics(), make_instance=make_instance, emf=_emf(instance.config), spans=spans
    )
    api_key = instance.config.api_key
    keys = None if api_key is None else ApiKeys(parse_keys(api_key))
    origins = Origins(parse_origins(instance.config.cors_origin))
    app = web.Application(middlewares=[edge(service, keys, origins, rules or EdgeRules())])
    app[SERVICE] = service
    if spans is not None:
        app.on_cleanup.append(lambda _: asyncio.to_thread(spans.close))
    app.on_response_prepare.append(stamp(origins))
    calls = None if handler is None else handler.calls
    health = HealthRoutes(service, ping_while_loading=ping_while_loading, calls=calls)
    app.add_routes(
        [
            web.get("/livez", health.livez),
            web.get("/readyz", health.readyz),
            web.get("/health", health.readyz),
            web.get("/ping", health.ping),
            web.get("/version", health.version),
            web.get("/metrics", health.metrics),
            web.get("/timeline", health.timeline),
            web.get("/debug/kv", DebugRoutes(service).kv),
            web.post("/invoke", _invoke_route(service, handler)),
            *routes(service),
        ]
    )
    return app


def _invoke_route(service: Service, handler: Handler | None) -> RouteHandler:
    if handler is None:
        return _without_function(service)
    # Imports everything that runs functions: servers with only a model do not need it.
    from .invoke import InvokeRoute

    return InvokeRoute(service, handler).post


def _another(config: ServeConfig) -> Instance:
    from ...runtime.instance import Instance  # imported already, for the first instance

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
    from .emf import EmfWriter  # rarely used

    return EmfWriter(config.served_name)


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
