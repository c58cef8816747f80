"""Streams to a client: server-sent events, or JSON lines, with keep-alives and bounds on slow
clients.

A stream begins with its first item, so that an error before it is still an ordinary response with
its own status; but no later than after one keep-alive interval, so that proxies see activity. The
items are opaque.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from aiohttp import web
from msgspec import Struct

from .errors import ApiError
from .limits import PIECE_BYTES, Limits

if TYPE_CHECKING:
    from .service import HttpCall


class Framing(Struct, frozen=True):
    """The format of items, which are JSON on one line, in the stream."""

    content_type: str
    prefix: bytes
    suffix: bytes
    has_comments: bool
    end: bytes  # the end of a successful stream
    error_body: Callable[[ApiError], bytes] = ApiError.body  # the last item of a failed stream


SSE = Framing("text/event-stream", b"data: ", b"\n\n", True, b"data: [DONE]\n\n")
NDJSON = Framing("application/x-ndjson", b"", b"\n", False, b"")


class EventStream:
    """One streamed response. Use it as an async context manager around the code that makes its
    items.
    """

    def __init__(
        self,
        request: web.Request,
        framing: Framing,
        limits: Limits,
        *,
        comment: Callable[[], str] = lambda: "waiting",
    ) -> None:
        """`comment` returns the text of the next keep-alive."""
        self._request = request
        self._framing = framing
        self._limits = limits
        self._comment = comment
        self._response = web.StreamResponse(
            headers={
                "Content-Type": f"{framing.content_type}; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # nginx and its derivatives would buffer the stream
            }
        )
        # Two tasks write: one the items, and one the keep-alives.
        self._lock = asyncio.Lock()
        self._last_write_s = asyncio.get_running_loop().time()
        self._ticker: asyncio.Task[None] | None = None

    @property
    def started(self) -> bool:
        """True if the client has the status line; later errors can only be items."""
        return self._response.prepared

    async def __aenter__(self) -> Self:
        if self._framing.has_comments:
            self._ticker = asyncio.create_task(self._keep_alive())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop_ticker()

    async def send(self, *items: bytes) -> None:
        """Write items, each JSON without line breaks. Waits for a slow client; raises
        `ConnectionError` if it has disconnected.
        """
        prefix, suffix = self._framing.prefix, self._framing.suffix
        await self._write(b"".join([prefix + item + suffix for item in items]))

    async def fail(self, error: ApiError, comment: str = "") -> web.StreamResponse:
        """End with an error item, after a comment where the format has them."""
        await self._stop_ticker()
        await self._write(self._comment_of(comment))
        await self.send(self._framing.error_body(error))
        await self._response.write_eof()
        return self._response

    async def finish(self, comment: str = "") -> web.StreamResponse:
        """End a successful stream, after a comment where the format has them."""
        await self._stop_ticker()
        end = self._comment_of(comment) + self._framing.end
        if end or not self.started:
            await self._write(end)
        await self._response.write_eof()
        return self._response

    def abort(self) -> None:
        """Abort the connection: for a client that does not read."""
        if self._request.transport is not None:
            self._request.transport.abort()

    def _comment_of(self, text: str) -> bytes:
        return f": {text}\n\n".encode() if text and self._framing.has_comments else b""

    async def _write(self, data: bytes) -> None:
        async with self._lock:
            if not self._response.prepared:
                await self._response.prepare(self._request)
            for start in range(0, len(data), PIECE_BYTES):
                await self._write_piece(data[start : start + PIECE_BYTES])
            self._last_write_s = asyncio.get_running_loop().time()

    async def _write_piece(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._limits.write_stall_s):
                await self._response.write(data)
                # aiohttp waits for a slow client after each 64 KiB that it wrote, however much is
                # buffered already.
                await self._request.writer.drain()
        except TimeoutError:
            self.abort()
            raise ConnectionResetError("the client read nothing for too long") from None

    async def _keep_alive(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            idle_s = loop.time() - self._last_write_s
            if idle_s < self._limits.keepalive_s:
                await asyncio.sleep(self._limits.keepalive_s - idle_s)
                continue
            # The task that writes items handles a client that has disconnected, or does not read.
            with contextlib.suppress(ConnectionError):
                await self._write(self._comment_of(self._comment()))
            self._last_write_s = loop.time()

    async def _stop_ticker(self) -> None:
        ticker, self._ticker = self._ticker, None
        if ticker is not None:
            ticker.cancel()
            # Unlike awaiting it, this distinguishes its cancellation from our own.
            await asyncio.wait({ticker})


async def complete(stream: EventStream, call: HttpCall, sending: Awaitable[None]) -> web.StreamResponse:
    """Await the sender, then end the stream: successfully, or with an error event if something was
    sent before.

    Errors before anything was sent pass through, and get a status of their own.
    """
    try:
        await sending
        return await stream.finish(call.comment)
    except ConnectionError:
        raise
    except asyncio.CancelledError:
        if call.ended_by is None or not stream.started:
            raise
        return await stream.fail(call.explain(call.ended_by), call.comment)
    except Exception as error:
        if not stream.started:
            raise
        return await stream.fail(call.explain(error), call.comment)
