"""The console's routes, imported by their first request: a start does without them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from aiohttp import web

from ..http.service import later

if TYPE_CHECKING:
    from ..http.service import Service

ASSETS = ("console.css", "console.js", "console.svg")
# Answered without a key: a browser asks for them before it has one, and they hold nothing of this server.
PATHS = frozenset({"/", *(f"/{name}" for name in ASSETS)})


def console_routes(service: Service, *, has_page: bool) -> Iterator[web.RouteDef]:
    """The routes of the page's own data, and with `has_page` those of the page."""
    live = f"{__package__}.live"
    # A stream is no answer to HEAD.
    yield web.get("/timeline/events", later(service, live, "TimelineEvents", "get"), allow_head=False)
    yield web.get("/debug/artifact", later(service, live, "ArtifactRoute", "get"))
    if has_page:
        page = later(service, __name__, "PageRoutes", "get")
        yield from (web.get(path, page) for path in sorted(PATHS))


class PageRoutes:
    """The page and its files, kept from their first request on."""

    def __init__(self, service: Service | None, *, mode: str = "server", needs_key: bool = False) -> None:
        """`service` is None in front of a pool, which says itself how it is served."""
        self._mode = mode
        self._needs_key = needs_key if service is None else service.instance.config.api_key is not None
        self._answers: dict[str, tuple[bytes, str, str]] = {}  # by path: body, type, entity tag

    async def get(self, request: web.Request) -> web.Response:
        body, content_type, tag = self._answer(request.path)
        from .files import POLICY  # imported by `_answer`

        headers = {
            "Content-Security-Policy": POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
            "ETag": tag,
        }
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=body, content_type=content_type, charset="utf-8", headers=headers)

    def routes(self) -> Iterator[web.RouteDef]:
        return (web.get(path, self.get) for path in sorted(PATHS))

    def _answer(self, path: str) -> tuple[bytes, str, str]:
        if path not in self._answers:
            from . import files  # with the first request

            name = path.removeprefix("/") or "index.html"
            is_page = path == "/"
            body = files.page(mode=self._mode, needs_key=self._needs_key) if is_page else files.asset(name)
            tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            self._answers[path] = (body, files.content_type(name), tag)
        return self._answers[path]
