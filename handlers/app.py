"""The application: routes, and what they share."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.typedefs import Handler as RouteHandler

from ..loader.timeline import Timeline
from ..runtime.metrics import Metrics
from .http.edge import Origins, edge, parse_origins, stamp
from .http.errors import ApiError
from .http.health import DebugRoutes, HealthRoutes
from .http.keys import ApiKeys, parse_keys
from .http.limits import Limits
from .http.server import serve
from .http.service import SERVICE, Service
from .http.sockets import max_files
from .openai.chat import ChatRoute
from .openai.completions import CompletionRoute
from .openai.embeddings import EmbeddingRoute, ModelRoutes
from .platforms import TRAITS, Platform
from .platforms.kserve.routes import kserve_routes

if TYPE_CHECKING:
    from ..runtime.config import ServeConfig
    from ..runtime.instance import Instance
    from .function.handler import Handler

__all__ = ["Limits", "create_app", "serve"]


def create_app(
    instance: Instance,
    *,
    handler: Handler | None = None,
    limits: Limits | None = None,
    platform: Platform = Platform.HTTP,
    make_instance: Callable[[], Instance] | None = None,
) -> web.Application:
    """The HTTP face of an instance, which may still be loading. `serve` runs it; the caller closes instance
    and handler. `make_instance` gives another one, not started, for who has the model unloaded and loaded again.
    """
    make_instance = make_instance or partial(_another, instance.config)
    limits = (limits or Limits()).within_files(max_files())
    service = Service(instance, limits, Metrics(), make_instance=make_instance)
    api_key = instance.config.api_key
    keys = None if api_key is None else ApiKeys(parse_keys(api_key))
    origins = Origins(parse_origins(instance.config.cors_origin))
    takes_any = platform is Platform.SAGEMAKER
    app = web.Application(middlewares=[edge(service, keys, origins, takes_any_media=takes_any)])
    app[SERVICE] = service
    app.on_response_prepare.append(stamp(origins))
    health = HealthRoutes(
        service,
        ping_while_loading=TRAITS[platform].ping_while_loading,
        calls=None if handler is None else handler.calls,
    )
    models = ModelRoutes(service)
    events = _on_first_use(lambda: _events_route(service, handler))
    app.add_routes(
        [
            web.get("/livez", health.livez),
            web.get("/readyz", health.readyz),
            web.get("/health", health.readyz),
            web.get("/ping", health.ping),
            web.get("/metrics", health.metrics),
            web.get("/timeline", health.timeline),
            web.get("/debug/kv", DebugRoutes(service).kv),
            web.get("/v1/models", models.list),
            web.get("/v1/models/{id:.+}", models.get),  # names may have slashes: org/model
            web.post("/v1/completions", CompletionRoute(service).post),
            web.post("/v1/chat/completions", ChatRoute(service).post),
            web.post("/v1/embeddings", EmbeddingRoute(service).post),
            web.post("/invoke", _invoke_route(service, handler)),
            web.post("/invocations", _on_first_use(lambda: _sagemaker_route(service, handler))),
            web.post("/", events),
            web.post("/events", events),
            *kserve_routes(service, handler),
        ]
    )
    return app


def _invoke_route(service: Service, handler: Handler | None) -> RouteHandler:
    if handler is None:
        return _no_function
    from .http.invoke import InvokeRoute  # with all that runs functions: servers of a model alone do without

    return InvokeRoute(service, handler).post


def _sagemaker_route(service: Service, handler: Handler | None) -> RouteHandler:
    from .platforms.sagemaker import SageMakerRoute

    return SageMakerRoute(service, handler).post


def _events_route(service: Service, handler: Handler | None) -> RouteHandler:
    from .platforms.cloudevents import CloudEventRoute

    return CloudEventRoute(service, handler).post


def _on_first_use(make: Callable[[], RouteHandler]) -> RouteHandler:
    """A route that is made, and its module imported, by the first request to it: few servers see more than one
    platform, and a cold start waits for every import.
    """
    made: list[RouteHandler] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        if not made:
            made.append(make())
        return await made[0](request)

    return handle


def _another(config: ServeConfig) -> Instance:
    from ..runtime.instance import Instance  # there is one already, so this is imported

    timeline = Timeline(started_at=time.monotonic())  # this process started long before
    return Instance(config, timeline=timeline)


async def _no_function(request: web.Request) -> web.StreamResponse:
    raise ApiError(
        404, "no function is served here: start the server with --handler module:function", code="no_handler"
    )
