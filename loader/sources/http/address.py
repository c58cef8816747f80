"""Addresses of the web taken apart, and names put into them.

What is spelt plainly is done here, as most addresses and all of our own names are; anything else by
`urllib.parse`, whose import alone would take 2 ms of a cold start's first 50. Pure.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_PLAIN = re.compile(
    r"(https?)://([a-z0-9][a-z0-9.-]*)(?::([1-9][0-9]{0,3}|[1-5][0-9]{4}))?((?:/[A-Za-z0-9._~-]*)*)"
)
_UNRESERVED = re.compile(r"[A-Za-z0-9._~-]*")  # RFC 3986, 2.3: never encoded
_PORTS = {"http": 80, "https": 443}


class Origin(NamedTuple):
    """Whom a connection is made to. `host` carries no brackets, also for an IPv6 address."""

    scheme: str  # http | https
    host: str
    port: int

    @property
    def authority(self) -> str:
        """The Host field: without the port where it is the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"


class WebAddress(NamedTuple):
    """An http(s) address without its fragment. What was encoded in its path and query stays so; all
    else in them that may not stand in a request line is encoded now.
    """

    origin: Origin
    path: str  # '' or '/…'
    query: str  # without the '?'; '' for none

    @property
    def target(self) -> str:
        """Path and query as a request line has them."""
        path = self.path or "/"
        return f"{path}?{self.query}" if self.query else path


def parse_address(url: str) -> WebAddress | None:
    """None where it is no http(s) address, or carries a user and password."""
    found = _PLAIN.fullmatch(url)
    if found:
        scheme, host, port, path = found.groups()
        return WebAddress(Origin(scheme, host, int(port) if port else _PORTS[scheme]), path, "")
    from urllib.parse import quote, urlsplit

    try:
        parts = urlsplit(url)
        port_number = parts.port
    except ValueError:
        return None
    scheme = parts.scheme.lower()
    if scheme not in _PORTS or not parts.hostname or "@" in parts.netloc:
        return None
    origin = Origin(scheme, parts.hostname, port_number or _PORTS[scheme])
    path, query = (quote(text, safe="/?:@-._~!$&'()*+,;=%") for text in (parts.path, parts.query))
    return WebAddress(origin, path, query)


def is_loopback(origin: Origin) -> bool:
    """True if an address is this machine's own, so that plain http carries no secret over a network."""
    return re.fullmatch(r"localhost|::1|127(\.\d{1,3}){3}", origin.host) is not None


def encode_path(name: str) -> str:
    """A name as it stands in an address's path, and in S3's signatures, which normalise neither
    '//' nor '.'.
    """
    return name if _UNRESERVED.fullmatch(name.replace("/", "")) else _quote(name, "/-_.~")


def encode_value(text: str) -> str:
    """A name or a value as it stands in an address's query."""
    return text if _UNRESERVED.fullmatch(text) else _quote(text, "-_.~")


def _quote(text: str, safe: str) -> str:
    from urllib.parse import quote

    return quote(text, safe=safe)
