"""Just enough of HTTP/1.1's server side: requests with bodies of known length, answers."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import parse_qsl, unquote

MAX_HEAD_BYTES = 64 * 1024


@dataclass(frozen=True)
class Request:
    """A request's head. `bucket` and `key` are its path's, decoded; `serial` counts the server's requests,
    `connection` the connections it accepted.
    """

    serial: int
    connection: int
    method: str
    bucket: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]  # names in lower case
    received_s: float  # on time.monotonic()'s clock

    @property
    def range(self) -> tuple[int, int] | None:
        """The half-open byte range of a 'bytes=first-last' header, if that is what was asked for."""
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        return (int(found[1]), int(found[2]) + 1) if found else None


@dataclass(frozen=True)
class FileBody:
    """The bytes [start, start + count) of a file."""

    path: str
    start: int
    count: int


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | FileBody = b""

    @property
    def length(self) -> int:
        return self.body.count if isinstance(self.body, FileBody) else len(self.body)


class RequestError(Exception):
    """The bytes received are not a request that this server knows."""


class RequestStream:
    """The receiving side of one connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray()
        self._body_left = 0
        self._wants_continue = False

    def next_head(self, serial: int, connection: int) -> Request | None:
        """The next request's head, or None when the client has closed. Skips the rest of the last body."""
        if self._wants_continue:
            self._body_left = 0  # it was never sent: the client was answered before it could go on
        while self._body_left:
            self.read_body(1 << 20)
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise RequestError("head too large")
            data = self._connection.recv(16 * 1024)
            if not data:
                return None
            self._buffer += data
        text = self._buffer[:end].decode("latin-1")
        del self._buffer[: end + 4]
        request = parse_head(text, serial, connection, time.monotonic())
        if "transfer-encoding" in request.headers:
            raise RequestError("bodies need a Content-Length")
        self._body_left = int(request.headers.get("content-length", "0"))
        self._wants_continue = request.headers.get("expect", "").lower() == "100-continue"
        return request

    def read_body(self, max_bytes: int) -> bytes:
        """Up to `max_bytes` more of the request's body; b'' at its end."""
        if not self._body_left:
            return b""
        if self._wants_continue:
            self._wants_continue = False
            self._connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not self._buffer:
            self._buffer += self._connection.recv(min(max_bytes, self._body_left))
            if not self._buffer:
                raise ConnectionError("the client closed in the middle of a body")
        data = bytes(self._buffer[: min(max_bytes, self._body_left)])
        del self._buffer[: len(data)]
        self._body_left -= len(data)
        return data

    def read_all(self, max_bytes: int = 16 << 20) -> bytes:
        if self._body_left > max_bytes:
            raise RequestError("body too large")
        data = bytearray()
        while piece := self.read_body(max_bytes):
            data += piece
        return bytes(data)


def parse_head(text: str, serial: int, connection: int, now_s: float) -> Request:
    first, *lines = text.split("\r\n")
    try:
        method, target, _ = first.split(" ")
        headers = {}
        for line in lines:
            name, value = line.split(":", 1)
            headers[name.lower()] = value.strip()
    except ValueError as error:
        raise RequestError(f"not a request: {first!r}") from error
    # Some clients write the whole address (RFC 9112, 3.2.2), AWS's own in C among them.
    path, _, query = re.sub(r"^https?://[^/?]*", "", target).partition("?")
    bucket, _, key = unquote(path).lstrip("/").partition("/")
    return Request(
        serial=serial,
        connection=connection,
        method=method,
        bucket=bucket,
        key=key,
        query=dict(parse_qsl(query, keep_blank_values=True)),
        headers=headers,
        received_s=now_s,
    )


def answer_head(answer: Answer) -> bytes:
    headers = {"Content-Length": str(answer.length), "Server": "store-server", **answer.headers}
    reason = HTTPStatus(answer.status).phrase
    lines = [f"HTTP/1.1 {answer.status} {reason}", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
