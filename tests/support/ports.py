"""Ports for servers of other processes, which bind them later."""

from __future__ import annotations

import itertools
import os
import socket
from pathlib import Path

LOWEST = 10_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")  # from which the system gives ports out
_numbers = itertools.count(os.getpid() * 7919)  # processes of one run begin far apart


def free_port() -> int:
    """A port of 127.0.0.1 that is free, and that the system gives to no other socket before it is bound: a port from
    its own range may be another one's by then.
    """
    size = _lowest_given_out() - LOWEST
    for _ in range(1000 if size > 0 else 0):
        port = LOWEST + next(_numbers) % size
        if _bound(port) is not None:
            return port
    found = _bound(0)
    assert found is not None
    return found


def _lowest_given_out() -> int:
    try:
        return int(_RANGE.read_text().split()[0])
    except (OSError, ValueError):
        return 0


def _bound(port: int) -> int | None:
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return None
        return int(sock.getsockname()[1])
