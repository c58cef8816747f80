"""Kept connections, by origin, bounded in number and in age. `close` makes every reader give up."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from .addresses import AddressBook
from .base import SourceOptions
from .http1 import Connection
from .web_address import Origin
from .wire import WireError

if TYPE_CHECKING:
    import ssl

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
        """The warmest idle connection, or a new one that is not connected yet: always that if `fresh`.

        Raises `WireError` where the certificates for TLS cannot be read.
        """
        with self._lock:
            idle = [] if fresh else self._idle.get(origin, [])
            while idle:
                connection = idle.pop()
                if time.monotonic() - connection.idle_since_s < MAX_IDLE_S and connection.looks_alive():
                    break
                connection.close()
            else:
                connection = Connection(origin, self._options, self._tls_for(origin), self._addresses)
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

    def rest(self) -> None:
        """Close the idle connections and forget where hosts are. Those in use are left alone."""
        with self._lock:
            idle, self._idle = self._idle, {}
            self._addresses = AddressBook()
        for connection in (one for connections in idle.values() for one in connections):
            connection.close()

    def close(self) -> None:
        """Close the idle connections; whoever waits on another gives up at once. Idempotent."""
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
            import ssl  # 10 ms that a plain store need not pay

            try:
                self._tls = ssl.create_default_context(cafile=self._ca_file)
            except OSError as error:
                message = f"the certificates to trust cannot be read from {self._ca_file}: {error}"
                raise WireError(message, is_final=True) from error
            self._tls.set_alpn_protocols(["http/1.1"])
        return self._tls
