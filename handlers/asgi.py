"""`teneral.asgi_app`: all routes of `teneral serve` as an ASGI application, to run alone or mounted in another.

It forwards each request to the same application that a server has, over a local socket (`serving_inside`), piece by
piece in both directions, so that limits, keys, errors and streams are the server's. The model starts with the
application's lifespan or its first request, whichever comes first: an application that another one mounts gets no
lifespan of its own.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ..loader.errors import TeneralError, UsageError
from .engine import PROCESS_SETTINGS, AsyncEngine, Engine, EngineInstance, checked_settings
from .http.limits import HOP_BY_HOP
from .platforms import HTTP, resolve_settings

if TYPE_CHECKING:
    from aiohttp import ClientSession
    from yarl import URL

    from ..runtime.instance.instance import Instance

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

# As ASGI has them, with those that its servers add themselves.
OWN_REQUEST_HEADERS = frozenset(name.encode() for name in HOP_BY_HOP)
OWN_RESPONSE_HEADERS = OWN_REQUEST_HEADERS | {b"date", b"server"}

_DOTS = re.compile(r"(?<=/)\.\.?(?=/|\Z)")


def asgi_app(model: str | os.PathLike[str] | Engine | AsyncEngine, **settings: Any) -> AsgiApp:
    """All routes of `teneral serve` as an ASGI 3 application: `/v1/chat/completions` and so on.

    `model` is an address, or an engine, which the application then shares and does not close. `settings`
    are those of `teneral serve` (docs/settings.md) without those of a process, such as `port`; with an
    engine there are none, because it has its own. Run it with any ASGI server on asyncio, such as uvicorn,
    or mount it:

        llm = teneral.asgi_app("Qwen/Qwen2.5-0.5B-Instruct")
        app = FastAPI(lifespan=llm.lifespan)
        app.mount("/llm", llm)

    Raises `UsageError` for an unknown or invalid setting. Errors of the load are answers of its routes.
    """
    if isinstance(model, EngineInstance):
        if settings:
            raise UsageError(
                "an application of an engine has no settings of its own",
                key=next(iter(settings)),
                hint="Pass them to the engine, or the model's address here.",
            )
        return AsgiApp(lambda: model, owns_engine=False)
    # On a platform, whose routes are behind names of its own, any name is this application's, as a server's there.
    config = resolve_settings(checked_settings(model, settings, without=PROCESS_SETTINGS), os.environ)
    return AsgiApp(lambda: EngineInstance(config), owns_engine=True)


class AsgiApp:
    """An ASGI 3 application. Serves one event loop at a time."""

    def __init__(self, make_engine: Callable[[], EngineInstance], *, owns_engine: bool) -> None:
        self._make_engine = make_engine
        self._owns_engine = owns_engine
        self._engine: EngineInstance | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening: asyncio.Task[ClientSession] | None = None
        self._stack = AsyncExitStack()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await _Exchange(scope, receive, send).forward(await self._open())
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1000, "reason": "there are no WebSockets here"})

    @asynccontextmanager
    async def lifespan(self, app: object = None) -> AsyncIterator[None]:
        """The model's life, for the application that mounts this one: `FastAPI(lifespan=llm.lifespan)`."""
        await self._open()
        try:
            yield
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """End running requests after the setting `drain_timeout_s` (8 s), and the model if it is not
        a caller's engine. Idempotent; a later request starts another one.
        """
        opening, self._opening = self._opening, None
        if opening is not None and self._loop is asyncio.get_running_loop():
            with suppress(TeneralError):
                await opening
            await self._stack.aclose()
        engine, self._engine = self._engine, None
        if engine is not None and self._owns_engine:
            await asyncio.to_thread(engine.release)

    async def _live(self, receive: Receive, send: Send) -> None:
        """Answer an ASGI server's lifespan events."""
        await receive()
        try:
            await self._open()
        except TeneralError as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.aclose()
        await send({"type": "lifespan.shutdown.complete"})

    async def _open(self) -> ClientSession:
        """The session with the server's application, which the first call starts."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._opening is not None and self._loop is not None and not self._loop.is_closed():
                raise UsageError(
                    "this application serves another event loop", hint="Make one for each event loop."
                )
            self._loop, self._opening = loop, None
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            self._opening = loop.create_task(self._start())
        return await asyncio.shield(self._opening)

    async def _start(self) -> ClientSession:
        if self._engine is None:
            self._engine = await asyncio.to_thread(self._make_engine)
        self._stack = AsyncExitStack()
        return await self._stack.enter_async_context(_serving(self._engine.instance))


@asynccontextmanager
async def _serving(instance: Instance) -> AsyncIterator[ClientSession]:
    """A context with a session whose requests reach the server's application for the instance."""
    # A web server takes a while to import, and the program's other requests go on.
    await asyncio.to_thread(import_module, f"{__package__}.app")
    from .app import Limits, create_app
    from .function.handler import load_handler
    from .http.server import serving_inside
    from .http.service import SERVICE

    config, limits = instance.config, Limits.from_config(instance.config)
    drain_timeout_s = HTTP.drain_timeout_s if config.drain_timeout_s is None else config.drain_timeout_s
    async with AsyncExitStack() as stack:
        handler = None
        if config.handler:
            handler = await asyncio.to_thread(load_handler, config.handler, max_calls=limits.max_in_flight)
            stack.push_async_callback(asyncio.to_thread, handler.close)
        app = create_app(instance, handler=handler, limits=limits, trusts_inside=False)
        session = await stack.enter_async_context(serving_inside(app))
        stack.push_async_callback(app[SERVICE].slot.close)
        stack.push_async_callback(app[SERVICE].in_flight.drain, drain_timeout_s)
        yield session


class _Exchange:
    """One request and its answer."""

    def __init__(self, scope: Message, receive: Receive, send: Send) -> None:
        self._method: str = scope["method"]
        self._headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name not in OWN_REQUEST_HEADERS
        ]
        self._target = _target_of(scope)
        self._receive = receive
        self._send = send
        self._body_ended = asyncio.Event()
        self._is_client_gone = False

    async def forward(self, session: ClientSession) -> None:
        """Send the request, and its answer as it arrives. A client that disconnects cancels it."""
        answering = asyncio.create_task(self._answer(session))
        watching = asyncio.create_task(self._watch())
        try:
            await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done() and not self._is_client_gone:
                await answering
        finally:
            # Cancelling the request closes its connection, and that cancels its work.
            for task in (answering, watching):
                task.cancel()
            await asyncio.gather(answering, watching, return_exceptions=True)

    async def _answer(self, session: ClientSession) -> None:
        async with session.request(
            self._method,
            self._target,
            headers=self._headers,
            data=await self._body(),
            allow_redirects=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
        ) as response:
            headers = [
                (name.lower(), value)
                for name, value in response.raw_headers
                if name.lower() not in OWN_RESPONSE_HEADERS
            ]
            await self._send({"type": "http.response.start", "status": response.status, "headers": headers})
            async for piece in response.content.iter_any():
                await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _body(self) -> bytes | AsyncIterator[bytes] | None:
        """The body: as a whole if it came at once, else in pieces as they arrive."""
        first, more = await self._next_piece()
        if not more:
            self._body_ended.set()
            return first or None
        return self._pieces(first)

    async def _pieces(self, first: bytes) -> AsyncIterator[bytes]:
        piece, more = first, True
        while True:
            if piece:
                yield piece
            if not more:
                self._body_ended.set()
                return
            piece, more = await self._next_piece()

    async def _next_piece(self) -> tuple[bytes, bool]:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._is_client_gone = True
            raise ConnectionResetError("the client disconnected")
        return message.get("body", b""), message.get("more_body", False)

    async def _watch(self) -> None:
        """Wait until the client disconnects, after its body."""
        await self._body_ended.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._is_client_gone = True


def _target_of(scope: Message) -> URL:
    """The path below the mount point, and the query, as they were sent."""
    from yarl import URL  # comes with the web server

    path = scope.get("raw_path") or quote(scope["path"], safe="/%:@!$&'()*+,;=~-._").encode()
    path = path.partition(b"?")[0].decode("latin-1")
    root = quote(scope.get("root_path", ""), safe="/:@!$&'()*+,;=~-._").rstrip("/")
    if path == root or path.startswith(f"{root}/"):  # some servers leave it out
        path = path[len(root) :] or "/"
    # Literal, as the application outside compared them: yarl would go up at "..", and take "//" for a host.
    path = _DOTS.sub(lambda dots: dots[0].replace(".", "%2E"), path)
    path = f"/%2F{path[2:]}" if path.startswith("//") else path
    return URL.build(path=path, query_string=scope.get("query_string", b"").decode("latin-1"), encoded=True)
