"""The console's routes, imported by their first request: a start does without them."""

from __future__ import annotations

from collections.abc import Iterator

from aiohttp import web

from ..http.routes import ANY, SSE, Route
from ..http.service import web_routes
from .files import PageFiles

# The page's own data.
ROUTES = (
    Route(
        "GET", "/timeline/events", ".console.live:TimelineEvents.get", "operate", "The same as it happens",
        media=(SSE,),
    ),
    Route(
        "GET", "/debug/artifact", ".console.live:ArtifactRoute.get", "operate", "Layers, tiers and digests",
        None, ANY,
    ),
)  # fmt: skip
PAGES = tuple(
    Route("GET", path, "get", "operate", "The console", media=(media,))
    for path, media in (
        ("/", "text/html"),
        ("/console.js", "text/javascript"),
        ("/console.svg", "image/svg+xml"),
    )
)


class PageRoutes:
    """The routes of the page and its files. `mode` is server or pool."""

    def __init__(self, *, mode: str, needs_key: bool) -> None:
        self._files = PageFiles(mode=mode, needs_key=needs_key)

    async def get(self, request: web.Request) -> web.Response:
        answer = self._files.answer(request.path, request.headers.get("If-None-Match"))
        return web.Response(status=answer.status, headers=answer.headers, body=answer.body or None)

    def routes(self) -> Iterator[web.RouteDef]:
        return web_routes(PAGES, lambda _: self.get)
