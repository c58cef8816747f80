"""Images at addresses: fetched from the origins that the operator names, and from public network addresses.

A client chooses the address, so nothing else of it is trusted. Names are resolved here, and the connection goes to an
address that was checked; redirects are checked like the first address. Time, bytes and fetches at once are bounded,
and an error names the origin only, since paths and queries may hold secrets.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import SplitResult, urljoin, urlsplit

from ...runtime.errors import RequestError
from ...runtime.images.decode import MAX_IMAGE_BYTES
from ..http.web_pages import ANY, parse_origins

if TYPE_CHECKING:
    from ..function.images import ImageSource
    from ..http.service import Service

FETCH_S = 10.0  # for one image, redirects included
MAX_REDIRECTS = 3
MAX_FETCHES = 8  # at the same time; others wait
MAX_FETCHED_BYTES = MAX_IMAGE_BYTES  # of all images of a request
_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}
_PIECE_BYTES = 1 << 16
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # IPv4 addresses in the last 32 bits


class ImagePlace(NamedTuple):
    """The checked parts of an address."""

    origin: str
    scheme: str
    host: str
    port: int
    target: str  # path and query


class ImageFetcher:
    """The fetcher of one server. Used on its event loop."""

    def __init__(self, origins: frozenset[str]) -> None:
        """`origins` are those of the setting; none: nothing is fetched."""
        self._origins = origins
        self._threads: ThreadPoolExecutor | None = None

    @classmethod
    def of(cls, service: Service) -> ImageFetcher:
        return cls(parse_origins(service.instance.config.image_origins, key="image_origins"))

    async def fetch(self, sources: Sequence[ImageSource]) -> dict[str, bytes]:
        """The file at each address. Raises `RequestError` for the first that cannot be had."""
        for source in sources:
            checked_place(source.url, self._origins, source.param)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(MAX_FETCHES, thread_name_prefix="teneral-fetch")
        loop = asyncio.get_running_loop()
        files: dict[str, bytes] = {}
        for url, param in {source.url: source.param for source in sources}.items():
            room = MAX_FETCHED_BYTES - sum(map(len, files.values()))
            files[url] = await loop.run_in_executor(
                self._threads, fetch_image, url, self._origins, param, room
            )
        return files


def fetch_image(url: str, origins: frozenset[str], param: str, max_bytes: int) -> bytes:
    """The file at an address. Blocks for `FETCH_S` at most, and for what the system takes to resolve names. Raises
    `RequestError`.
    """
    deadline_s = time.monotonic() + FETCH_S
    for _ in range(1 + MAX_REDIRECTS):
        place = checked_place(url, origins, param)
        try:
            with closing(_connected(place, origins, param, deadline_s)) as connection:
                response = _answer(connection, place)
                if response.status not in _REDIRECTS:
                    return _body(response, place, param, max_bytes)
                url = urljoin(url, response.headers.get("Location", ""))
        except (OSError, HTTPException, ValueError) as error:
            raise _failed(place, param, type(error).__name__) from error
    raise _failed(place, param, f"more than {MAX_REDIRECTS} redirects")


def checked_place(url: str, origins: frozenset[str], param: str) -> ImagePlace:
    """The parts of an address from one of these origins. Raises `RequestError` for others."""
    try:
        parts = urlsplit(url)
        place = _place(parts)
    except ValueError:
        raise RequestError(f"{param}: the image's address is invalid", param=param) from None
    if place is None or parts.username is not None or parts.password is not None:
        raise RequestError(f"{param}: an image's address must be http or https, without a user", param=param)
    if ANY not in origins and place.origin not in origins:
        hint = "Send the image as a data URL, or have the server's operator name that origin with --image-origins."
        raise RequestError(
            f"{param}: this server fetches no images from {place.origin[:200]}", param=param, hint=hint
        )
    return place


def _place(parts: SplitResult) -> ImagePlace | None:
    if parts.scheme not in _PORTS or not parts.hostname:
        return None
    port = parts.port or _PORTS[parts.scheme]
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    shown = host if port == _PORTS[parts.scheme] else f"{host}:{port}"
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return ImagePlace(f"{parts.scheme}://{shown}", parts.scheme, parts.hostname, port, target)


def _connected(place: ImagePlace, origins: frozenset[str], param: str, deadline_s: float) -> HTTPConnection:
    """A connection to a checked address, which is cut at the deadline."""
    found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in found]
    is_named = place.origin in origins and _is_literal(place.host)
    if not addresses or not (is_named or all(map(is_public, addresses))):
        raise RequestError(f"{param}: {place.origin[:200]} is no public address", param=param)
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    sock = socket.create_connection((addresses[0], place.port), timeout=left_s)
    try:
        watchdog = threading.Timer(deadline_s - time.monotonic(), _cut, [sock])
        watchdog.daemon = True
        if place.scheme == "https":
            sock.settimeout(max(0.001, deadline_s - time.monotonic()))
            sock = ssl.create_default_context().wrap_socket(sock, server_hostname=place.host)
    except BaseException:
        sock.close()
        raise
    connection = _WatchedConnection(place.host, place.port, watchdog)
    connection.sock = sock
    watchdog.args = [sock]
    watchdog.start()
    return connection


class _WatchedConnection(HTTPConnection):
    def __init__(self, host: str, port: int, watchdog: threading.Timer) -> None:
        super().__init__(host, port)
        self._watchdog = watchdog

    def close(self) -> None:
        self._watchdog.cancel()
        super().close()


def _cut(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _answer(connection: HTTPConnection, place: ImagePlace) -> HTTPResponse:
    headers = {"Accept": "image/*", "User-Agent": "teneral", "Connection": "close"}
    connection.request("GET", place.target, headers=headers)
    return connection.getresponse()


def _body(response: HTTPResponse, place: ImagePlace, param: str, max_bytes: int) -> bytes:
    if response.status != 200:
        raise _failed(place, param, f"status {response.status}")
    data = bytearray()
    while piece := response.read(_PIECE_BYTES):
        data += piece
        if len(data) > max_bytes:
            raise _failed(place, param, f"more than {max_bytes} bytes")
    if response.length:
        raise _failed(place, param, "the answer ended early")
    return bytes(data)


def is_public(address: str) -> bool:
    """True for an address of the public network, also one that stands for an IPv4 address."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo is not None else None)
        if inner is None and ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        ip = inner or ip
    return ip.is_global and not ip.is_multicast


def _is_literal(host: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return False


def _failed(place: ImagePlace, param: str, why: str) -> RequestError:
    return RequestError(f"{param}: the image at {place.origin[:200]} cannot be fetched: {why}", param=param)
