"""A Blob Storage container's folder as a store.

Reading goes over `http_client`; nothing of Azure's packages is needed or imported. An object's
version is its ETag. Writing is in `uploads.py`, imported by the first write.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...errors import AccessDeniedError, SourceError, TeneralError
from .. import base
from ..base import ObjectInfo, SourceOptions, check_name
from ..http.client import HttpClient
from ..http.head import Head, Headers, Request
from ..http.outage import HttpStatistics, Note
from ..http.tokens import TokenCache, bearer
from .address import Query, blob_path, encoded, settings_from
from .credentials import RENEW_S, ask_token

if TYPE_CHECKING:
    from ..base import Writer
    from .answers import Page
    from .uploads import Uploads

API_VERSION = "2021-08-06"
PAGE_OBJECTS = 1_000
MAX_PAGE_BYTES = 32 * 1024 * 1024
MAX_PAGES = 1_000
_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


class AzStore:
    """A `Store` on az://account/container/prefix."""

    def __init__(self, url: str, options: SourceOptions | None = None) -> None:
        """Raises `UsageError` for an invalid address or option. Does not touch the network."""
        options = options or SourceOptions()
        self._settings, self._container, self._prefix = settings_from(url, options, os.environ)
        self._options = options
        needs_token = not (self._settings.is_anonymous or self._settings.key or self._settings.sas)
        self._tokens = TokenCache(lambda: ask_token(os.environ), renew_s=RENEW_S) if needs_token else None
        self._client = HttpClient(self, options)
        self._uploads: Uploads | None = None
        self._lock = threading.Lock()
        self._closed = False

    @property
    def url(self) -> str:
        return f"az://{self._settings.account}/{self._container}/{self._prefix}".rstrip("/")

    @property
    def follows_redirects(self) -> bool:
        return False

    def stat(self, name: str) -> ObjectInfo:
        return self._client.stat(name)

    def read(self, name: str, *, max_bytes: int) -> tuple[bytes, ObjectInfo]:
        return self._client.read(name, max_bytes=max_bytes)

    def read_into(
        self, name: str, start: int, buffer: memoryview, *, version: str | None = None
    ) -> str | None:
        return self._client.read_into(name, start, buffer, version)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """As `Source.list`, a page of 1,000 at a time. A folder without blobs is empty, not
        missing.
        """
        folder = f"{self._prefix}/" if self._prefix else ""
        marker: str | None = None
        for _ in range(MAX_PAGES):
            query = [("restype", "container"), ("comp", "list"), ("maxresults", str(PAGE_OBJECTS))]
            if folder + prefix:
                query.append(("prefix", folder + prefix))
            if marker is not None:
                query.append(("marker", marker))
            page = self._page(tuple(query))
            for found in page.objects:
                name = found.key.removeprefix(folder)
                # Else a folder's marker.
                if found.key.startswith(folder + prefix) and base.is_name(name):
                    yield ObjectInfo(name, found.size_bytes, found.version)
            marker = page.next_marker
            if marker is None:
                return
        raise SourceError(f"{self.url} holds too many objects to be listed", source=self.url)

    def on_outage(self, note: Note) -> None:
        """As `Outage.watch`."""
        self._client.on_outage(note)

    def quiesce(self) -> None:
        """As `Remote.quiesce`."""
        self._client.quiesce()
        if self._tokens is not None:
            self._tokens.forget()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            uploads, self._uploads = self._uploads, None
        self._client.close()
        if uploads is not None:
            uploads.close()

    def statistics(self) -> HttpStatistics:
        """Of reading."""
        return self._client.statistics()

    def create(self, name: str, *, if_absent: bool = False) -> Writer:
        from .uploads import AzWriter  # as in `_writing`

        check_name(name)
        return AzWriter(self._writing(), name, if_absent=if_absent)

    def put(
        self, name: str, data: bytes, *, if_absent: bool = False, if_version: str | None = None
    ) -> ObjectInfo:
        check_name(name)
        return self._writing().put(name, data, if_absent=if_absent, if_version=if_version)

    def delete(self, name: str) -> None:
        check_name(name)
        self._writing().delete(name)

    def request(self, name: str, extra: Headers) -> Request:
        """As `ObjectServer.request`."""
        return self._authorized("GET", name, (), extra, 0)

    def refusal(self, name: str, request: Request, head: Head, body: bytes) -> TeneralError | None:
        """As `ObjectServer.refusal`."""
        if head.status == 401 and self._tokens is not None and self._tokens.renews(request):
            return None
        from .answers import explain  # only on the way to an error

        return explain(
            head.status,
            body,
            source=self.url,
            name=name,
            is_anonymous=self._settings.is_anonymous,
            retry_after_s=head.retry_after_s,
        )

    def _page(self, query: Query) -> Page:
        from .answers import parse_page  # a cold start lists nothing

        body, _ = self._client.fetch(
            "", lambda: self._authorized("GET", "", query, (), 0), max_bytes=MAX_PAGE_BYTES
        )
        return parse_page(body, where=self.url)

    def _authorized(self, method: str, name: str, query: Query, headers: Headers, num_bytes: int) -> Request:
        """A request as of now for an object ('' for the container), with a body of `num_bytes`."""
        key = f"{self._prefix}/{name}" if self._prefix and name else name
        path = blob_path(self._settings, self._container, key)
        own: Headers = (("x-ms-version", API_VERSION), ("x-ms-date", date(time.time())))
        if self._settings.key:
            own = (*own, ("Authorization", self._signature(method, path, query, (*headers, *own), num_bytes)))
        elif self._tokens is not None:
            own = (*own, *bearer(self._tokens.get()))
        target = encoded(path, query, self._settings.sas)
        return Request(method, self._settings.origin, target, headers, own)

    def _signature(self, method: str, path: str, query: Query, headers: Headers, num_bytes: int) -> str:
        from .credentials import authorization

        try:
            return authorization(self._settings, method, path, query, headers, num_bytes)
        except ValueError:
            raise AccessDeniedError("the account's key is malformed", hint="Copy it once more.") from None

    def _writing(self) -> Uploads:
        from .uploads import Uploads  # with http.client and ssl; serving never writes

        with self._lock:
            if self._closed:
                raise base.closed(self.url, "")
            if self._uploads is None:
                self._uploads = Uploads(self.url, self._options, build=self._authorized, refusal=self.refusal)
            return self._uploads


def date(unix_s: float) -> str:
    """A time as HTTP writes it, whatever the locale."""
    now = time.gmtime(unix_s)
    day, month = _DAYS[now.tm_wday], _MONTHS[now.tm_mon - 1]
    return (
        f"{day}, {now.tm_mday:02} {month} {now.tm_year} {now.tm_hour:02}:{now.tm_min:02}:{now.tm_sec:02} GMT"
    )
