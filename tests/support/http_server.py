"""A server on loopback, in the test's own event loop, in front of an instance that the test steers; and a
client for it.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from teneral.handlers.app import Limits, create_app, serve
from teneral.handlers.function.handler import Handler
from teneral.handlers.http.listening import shown_address
from teneral.handlers.http.server import Accepted
from teneral.handlers.http.service import SERVICE, Service
from teneral.handlers.platforms import HTTP, Platform
from teneral.loader.errors import TeneralError

PLATFORM_PATHS = ("/", "/events", "/invocations")


class Server:
    """A running server and a client for it."""

    def __init__(
        self,
        instance: Any,
        app: web.Application,
        client: aiohttp.ClientSession,
        address: tuple[str, int],
        stop: asyncio.Event,
        task: asyncio.Task[TeneralError | None],
        handler: Handler | None,
    ) -> None:
        self.instance = instance
        self.app = app
        self.service: Service = app[SERVICE]
        self.client = client
        self.address = address
        self.stop = stop
        self.task = task
        self._handler = handler

    @property
    def url(self) -> str:
        return f"http://{self.address[0]}:{self.address[1]}"

    @property
    def handler(self) -> Handler:
        assert self._handler is not None
        return self._handler

    async def get(self, path: str, **kwargs: Any) -> Answer:
        return await self.request("GET", path, **kwargs)

    async def post(self, path: str, body: Any = None, **kwargs: Any) -> Answer:
        return await self.request("POST", path, json=body, **kwargs)

    async def request(self, method: str, path: str, **kwargs: Any) -> Answer:
        """Bytes have the type JSON, whatever they are, unless the type is given or a platform's."""
        if "data" in kwargs and path not in PLATFORM_PATHS and not path.startswith("/v2/"):
            kwargs["headers"] = {"Content-Type": "application/json", **kwargs.get("headers", {})}
        async with self.client.request(method, path, **kwargs) as response:
            return Answer(response.status, response.headers, await response.read())

    def stream(self, path: str, body: dict[str, Any], **kwargs: Any) -> Any:
        """The response while it comes, as a context manager; `stream` is set in the body."""
        return self.client.post(path, json={**body, "stream": True}, **kwargs)

    def post_paths(self) -> set[str]:
        """Of all routes that do work, with something in place of what is variable in them."""
        routes = [route for route in self.app.router.routes() if route.method == "POST"]
        return {re.sub(r"{[^}]*}", "x", route.resource.canonical) for route in routes if route.resource}

    async def eventually(self, condition: Callable[[], bool]) -> None:
        """Returns when the condition holds; the test's own time limit is the limit."""
        while not condition():
            await asyncio.sleep(0.005)

    def running(self) -> int:
        return int(self.instance.engine.result().statistics().running)

    def metrics_text(self) -> str:
        """What /metrics counts, also when the server is gone."""
        return self.service.metrics.render({}).decode()

    def queued(self) -> int:
        return int(self.instance.engine.result().statistics().queued)


class Answer:
    def __init__(self, status: int, headers: Any, body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        """The error object, once its shape is right."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


def events(body: bytes) -> list[str]:
    """The data of each server-sent event; comments are left out."""
    return [
        line.removeprefix("data: ")
        for block in body.decode().split("\n\n")
        for line in block.split("\n")
        if line.startswith("data: ")
    ]


@asynccontextmanager
async def running_server(
    instance: Any,
    *,
    handler: Handler | None = None,
    limits: Limits | None = None,
    drain_timeout_s: float = 5.0,
    send_buffer_bytes: int | None = None,
    platform: Platform = HTTP,
    make_instance: Callable[[], Any] | None = None,
    listener: socket.socket | None = None,
    accepted: Accepted | None = None,
) -> AsyncIterator[Server]:
    """`send_buffer_bytes` is what the system may hold back for a client that does not read. `listener` listens
    already, and `accepted` has the connections that it accepted so far.
    """
    app = create_app(instance, handler=handler, limits=limits, platform=platform, make_instance=make_instance)
    stop = asyncio.Event()
    with instance, listener or socket.socket() as sock:
        if listener is None:
            if send_buffer_bytes is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
            sock.bind(("127.0.0.1", 0))
            sock.listen()
        address = sock.getsockname()
        url = f"http://{shown_address(sock)}"
        serving = serve(app, sock, drain_timeout_s=drain_timeout_s, stop=stop, accepted=accepted)
        task = asyncio.create_task(serving)
        try:
            async with aiohttp.ClientSession(url) as client:
                yield Server(instance, app, client, address, stop, task, handler)
        finally:
            stop.set()
            await task
    if handler is not None:
        handler.close()
