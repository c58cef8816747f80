"""Lambda's Runtime API as a test wants it: a server that hands out invocations and keeps what comes back.

It holds the protocol up: one answer for an invocation, lengths or chunks as they are announced, trailers only where
they were. What it can do wrong on demand is in `Trouble`.

    with FakeRuntimeApi() as api:
        outcome = api.invoke({"name": "x"})      # waits for the answer
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import queue
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from tests.support.load import patience_s

WAIT_S = patience_s(60)
PREFIX = "/2018-06-01/runtime/"
ARN = "arn:aws:lambda:eu-central-1:123456789012:function:tests"


@dataclass(frozen=True)
class Trouble:
    """What goes wrong with one request. `drop`: the connection is closed in place of an answer."""

    drop: bool = False
    status: int = 0
    wait_s: float = 0.0


@dataclass
class Outcome:
    """An invocation and its answer; `pieces` are the chunks of a streamed one, `piece_times_s` when they came."""

    request_id: str
    kind: str = ""  # response or error
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    pieces: list[bytes] = field(default_factory=list)
    piece_times_s: list[float] = field(default_factory=list)  # on time.monotonic()'s clock
    trailers: dict[str, str] = field(default_factory=dict)
    first_piece: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    handed_out_s: float = 0.0  # on time.monotonic()'s clock
    answered_s: float = 0.0

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def is_streamed(self) -> bool:
        return self.headers.get("lambda-runtime-function-response-mode") == "streaming"

    def wait(self) -> Self:
        assert self.done.wait(WAIT_S), "the invocation was not answered"
        return self

    def trailing_error(self) -> Any:
        """The error behind the pieces."""
        assert self.trailers["lambda-runtime-function-error-type"]
        return json.loads(base64.b64decode(self.trailers["lambda-runtime-function-error-body"]))


@dataclass
class _Invocation:
    outcome: Outcome
    headers: dict[str, str]
    body: bytes


class FakeRuntimeApi:
    """On loopback, a thread a connection."""

    def __init__(self, *, chunked: bool = False) -> None:
        """With `chunked`, events are sent in chunks, as Lambda's own server sends long ones."""
        self._chunked = chunked
        self._numbers = itertools.count(1)
        self._pending: queue.Queue[_Invocation | None] = queue.Queue()
        self._open: dict[str, Outcome] = {}
        self._trouble: dict[str, list[Trouble]] = {}
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._stopping = False
        self.num_connections = 0
        self.init_errors: queue.Queue[tuple[dict[str, str], Any]] = queue.Queue()
        self.restore_errors: queue.Queue[tuple[dict[str, str], Any]] = queue.Queue()
        self.restore = threading.Event()  # set it, and restore/next is answered
        self.asked_to_restore = threading.Event()
        self.num_polling = 0  # requests that wait for an invocation now
        self.polled = threading.Event()  # the first has come
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, name="fake-runtime-api", daemon=True).start()

    # the test's side

    def submit(self, event: Any = None, *, timeout_s: float = 60.0, **headers: str) -> Outcome:
        """Have an invocation handed out. `event` is JSON-ready, or bytes as they are; headers by name, with _ for -."""
        outcome = Outcome(f"{next(self._numbers):08x}-1111-2222-3333-444444444444")
        given = {
            "Content-Type": "application/json",
            "Lambda-Runtime-Aws-Request-Id": outcome.request_id,
            "Lambda-Runtime-Deadline-Ms": str(int(1000 * (time.time() + timeout_s))),
            "Lambda-Runtime-Invoked-Function-Arn": ARN,
            "Lambda-Runtime-Trace-Id": f"Root=1-{outcome.request_id}",
        } | {name.replace("_", "-"): value for name, value in headers.items()}
        body = event if isinstance(event, bytes) else json.dumps(event).encode()
        with self._lock:
            self._open[outcome.request_id] = outcome
        self._pending.put(_Invocation(outcome, given, body))
        return outcome

    def invoke(self, event: Any = None, **options: Any) -> Outcome:
        return self.submit(event, **options).wait()

    def trouble(self, endpoint: str, *troubles: Trouble) -> None:
        """For the next requests of an endpoint: next, response, error, …"""
        with self._lock:
            self._trouble.setdefault(endpoint, []).extend(troubles)

    def drop_connections(self) -> None:
        """Close all of them, as a server does that is restarted."""
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            _shut(connection)

    def close(self) -> None:
        self._stopping = True
        _shut(self._listener)
        self._listener.close()
        self.drop_connections()
        self._pending.put(None)  # a waiter for an invocation passes it on
        self.restore.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # the runtime's side

    def _accept(self) -> None:
        while not self._stopping:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.num_connections += 1
            with self._lock:
                self._connections.add(connection)
            threading.Thread(
                target=self._serve, args=(connection,), name="fake-runtime-api", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, connection.makefile("rb") as reader:
                while line := reader.readline():
                    method, path, _ = line.decode().split()
                    headers = _read_headers(reader)
                    self._answer(connection, reader, method, path, headers)
        except (OSError, ValueError):
            pass  # it went away, or was cut off
        finally:
            with self._lock:
                self._connections.discard(connection)

    def _answer(
        self, connection: socket.socket, reader: Any, method: str, path: str, headers: dict[str, str]
    ) -> None:
        assert path.startswith(PREFIX), path
        *place, endpoint = path.removeprefix(PREFIX).split("/")
        assert method == ("GET" if endpoint == "next" else "POST")
        with self._lock:
            troubles = self._trouble.get(endpoint)
            trouble = troubles.pop(0) if troubles else Trouble()
        outcome = self._open.get(place[-1]) if place[0] == "invocation" and endpoint != "next" else None
        body, pieces, trailers = _read_body(reader, headers, outcome)
        time.sleep(trouble.wait_s)
        if trouble.drop:
            raise OSError("dropped")
        if trouble.status:
            _send(connection, trouble.status, {}, b'{"errorType":"Trouble","errorMessage":"as asked"}')
        elif place == ["invocation"] and endpoint == "next":
            self._hand_out(connection)
        elif place == ["restore"] and endpoint == "next":
            self.asked_to_restore.set()
            assert self.restore.wait(WAIT_S)
            _send(connection, 200, {}, b"")
        elif place[0] in ("init", "restore"):
            errors = self.init_errors if place[0] == "init" else self.restore_errors
            errors.put((headers, json.loads(body)))
            _send(connection, 202, {}, b'{"status":"OK"}')
        elif outcome is None or outcome.done.is_set():
            _send(connection, 400, {}, b'{"errorType":"InvalidRequestID"}')
        else:
            outcome.kind, outcome.headers, outcome.trailers = endpoint, headers, trailers
            outcome.body, outcome.pieces = body, pieces
            outcome.answered_s = time.monotonic()
            outcome.done.set()
            _send(connection, 202, {}, b'{"status":"OK"}')

    def _hand_out(self, connection: socket.socket) -> None:
        self.num_polling += 1
        self.polled.set()
        try:
            invocation = self._pending.get()
        finally:
            self.num_polling -= 1
        if invocation is not None and _is_open(connection):
            invocation.outcome.handed_out_s = time.monotonic()
            _send(connection, 200, invocation.headers, invocation.body, chunked=self._chunked)
        else:
            self._pending.put(invocation)  # who asked has gone: for another
            raise OSError("gone")


def _is_open(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _read_headers(reader: Any) -> dict[str, str]:
    headers = {}
    while (line := reader.readline()) not in (b"\r\n", b""):
        name, _, value = line.decode().partition(":")
        headers[name.strip().lower()] = value.strip()
    return headers


def _read_body(
    reader: Any, headers: Mapping[str, str], outcome: Outcome | None
) -> tuple[bytes, list[bytes], dict[str, str]]:
    if headers.get("transfer-encoding") != "chunked":
        size_bytes = int(headers.get("content-length", 0))
        body = reader.read(size_bytes)
        if len(body) < size_bytes:
            raise OSError("cut off")
        return body, [], {}
    pieces: list[bytes] = []
    while size_bytes := int(reader.readline(), 16):
        pieces.append(reader.read(size_bytes))
        if len(pieces[-1]) < size_bytes:
            raise OSError("cut off")
        assert reader.readline() == b"\r\n"
        if outcome is not None:
            outcome.pieces = pieces
            outcome.piece_times_s.append(time.monotonic())
            outcome.first_piece.set()
    trailers = _read_headers(reader)
    announced = {name.strip().lower() for name in headers.get("trailer", "").split(",")}
    assert set(trailers) <= announced, "trailers must be announced"
    return b"".join(pieces), pieces, trailers


def _send(
    connection: socket.socket, status: int, headers: Mapping[str, str], body: bytes, *, chunked: bool = False
) -> None:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    if chunked:
        half = max(1, len(body) // 2)
        framed = b"".join(
            b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (body[:half], body[half:]) if piece
        )
        lines, body = lines + "Transfer-Encoding: chunked\r\n", framed + b"0\r\n\r\n"
    else:
        lines += f"Content-Length: {len(body)}\r\n"
    connection.sendall(f"HTTP/1.1 {status} As Asked\r\n{lines}\r\n".encode() + body)


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
