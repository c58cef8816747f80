"""Forward proxies by the variables that other programs use: HTTPS_PROXY, HTTP_PROXY, ALL_PROXY, NO_PROXY.

    https://…  CONNECT to the proxy, then TLS with the server itself: the proxy sees its name alone
    http://…   the whole address in the request line, and the proxy's credentials in a header of their own

Names in small letters go before those in capitals. This machine and the metadata services of clouds
are always asked directly: a proxy would be another machine, with credentials of its own. Reads no
environment and no sockets: pure.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Mapping
from typing import NamedTuple

from ...errors import UsageError
from .address import Origin, is_loopback, parse_address
from .head import Headers

MAX_VALUE_CHARS = 16_384  # of a variable
_METADATA = re.compile(r"169\.254(\.\d{1,3}){2}|fe80:.*|fd00:ec2:.*|metadata(\.google\.internal)?")


class Proxy(NamedTuple):
    """A forward proxy. Its credentials are not shown."""

    origin: Origin
    headers: Headers = ()  # for the proxy alone

    def __repr__(self) -> str:
        return f"Proxy({self.origin})"

    def tunnel_request(self, origin: Origin) -> bytes:
        """The head of the request for a connection to the origin."""
        host = f"[{origin.host}]" if ":" in origin.host else origin.host
        lines = [
            f"CONNECT {host}:{origin.port} HTTP/1.1",
            f"Host: {host}:{origin.port}",
            "User-Agent: teneral",
            *(f"{name}: {value}" for name, value in self.headers),
        ]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class Proxies:
    """The proxies of an environment."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        direct = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
        self._direct = [entry for entry in re.split(r"[,\s]+", direct[:MAX_VALUE_CHARS].lower()) if entry]

    def of(self, origin: Origin) -> Proxy | None:
        """The proxy for connections to the origin; None for none. Raises `UsageError` for a malformed
        or unsupported one, naming the variable.
        """
        if is_loopback(origin) or _METADATA.fullmatch(origin.host):
            return None
        scheme = origin.scheme
        for name in (f"{scheme}_proxy", f"{scheme.upper()}_PROXY", "all_proxy", "ALL_PROXY"):
            # A web server hands its client's `Proxy` header to CGI programs as HTTP_PROXY.
            if name == "HTTP_PROXY" and "REQUEST_METHOD" in self._environment:
                continue
            if value := self._environment.get(name, "").strip():
                is_direct = any(_matches(entry, origin) for entry in self._direct)
                return None if is_direct else _parse(name, value)
        return None


def _parse(variable: str, value: str) -> Proxy:
    scheme, _, rest = value.partition("://") if "://" in value else ("http", "", value)
    if scheme.lower() != "http":
        raise UsageError(
            f"{variable} names a proxy of the kind {scheme[:20]!r}, which is not supported",
            key=variable,
            hint="Give the address of an HTTP proxy, http://host:port, or have NO_PROXY name the store's host.",
        )
    user, at, place = rest.rpartition("@")
    address = parse_address(f"http://{place.rstrip('/')}") if len(value) <= MAX_VALUE_CHARS else None
    if address is None or address.path or address.query:
        raise UsageError(
            f"{variable} is not the address of a proxy",  # it may hold a password
            key=variable,
            hint="Write http://host:port or http://user:password@host:port.",
        )
    if not at:
        return Proxy(address.origin)
    from urllib.parse import unquote_to_bytes  # most proxies ask for no password

    name, _, password = user.partition(":")
    pair = unquote_to_bytes(name) + b":" + unquote_to_bytes(password)
    basic = binascii.b2a_base64(pair, newline=False).decode()
    return Proxy(address.origin, (("Proxy-Authorization", f"Basic {basic}"),))


def _matches(entry: str, origin: Origin) -> bool:
    """True if an entry of NO_PROXY (*, a host or domain, perhaps with a port, an address or a network)
    names the origin.
    """
    host = origin.host.lower().rstrip(".")
    if entry == "*":
        return True
    found = re.fullmatch(r"(?:\[([^\]]*)\]|([^:]*))(?::(\d{1,5}))?", entry)  # else an IPv6 address as it is
    if found is not None:
        if found[3] and int(found[3]) != origin.port:
            return False
        entry = found[1] or found[2] or ""
    domain = entry.removeprefix("*").removeprefix(".")
    if domain and (host == domain or host.endswith(f".{domain}")):
        return True
    if not re.fullmatch(r"[0-9a-f.:]+", host) or not re.fullmatch(r"[0-9a-f.:]+(/\d+)?", entry):
        return False
    import ipaddress  # few addresses of stores are numbers

    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return False
