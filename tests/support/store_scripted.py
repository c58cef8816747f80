"""A server with scripted answers, byte for byte: for answers that no sound server gives."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Self


class ScriptedServer:
    """Gives the n-th request the n-th answer, over however many connections, and closes after each answer."""

    def __init__(self, *answers: bytes) -> None:
        self._answers = answers
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._connections: list[socket.socket] = []
        self.requests: list[bytes] = []  # their heads
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for connection in self._connections:
            connection.close()

    def _serve(self) -> None:
        for answer in self._answers:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            with suppress(OSError):
                head = b""
                while b"\r\n\r\n" not in head:
                    head += connection.recv(65536)
                self.requests.append(head)
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)  # all closing that the client can see
