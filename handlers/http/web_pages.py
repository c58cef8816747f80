"""The protection of a server from web pages in its users' browsers.

A page can send requests to any address that its browser reaches: another site's page does so with an `Origin` (403
unless it is named), or with a form's media types (415). And a page can have its own name lead to another address once
it is loaded (DNS rebinding): its requests then have no `Origin`, because they are the page's own, but the page's name
as `Host`.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Collection
from functools import lru_cache
from ipaddress import ip_address

from aiohttp import web

from ...loader.errors import UsageError
from .errors import ApiError

ANY = "*"  # host name, or origin
MAX_ORIGINS = 64
MAX_HOSTS = 64
PREFLIGHT_AGE_S = 600
SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))
EXPOSED_HEADERS = "x-request-id, openai-processing-ms, retry-after"
MAX_ASKED_HEADERS_CHARS = 4096
# Media types that a form can send, and a page without a preflight.
FORM_TYPES = frozenset(("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"))
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._:\[\]-]+|null")
_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*")
_PORT = re.compile(r":[0-9]{0,5}\Z")
# Below these no name can be registered (RFC 6761, 6762 and 8375; ICANN for `internal`).
PRIVATE_SUFFIXES = (".localhost", ".local", ".internal", ".home.arpa", ".test")
_TOKENS = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]*")
_JSON = re.compile(r"application/json|[\w.-]+/[\w.-]+\+json", re.ASCII)


def parse_origins(setting: str | None, *, key: str = "cors_origin") -> frozenset[str]:
    """The origins in the setting `key`, separated by commas. Raises `UsageError`."""
    if setting is None:
        return frozenset()
    origins = frozenset(origin.strip().lower().rstrip("/") for origin in setting.split(",") if origin.strip())
    if not 0 < len(origins) <= MAX_ORIGINS or not all(
        origin == ANY or _ORIGIN.fullmatch(origin) for origin in origins
    ):
        raise UsageError(
            f"{key} must be 1 to {MAX_ORIGINS} origins such as https://app.example.com, or *",
            key=key,
            hint="Write scheme, host and port as in the browser's address bar, without a path.",
        )
    return origins


def parse_hosts(setting: str | None) -> frozenset[str]:
    """The host names in a setting, separated by commas. Raises `UsageError`."""
    if setting is None:
        return frozenset()
    hosts = frozenset(map(_name_of, filter(None, map(str.strip, setting.split(",")))))
    if not 0 < len(hosts) <= MAX_HOSTS or not all(
        host == ANY or _NAME.fullmatch(host) or _is_address(host) for host in hosts
    ):
        raise UsageError(
            f"allowed_hosts must be 1 to {MAX_HOSTS} host names such as models.example.com, or *",
            key="allowed_hosts",
            hint="Write each name as in the browser's address bar, without scheme and path.",
        )
    return hosts


class Hosts:
    """The names by which a server may be called.

    A page whose name leads to a server that others cannot reach reads it as its own, if the server needs no key. Such
    a server is therefore called by an address, by `localhost`, by a name that cannot be registered, or by one that
    the operator has named.
    """

    def __init__(self, named: Collection[str], *, is_open: bool, origins: Collection[str] = ()) -> None:
        """`named` are the operator's, which then hold at every address; `is_open` without a key. Pages of `origins`
        may read the server anyway, so that its name may be theirs.
        """
        self._must_match = bool(named)
        self._is_open = is_open
        self._any = ANY in named or (ANY in origins and not named)
        self._named = frozenset(named) | {_name_of(origin.partition("://")[2]) for origin in origins}
        self._named |= {socket.gethostname().lower()}

    def check(self, request: web.Request) -> None:
        """Raise 403 for a request under a name that is not this server's. One without a `Host` is of no browser."""
        if self._any or not (self._must_match or (self._is_open and not _is_public(request))):
            return
        for host in request.headers.getall("Host", ()):
            name = _name_of(host)
            if name and name not in self._named and not _is_private_name(name) and not _is_address(name):
                raise ApiError(
                    403,
                    f"this server may not be called as {name[:200]!r}: name that host with --allowed-hosts, or call "
                    "the server by its IP address",
                    code="host_not_allowed",
                )


def _is_public(request: web.Request) -> bool:
    """True if the connection came to an address of the public internet, where every client reaches it directly."""
    place = None if request.transport is None else request.transport.get_extra_info("sockname")
    return isinstance(place, tuple) and _is_global(place[0])


@lru_cache(64)
def _is_global(address: str) -> bool:
    found = ip_address(address)
    return (getattr(found, "ipv4_mapped", None) or found).is_global


def _name_of(place: str) -> str:
    """The host in `host:port`, in lower case, without the brackets of an IPv6 address and the root's dot."""
    name = _PORT.sub("", place).lower()
    if name.startswith("[") and name.endswith("]"):
        return name[1:-1]
    return name.removesuffix(".")


def _is_private_name(name: str) -> bool:
    if not _NAME.fullmatch(name):
        return False
    return "." not in name or name.endswith(PRIVATE_SUFFIXES)


@lru_cache(64)
def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


class Origins:
    """The origins of pages that may send requests. Pages of the server's own address may, too, if that is an IP
    address, `localhost` or one of `hosts`: any other name may be made to lead here.
    """

    def __init__(self, named: Collection[str], hosts: Collection[str] = ()) -> None:
        self._named = frozenset(named)
        self._hosts = frozenset(hosts) | {"localhost"}

    def names(self, origin: str) -> bool:
        """True if the operator named it. Case-insensitive."""
        return ANY in self._named or origin.lower() in self._named

    def check(self, request: web.Request) -> None:
        """Raise 403 for a request of a page that may not send it."""
        origin = request.headers.get("Origin")
        if origin is None or self.names(origin) or self._is_own(origin, request.headers.get("Host", "")):
            return
        raise ApiError(
            403,
            f"pages of {origin[:200]!r} may not send requests here: name that origin with --cors-origin",
            code="origin_not_allowed",
        )

    def _is_own(self, origin: str, host: str) -> bool:
        _, _, place = origin.partition("://")
        if not place or place.lower() != host.lower():
            return False
        name = _name_of(place)
        return name in self._hosts or _is_address(name)

    def preflight(self, request: web.Request) -> web.Response | None:
        """The answer to a browser's preflight; None for other requests. Raises 403."""
        if request.method != "OPTIONS" or "Access-Control-Request-Method" not in request.headers:
            return None
        self.check(request)
        headers = {
            "Access-Control-Allow-Methods": "GET, HEAD, POST, DELETE",
            "Access-Control-Max-Age": str(PREFLIGHT_AGE_S),
        }
        asked = request.headers.get("Access-Control-Request-Headers", "")
        if asked and len(asked) <= MAX_ASKED_HEADERS_CHARS and _TOKENS.fullmatch(asked):
            headers["Access-Control-Allow-Headers"] = asked
        if request.headers.get("Access-Control-Request-Private-Network") == "true":
            headers["Access-Control-Allow-Private-Network"] = "true"
        return web.Response(status=204, headers=headers)

    def stamp(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add the headers by which a browser lets the page read the response."""
        if not self._named:
            return
        response.headers["Vary"] = "Origin"
        origin = request.headers.get("Origin")
        if origin is not None and self.names(origin):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = EXPOSED_HEADERS


def check_media_type(request: web.Request, *, takes_any: bool) -> None:
    """Raise 415 for a body that a form could send, if the route needs another media type.
    `takes_any`: the platform sends bodies of every kind to /invocations.
    """
    media = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if _JSON.fullmatch(media) or not request.can_read_body:
        return
    if request.path == "/invocations":
        if takes_any or (media and media not in FORM_TYPES):
            return
    # CloudEvents in binary mode; pages cannot send such headers without a preflight.
    elif request.path in ("/", "/events"):
        if any(name.lower().startswith("ce-") for name in request.headers):
            return
    elif request.path.startswith("/v2/") and media in ("", "application/octet-stream"):
        return  # Triton's own clients send none
    # Forms with files, as clients send sound. Pages of other origins are refused by `Origins`.
    elif request.path.startswith("/v1/audio/") and media == "multipart/form-data":
        return
    raise ApiError(
        415,
        f"a body of type {media[:100]!r} is not supported: send it with 'Content-Type: application/json'",
        code="unsupported_media_type",
    )
