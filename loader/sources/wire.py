"""One TCP or TLS connection: made within a time limit, read without the GIL, given up at once when told to.

Threads that wait in here hold no GIL, on plain sockets for up to a megabyte in one system call
(`MSG_WAITALL`): bytes go on flowing while another thread imports torch. A wire knows nothing of HTTP.
Proxies are not supported.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from .base import SourceOptions
from .http_head import Origin

if TYPE_CHECKING:
    import ssl

MAX_SLICE_BYTES = 1024 * 1024  # the most that is awaited in one system call
_TICK_S = 1.0  # how often a wait without a byte is looked at


class WireError(Exception):
    """The connection could not be made, broke, fell silent or made no sense. `is_final`: no retry helps."""

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


class WireTimeoutError(WireError):
    """Nothing arrived for as long as the options allow."""


class Wire:
    """For one thread at a time; `interrupt` may be called by any."""

    def __init__(self, origin: Origin, options: SourceOptions, tls: ssl.SSLContext | None) -> None:
        self.origin = origin
        self._connect_timeout_s = options.connect_timeout_s
        self._read_timeout_s = options.read_timeout_s
        self._tls = tls
        self._socket: socket.socket | None = None
        self._interrupted = False

    @property
    def is_connected(self) -> bool:
        return self._socket is not None

    def connect(self) -> None:
        """Try the host's addresses one after another, within one time limit. Raises `WireError`."""
        host, port = self.origin.host, self.origin.port
        try:
            addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise WireError(f"the host name {host} cannot be resolved ({error})") from error
        deadline_s = time.monotonic() + self._connect_timeout_s
        failure: OSError = TimeoutError()
        for family, kind, protocol, _, address in addresses:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                break
            try:
                self._connect_to(socket.socket(family, kind, protocol), address, left_s)
            except OSError as error:
                failure = error
                self.close()
                continue
            return
        if self._tls is not None and _is_bad_certificate(failure):
            raise WireError(f"{self.origin} has no valid certificate: {failure}", is_final=True) from failure
        reason = (
            f"no answer for {self._connect_timeout_s:g} s" if isinstance(failure, TimeoutError) else failure
        )
        raise WireError(f"no connection to {self.origin} could be made: {reason}") from failure

    def send(self, data: bytes) -> None:
        """Send a request: a few kilobytes at most, so that this never waits long. Raises `WireError`."""
        try:
            self._held().sendall(data)
        except OSError as error:
            raise self._broken(error) from error

    def receive(self, view: memoryview, *, wait_all: bool = False) -> int:
        """At least one byte at the start of `view`, and on a plain socket with `wait_all` usually all of it.

        Raises `WireError`, also after `read_timeout_s` without a byte.
        """
        connected = self._held()
        flags = socket.MSG_WAITALL if wait_all and self._tls is None else 0
        began_s = time.monotonic()
        while True:
            try:
                count = connected.recv_into(view, min(len(view), MAX_SLICE_BYTES), flags)
            except BlockingIOError as error:  # a tick without a byte
                if time.monotonic() - began_s >= self._read_timeout_s or self._interrupted:
                    raise self._silent() from error
                continue
            except TimeoutError as error:
                raise self._silent() from error
            except OSError as error:
                raise self._broken(error) from error
            if count == 0:
                raise self._broken(None)
            return count

    def has_arrivals(self) -> bool:
        """Whether bytes, an error or the connection's end are waiting to be read. Does not block."""
        poll = select.poll()
        poll.register(self._held(), select.POLLIN)
        return bool(poll.poll(0))

    def interrupt(self) -> None:
        """Make whoever waits on this wire give up with a `WireError`, now and from now on."""
        self._interrupted = True
        connected = self._socket
        if connected is not None:
            with suppress(OSError):
                # Not `connected.shutdown`: an SSLSocket's forgets its session first, and a read that is under
                # way would then hand out ciphertext.
                socket.socket.shutdown(connected, socket.SHUT_RDWR)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connect_to(self, plain: socket.socket, address: tuple[object, ...], timeout_s: float) -> None:
        self._hold(plain)
        plain.settimeout(timeout_s)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plain.connect(address)
        if self._tls is not None:
            host = self.origin.host
            # suppress_ragged_eofs=False: a connection that was cut must not look like one that ended.
            secure = self._tls.wrap_socket(
                plain, server_hostname=host, do_handshake_on_connect=False, suppress_ragged_eofs=False
            )
            self._hold(secure)
            secure.do_handshake()
            secure.settimeout(self._read_timeout_s)
            return
        # Python's timeouts make a socket non-blocking, and then MSG_WAITALL does not wait: use the kernel's.
        plain.settimeout(None)
        tick_s = max(0.001, min(_TICK_S, self._read_timeout_s))  # 0 would mean for ever
        timeval = struct.pack("@ll", int(tick_s), int(tick_s % 1 * 1e6))
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)

    def _hold(self, new: socket.socket) -> None:
        self._socket = new
        if (
            self._interrupted
        ):  # looked at after the assignment, as `interrupt` sets it before it looks at that
            raise ConnectionAbortedError("interrupted")

    def _held(self) -> socket.socket:
        if self._socket is None:
            raise WireError(f"there is no connection to {self.origin}")
        return self._socket

    def _silent(self) -> WireTimeoutError:
        return WireTimeoutError(f"{self.origin} sent nothing for {self._read_timeout_s:g} s")

    def _broken(self, error: OSError | None) -> WireError:
        return WireError(f"{self.origin} closed the connection too early" + (f" ({error})" if error else ""))


def _is_bad_certificate(error: OSError) -> bool:
    import ssl  # only a connection with TLS gets here

    return isinstance(error, ssl.SSLCertVerificationError)
