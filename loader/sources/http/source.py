"""A folder of a web server as a source: read only, and it cannot be listed.

Any server will do that answers byte ranges. The query of the address is sent with each request
(it may be an access signature), and never shown.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import (
    AccessDeniedError,
    NotFoundError,
    SourceError,
    TeneralError,
    UnavailableError,
    UsageError,
)
from .. import base
from ..base import ObjectInfo, SourceOptions
from .address import encode_path, parse_address
from .bucket import HttpReads
from .client import HttpClient
from .head import Head, Headers, Request, is_header

RETRYABLE = frozenset({408, 425, 429, 500, 502, 503, 504})


class HttpSource(HttpReads):
    """A `Source` on the folder at `url`."""

    def __init__(self, url: str, options: SourceOptions | None = None) -> None:
        """Raises `UsageError` for an invalid address or header."""
        options = options or SourceOptions()
        address = parse_address(url)
        if address is None:
            shown = url.partition("?")[0].rpartition("@")[2]
            hint = "Write http(s)://host/folder; credentials go into headers, not into the address."
            raise UsageError(f"{shown} is not a web address that can be used", hint=hint)
        for name, value in options.headers:
            if not is_header(name, value):
                raise UsageError(f"the header {name!r} cannot be sent", key="headers")
        self._origin = address.origin
        self._folder = address.path.rstrip("/")
        self._query = f"?{address.query}" if address.query else ""
        self._headers = options.headers
        self._client = HttpClient(self, options)

    @property
    def url(self) -> str:
        return f"{self._origin}{self._folder}"

    @property
    def follows_redirects(self) -> bool:
        return True

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        raise UsageError(
            f"{self.url} cannot be listed: the web has no way to ask for that",
            hint="Use the folder's s3:// address, or a copy on disk.",
        )

    def request(self, name: str, extra: Headers) -> Request:
        target = f"{self._folder}/{encode_path(name)}{self._query}"
        return Request("GET", self._origin, target, extra, self._headers)

    def refusal(self, name: str, request: Request, head: Head, body: bytes) -> TeneralError:
        """The error by the status alone: a web server's words are not looked at."""
        if head.status in (401, 403):
            return AccessDeniedError(
                f"{name} in {self.url}: access is denied ({head.status})",
                source=self.url,
                name=name,
                hint="Give the credentials that the server asks for, or check that they may read this object.",
                may_be_absent=head.status == 403,
            )
        return status_error(self.url, name, head.status, retry_after_s=head.retry_after_s)


def status_error(
    source: str, name: str, status: int, *, detail: str = "", retry_after_s: float | None = None
) -> SourceError:
    """The error that a status other than success means for an object, or with '' for its folder.
    `detail` has the status and the store's own words. Refusals of the caller are a store's own.
    """
    what = f"{name} in {source}" if name else source
    answer = f"{what}: the store answers {detail or status}"
    match status:
        case 404 | 410:
            return NotFoundError(f"there is no {what}", source=source, name=name)
        case 412:
            return base.changed(source, name, "it has another version than expected")
        case 416:
            return base.changed(source, name, "it is shorter than expected")
        case status if status in RETRYABLE:
            return UnavailableError(answer, source=source, name=name, retry_after_s=retry_after_s)
    return SourceError(answer, source=source, name=name, hint="Check the address.")
