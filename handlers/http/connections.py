"""The bounds on connections: their number, the time and size of a request's head, and the unsent
data of slow clients. (The bounds on the rest of a request are in `limits` and `admission`.)

An idle connection costs a file descriptor, and so do a client that sends its headers byte by byte,
for as long as it likes, and one that sends its body byte by byte. So if there are too many, the
connection with the longest idle time is closed, then the one with the slowest body; only if all of
them are busy is a new one refused. A slow reader holds its unread data: a bounded part of a stream,
since more is written only if there is room; or a whole answer, until the client has read almost
nothing for too long. This module knows no routes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.http_writer import HttpVersion11
from aiohttp.streams import StreamReader
from multidict import CIMultiDict, CIMultiDictProxy

from .errors import INVALID_REQUEST, SERVER_ERROR, ApiError, as_api_error
from .limits import (
    IDLE_CONNECTION_S,
    MAX_HEAD_BYTES,
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    MAX_REQUEST_LINE_BYTES,
    MAX_UNSENT_BYTES,
    PIECE_BYTES,
    Limits,
)

HEAD_END = b"\r\n\r\n"
# Minimum that a client must read of waiting data within the stall time.
MIN_TAKEN_BYTES = 16 << 10
# Beyond it writers wait; there is room for one more piece after it.
HIGH_WATER_BYTES = MAX_UNSENT_BYTES - PIECE_BYTES - 1024
REFUSED_S = 1.0  # for the client to read why it was refused
# A slower body may be dropped for a new connection.
SLOW_BODY_S = 5.0
MAX_REASON_CHARS = 200  # of aiohttp's words on bytes that are not HTTP


def app_runner(app: web.Application) -> web.AppRunner:
    """A runner of `app` with the limits of all servers."""
    return _Runner(
        app,
        access_log=None,  # `edge` writes one
        # A disconnected client cancels its handler, and with it its generations.
        handler_cancellation=True,
        keepalive_timeout=IDLE_CONNECTION_S,
        # `compression.py` decompresses bodies, within their limits.
        auto_decompress=False,
        max_line_size=MAX_REQUEST_LINE_BYTES,
        max_field_size=MAX_HEADER_BYTES,
        max_headers=MAX_HEADERS,
        logger=_wire_logger(),
        # After the drain only answers being sent are left.
        shutdown_timeout=0.5,
    )


class _Runner(web.AppRunner):
    """aiohttp's, with `_Protocol` for its connections, for which aiohttp has no option, and without its early answer to
    `Expect`.
    """

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        server.__class__ = _Server
        server.request_factory = _without_expect(server.request_factory)
        return server


def _without_expect(make: Callable[..., web.BaseRequest]) -> Callable[..., web.BaseRequest]:
    """A factory of requests that keeps `Expect` from aiohttp, which would send `100 Continue` before anybody has looked
    at the request; `invite_body` sends it. Other expectations are none that a server must know (RFC 9110, 10.1.1).
    """

    def make_request(message: Any, *rest: Any) -> web.BaseRequest:
        if "Expect" not in message.headers:
            return make(message, *rest)
        headers = CIMultiDict(message.headers)
        del headers["Expect"]
        return make(message._replace(headers=CIMultiDictProxy(headers)), *rest)

    return make_request


async def invite_body(request: web.Request) -> None:
    """Send `100 Continue` to a client that waits for it before it sends the body. Call it once, when the body is
    wanted.
    """
    # As they came: `_without_expect` has taken it out of the others.
    expected = (value for name, value in request.raw_headers if name.lower() == b"expect")
    if request.version >= HttpVersion11 and any(value.lower() == b"100-continue" for value in expected):
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer itself has not begun


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        protocol = super().__call__()
        protocol.__class__ = _Protocol
        return protocol


class _Protocol(web.RequestHandler):
    """aiohttp's, but errors outside of the application have the shape of all others."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to a request that is not valid HTTP, or whose handling failed. Raises `ConnectionError` where an
        answer has begun.
        """
        super().handle_error(request, status, exc, message)  # logs it
        if isinstance(exc, HttpProcessingError):
            error = _wire_error(status, exc, message)
            request._version = HttpVersion11  # aiohttp has put 1.0 in place of what it could not read
        else:
            error = as_api_error(exc or RuntimeError())
        response = error.response()
        response.headers["Server"] = "teneral"  # aiohttp's own would show version numbers
        response.force_close()
        return response


def _wire_error(status: int, error: HttpProcessingError, message: str | None) -> ApiError:
    """The answer to a head that aiohttp does not take."""
    if isinstance(error, LineTooLong):
        if error.args[1] == MAX_REQUEST_LINE_BYTES:
            return _line_too_long()
        return ApiError(431, f"a header is larger than {MAX_HEADER_BYTES} bytes", code="headers_too_large")
    reason = (message or error.message).strip().partition("\n")[0][:MAX_REASON_CHARS].rstrip(": ")
    if reason == "Too many headers received":
        return ApiError(431, f"there are more than {MAX_HEADERS} headers", code="headers_too_large")
    return ApiError(status, f"the request is not valid HTTP: {reason}", code="invalid_http")


def _line_too_long() -> ApiError:
    return ApiError(414, f"the URL is larger than {MAX_REQUEST_LINE_BYTES} bytes", code="url_too_long")


def _wire_logger() -> logging.Logger:
    """The logger for aiohttp."""
    logger = logging.getLogger("teneral.http.wire")
    logger.addFilter(_tell_bad_requests_briefly)
    return logger


def _tell_bad_requests_briefly(record: logging.LogRecord) -> bool:
    """Shorten the log of a client that does not speak HTTP. aiohttp logs an error with a traceback,
    but it is no error of the server: any port scanner would fill its log.
    """
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.levelno = min(record.levelno, logging.INFO)
        record.levelname = logging.getLevelName(record.levelno)
        record.msg = f"{record.getMessage()}: {' '.join(error.message.split())[:MAX_REASON_CHARS]}"
        record.args, record.exc_info = (), None
    return True


class Connections:
    """The connections of one server. For the event loop's thread only."""

    def __init__(self, limits: Limits, retry_after_s: Callable[[], float] = lambda: 1.0) -> None:
        self.limits = limits
        self.retry_after_s = retry_after_s
        self._open: dict[object, _Connection] = {}  # by aiohttp's protocol, as known to requests
        # The connection with the longest idle time first.
        self._idle: dict[_Connection, None] = {}
        # Connections with an incomplete body, and the time of its start.
        self._receiving: dict[_Connection, float] = {}

    def __len__(self) -> int:
        return len(self._open)

    def unsent_bytes(self) -> list[int]:
        """The bytes of each connection that the kernel has not accepted yet."""
        return [connection.unsent_bytes for connection in self._open.values()]

    def guarding(self, make: Callable[[], Any], unsent: bytes = b"") -> Callable[[], asyncio.Protocol]:
        """A protocol factory that wraps each protocol of `make` in these bounds. `unsent` is the rest of an answer
        that was begun before, to be sent first.
        """
        return lambda: _Connection(self, make, unsent)

    def request_begins(self, protocol: object, *, body_is_to_come: bool = False) -> None:
        """Record a request's head; until `request_ends` its connection is busy."""
        if (connection := self._open.get(protocol)) is not None:
            connection.begin()
            self._idle.pop(connection, None)
            if body_is_to_come:
                self._receiving[connection] = time.monotonic()

    def body_is_there(self, protocol: object) -> None:
        """Record that the whole body of the request has arrived."""
        if (connection := self._open.get(protocol)) is not None:
            self._receiving.pop(connection, None)

    def request_ends(self, protocol: object, body: StreamReader) -> None:
        """Record the end of its handler; the rest of its `body` is not a head."""
        if (connection := self._open.get(protocol)) is not None:
            connection.is_working = False
            connection.body = body
            self._receiving.pop(connection, None)
            self._idle[connection] = None

    def make_room(self) -> bool:
        """Make room for one more connection, if necessary by closing the one with the longest idle
        time, or the slowest body. Returns whether there is room.
        """
        if len(self._open) < self.limits.max_connections:
            return True
        longest = next(iter(self._idle), None)
        if longest is None and self._receiving:
            slowest, since_s = next(iter(self._receiving.items()))
            longest = slowest if time.monotonic() - since_s >= SLOW_BODY_S else None
        if longest is None:
            return False
        self.closed(longest)
        longest.abort()
        return True

    def opened(self, connection: _Connection) -> None:
        self._open[connection.protocol] = connection
        self._idle[connection] = None

    def closed(self, connection: _Connection) -> None:
        """Remove a connection. Idempotent."""
        self._open.pop(connection.protocol, None)
        self._idle.pop(connection, None)
        self._receiving.pop(connection, None)


class _Connection(asyncio.Protocol):
    """A wrapper of aiohttp's protocol that forwards everything."""

    def __init__(self, owner: Connections, make: Callable[[], Any], unsent: bytes) -> None:
        self.protocol: Any = None  # aiohttp's, once there is room for it
        self.is_working = False
        self._is_refused = False
        self.body: StreamReader | None = None  # of the last request
        self._make = make
        self._owner = owner
        self._unsent = unsent
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None  # runs while a head is arriving
        self._head_bytes = 0
        self._head_is_whole = self._line_is_whole = False
        # Of the head so far: its end may arrive in two pieces.
        self._tail = b""
        self._stall_timer: asyncio.TimerHandle | None = None  # runs while writers wait

    @property
    def unsent_bytes(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def begin(self) -> None:
        self.is_working = True
        self._forget_head()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if not self._owner.make_room():
            if self._unsent:
                self.abort()  # an error cannot follow half an answer
                return
            self._refuse(503, "all connections of this server are busy", "too_many_connections")
            return
        self.protocol = self._make()
        self._owner.opened(self)
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self.protocol.connection_made(transport)
        self._transport.write(self._unsent)
        self._unsent = b""

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._is_behind_a_head(data) or self._take_head(data):
            self.protocol.data_received(data)

    def eof_received(self) -> bool | None:
        return self.protocol.eof_received()  # type: ignore[no-any-return]

    def pause_writing(self) -> None:
        self._watch_taking()
        self.protocol.pause_writing()

    def resume_writing(self) -> None:
        self._stop_watching()
        self.protocol.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._forget_head()
        self._stop_watching()
        if self.protocol is not None:
            self._owner.closed(self)
            self.protocol.connection_lost(error)

    def _is_behind_a_head(self, data: bytes) -> bool:
        """True if this data belongs to a request with a complete head, or follows it.

        A client that was answered before it had sent its body continues to send. aiohttp reads that
        for some seconds, and discards it: closing at once would lose the answer, too. The end of
        such a body may arrive in one piece with the next head; the data after it then is not
        counted as a head (nor if it only looks so: aiohttp's bounds remain).
        """
        is_behind = self.is_working or (self.body is not None and not self.body.is_eof())
        if is_behind and HEAD_END in data:
            self._head_is_whole = True
        return is_behind

    def _take_head(self, data: bytes) -> bool:
        """Count the bytes of a head. Returns False beyond the limit, when the connection is being
        closed.
        """
        owner = self._owner
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(
                owner.limits.head_timeout_s,
                self._refuse,
                408,
                "the headers did not arrive in time",
                "request_timeout",
            )
        if self._head_is_whole:
            return True  # the body of a request that is about to begin
        head = self._tail + data
        self._tail = head[1 - len(HEAD_END) :]
        self._head_is_whole = HEAD_END in head
        self._line_is_whole = self._line_is_whole or b"\n" in data
        self._head_bytes += len(data)
        if self._head_is_whole or self._head_bytes <= MAX_HEAD_BYTES:
            return True
        if self._line_is_whole:
            self._refuse(431, f"the headers are larger than {MAX_HEAD_BYTES} bytes", "headers_too_large")
        else:
            error = _line_too_long()
            self._refuse(error.status, error.message, "url_too_long")
        return False

    def _watch_taking(self) -> None:
        """Abort the connection unless the client reads. A timer, because the handler of a whole
        answer has ended.
        """
        unsent_bytes = self.unsent_bytes

        def check() -> None:
            if unsent_bytes - self.unsent_bytes < MIN_TAKEN_BYTES:
                self.abort()
            else:
                self._watch_taking()

        self._stall_timer = asyncio.get_running_loop().call_later(self._owner.limits.write_stall_s, check)

    def _stop_watching(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer at once and close. What a connection that has a place goes on to send is thrown away for a moment: to
        close before it was read would reset the connection, and lose the answer.
        """
        self._forget_head()
        kind = SERVER_ERROR if status >= 500 else INVALID_REQUEST
        body = ApiError(status, message, kind=kind, code=code).body()
        lines = [
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            "Connection: close",
            *([f"Retry-After: {math.ceil(self._owner.retry_after_s())}"] if status == 503 else []),
        ]
        assert self._transport is not None
        self._transport.write("\r\n".join(lines).encode() + HEAD_END + body)
        if self.protocol is None:
            self._transport.close()
            return
        self._is_refused = True
        self._transport.write_eof()
        asyncio.get_running_loop().call_later(REFUSED_S, self._transport.close)

    def _forget_head(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._head_bytes, self._tail = 0, b""
        self._head_is_whole = self._line_is_whole = False
