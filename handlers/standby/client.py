"""`teneral serve` with `standby_socket`: everything except the open port is handed over to a
process that has imported everything.

This process stays the platform's: it forwards signals, and ends with the other's status. Without a
standby, it continues by itself, with next to no time lost.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ...loader.process.helper import ProcessContext, ProcessLimits
from ...loader.timeline import Timeline
from ...runtime.config import ServeConfig
from .handover import Channel, HandoverError, Order, check_path

ANSWER_TIMEOUT_S = (
    # A standby answers in a millisecond; one that is still being forked is not worth waiting for.
    0.3
)
LOST_STATUS = 1


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
    order = Order(config, context, timeline.started_at, (0, 1, 2), listener.fileno())
    try:
        channel.settimeout(ANSWER_TIMEOUT_S)
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


def _connect(path: str) -> Channel | None:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(ANSWER_TIMEOUT_S)
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
