"""The console's routes, imported by their first request: a start does without them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from aiohttp import web

from ..http.service import later
from .files import PATHS, PageFiles

if TYPE_CHECKING:
    from ..http.service import Service


def console_routes(service: Service, *, has_page: bool) -> Iterator[web.RouteDef]:
    """The routes of the page's own data, and with `has_page` those of the page."""
    live = f"{__package__}.live"
    # A stream is no answer to HEAD.
    yield web.get("/timeline/events", later(service, live, "TimelineEvents", "get"), allow_head=False)
    yield web.get("/debug/artifact", later(service, live, "ArtifactRoute", "get"))
    if has_page:
        needs_key = service.instance.config.api_key is not None
        yield from PageRoutes(mode="server", needs_key=needs_key).routes()


class PageRoutes:
    """The routes of the page and its files. `mode` is server or pool."""

    def __init__(self, *, mode: str, needs_key: bool) -> None:
        self._files = PageFiles(mode=mode, needs_key=needs_key)

    async def get(self, request: web.Request) -> web.Response:
        answer = self._files.answer(request.path, request.headers.get("If-None-Match"))
        return web.Response(status=answer.status, headers=answer.headers, body=answer.body or None)

    def routes(self) -> Iterator[web.RouteDef]:
        return (web.get(path, self.get) for path in sorted(PATHS))
