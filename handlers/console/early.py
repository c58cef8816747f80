"""The console's page while the web server is still being imported.

The port opens first and answers last: the imports between take most of the start of a small model, and a browser that
comes at once would wait for them. Meanwhile a thread accepts connections, and looks at what they send without taking it
(MSG_PEEK). A plain `GET` of one of the page's files it answers itself, with the headers of `routes`. Every other
connection stays as it is, with all its bytes in the kernel, until `hand_over` gives it to the web server.

The thread sleeps until a client comes, and reads files and imports modules only for such a request. It never waits for
a client: a request that is not there as a whole when it is first looked at is the web server's, and so is the rest of
an answer that the client does not read. Connections, answers and the bytes of a request are bounded; beyond the bounds
clients wait in the backlog, as they do without this.
"""

from __future__ import annotations

import os
import re
import select
import socket
import threading
import time
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from .files import PageFiles

# Of all clients together, from the start to `hand_over`. A server has at least 24 descriptors for connections.
MAX_CONNECTIONS = 16
MAX_ANSWERS = 64
MAX_HEAD_BYTES = 8 << 10
_KEPT = b"keep-alive"
_REASONS = {200: "OK", 304: "Not Modified"}
HEAD = rb"GET (/|/console\.(?:js|svg)) HTTP/1\.1\r\n(?:[A-Za-z0-9-]{1,100}:[ -~]*\r\n){0,100}\r\n"
# By any other name it may not be this server that a page is of: that is for the web server to say.
_OWN_HOST = rb"(?i)(?:localhost|\d{1,3}(?:\.\d{1,3}){3}|\[[0-9a-f:.]{2,45}\])(?::\d{1,5})?"
_FIELD = rb"(?m)^([A-Za-z0-9-]+): *(.*?) *\r$"
# Headers by which a request means more than its first line says, or that the web server logs or repeats.
_MORE = frozenset(
    (
        b"content-length",
        b"transfer-encoding",
        b"expect",
        b"upgrade",
        b"origin",
        b"x-request-id",
        b"traceparent",
    )
)

# Called with the path, the status and the seconds of an answer.
Count = Callable[[str, int, float], None]


class EarlyPage:
    """The page at a listening socket, from the construction to `hand_over`. As a context it closes the connections that
    were not handed over.
    """

    def __init__(self, listener: socket.socket, *, needs_key: bool = False, more_headers: str = "") -> None:
        """`more_headers` are lines for each answer, each with its line break. Makes the listener non-blocking."""
        listener.setblocking(False)  # a client may go away between `poll` and `accept`
        self._listener = listener
        self._needs_key = needs_key
        self._more_headers = more_headers
        self._connections: dict[int, socket.socket] = {}  # by descriptor, in the order of their arrival
        self._unsent: dict[int, bytes] = {}
        self._answered: list[tuple[str, int, float]] = []
        self._is_ended = False
        self._stop, self._stopping = os.pipe()
        self._thread = threading.Thread(target=self._run, name="teneral-early-page", daemon=True)
        self._thread.start()

    def hand_over(self, count: Count) -> list[tuple[socket.socket, bytes]]:
        """Stop, count the answers, and give all open connections to the caller, who closes them: each with the rest of
        an answer that has to be sent before any other.
        """
        self._end()
        for answered in self._answered:
            count(*answered)
        waiting = [(each, self._unsent.get(number, b"")) for number, each in self._connections.items()]
        self._connections = {}
        return waiting

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        for connection in self._connections.values():
            connection.close()

    def _end(self) -> None:
        if not self._is_ended:
            self._is_ended = True
            os.write(self._stopping, b".")
            self._thread.join()
            os.close(self._stop)
            os.close(self._stopping)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._stop, select.POLLIN)
        poll.register(self._listener, select.POLLIN)
        while len(self._answered) < MAX_ANSWERS:
            ready = [number for number, _ in poll.poll()]
            if self._stop in ready:
                return
            # With the first client.
            from ...loader.process.cpu import quick_turns

            # Each system call gives up the GIL, and a thread that imports would keep it for 5 ms every time.
            with quick_turns():
                for number in ready:
                    if number == self._listener.fileno():
                        self._accept(poll)
                    elif not self._serve(number):
                        poll.unregister(number)

    def _accept(self, poll: select.poll) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # the client is gone
        except OSError:  # no descriptor is left
            poll.unregister(self._listener)
            return
        connection.setblocking(False)
        self._connections[connection.fileno()] = connection
        poll.register(connection, select.POLLIN)
        if len(self._connections) == MAX_CONNECTIONS:
            poll.unregister(self._listener)

    def _serve(self, number: int) -> bool:
        """Answer the next request of a connection. False if the connection is the web server's from here on."""
        began_s = time.monotonic()
        connection = self._connections[number]
        try:
            head = connection.recv(MAX_HEAD_BYTES, socket.MSG_PEEK)
            found = re.match(HEAD, head)
            if found is None:
                return False
            path, headers = found[1].decode(), [(n.lower(), v) for n, v in re.findall(_FIELD, found[0])]
            fields = dict(headers)
            is_plain = len(fields) == len(headers) and not fields.keys() & _MORE
            is_own = re.fullmatch(_OWN_HOST, fields.get(b"host", b""))
            if not is_plain or not is_own or fields.get(b"connection", _KEPT).lower() != _KEPT:
                return False
            status, data = self._response(path, fields.get(b"if-none-match"))
            connection.recv(found.end())  # nothing of the next request
        except OSError:
            return False  # the web server finds the same error, and logs it
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            num_sent = connection.send(data)
        except BlockingIOError:
            num_sent = 0
        except OSError:
            return False  # the client is gone
        self._answered.append((path, status, time.monotonic() - began_s))
        if num_sent < len(data):
            self._unsent[number] = data[num_sent:]
        return num_sent == len(data)

    def _response(self, path: str, known_tag: bytes | None) -> tuple[int, bytes]:
        """Status and bytes of an answer, with the headers that the web server gives it."""
        answer = self._files.answer(path, None if known_tag is None else known_tag.decode())
        lines = [f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}"]
        lines += [f"{name}: {value}" for name, value in answer.headers.items()]
        if answer.status == 200:
            lines.append(f"Content-Length: {len(answer.body)}")
        lines += [
            f"Date: {time.strftime('%a, %d %b %Y %H:%M:%S GMT', time.gmtime())}",
            "Server: teneral",
            f"x-request-id: req_{os.urandom(12).hex()}",
            "openai-processing-ms: 0",
        ]
        head_text = "\r\n".join(lines) + f"\r\n{self._more_headers}\r\n"
        return answer.status, head_text.encode() + answer.body

    @cached_property
    def _files(self) -> PageFiles:
        from .files import PageFiles  # with the first request

        return PageFiles(needs_key=self._needs_key)
