"""The complete application: OpenAI's routes and those of every platform, on the web server of
`http/`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from aiohttp import web

from . import platforms
from .anthropic.routes import anthropic_routes, is_anthropic
from .console.files import PATHS as CONSOLE_PATHS
from .console.routes import console_routes
from .http.application import make_application
from .http.edge import OPEN_PATHS, EdgeRules
from .http.limits import Limits
from .http.server import serve
from .http.service import CALL
from .openai.routes import COHERE_RERANK, openai_routes
from .platforms import HTTP, Platform, Route, imported, routes_of

if TYPE_CHECKING:
    from aiohttp.typedefs import Handler as RouteHandler

    from ..runtime.instance import Instance
    from .function.handler import Handler
    from .http.errors import ApiError
    from .http.service import Service

__all__ = ["Limits", "create_app", "edge_rules", "serve"]

_PARAMETER = re.compile(r"{(\w+):[^{}]*}")


def create_app(
    instance: Instance,
    *,
    handler: Handler | None = None,
    limits: Limits | None = None,
    platform: Platform = HTTP,
    make_instance: Callable[[], Instance] | None = None,
) -> web.Application:
    """`make_application` with all routes of this server. `serve` runs it."""

    def routes(service: Service) -> Iterator[web.RouteDef]:
        yield from openai_routes(service)
        yield from anthropic_routes(service)
        if not platform.run:  # a platform without a port has no browser in front of it
            yield from console_routes(service, has_page=instance.config.console)
        for row in platforms.PLATFORMS:
            yield from _platform_routes(row, service, handler)
        yield web.get("/openapi.json", _document_route(rules.open_paths))

    rules = edge_rules(platform, has_console=instance.config.console)
    return make_application(
        instance,
        routes,
        handler=handler,
        limits=limits,
        rules=rules,
        ping_while_loading=platform.ping_while_loading,
        make_instance=make_instance,
    )


def edge_rules(platform: Platform, *, has_console: bool = True) -> EdgeRules:
    """The edge's rules for all platforms' routes, and for the platform of this server."""
    console_paths = CONSOLE_PATHS if has_console and not platform.run else frozenset()
    routes = [route for row in platforms.PLATFORMS for route in routes_of(row)]
    return EdgeRules(
        open_paths=OPEN_PATHS | console_paths | {_pattern(route) for route in routes if route.is_open},
        control_paths=frozenset(_pattern(route) for route in routes if route.is_control),
        takes_any_media=platform.takes_any_media,
        error_response=_error_response,
    )


def _platform_routes(platform: Platform, service: Service, handler: Handler | None) -> Iterator[web.RouteDef]:
    """Routes whose module is imported, and whose object is made, by the first request."""
    made: list[object] = []

    def to(name: str) -> RouteHandler:
        async def handle(request: web.Request) -> web.StreamResponse:
            if not made:
                made.append(imported(platform.api)(service, handler))
            response: web.StreamResponse = await getattr(made[0], name)(request)
            return response

        return handle

    for route in routes_of(platform):
        if route.method == "GET":
            yield web.get(route.path, to(route.name))
        else:
            yield web.route(route.method, route.path, to(route.name))


def _document_route(open_paths: frozenset[str]) -> RouteHandler:
    """The OpenAPI document, made by its first request."""
    made: list[bytes] = []

    async def get(request: web.Request) -> web.Response:
        if not made:
            # It imports the types of all bodies, in a thread: requests go on meanwhile.
            made.append(await asyncio.to_thread(_document, open_paths))
        return web.Response(body=made[0], content_type="application/json")

    return get


def _document(open_paths: frozenset[str]) -> bytes:
    # Few clients read it.
    from .api_document.document import document
    from .http.json_bodies import encode

    return encode(document(open_paths))


def _pattern(route: Route) -> str:
    """The path in aiohttp's syntax, without the parameters' own patterns."""
    return _PARAMETER.sub(r"{\1}", route.path)


def _error_response(request: web.Request, error: ApiError) -> web.Response:
    """The error in the protocol of the requested path."""
    if is_anthropic(request.path, request.headers):
        # Rarely used.
        from .anthropic.errors import error_response

        call = CALL.get(None)
        return error_response(error, None if call is None else call.request_id)
    for row in () if request.path == COHERE_RERANK else platforms.PLATFORMS:
        if row.error_prefix and f"{request.path}/".startswith(row.error_prefix):
            response: web.Response = imported(row.error_response)(error)
            return response
    return error.response()
