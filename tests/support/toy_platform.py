"""A toy platform: all that a platform needs is this file and its row.

Run as a program, it is `teneral` with the row: `TOY_PORT=8000 python -m tests.support.toy_platform serve MODEL`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from teneral.handlers.http.errors import ApiError
from teneral.handlers.http.invoke import invoking
from teneral.handlers.platforms import Platform, Route

if TYPE_CHECKING:
    from teneral.handlers.function.handler import Handler
    from teneral.handlers.http.service import Service

ROW = Platform(
    "toy",
    sign="TOY_FUNCTION_NAME",
    drain_timeout_s=3.0,
    ping_while_loading=202,
    variables=(("TOY_PORT", "port"),),
    routes=(
        Route("POST", "/toy/run", "post", "function", "Call the function", {}, {}),
        Route("GET", "/toy/alive", "alive", "operate", "Liveness", is_open=True),
    ),
    api=f"{__name__}:ToyRoutes",
    error_prefix="/toy/",
    error_response=f"{__name__}:error_response",
)


class ToyRoutes:
    """Events are wrapped in `{"toy": …}`, and so are answers."""

    def __init__(self, service: Service, handler: Handler | None) -> None:
        self._service = service
        self._handler = handler

    async def alive(self, request: web.Request) -> web.Response:
        return web.Response(text="alive")

    async def post(self, request: web.Request) -> web.Response:
        if self._handler is None:
            raise ApiError(404, "the toy platform needs a function")
        async with self._service.admission.body(request) as data:
            event: Any = msgspec.json.decode(data)
            async with invoking(
                self._service, self._handler, event["toy"], platform={"name": "toy"}
            ) as values:
                given = [value async for value in values]
        return web.Response(body=msgspec.json.encode({"toy": given}), content_type="application/json")


def error_response(error: ApiError) -> web.Response:
    return web.Response(status=error.status, text=f"toy trouble: {error.message}")


if __name__ == "__main__":
    from teneral import cli
    from teneral.handlers import platforms

    platforms.PLATFORMS = (*platforms.PLATFORMS, ROW)
    sys.exit(cli.run(sys.argv[1:]))
