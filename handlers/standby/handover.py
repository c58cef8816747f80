"""The protocol between `teneral serve` and a standby process, one message each way, then its open files; and its
client, `teneral serve` with `standby_socket`.

    client → standby   the configuration, environment and folder, with the files (standard streams and the listening
                       socket)
    standby → client   its process number: it is free, and has taken the files
    client → standby   go
    standby → client   the exit status, at the end

Instead of an order, the first message may ask for the pool's status, and the answer is all there is.

A message is a line of JSON over a local socket whose two ends must belong to the same user. An end of the socket
before the last message means that the other process is gone.

The client hands over everything except the open port, and stays the platform's process: it forwards signals, and ends
with the other's status. Without a standby, it continues by itself, with next to no time lost.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from ...loader.errors import UnavailableError, UsageError
from ...loader.process.helper import ProcessContext, ProcessLimits
from ...loader.timeline import Timeline
from ...runtime.config import ServeConfig

MAX_MESSAGE_BYTES = 1 << 20  # mostly the environment
MAX_FILES = 8
# Process, user and group, as in SO_PEERCRED.
_CREDENTIALS = struct.Struct("3i")
# A standby answers in a millisecond; one that is still being forked is not worth waiting for.
ANSWER_TIMEOUT_S = 0.3
# The most by which that is extended where tasks wait for cores: a start without a standby is slower there, too.
MAX_SLOWDOWN = 10.0
LOST_STATUS = 1
STATUS_QUESTION = {"status": True}


class HandoverError(Exception):
    """The other process is gone, belongs to another user, or violates the protocol."""


class HandOver(NamedTuple):
    """The content of a hand-over. The receiver closes the open files."""

    config: ServeConfig
    context: ProcessContext
    # Of the client process, on the clock that all processes share.
    started_at: float
    streams: tuple[int, int, int]
    listener: int

    def close(self) -> None:
        """Close the files, if the order is not served."""
        for fd in (*self.streams, self.listener):
            os.close(fd)

    def encode(self) -> tuple[bytes, list[int]]:
        """The message, and its files."""
        message = {
            "config": self.config.as_dict(),
            "environment": self.context.environment,
            "folder": self.context.folder,
            "limits": self.context.limits,
            "started_at": self.started_at,
        }
        return _line(message), [*self.streams, self.listener]

    @classmethod
    def decode(cls, message: dict[str, Any], files: list[int]) -> HandOver:
        """Decode an order. Raises `HandoverError` for an invalid one."""
        try:
            config = ServeConfig(**message["config"])
            limits = _limits(message["limits"])
            context = ProcessContext(dict(message["environment"]), str(message["folder"]), limits)
            stdin, stdout, stderr, listener = files
            return cls(config, context, float(message["started_at"]), (stdin, stdout, stderr), listener)
        except (KeyError, TypeError, ValueError) as error:
            raise HandoverError(f"invalid order: {type(error).__name__}: {error}") from error


class Channel:
    """One end of the connection. Not thread-safe. Close it with `close`."""

    def __init__(self, sock: socket.socket) -> None:
        """Take ownership of the connected socket. Raises `HandoverError` if the other end belongs
        to another user.
        """
        self._socket = sock
        self._rest = b""
        _, user, _ = _CREDENTIALS.unpack(
            sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if user != os.geteuid():
            sock.close()
            raise HandoverError(f"the other end belongs to user {user}")

    def fileno(self) -> int:
        return self._socket.fileno()

    def settimeout(self, timeout_s: float | None) -> None:
        self._socket.settimeout(timeout_s)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. Raises `HandoverError`."""
        self._send(_line(message), [])

    def send_order(self, order: HandOver) -> None:
        """Send an order. The files stay open here as well. Raises `HandoverError`."""
        self._send(*order.encode())

    def receive(self) -> dict[str, Any]:
        """The next message. Raises `HandoverError` at the end, or after the time limit."""
        return self._receive([])

    def receive_order(self) -> HandOver | None:
        """An order; None for a question for the pool's status. Raises `HandoverError`."""
        files: list[int] = []
        try:
            message = self._receive(files)
            if message == STATUS_QUESTION and not files:
                return None
            return HandOver.decode(message, files)
        except HandoverError:
            for fd in files:
                os.close(fd)
            raise

    def close(self) -> None:
        self._socket.close()

    def _send(self, data: bytes, files: list[int]) -> None:
        try:
            sent = socket.send_fds(self._socket, [data], files) if files else 0
            self._socket.sendall(data[sent:])
        except OSError as error:
            raise HandoverError(f"cannot send: {error}") from error

    def _receive(self, files: list[int]) -> dict[str, Any]:
        data = self._rest
        while b"\n" not in data:
            if len(data) > MAX_MESSAGE_BYTES:
                raise HandoverError(f"the message is longer than {MAX_MESSAGE_BYTES} bytes")
            try:
                piece, given, _, _ = socket.recv_fds(self._socket, 1 << 16, MAX_FILES)
            except OSError as error:
                raise HandoverError(f"cannot receive: {error}") from error
            files += given
            if not piece:
                raise HandoverError("the other end is gone")
            data += piece
        line, _, self._rest = data.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError as error:
            raise HandoverError(f"the message is not JSON: {error}") from error
        if not isinstance(message, dict):
            raise HandoverError("the message is not a JSON object")
        return message


def _limits(message: Any) -> ProcessLimits | None:
    """The limits of a message. Raises `TypeError` or `ValueError` for invalid ones."""
    if message is None:
        return None
    umask, resources, niceness, cores = message
    return ProcessLimits(
        int(umask),
        {str(name): (int(soft), int(hard)) for name, (soft, hard) in resources.items()},
        int(niceness),
        tuple(map(int, cores)),
    )


def check_path(path: str) -> str:
    """Return a socket's path; raises `UsageError` for one that is too long for the system."""
    if len(os.fsencode(path)) > 100:
        raise UsageError(f"the socket's path {path} is longer than 100 bytes", key="standby_socket")
    return path


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def hand_over(config: ServeConfig, listener: socket.socket, timeline: Timeline) -> int | None:
    """Hand over, and return the exit status of the standby; None, at once, without one.

    Raises `UsageError` for a path that is not a socket. Blocks while it serves. After a hand-over
    this process no longer holds the listening socket.
    """
    assert config.standby_socket is not None
    channel = _connect(check_path(config.standby_socket))
    if channel is None:
        return None
    context = ProcessContext(dict(os.environ), os.getcwd(), ProcessLimits.current())
    order = HandOver(config, context, timeline.started_at, (0, 1, 2), listener.fileno())
    try:
        channel.settimeout(_answer_timeout_s())
        channel.send_order(order)
        process_id = int(channel.receive()["process"])
        channel.settimeout(None)
        channel.send({"go": True})
    except (HandoverError, KeyError, TypeError, ValueError):
        channel.close()
        return None
    listener.close()
    with _passing_on_signals(process_id):
        try:
            return int(channel.receive()["status"])
        except (HandoverError, KeyError, TypeError, ValueError):
            print(f"teneral: the standby process {process_id} ended without an exit status", file=sys.stderr)
            return LOST_STATUS
        finally:
            channel.close()


def ask_status(path: str) -> dict[str, Any]:
    """The status of the pool at the socket `path`. Raises `UnavailableError` where none answers."""
    channel = _connect(check_path(path))
    if channel is not None:
        try:
            channel.send(STATUS_QUESTION)
            return channel.receive()
        except HandoverError:
            pass
        finally:
            channel.close()
    raise UnavailableError(
        f"no standby pool of this user answers at {path}",
        hint="Start one, `teneral standby SOCKET`; or all of its processes have just been taken: ask again.",
    )


def _answer_timeout_s() -> float:
    """By the tasks for each core in the last minute."""
    slowdown = os.getloadavg()[0] / (os.cpu_count() or 1)
    return ANSWER_TIMEOUT_S * min(MAX_SLOWDOWN, max(1.0, slowdown))


def _connect(path: str) -> Channel | None:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(_answer_timeout_s())
        sock.connect(path)
        return Channel(sock)
    except (OSError, HandoverError):
        sock.close()
        return None


@contextmanager
def _passing_on_signals(process_id: int) -> Iterator[None]:
    def pass_on(number: int, _: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(process_id, number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
