"""HTTP/1.1 over kept connections: a request goes out, the answer's head is parsed, its body lands
in place.

The body of a known length goes straight into the caller's memory; only what came along with the
head is copied. Lengths are never guessed. All but the reading of such a body is written as
coroutines (`poll_coroutines.py`), so that one thread can wait for two connections. A connection
knows nothing of retries, ranges or objects. The pool keeps connections by origin, bounded in number
and in age; closing it makes every reader give up.
"""

from __future__ import annotations

import os
import re
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from ..base import SourceOptions
from .address import Origin
from .head import Head, HeadError, Request, parse_head
from .poll_coroutines import PollCoroutine
from .wire import AddressBook, Wire, WireError, WireTimeoutError, refused_by_proxy

if TYPE_CHECKING:
    import ssl

    from .proxy import Proxies, Proxy

MAX_HEAD_BYTES = 32 * 1024
MAX_INFORMATIONAL = 8  # heads of status 1xx before the answer's own
MAX_TRAILERS = 32
_RECEIVE_BYTES = 16 * 1024  # at a time, where the length is not known yet: heads and chunks
_CHUNK_SIZE = rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;.*)?"


class StaleConnectionError(WireError):
    """The server had closed a kept connection before this request: a new one may do; nothing has
    failed.
    """


class BodyTooLargeError(Exception):
    """A body is longer than its reader allows."""


class Connection:
    """Connects at its first request. For one thread at a time; `interrupt` may be called by any."""

    def __init__(
        self,
        origin: Origin,
        options: SourceOptions,
        tls: ssl.SSLContext | None,
        addresses: AddressBook,
        proxy: Proxy | None = None,
    ) -> None:
        self.origin = origin
        self.idle_since_s = 0.0  # the pool's note
        self._proxy = proxy
        self._wire = Wire(origin, options, tls, addresses, proxy)
        self._buffer = bytearray()  # received, not yet used
        # Bytes of the body still to come; None where only its end will tell.
        self._remaining: int | None = 0
        self._is_chunked = False
        self._chunk_left = 0  # bytes of the chunk that is being read
        self._keeps_alive = False
        self._is_fresh = True  # no answer has come over it yet

    @property
    def is_connected(self) -> bool:
        return self._wire.is_connected

    @property
    def is_reusable(self) -> bool:
        """True if the last answer was read to its end, nothing came behind it, and the server keeps
        on.
        """
        return self._keeps_alive and self._remaining == 0 and not self._buffer

    @property
    def body_length(self) -> int | None:
        """Bytes of the body that are still to come; None where only its end will tell."""
        return self._remaining

    def exchange(self, request: Request) -> PollCoroutine[Head]:
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
        if head.status == 407 and self._proxy is not None:
            raise refused_by_proxy(self._proxy, self.origin, head.status)
        has_body = request.method != "HEAD" and head.status not in (204, 304)
        self._keeps_alive = head.keeps_alive
        self._is_chunked = has_body and head.is_chunked
        self._chunk_left = 0
        self._remaining = head.content_length if has_body else 0
        self._is_fresh = False
        return head

    def _ask(self, request: Request) -> PollCoroutine[None]:
        """Send the request and wait for the first byte of an answer."""
        if not self._wire.is_connected:
            yield from self._wire.connect()
        if self._proxy is not None and self.origin.scheme == "http":  # the target is the whole address
            private = (*request.private_headers, *self._proxy.headers)
            request = request._replace(target=f"{self.origin}{request.target}", private_headers=private)
        try:
            self._wire.send(request.encode())
            self._send_body(request.body)
            yield from self._receive_more()
        except WireTimeoutError:
            raise
        except WireError as error:
            if self._is_fresh:
                raise
            raise StaleConnectionError(str(error)) from error

    def _send_body(self, body: bytes) -> None:
        try:
            self._wire.send(body)
        except WireTimeoutError:
            raise
        except WireError:
            pass  # a server that closes before it has all of it may have given its reason

    def read_some(self, view: memoryview) -> int:
        """Put more of a body of known length at the start of `view`: what comes within a tick,
        perhaps nothing.

        The number of bytes; never more than the body has. Blocks. Raises `WireError`.
        """
        view = view[: self._remaining]
        count = self._take(view) if self._buffer else self._wire.receive(view)
        self._remaining = (self._remaining or 0) - count
        return count

    def read_soon(self, view: memoryview) -> PollCoroutine[int]:
        """Read what comes next; waits, as steps do, until there is something."""
        view = view[: self._remaining]
        count = self._take(view) if self._buffer else (yield from self._wire.receive_soon(view))
        self._remaining = (self._remaining or 0) - count
        return count

    def wait_for_body(self) -> PollCoroutine[None]:
        """Return when the body has begun, or has no bytes at all."""
        if not self._buffer and self._remaining != 0:
            yield from self._receive_more()

    def read_all(self, max_bytes: int) -> PollCoroutine[bytes]:
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

    def read_excerpt(self, max_bytes: int) -> PollCoroutine[bytes]:
        """The beginning of a body that explains an error; what there is of it, whatever happens
        meanwhile.
        """
        body = bytearray()
        try:
            while len(body) < max_bytes and (piece := (yield from self._next_piece())):
                body += piece
        except WireError:
            self._keeps_alive = False
        return bytes(body[:max_bytes])

    def looks_alive(self) -> bool:
        """True if an idle connection is still open, as far as this side can tell. Does not block."""
        # Anything that arrives while nothing was asked for is the end, or an answer to no request.
        return self.is_reusable and self._wire.is_connected and not self._wire.has_arrivals()

    def interrupt(self) -> None:
        """Make threads that wait on this connection give up with a `WireError`, now and from now
        on.
        """
        self._wire.interrupt()

    def close(self) -> None:
        self._keeps_alive = False
        self._wire.close()

    def _receive_head(self) -> PollCoroutine[Head]:
        for _ in range(MAX_INFORMATIONAL):
            head = parse_head((yield from self._receive_until(b"\r\n\r\n", MAX_HEAD_BYTES)))
            if head.status >= 200:
                return head
        raise HeadError("no answer behind the informational ones")

    def _receive_until(self, mark: bytes, max_bytes: int) -> PollCoroutine[bytes]:
        """The bytes before `mark`; both are taken from the buffer."""
        searched = 0
        while (end := self._buffer.find(mark, searched)) < 0:
            searched = max(0, len(self._buffer) - len(mark) + 1)
            if len(self._buffer) > max_bytes:
                raise HeadError(f"more than {max_bytes:,} bytes without an end")
            yield from self._receive_more()
        data = bytes(self._buffer[:end])
        del self._buffer[: end + len(mark)]
        return data

    def _receive_more(self) -> PollCoroutine[None]:
        piece = bytearray(_RECEIVE_BYTES)
        count = yield from self._wire.receive_soon(memoryview(piece))
        self._buffer += memoryview(piece)[:count]

    def _take(self, view: memoryview) -> int:
        """Move what is in the buffer already to the start of `view`."""
        count = min(len(view), len(self._buffer))
        view[:count] = self._buffer[:count]
        del self._buffer[:count]
        return count

    def _next_piece(self) -> PollCoroutine[bytes]:
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
        if self._remaining is not None:  # else it ends with the connection: whether it is whole is unknown
            self._remaining -= len(piece)
        return piece

    def _next_chunk_piece(self) -> PollCoroutine[bytes]:
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

    def _receive_chunk_size(self) -> PollCoroutine[int]:
        line = yield from self._receive_until(b"\r\n", 1024)
        found = re.fullmatch(_CHUNK_SIZE, line)
        if not found:
            raise HeadError(f"{line[:80]!r} is not the size of a chunk")
        return int(found[1], 16)

    def _skip_trailers(self) -> PollCoroutine[None]:
        for _ in range(MAX_TRAILERS):
            if not (yield from self._receive_until(b"\r\n", MAX_HEAD_BYTES)):
                return
        raise HeadError("too many trailers")


PROXY_VARIABLES = ("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
MAX_IDLE = 32  # connections kept for an origin; how many are in use is up to the threads that read
MAX_IDLE_S = 15.0  # S3 and most proxies close after 20 s or more: an older one is likely dead


class PoolStatistics(NamedTuple):
    opened: int  # connections made so far
    in_use: int
    idle: int


class ConnectionPool:
    """Thread-safe. A connection that was taken must be given back, in whatever state it is."""

    def __init__(self, options: SourceOptions, *, ca_file: str | None = None) -> None:
        """`ca_file` holds the certificates to trust, in place of the system's."""
        self._options = options
        self._ca_file = ca_file
        self._proxies = proxies_of_environment()
        self._tls: ssl.SSLContext | None = None
        self._addresses = AddressBook()
        self._idle: dict[Origin, list[Connection]] = {}  # the last one was used last
        self._in_use: set[Connection] = set()
        self._opened = 0
        self._closed = False
        self._lock = threading.Lock()

    @property
    def is_closed(self) -> bool:
        return self._closed

    def take(self, origin: Origin, *, fresh: bool = False) -> Connection:
        """The warmest idle connection, or a new one that is not connected yet: always that if
        `fresh`.

        Raises `WireError` where the certificates for TLS cannot be read, and `UsageError` for a proxy
        that cannot be used.
        """
        with self._lock:
            idle = [] if fresh else self._idle.get(origin, [])
            while idle:
                connection = idle.pop()
                if time.monotonic() - connection.idle_since_s < MAX_IDLE_S and connection.looks_alive():
                    break
                connection.close()
            else:
                proxy = None if self._proxies is None else self._proxies.of(origin)
                tls = self._tls_for(origin)
                connection = Connection(origin, self._options, tls, self._addresses, proxy)
                self._opened += 1
            self._in_use.add(connection)
            if self._closed:
                connection.interrupt()
        return connection

    def give_back(self, connection: Connection) -> None:
        with self._lock:
            self._in_use.discard(connection)
            idle = self._idle.setdefault(connection.origin, [])
            if connection.is_reusable and not self._closed and len(idle) < MAX_IDLE:
                connection.idle_since_s = time.monotonic()
                idle.append(connection)
                return
        connection.close()

    def quiesce(self) -> None:
        """Close the idle connections and forget where hosts are. Those in use are left alone."""
        with self._lock:
            idle, self._idle = self._idle, {}
            self._addresses = AddressBook()
        for connection in (one for connections in idle.values() for one in connections):
            connection.close()

    def close(self) -> None:
        """Close the idle connections; readers of the others give up at once. Idempotent."""
        with self._lock:
            self._closed = True
            for connection in self._in_use:
                connection.interrupt()
            for connection in (one for idle in self._idle.values() for one in idle):
                connection.close()
            self._idle.clear()

    def statistics(self) -> PoolStatistics:
        with self._lock:
            idle = sum(len(connections) for connections in self._idle.values())
            return PoolStatistics(self._opened, len(self._in_use), idle)

    def _tls_for(self, origin: Origin) -> ssl.SSLContext | None:
        if origin.scheme != "https":
            return None
        if self._tls is None:
            self._tls = tls_context(self._ca_file)
        return self._tls


def trusted_certificates(ca_file: str | None) -> str | None:
    """The file or folder of certificates to trust in place of the system's; None for those."""
    return ca_file or os.environ.get("SSL_CERT_FILE") or os.environ.get("REQUESTS_CA_BUNDLE") or None


def tls_context(ca_file: str | None = None) -> ssl.SSLContext:
    """A context that trusts `trusted_certificates`. Raises `WireError` where they cannot be read."""
    import ssl  # 10 ms that a plain store need not pay

    trusted = trusted_certificates(ca_file)
    try:
        if trusted is not None and os.path.isdir(trusted):
            context = ssl.create_default_context(capath=trusted)
        else:
            context = ssl.create_default_context(cafile=trusted)
    except OSError as error:
        message = f"the certificates to trust cannot be read from {trusted}: {error}"
        raise WireError(message, is_final=True) from error
    context.set_alpn_protocols(["http/1.1"])
    return context


def proxies_of_environment() -> Proxies | None:
    """None where no variable names a proxy."""
    if not any(map(os.environ.get, PROXY_VARIABLES)):
        return None
    from .proxy import Proxies  # few networks have one

    return Proxies(os.environ)
