"""The application: routes, and what they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.typedefs import Handler as RouteHandler

from ...runtime.metrics import Metrics
from ..platforms import Platform
from .chat import ChatRoute
from .completions import CompletionRoute
from .debug import DebugRoutes
from .edge import edge, stamp
from .embeddings import EmbeddingRoute
from .errors import ApiError
from .health import HealthRoutes
from .limits import Limits
from .models import ModelRoutes
from .server import serve
from .service import SERVICE, Service

if TYPE_CHECKING:
    from ...runtime.instance import Instance
    from ..function import Handler

__all__ = ["Limits", "create_app", "serve"]


def create_app(
    instance: Instance,
    *,
    handler: Handler | None = None,
    limits: Limits | None = None,
    platform: Platform = Platform.HTTP,
) -> web.Application:
    """The HTTP face of an instance, which may still be loading. `serve` runs it; the caller closes instance
    and handler.
    """
    service = Service(instance, limits or Limits(), Metrics())
    app = web.Application(middlewares=[edge(service, instance.config.api_key)])
    app[SERVICE] = service
    app.on_response_prepare.append(stamp)
    health, models = HealthRoutes(service), ModelRoutes(service)
    app.add_routes(
        [
            web.get("/livez", health.livez),
            web.get("/readyz", health.readyz),
            web.get("/metrics", health.metrics),
            web.get("/timeline", health.timeline),
            web.get("/debug/kv", DebugRoutes(service).kv),
            web.get("/v1/models", models.list),
            web.get("/v1/models/{id:.+}", models.get),  # names may have slashes: org/model
            web.post("/v1/completions", CompletionRoute(service).post),
            web.post("/v1/chat/completions", ChatRoute(service).post),
            web.post("/v1/embeddings", EmbeddingRoute(service).post),
            web.post("/invoke", _invoke_route(service, handler)),
        ]
    )
    return app


def _invoke_route(service: Service, handler: Handler | None) -> RouteHandler:
    if handler is None:
        return _no_function
    from .invoke import InvokeRoute  # with all that runs functions: servers of a model alone do without

    return InvokeRoute(service, handler).post


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


async def _no_function(request: web.Request) -> web.StreamResponse:
    raise ApiError(
        404, "no function is served here: start the server with --handler module:function", code="no_handler"
    )
