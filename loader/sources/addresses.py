"""Which addresses a host has, for a while, and which of them to try first.

Connections are spread over a host's addresses, and one that did not answer is tried last: a front-end of a
store that is down costs one connection its time, not all of them.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import Any, TypeAlias

from .web_address import Origin

MAX_AGE_S = 30.0  # stores change their addresses by the minute

Address: TypeAlias = tuple[socket.AddressFamily, int, tuple[Any, ...]]  # family, protocol, what to connect to


class _Entry:
    """A host's addresses in turn; those that `failed` come last, in whatever turn."""

    __slots__ = ("addresses", "failed", "resolved_s")

    def __init__(self, addresses: list[Address], resolved_s: float) -> None:
        self.addresses = addresses
        self.resolved_s = resolved_s
        self.failed: set[Address] = set()


class AddressBook:
    """Thread-safe. Asking for a host that is not known yet blocks everybody for as long as a look-up takes."""

    def __init__(self) -> None:
        self._entries: dict[Origin, _Entry] = {}
        self._lock = threading.Lock()

    def addresses(self, origin: Origin) -> list[Address]:
        """All of them, the one to try first in front. Raises `OSError` or `UnicodeError` for an unknown host."""
        with self._lock:
            entry = self._entries.get(origin)
            if entry is None or time.monotonic() - entry.resolved_s > MAX_AGE_S:
                # As bytes: of a text the letters of all languages would be looked through, in a module of a megabyte.
                host = origin.host.encode() if origin.host.isascii() else origin.host
                found = socket.getaddrinfo(host, origin.port, type=socket.SOCK_STREAM)
                addresses: list[Address] = [
                    (family, protocol, address) for family, _, protocol, _, address in found
                ]
                entry = self._entries[origin] = _Entry(addresses, time.monotonic())
            given = sorted(entry.addresses, key=entry.failed.__contains__)
            # The next connection tries another one first, of the kind (IPv6, IPv4) that the system prefers.
            same = [address for address in entry.addresses if address[0] == given[0][0]]
            others = [address for address in entry.addresses if address[0] != given[0][0]]
            entry.addresses = [*same[1:], same[0], *others]
            return given

    def failed(self, origin: Origin, address: Address) -> None:
        """No connection could be made to this one, or not soon: try it last."""
        with self._lock:
            entry = self._entries.get(origin)
            if entry is not None:
                entry.failed.add(address)

    def forget(self, origin: Origin) -> None:
        """None of them answered: ask for them anew."""
        with self._lock:
            self._entries.pop(origin, None)
