"""Requests that web pages send. A page of any site can have a visitor's browser send requests to the visitor's own
machine, so a page's request is refused unless `--cors-origin` names the page's origin.

A browser says the origin of a page with every request that does something, and asks before it sends a body that no form
could send. So what has another site's `Origin` is refused, and a body without the route's media type, too. Requests
that reach the application from inside of its process are no browser's.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Collection
from ipaddress import ip_address

from aiohttp import web

from ...loader.errors import UsageError
from .errors import ApiError

ANY_ORIGIN = "*"
MAX_ORIGINS = 64
PREFLIGHT_AGE_S = 600
SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))
EXPOSED_HEADERS = "x-request-id, openai-processing-ms, retry-after"
MAX_ASKED_HEADERS_CHARS = 4096
# What a form can send, and a page without being asked first.
FORM_TYPES = frozenset(("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"))
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._:\[\]-]+|null")
_TOKENS = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]*")
_JSON = re.compile(r"application/json|[\w.-]+/[\w.-]+\+json", re.ASCII)


def parse_origins(setting: str | None) -> frozenset[str]:
    """The origins that a setting names, separated by commas. Raises `UsageError`."""
    if setting is None:
        return frozenset()
    origins = frozenset(origin.strip().lower().rstrip("/") for origin in setting.split(",") if origin.strip())
    if not 0 < len(origins) <= MAX_ORIGINS or not all(
        origin == ANY_ORIGIN or _ORIGIN.fullmatch(origin) for origin in origins
    ):
        raise UsageError(
            f"cors_origin must be 1 to {MAX_ORIGINS} origins such as https://app.example.com, or *",
            key="cors_origin",
            hint="Give scheme, host and port as the browser's address bar has them, without a path.",
        )
    return origins


class Origins:
    """Which pages may send requests."""

    def __init__(self, named: Collection[str]) -> None:
        self._named = frozenset(named)

    def names(self, origin: str) -> bool:
        """Whether the operator named it. Its case does not matter."""
        return ANY_ORIGIN in self._named or origin.lower() in self._named

    def check(self, request: web.Request) -> None:
        """Raises 403 for a request of a page that may not send it."""
        origin = request.headers.get("Origin")
        if origin is None or self.names(origin) or _is_own(origin, request.headers.get("Host", "")):
            return
        raise ApiError(
            403,
            f"pages of {origin[:200]!r} may not send requests here: name that origin with --cors-origin",
            code="origin_not_allowed",
        )

    def preflight(self, request: web.Request) -> web.Response | None:
        """The answer to a browser that asks before it sends something; None where it does not ask. Raises 403."""
        if request.method != "OPTIONS" or "Access-Control-Request-Method" not in request.headers:
            return None
        self.check(request)
        headers = {
            "Access-Control-Allow-Methods": "GET, HEAD, POST",
            "Access-Control-Max-Age": str(PREFLIGHT_AGE_S),
        }
        asked = request.headers.get("Access-Control-Request-Headers", "")
        if asked and len(asked) <= MAX_ASKED_HEADERS_CHARS and _TOKENS.fullmatch(asked):
            headers["Access-Control-Allow-Headers"] = asked
        if request.headers.get("Access-Control-Request-Private-Network") == "true":
            headers["Access-Control-Allow-Private-Network"] = "true"
        return web.Response(status=204, headers=headers)

    def stamp(self, request: web.Request, response: web.StreamResponse) -> None:
        """The headers by which a browser lets the page read the response."""
        if not self._named:
            return
        response.headers["Vary"] = "Origin"
        origin = request.headers.get("Origin")
        if origin is not None and self.names(origin):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = EXPOSED_HEADERS


def check_media_type(request: web.Request, *, takes_any: bool) -> None:
    """Raises 415 for a body that a form could send, where the route's media type would have to be said. `takes_any`:
    the platform hands over bodies of every kind at /invocations.
    """
    media = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if _JSON.fullmatch(media) or not request.can_read_body:
        return
    if request.path == "/invocations":
        if takes_any or (media and media not in FORM_TYPES):
            return
    elif request.path in ("/", "/events"):  # CloudEvents in binary mode; no page sends such headers unasked
        if any(name.lower().startswith("ce-") for name in request.headers):
            return
    elif request.path.startswith("/v2/") and media in ("", "application/octet-stream"):
        return  # Triton's own clients say none
    raise ApiError(
        415,
        f"a body of type {media[:100]!r} is not taken: send it with 'Content-Type: application/json'",
        code="unsupported_media_type",
    )


def is_from_inside(request: web.Request) -> bool:
    """Whether it came over the local socket of `inside.py`."""
    sock = None if request.transport is None else request.transport.get_extra_info("socket")
    return sock is not None and sock.family == socket.AF_UNIX


def _is_own(origin: str, host: str) -> bool:
    """Whether the page came from this server's own address, which is no name: a name may be made to lead here."""
    _, _, place = origin.partition("://")
    if not place or place.lower() != host.lower():
        return False
    name = place.rpartition(":")[0] if re.search(r":\d+$", place) else place
    if name.lower() == "localhost":
        return True
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
