"""A Cloud Storage bucket's folder as a store.

Reading goes over `http/client.py` with a bearer token; nothing of Google's packages is needed or
imported. An object's version is its generation. Writing is in `uploads.py`, imported by the first
write.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ...errors import TeneralError
from ..base import SourceOptions
from ..http.bucket import BucketStore, ListingPage
from ..http.client import HttpClient
from ..http.head import Head, Headers, Request
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
    from .uploads import GsUploads

PAGE_OBJECTS = 1_000
MAX_PAGE_BYTES = 32 * 1024 * 1024  # of 1,000 objects, with the fields that are asked for
_FIELDS = "nextPageToken,items(name,size,generation,updated)"


class GsStore(BucketStore):
    """A `Store` on gs://bucket/prefix."""

    def __init__(self, url: str, options: SourceOptions | None = None) -> None:
        """Raises `UsageError` for an invalid address or option. Does not touch the network."""
        options = options or SourceOptions()
        self._bucket, prefix = parse_url(url)
        super().__init__(prefix)
        self._settings = settings_from(options, os.environ)
        self._options = options
        self._tokens = None if self._settings.is_anonymous else token_chain(os.environ)
        self._client = HttpClient(self, options, read_head=with_generation)

    @property
    def url(self) -> str:
        return f"gs://{self._bucket}/{self._prefix}".rstrip("/")

    def request(self, name: str, extra: Headers) -> Request:
        """A request of Google's. The condition on a version becomes one on the generation."""
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
        if head.status == 401 and self._tokens is not None and self._tokens.renews(request):
            return None
        from .answers import explain  # only on the way to an error

        return explain(head, body, source=self.url, name=name, is_anonymous=self._tokens is None)

    def _page(self, prefix: str, token: str | None) -> ListingPage:
        from .answers import parse_page  # a cold start lists nothing

        query: Query = (("prefix", prefix), ("maxResults", str(PAGE_OBJECTS)), ("fields", _FIELDS))
        if token is not None:
            query = (*query, ("pageToken", token))
        target = list_target(self._bucket, query)
        body, _ = self._client.fetch(
            "", lambda: self._authorized("GET", target, ()), max_bytes=MAX_PAGE_BYTES
        )
        return parse_page(body, where=self.url)

    def _authorized(self, method: str, target: str, headers: Headers, body: bytes = b"") -> Request:
        """A request as of now, with a token that is good."""
        private: Headers = () if self._tokens is None else bearer(self._tokens.get())
        if self._settings.user_project is not None:
            private = (*private, ("x-goog-user-project", self._settings.user_project))
        return Request(method, self._settings.origin, target, headers, private, body)

    def _open_uploads(self) -> GsUploads:
        from .uploads import GsUploads  # a cold start writes nothing

        origin = self._settings.origin
        return GsUploads(
            self, self._bucket, self._prefix, self._options, origin=origin, build=self._authorized
        )

    def _forget_credentials(self) -> None:
        if self._tokens is not None:
            self._tokens.forget()


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
