"""A Cloud Storage bucket's folder as a store.

Reading goes over `http_client` with a bearer token; nothing of Google's packages is needed or
imported. An object's version is its generation. Writing is in `uploads.py`, imported by the first
write.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...errors import SourceError, TeneralError
from .. import base
from ..base import ObjectInfo, SourceOptions, check_name
from ..http.client import HttpClient
from ..http.head import Head, Headers, Request
from ..http.outage import HttpStatistics, Note
from ..http.tokens import bearer
from .address import (
    Query,
    generation_of,
    is_number,
    list_target,
    object_target,
    parse_url,
    settings_from,
    version_of,
)
from .credentials import token_chain

if TYPE_CHECKING:
    from ..base import Writer
    from .answers import Page
    from .uploads import Uploads

PAGE_OBJECTS = 1_000
MAX_PAGE_BYTES = 32 * 1024 * 1024  # of 1,000 objects, with the fields that are asked for
MAX_PAGES = 1_000
_FIELDS = "nextPageToken,items(name,size,generation)"


class GsStore:
    """A `Store` on gs://bucket/prefix."""

    def __init__(self, url: str, options: SourceOptions | None = None) -> None:
        """Raises `UsageError` for an invalid address or option. Does not touch the network."""
        options = options or SourceOptions()
        self._bucket, self._prefix = parse_url(url)
        self._settings = settings_from(options, os.environ)
        self._options = options
        self._tokens = None if self._settings.is_anonymous else token_chain(os.environ)
        self._client = HttpClient(self, options, read_head=with_generation)
        self._uploads: Uploads | None = None
        self._lock = threading.Lock()
        self._closed = False

    @property
    def url(self) -> str:
        return f"gs://{self._bucket}/{self._prefix}".rstrip("/")

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
        """As `Source.list`, a page of 1,000 at a time. A folder without objects is empty, not
        missing.
        """
        folder = f"{self._prefix}/" if self._prefix else ""
        token: str | None = None
        for _ in range(MAX_PAGES):
            query = [("prefix", folder + prefix), ("maxResults", str(PAGE_OBJECTS)), ("fields", _FIELDS)]
            if token is not None:
                query.append(("pageToken", token))
            page = self._page(tuple(query))
            for found in page.objects:
                name = found.key.removeprefix(folder)
                # Else a folder's marker.
                if found.key.startswith(folder + prefix) and base.is_name(name):
                    yield ObjectInfo(name, found.size_bytes, found.version)
            token = page.next_token
            if token is None:
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
        from .uploads import GsWriter  # as in `_writing`

        check_name(name)
        return GsWriter(self._writing(), name, if_absent=if_absent)

    def put(
        self, name: str, data: bytes, *, if_absent: bool = False, if_version: str | None = None
    ) -> ObjectInfo:
        check_name(name)
        return self._writing().put(name, data, if_absent=if_absent, if_version=if_version)

    def delete(self, name: str) -> None:
        check_name(name)
        self._writing().delete(name)

    def request(self, name: str, extra: Headers) -> Request:
        """As `ObjectServer.request`. The condition on a version becomes one on the generation."""
        query: Query = (("alt", "media"),)
        headers = []
        for field, value in extra:
            generation = generation_of(value) if field == "If-Match" else None
            if generation is not None:
                query = (*query, ("ifGenerationMatch", generation))
            else:
                headers.append((field, value))
        return self._authorized("GET", object_target(self._bucket, self._key(name), query), tuple(headers))

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
            is_anonymous=self._tokens is None,
            retry_after_s=head.retry_after_s,
        )

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def _page(self, query: Query) -> Page:
        from .answers import parse_page  # a cold start lists nothing

        target = list_target(self._bucket, query)
        body, _ = self._client.fetch(
            "", lambda: self._authorized("GET", target, ()), max_bytes=MAX_PAGE_BYTES
        )
        return parse_page(body, where=self.url)

    def _authorized(self, method: str, target: str, headers: Headers) -> Request:
        """A request as of now, with a token that is good."""
        private: Headers = () if self._tokens is None else bearer(self._tokens.get())
        if self._settings.user_project is not None:
            private = (*private, ("x-goog-user-project", self._settings.user_project))
        return Request(method, self._settings.origin, target, headers, private)

    def _writing(self) -> Uploads:
        from .uploads import Uploads  # with http.client and ssl; serving never writes

        with self._lock:
            if self._closed:
                raise base.closed(self.url, "")
            if self._uploads is None:
                self._uploads = Uploads(
                    self.url,
                    self._bucket,
                    self._prefix,
                    self._options,
                    origin=self._settings.origin,
                    build=self._authorized,
                    refusal=self.refusal,
                )
            return self._uploads


def with_generation(head: Head) -> Head:
    """The head with the object's generation as its ETag, and with the coding in which the object is
    stored.

    An object stored with gzip is decompressed by Cloud Storage for readers that do not take gzip:
    its ranges would be those of other bytes.
    """
    generation = head.headers.get("x-goog-generation")
    stored = head.headers.get("x-goog-stored-content-encoding", "identity")
    headers = head.headers
    if generation is not None and is_number(generation):
        headers = {**headers, "etag": version_of(generation)}
    if stored != "identity":
        headers = {**headers, "content-encoding": stored}
    return head._replace(headers=headers)
