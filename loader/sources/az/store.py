"""A Blob Storage container's folder as a store.

Reading goes over `http/client.py`; nothing of Azure's packages is needed or imported. An object's
version is its ETag. Writing is in `uploads.py`, imported by the first write.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from ...errors import AccessDeniedError, TeneralError
from ..base import SourceOptions
from ..http.bucket import BucketStore, ListingPage
from ..http.client import HttpClient
from ..http.head import Head, Headers, Request, format_date
from ..http.tokens import TokenCache, bearer
from .address import Query, blob_path, encoded, settings_from
from .credentials import RENEW_S, ask_token

if TYPE_CHECKING:
    from .uploads import AzUploads

API_VERSION = "2021-08-06"
PAGE_OBJECTS = 1_000
MAX_PAGE_BYTES = 32 * 1024 * 1024


class AzStore(BucketStore):
    """A `Store` on az://account/container/prefix."""

    def __init__(self, url: str, options: SourceOptions | None = None) -> None:
        """Raises `UsageError` for an invalid address or option. Does not touch the network."""
        options = options or SourceOptions()
        self._settings, self._container, prefix = settings_from(url, options, os.environ)
        super().__init__(prefix)
        self._options = options
        needs_token = not (self._settings.is_anonymous or self._settings.key or self._settings.sas)
        self._tokens = TokenCache(lambda: ask_token(os.environ), renew_s=RENEW_S) if needs_token else None
        self._client = HttpClient(self, options)

    @property
    def url(self) -> str:
        return f"az://{self._settings.account}/{self._container}/{self._prefix}".rstrip("/")

    def request(self, name: str, extra: Headers) -> Request:
        return self._authorized("GET", name, (), extra)

    def refusal(self, name: str, request: Request, head: Head, body: bytes) -> TeneralError | None:
        if head.status == 401 and self._tokens is not None and self._tokens.renews(request):
            return None
        from .answers import explain  # only on the way to an error

        return explain(head, body, source=self.url, name=name, is_anonymous=self._settings.is_anonymous)

    def _page(self, prefix: str, token: str | None) -> ListingPage:
        from .answers import parse_page  # a cold start lists nothing

        query: Query = (("restype", "container"), ("comp", "list"), ("maxresults", str(PAGE_OBJECTS)))
        if prefix:
            query = (*query, ("prefix", prefix))
        if token is not None:
            query = (*query, ("marker", token))
        body, _ = self._client.fetch(
            "", lambda: self._authorized("GET", "", query, ()), max_bytes=MAX_PAGE_BYTES
        )
        return parse_page(body, where=self.url)

    def _authorized(
        self, method: str, name: str, query: Query, headers: Headers, body: bytes = b""
    ) -> Request:
        """A request as of now for an object ('' for the container)."""
        path = blob_path(self._settings, self._container, self._key(name) if name else "")
        own: Headers = (("x-ms-version", API_VERSION), ("x-ms-date", format_date(time.time())))
        if self._settings.key:
            own = (*own, ("Authorization", self._signature(method, path, query, (*headers, *own), len(body))))
        elif self._tokens is not None:
            own = (*own, *bearer(self._tokens.get()))
        target = encoded(path, query, self._settings.sas)
        return Request(method, self._settings.origin, target, headers, own, body)

    def _signature(self, method: str, path: str, query: Query, headers: Headers, num_bytes: int) -> str:
        from .credentials import authorization

        try:
            return authorization(self._settings, method, path, query, headers, num_bytes)
        except ValueError:
            raise AccessDeniedError("the account's key is malformed", hint="Copy it once more.") from None

    def _open_uploads(self) -> AzUploads:
        from .uploads import AzUploads  # a cold start writes nothing

        return AzUploads(self, self._options, build=self._authorized)

    def _forget_credentials(self) -> None:
        if self._tokens is not None:
            self._tokens.forget()
