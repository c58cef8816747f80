"""The complete application: OpenAI's routes and those of every platform, on the web server of
`http/`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web

from . import platforms
from .anthropic.routes import ROUTES as ANTHROPIC
from .console.files import PATHS as CONSOLE_PATHS
from .console.routes import ROUTES as CONSOLE
from .console.routes import PageRoutes
from .http.application import make_application
from .http.edge import OPEN_PATHS, EdgeRules
from .http.limits import Limits
from .http.routes import DOCUMENT
from .http.server import serve
from .http.service import later, web_routes

# What all answers of text share, imported before the first request; a route is imported by its own.
from .openai import fields, generation, structured  # noqa: F401
from .openai.routes import ROUTES as OPENAI
from .platforms import HTTP, Platform, imported, routes_of

if TYPE_CHECKING:
    from aiohttp.typedefs import Handler as RouteHandler

    from ..runtime.instance.instance import Instance
    from .function.handler import Handler
    from .http.service import Service

__all__ = ["Limits", "create_app", "edge_rules", "serve"]


def create_app(
    instance: Instance,
    *,
    handler: Handler | None = None,
    limits: Limits | None = None,
    platform: Platform = HTTP,
    make_instance: Callable[[], Instance] | None = None,
    trusts_inside: bool = True,
) -> web.Application:
    """`make_application` with all routes of this server. `serve` runs it. `trusts_inside` is of `EdgeRules`."""

    def routes(service: Service) -> Iterator[web.RouteDef]:
        yield from web_routes((*OPENAI, *ANTHROPIC, *(CONSOLE if has_port else ())), partial(later, service))
        if has_port and instance.config.console:
            needs_key = instance.config.api_key is not None
            yield from PageRoutes(mode="server", needs_key=needs_key).routes()
        for row in platforms.PLATFORMS:
            yield from _platform_routes(row, service, handler)
        yield from web_routes([DOCUMENT], lambda _: _document_route(rules.open_paths))

    has_port = not platform.run  # without one there is no browser in front of it
    rules = edge_rules(platform, has_console=instance.config.console, trusts_inside=trusts_inside)
    return make_application(
        instance,
        routes,
        handler=handler,
        limits=limits,
        rules=rules,
        ping_while_loading=platform.ping_while_loading,
        make_instance=make_instance,
    )


def edge_rules(platform: Platform, *, has_console: bool = True, trusts_inside: bool = True) -> EdgeRules:
    """The edge's rules for all platforms' routes, and for the platform of this server."""
    console_paths = CONSOLE_PATHS if has_console and not platform.run else frozenset()
    routes = [route for row in platforms.PLATFORMS for route in routes_of(row)]
    return EdgeRules(
        open_paths=OPEN_PATHS | console_paths | {route.canonical for route in routes if route.is_open},
        control_paths=frozenset(route.canonical for route in routes if route.is_control),
        takes_any_media=platform.takes_any_media,
        trusts_inside=trusts_inside,
        error_response=platforms.shaped_response,
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

    yield from web_routes(routes_of(platform), to)


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
