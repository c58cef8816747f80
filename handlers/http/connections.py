"""The bounds on connections: how many there are, how long and how large the head of a request may be, and how much lies
here that a client does not take. (What a request may cost once its head is there, `limits` and `admission` say.)

A connection that nobody uses costs a file descriptor, and a client that sends its headers byte by byte holds
one for as long as it likes, and so does one that sends its body byte by byte. So when there are too many, the one that
has been idle the longest gives way, then the one whose body has been on its way the longest; only when all of them are
at work is a new one refused. A client that reads slowly holds what it has not read: of a stream
that is bounded here, since more is written only when there is room; of a whole answer it is the answer, until the
client has taken next to nothing for too long. It knows no routes.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

from aiohttp.streams import StreamReader

from .errors import INVALID_REQUEST, SERVER_ERROR, ApiError
from .limits import MAX_UNSENT_BYTES, PIECE_BYTES

HEAD_END = b"\r\n\r\n"
MIN_TAKEN_BYTES = 16 << 10  # by a client for which something waits, in the time that it has to take anything
# Beyond it writers wait; behind it there is room for one more piece.
HIGH_WATER_BYTES = MAX_UNSENT_BYTES - PIECE_BYTES - 1024
SLOW_BODY_S = 5.0  # a body that is longer on its way may have to give way to a new connection


class Connections:
    """All connections of one server. Lives in the event loop's thread only."""

    def __init__(
        self,
        *,
        max_connections: int,
        max_head_bytes: int,
        head_timeout_s: float,
        write_stall_s: float,
        retry_after_s: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.max_head_bytes = max_head_bytes
        self.head_timeout_s = head_timeout_s
        self.write_stall_s = write_stall_s
        self.retry_after_s = retry_after_s
        self._max_connections = max_connections
        self._open: dict[object, _Connection] = {}  # by aiohttp's protocol, which requests know
        self._idle: dict[_Connection, None] = {}  # the one that has been idle the longest stands first
        self._receiving: dict[_Connection, float] = {}  # whose bodies are on their way, and since when

    def __len__(self) -> int:
        return len(self._open)

    def unsent_bytes(self) -> list[int]:
        """Of each connection, what was written that the kernel has not taken yet."""
        return [connection.unsent_bytes for connection in self._open.values()]

    def guarding(self, make: Callable[[], Any]) -> Callable[[], asyncio.Protocol]:
        """A protocol factory that puts each protocol of `make` behind these bounds."""
        return lambda: _Connection(self, make)

    def request_begins(self, protocol: object, *, body_is_to_come: bool = False) -> None:
        """A request's head is there; until `request_ends` its connection is at work."""
        if (connection := self._open.get(protocol)) is not None:
            connection.begin()
            self._idle.pop(connection, None)
            if body_is_to_come:
                self._receiving[connection] = time.monotonic()

    def body_is_there(self, protocol: object) -> None:
        """The whole body of the request has come."""
        if (connection := self._open.get(protocol)) is not None:
            self._receiving.pop(connection, None)

    def request_ends(self, protocol: object, body: StreamReader) -> None:
        """Its handler is done; what is still to come of its `body` is no head."""
        if (connection := self._open.get(protocol)) is not None:
            connection.is_working = False
            connection.body = body
            self._receiving.pop(connection, None)
            self._idle[connection] = None

    def make_room(self) -> bool:
        """Whether there is room for one more, where need be by closing the one that has been idle the longest, or whose
        body has been on its way the longest.
        """
        if len(self._open) < self._max_connections:
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
        """Forget a connection. Idempotent."""
        self._open.pop(connection.protocol, None)
        self._idle.pop(connection, None)
        self._receiving.pop(connection, None)


class _Connection(asyncio.Protocol):
    """Stands before aiohttp's protocol and passes everything on."""

    def __init__(self, owner: Connections, make: Callable[[], Any]) -> None:
        self.protocol: Any = None  # aiohttp's, once there is room for it
        self.is_working = False
        self.body: StreamReader | None = None  # of the last request
        self._make = make
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None  # runs while a head is arriving
        self._head_bytes = 0
        self._head_is_whole = False
        self._tail = b""  # of the head so far: its end may come in two pieces
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
            self._refuse(503, "all connections that this server may have are at work", "too_many_connections")
            return
        self.protocol = self._make()
        self._owner.opened(self)
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self.protocol.connection_made(transport)

    def data_received(self, data: bytes) -> None:
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
        """Whether what comes now belongs to a request whose head was whole, or comes behind it.

        A client that was answered before it had sent its body goes on sending. aiohttp reads that for some seconds, and
        throws it away: to close at once would take the answer from the client, too. The end of such a body may come in
        one piece with the next head; then what follows is no head (nor if it only looks so: aiohttp's bounds remain).
        """
        is_behind = self.is_working or (self.body is not None and not self.body.is_eof())
        if is_behind and HEAD_END in data:
            self._head_is_whole = True
        return is_behind

    def _take_head(self, data: bytes) -> bool:
        """Count what belongs to a head. False when it was too much, and the connection is being closed."""
        owner = self._owner
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(
                owner.head_timeout_s,
                self._refuse,
                408,
                "the headers did not arrive in time",
                "request_timeout",
            )
        if self._head_is_whole:
            return True  # a body, of a request that is about to begin
        head = self._tail + data
        self._tail = head[1 - len(HEAD_END) :]
        self._head_is_whole = HEAD_END in head
        self._head_bytes += len(data)
        if self._head_is_whole or self._head_bytes <= owner.max_head_bytes:
            return True
        self._refuse(431, f"the headers are larger than {owner.max_head_bytes} bytes", "headers_too_large")
        return False

    def _watch_taking(self) -> None:
        """Cut the client off unless it takes something. No handler does it: that of a whole answer is done."""
        unsent_bytes = self.unsent_bytes

        def check() -> None:
            if unsent_bytes - self.unsent_bytes < MIN_TAKEN_BYTES:
                self.abort()
            else:
                self._watch_taking()

        self._stall_timer = asyncio.get_running_loop().call_later(self._owner.write_stall_s, check)

    def _stop_watching(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer at once, and close; nothing more is read."""
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
        self._transport.close()

    def _forget_head(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._head_bytes, self._tail, self._head_is_whole = 0, b"", False
