"""One TCP or TLS connection, and the addresses of its host.

A connection is made within a time limit, read without the GIL, and given up as soon as its source
closes. There are two ways to read. Bodies: a blocking call for up to a megabyte (`MSG_WAITALL`)
that lasts a tick at most, so that bytes go on flowing while another thread imports torch, and the
reader can look at its clock. All else: coroutines (`poll_coroutines.py`), so that one thread can
wait for two wires. Of HTTP a wire knows the request for a proxy's tunnel alone.

Connections are spread over a host's addresses, and one that did not answer is tried last: a
front-end of a store that is down costs one connection its time, not all of them.
"""

from __future__ import annotations

import errno
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from ..base import SourceOptions
from .address import Origin
from .poll_coroutines import TICK_S, PollCoroutine, Wait

if TYPE_CHECKING:
    import ssl

    from .proxy import Proxy

MAX_AGE_S = 30.0  # stores change their addresses by the minute

# Family, protocol, what to connect to.
Address: TypeAlias = tuple[socket.AddressFamily, int, tuple[Any, ...]]


class _HostAddresses:
    """A host's addresses in turn; those that `failed` come last, in whatever turn."""

    __slots__ = ("addresses", "failed", "resolved_s")

    def __init__(self, addresses: list[Address], resolved_s: float) -> None:
        self.addresses = addresses
        self.resolved_s = resolved_s
        self.failed: set[Address] = set()


class AddressBook:
    """Thread-safe. Asking for a host that is not known yet blocks everybody for as long as a
    look-up takes.
    """

    def __init__(self) -> None:
        self._entries: dict[Origin, _HostAddresses] = {}
        self._lock = threading.Lock()

    def addresses(self, origin: Origin) -> list[Address]:
        """All of them, the one to try first in front. Raises `OSError` or `UnicodeError` for an
        unknown host.
        """
        with self._lock:
            entry = self._entries.get(origin)
            if entry is None or time.monotonic() - entry.resolved_s > MAX_AGE_S:
                # As bytes: of a text the letters of all languages would be looked through, in a
                # module of a megabyte.
                host = origin.host.encode() if origin.host.isascii() else origin.host
                found = socket.getaddrinfo(host, origin.port, type=socket.SOCK_STREAM)
                addresses: list[Address] = [
                    (family, protocol, address) for family, _, protocol, _, address in found
                ]
                entry = self._entries[origin] = _HostAddresses(addresses, time.monotonic())
            given = sorted(entry.addresses, key=entry.failed.__contains__)
            # The next connection tries another one first, of the kind (IPv6, IPv4) that the system
            # prefers.
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


MAX_TUNNEL_HEAD_BYTES = 16 * 1024  # of a proxy's answer
MAX_SLICE_BYTES = 1024 * 1024  # the most that is awaited in one system call
# A reader that waits for more than that is woken by that much, and not by each packet.
WAKE_BYTES = 512 * 1024
# What TLS waits for, by the names of its errors: their classes would cost a plain store the import
# of `ssl`.
_TLS_WAITS = {"SSLWantReadError": select.POLLIN, "SSLWantWriteError": select.POLLOUT}
_UNDER_WAY = (errno.EINPROGRESS, errno.EALREADY, errno.EWOULDBLOCK, errno.EINTR)


class WireError(Exception):
    """The connection could not be made, broke, fell silent or made no sense. `is_final`: no retry
    helps; `is_outage`: the store may be away for a while; `hint`: '' for the usual one.
    """

    def __init__(
        self, message: str, *, is_final: bool = False, is_outage: bool = True, hint: str = ""
    ) -> None:
        super().__init__(message)
        self.is_final = is_final
        self.is_outage = is_outage
        self.hint = hint


class WireTimeoutError(WireError):
    """Nothing, or next to nothing, arrived for as long as the options allow."""


def refused_by_proxy(proxy: Proxy, origin: Origin, status: int) -> WireError:
    """The error for a proxy's own answer. Its credentials are not shown."""
    what = "asks for other credentials" if status == 407 else "refuses the connection"
    return WireError(
        f"the proxy {proxy.origin} {what} to {origin} ({status})",
        is_final=status < 500 and status != 429,
        hint="Check the proxy's address, user and password in HTTPS_PROXY or HTTP_PROXY, or have NO_PROXY "
        f"name {origin.host}.",
    )


class Wire:
    """For one thread at a time; `interrupt` may be called by any."""

    def __init__(
        self,
        origin: Origin,
        options: SourceOptions,
        tls: ssl.SSLContext | None,
        addresses: AddressBook,
        proxy: Proxy | None = None,
    ) -> None:
        self.origin = origin
        self._proxy = proxy
        self._peer = origin if proxy is None else proxy.origin
        self._connect_timeout_s = options.connect_timeout_s
        self._read_timeout_s = options.read_timeout_s
        self._min_rate_bytes_s = options.min_rate_bytes_s
        self._tls = tls
        self._addresses = addresses
        self._socket: socket.socket | None = None
        self._wakes_at = 1
        self._interrupted = False
        self._heard_s = 0.0  # when the last byte came
        self._window_s = 0.0  # since when bytes are counted for the rate
        self._window_bytes = 0

    @property
    def is_connected(self) -> bool:
        return self._socket is not None

    def connect(self) -> PollCoroutine[None]:
        """Try the addresses of the host, or of the proxy, one after another, within one time limit.
        Raises `WireError`.
        """
        host = self._peer.host if self._proxy is None else f"{self._peer.host} of the proxy"
        try:
            addresses = self._addresses.addresses(self._peer)
        except (OSError, UnicodeError) as error:
            is_unknown = isinstance(error, UnicodeError) or error.errno == socket.EAI_NONAME
            raise WireError(
                f"the host name {host} cannot be resolved ({error})", is_outage=not is_unknown
            ) from error
        ends_s = time.monotonic() + self._connect_timeout_s
        failure: OSError = TimeoutError()
        for number, address in enumerate(addresses):
            left_s = ends_s - time.monotonic()
            # Each gets its share of the time: one that swallows packets must not use up that of the
            # others.
            deadline_s = time.monotonic() + left_s / (len(addresses) - number)
            try:
                yield from self._connect_to(address, deadline_s)
                break
            except OSError as error:
                failure = error
                self.close()
                self._addresses.failed(self._peer, address)
            except GeneratorExit:  # another connection was sooner
                self.close()
                self._addresses.failed(self._peer, address)
                raise
        if self.is_connected:
            return
        self._addresses.forget(self._peer)
        if self._tls is not None and _is_bad_certificate(failure):
            raise WireError(f"{self.origin} has no valid certificate: {failure}", is_final=True) from failure
        reason = (
            f"no answer for {self._connect_timeout_s:g} s" if isinstance(failure, TimeoutError) else failure
        )
        way = "" if self._proxy is None else f" through the proxy {self._peer}"
        raise WireError(f"no connection to {self.origin} could be made{way}: {reason}") from failure

    def send(self, data: bytes) -> None:
        """Send a request's head, or its body. Blocks. Raises `WireError`, also where the server takes
        nothing for `read_timeout_s`.
        """
        connected = self._held()
        self._heard_s = time.monotonic()
        left = memoryview(data)
        try:
            self._wake_at(connected, 1)
            if self._tls is not None:
                connected.settimeout(TICK_S)
            while left:
                try:
                    left = left[connected.send(left[:MAX_SLICE_BYTES]) :]
                    self._heard_s = time.monotonic()
                except (BlockingIOError, TimeoutError):
                    if time.monotonic() - self._heard_s >= self._read_timeout_s or self._interrupted:
                        message = f"{self.origin} took nothing for {self._read_timeout_s:g} s"
                        raise WireTimeoutError(message) from None
        except OSError as error:
            raise self._broken(error) from error
        self._window_s, self._window_bytes = self._heard_s, 0

    def receive(self, view: memoryview) -> int:
        """Fill the beginning of `view` with what comes within a tick, up to a megabyte; 0 where nothing does. Blocks.
        All of `view` is expected to come.

        Raises `WireError`, also where so little came for `read_timeout_s` that the wire must be
        dead.
        """
        connected = self._held()
        # Whatever is missing of this slice, so much is to come behind it.
        wake_bytes = WAKE_BYTES if len(view) >= MAX_SLICE_BYTES + WAKE_BYTES else 1
        view = view[:MAX_SLICE_BYTES]
        try:
            if self._tls is None:
                self._wake_at(connected, wake_bytes)
                count = connected.recv_into(view, len(view), socket.MSG_WAITALL)
                if count == 0:
                    raise self._broken(None)
            else:
                count = self._receive_secure(connected, view)
        except (BlockingIOError, TimeoutError):
            count = 0
        except OSError as error:
            raise self._broken(error) from error
        self._note(count)
        return count

    def receive_soon(self, view: memoryview) -> PollCoroutine[int]:
        """At least one byte at the start of `view`. Raises as `receive`."""
        connected = self._held()
        self._wake_at(connected, 1)
        while True:
            try:
                if self._tls is None:
                    count = connected.recv_into(view, len(view), socket.MSG_DONTWAIT)
                else:
                    connected.settimeout(0)
                    count = connected.recv_into(view)
            except OSError as error:
                if not _would_block(error):
                    raise self._broken(error) from error
                self._note(0)
                yield Wait(connected.fileno(), _events(error, select.POLLIN))
                continue
            if count == 0:
                raise self._broken(None)
            self._note(count)
            return count

    def has_arrivals(self) -> bool:
        """True if bytes, an error or the connection's end are waiting to be read. Does not block."""
        poll = select.poll()
        poll.register(self._held(), select.POLLIN)
        return bool(poll.poll(0))

    def interrupt(self) -> None:
        """Make threads that wait on this wire give up with a `WireError`, now and from now on."""
        self._interrupted = True
        connected = self._socket
        if connected is not None:
            with suppress(OSError):
                # Not `connected.shutdown`: an SSLSocket's forgets its session first, and a read
                # that is under way would then hand out ciphertext.
                socket.socket.shutdown(connected, socket.SHUT_RDWR)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connect_to(self, address: Address, deadline_s: float) -> PollCoroutine[None]:
        family, protocol, place = address
        plain = socket.socket(family, socket.SOCK_STREAM, protocol)
        self._hold(plain)
        plain.setblocking(False)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while (code := plain.connect_ex(place)) in _UNDER_WAY:
            yield from self._wait(plain, select.POLLOUT, deadline_s)
        if code not in (0, errno.EISCONN):
            raise OSError(code, errno.errorcode.get(code, "connect failed"))
        if self._tls is None:
            # Python's timeouts make a socket non-blocking, and then MSG_WAITALL does not wait: use
            # the kernel's.
            plain.setblocking(True)
            timeval = struct.pack("@ll", 0, int(min(TICK_S, self._read_timeout_s) * 1e6) or 1)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", 1, 0))
            return
        if self._proxy is not None:
            yield from self._open_tunnel(plain, self._proxy, deadline_s)
        # suppress_ragged_eofs=False: a connection that was cut must not look like one that ended.
        secure = self._tls.wrap_socket(
            plain,
            server_hostname=self.origin.host,
            do_handshake_on_connect=False,
            suppress_ragged_eofs=False,
        )
        self._hold(secure)
        yield from self._until_done(secure, secure.do_handshake, deadline_s)

    def _open_tunnel(self, plain: socket.socket, proxy: Proxy, deadline_s: float) -> PollCoroutine[None]:
        """Have the proxy connect to the origin. Raises `OSError`, and `WireError` where it refuses."""
        from .head import HeadError, parse_head  # few networks have a proxy

        plain.send(proxy.tunnel_request(self.origin))  # small, and nothing is in front of it
        answer = bytearray()
        while b"\r\n\r\n" not in answer:  # the server says nothing before TLS begins
            yield from self._wait(plain, select.POLLIN, deadline_s)
            with suppress(BlockingIOError):
                piece = plain.recv(MAX_TUNNEL_HEAD_BYTES)
                if not piece or len(answer) + len(piece) > MAX_TUNNEL_HEAD_BYTES:
                    raise ConnectionError("the proxy gave no answer")
                answer += piece
        try:
            status = parse_head(bytes(answer).partition(b"\r\n\r\n")[0]).status
        except HeadError as error:
            raise ConnectionError(f"the proxy sent a malformed answer: {error}") from error
        if status != 200:
            raise refused_by_proxy(proxy, self.origin, status)

    def _until_done(
        self, secure: ssl.SSLSocket, act: Callable[[], None], deadline_s: float
    ) -> PollCoroutine[None]:
        while True:
            try:
                return act()
            except OSError as error:
                if not _would_block(error):
                    raise
                events = _events(error, select.POLLIN)
            yield from self._wait(secure, events, deadline_s)

    def _wait(self, connected: socket.socket, events: int, deadline_s: float) -> PollCoroutine[None]:
        if time.monotonic() >= deadline_s:
            raise TimeoutError
        yield Wait(connected.fileno(), events)
        self._check_interrupted()

    def _wake_at(self, connected: socket.socket, num_bytes: int) -> None:
        if self._wakes_at != num_bytes:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
            self._wakes_at = num_bytes

    def _receive_secure(self, connected: socket.socket, view: memoryview) -> int:
        """The equivalent of MSG_WAITALL on a plain socket. TLS hands out a record, 16 KiB, at a
        time.
        """
        connected.settimeout(TICK_S)
        filled = 0
        ends_s = time.monotonic() + TICK_S
        while filled < len(view) and (not filled or time.monotonic() < ends_s):
            try:
                count = connected.recv_into(view[filled:])
            except OSError:
                if not filled:
                    raise
                break  # what has come counts; the next call will say the same
            if count == 0 and not filled:
                raise self._broken(None)
            if count == 0:
                break
            filled += count
        return filled

    def _note(self, count: int) -> None:
        """Count what came, or that nothing did. Raises where the wire must be taken for dead."""
        now_s = time.monotonic()
        if count:
            self._heard_s = now_s
            self._window_bytes += count
        elif now_s - self._heard_s >= self._read_timeout_s or self._interrupted:
            raise WireTimeoutError(f"{self.origin} sent nothing for {self._read_timeout_s:g} s")
        window_s = now_s - self._window_s
        if window_s >= self._read_timeout_s:
            if self._window_bytes < self._min_rate_bytes_s * window_s:
                raise WireTimeoutError(
                    f"{self.origin} sent only {self._window_bytes:,} bytes in {window_s:.1f} s"
                )
            self._window_s, self._window_bytes = now_s, 0

    def _hold(self, new: socket.socket) -> None:
        self._socket = new
        # Looked at after the assignment, as `interrupt` sets it before it looks at that.
        self._check_interrupted()

    def _check_interrupted(self) -> None:
        if self._interrupted:
            raise ConnectionAbortedError("interrupted")

    def _held(self) -> socket.socket:
        if self._socket is None:
            raise WireError(f"there is no connection to {self.origin}")
        return self._socket

    def _broken(self, error: OSError | None) -> WireError:
        return WireError(f"{self.origin} closed the connection too early" + (f" ({error})" if error else ""))


def _would_block(error: OSError) -> bool:
    return isinstance(error, BlockingIOError) or type(error).__name__ in _TLS_WAITS


def _events(error: OSError, usual: int) -> int:
    """The event to wait for after an error by which an operation would block."""
    return _TLS_WAITS.get(type(error).__name__, usual)


def _is_bad_certificate(error: OSError) -> bool:
    import ssl  # only a connection with TLS gets here

    return isinstance(error, ssl.SSLCertVerificationError)
