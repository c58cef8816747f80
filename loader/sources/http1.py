"""HTTP/1.1 over a kept connection: a request goes out, the answer's head is parsed, its body lands in place.

The body of a known length goes straight into the caller's memory; only what came along with the head is
copied. Lengths are never guessed. All but the reading of such a body is written as steps (`steps.py`), so that
one thread can wait for two connections. A connection knows nothing of retries, ranges or objects.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .addresses import AddressBook
from .base import SourceOptions
from .http_head import Head, HeadError, Request, parse_head
from .steps import Steps
from .web_address import Origin
from .wire import Wire, WireError, WireTimeoutError

if TYPE_CHECKING:
    import ssl

MAX_HEAD_BYTES = 32 * 1024
MAX_INFORMATIONAL = 8  # heads of status 1xx before the answer's own
MAX_TRAILERS = 32
_RECEIVE_BYTES = 16 * 1024  # at a time, where the length is not known yet: heads and chunks
_CHUNK_SIZE = rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;.*)?"


class StaleConnectionError(WireError):
    """The server had closed a kept connection before this request: a new one may do; nothing has failed."""


class BodyTooLargeError(Exception):
    """A body is longer than its reader allows."""


class Connection:
    """Connects at its first request. For one thread at a time; `interrupt` may be called by any."""

    def __init__(
        self, origin: Origin, options: SourceOptions, tls: ssl.SSLContext | None, addresses: AddressBook
    ) -> None:
        self.origin = origin
        self.idle_since_s = 0.0  # the pool's note
        self._wire = Wire(origin, options, tls, addresses)
        self._buffer = bytearray()  # received, not yet used
        self._remaining: int | None = 0  # bytes of the body still to come; None where only its end will tell
        self._is_chunked = False
        self._chunk_left = 0  # bytes of the chunk that is being read
        self._keeps_alive = False
        self._is_fresh = True  # no answer has come over it yet

    @property
    def is_connected(self) -> bool:
        return self._wire.is_connected

    @property
    def is_reusable(self) -> bool:
        """Whether the last answer was read to its end, nothing came behind it, and the server keeps on."""
        return self._keeps_alive and self._remaining == 0 and not self._buffer

    @property
    def body_length(self) -> int | None:
        """Bytes of the body that are still to come; None where only its end will tell."""
        return self._remaining

    def exchange(self, request: Request) -> Steps[Head]:
        """Send the request; the head of the answer, whose body is unread then. Raises `WireError`.

        `StaleConnectionError` says that this connection was kept for too long.
        """
        self._keeps_alive = False
        yield from self._ask(request)
        try:
            head = yield from self._receive_head()
        except HeadError as error:
            message = f"{self.origin} sent a malformed answer: {error}"
            raise WireError(message, is_outage=False) from error
        has_body = request.method != "HEAD" and head.status not in (204, 304)
        self._keeps_alive = head.keeps_alive
        self._is_chunked = has_body and head.is_chunked
        self._chunk_left = 0
        self._remaining = head.content_length if has_body else 0
        self._is_fresh = False
        return head

    def _ask(self, request: Request) -> Steps[None]:
        """Send the request and wait for the first byte of an answer."""
        if not self._wire.is_connected:
            yield from self._wire.connect()
        try:
            self._wire.send(request.encode())
            yield from self._receive_more()
        except WireTimeoutError:
            raise
        except WireError as error:
            if self._is_fresh:
                raise
            raise StaleConnectionError(str(error)) from error

    def read_some(self, view: memoryview) -> int:
        """Put more of a body of known length at the start of `view`: what comes within a tick, perhaps nothing.

        The number of bytes; never more than the body has. Blocks. Raises `WireError`.
        """
        view = view[: self._remaining]
        count = self._take(view) if self._buffer else self._wire.receive(view)
        self._remaining = (self._remaining or 0) - count
        return count

    def read_soon(self, view: memoryview) -> Steps[int]:
        """As `read_some`, but waits as steps do, and until there is something."""
        view = view[: self._remaining]
        count = self._take(view) if self._buffer else (yield from self._wire.receive_soon(view))
        self._remaining = (self._remaining or 0) - count
        return count

    def wait_for_body(self) -> Steps[None]:
        """Return when the body has begun, or has no bytes at all."""
        if not self._buffer and self._remaining != 0:
            yield from self._receive_more()

    def read_all(self, max_bytes: int) -> Steps[bytes]:
        """The whole body. Raises `WireError` where its end is not marked, and `BodyTooLargeError`."""
        if self._remaining is None and not self._is_chunked:
            raise WireError(f"{self.origin} does not say how long its answer is", is_outage=False)
        if self._remaining is not None and self._remaining > max_bytes:
            raise BodyTooLargeError
        body = bytearray()
        while piece := (yield from self._next_piece()):
            body += piece
            if len(body) > max_bytes:
                raise BodyTooLargeError
        return bytes(body)

    def read_excerpt(self, max_bytes: int) -> Steps[bytes]:
        """The beginning of a body that explains an error; what there is of it, whatever happens meanwhile."""
        body = bytearray()
        try:
            while len(body) < max_bytes and (piece := (yield from self._next_piece())):
                body += piece
        except WireError:
            self._keeps_alive = False
        return bytes(body[:max_bytes])

    def looks_alive(self) -> bool:
        """Whether an idle connection is still open, as far as this side can tell. Does not block."""
        # Anything that arrives while nothing was asked for is the end, or an answer to nobody.
        return self.is_reusable and self._wire.is_connected and not self._wire.has_arrivals()

    def interrupt(self) -> None:
        """Make whoever waits on this connection give up with a `WireError`, now and from now on."""
        self._wire.interrupt()

    def close(self) -> None:
        self._keeps_alive = False
        self._wire.close()

    def _receive_head(self) -> Steps[Head]:
        for _ in range(MAX_INFORMATIONAL):
            head = parse_head((yield from self._receive_until(b"\r\n\r\n", MAX_HEAD_BYTES)))
            if head.status >= 200:
                return head
        raise HeadError("no answer behind the informational ones")

    def _receive_until(self, mark: bytes, max_bytes: int) -> Steps[bytes]:
        """What comes before `mark`; both are taken from the buffer."""
        searched = 0
        while (end := self._buffer.find(mark, searched)) < 0:
            searched = max(0, len(self._buffer) - len(mark) + 1)
            if len(self._buffer) > max_bytes:
                raise HeadError(f"more than {max_bytes:,} bytes without an end")
            yield from self._receive_more()
        data = bytes(self._buffer[:end])
        del self._buffer[: end + len(mark)]
        return data

    def _receive_more(self) -> Steps[None]:
        piece = bytearray(_RECEIVE_BYTES)
        count = yield from self._wire.receive_soon(memoryview(piece))
        self._buffer += memoryview(piece)[:count]

    def _take(self, view: memoryview) -> int:
        """Move what is in the buffer already to the start of `view`."""
        count = min(len(view), len(self._buffer))
        view[:count] = self._buffer[:count]
        del self._buffer[:count]
        return count

    def _next_piece(self) -> Steps[bytes]:
        """More of the body, however its end is marked; b"" at its end."""
        try:
            if self._is_chunked:
                return (yield from self._next_chunk_piece())
        except HeadError as error:
            raise WireError(f"{self.origin} sent a malformed body: {error}", is_outage=False) from error
        if self._remaining == 0:
            return b""
        if not self._buffer:
            yield from self._receive_more()
        piece = bytes(self._buffer[: self._remaining])
        del self._buffer[: len(piece)]
        if (
            self._remaining is not None
        ):  # else it ends with the connection: whether it is whole, nobody can tell
            self._remaining -= len(piece)
        return piece

    def _next_chunk_piece(self) -> Steps[bytes]:
        if self._remaining == 0:
            return b""
        if self._chunk_left == 0:
            self._chunk_left = yield from self._receive_chunk_size()
            if self._chunk_left == 0:
                yield from self._skip_trailers()
                self._remaining = 0
                return b""
        if not self._buffer:
            yield from self._receive_more()
        piece = bytes(self._buffer[: self._chunk_left])
        del self._buffer[: len(piece)]
        self._chunk_left -= len(piece)
        if self._chunk_left == 0 and (yield from self._receive_until(b"\r\n", 2)):
            raise HeadError("a chunk is longer than its size")
        return piece

    def _receive_chunk_size(self) -> Steps[int]:
        line = yield from self._receive_until(b"\r\n", 1024)
        found = re.fullmatch(_CHUNK_SIZE, line)
        if not found:
            raise HeadError(f"{line[:80]!r} is not the size of a chunk")
        return int(found[1], 16)

    def _skip_trailers(self) -> Steps[None]:
        for _ in range(MAX_TRAILERS):
            if not (yield from self._receive_until(b"\r\n", MAX_HEAD_BYTES)):
                return
        raise HeadError("too many trailers")
