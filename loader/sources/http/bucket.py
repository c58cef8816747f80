"""Sources over HTTP: what all of them share, and a bucket's folder as a store.

A kind of bucket adds its requests, its refusals and its writing. Bodies of listings are bounded and
parsed by the kind; its uploads are imported by the first write: serving never writes.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from ...errors import SourceError
from .. import base
from ..base import ObjectInfo, Writer, check_name
from .client import HttpClient
from .outage import HttpStatistics, Note

MAX_PAGES = 1_000  # of a listing, of 1,000 objects each


class HttpReads:
    """The reading methods of a `Source`, by its `_client`."""

    _client: HttpClient

    def stat(self, name: str) -> ObjectInfo:
        return self._client.stat(name)

    def read(self, name: str, *, max_bytes: int) -> tuple[bytes, ObjectInfo]:
        return self._client.read(name, max_bytes=max_bytes)

    def read_into(
        self, name: str, start: int, buffer: memoryview, *, version: str | None = None
    ) -> str | None:
        return self._client.read_into(name, start, buffer, version)

    def on_outage(self, note: Note) -> None:
        self._client.on_outage(note)

    def quiesce(self) -> None:
        self._client.quiesce()

    def close(self) -> None:
        self._client.close()

    def statistics(self) -> HttpStatistics:
        """Of reading."""
        return self._client.statistics()


class Listed(NamedTuple):
    """An object of a listing."""

    key: str  # with the folder's prefix
    size_bytes: int
    version: str
    modified_unix_s: float | None = None


class ListingPage(NamedTuple):
    objects: tuple[Listed, ...]
    next_token: str | None


class BucketUploads(Protocol):
    """The writing side of one store. Thread-safe. Names are relative to the prefix."""

    def create(self, name: str, *, if_absent: bool) -> Writer: ...

    def put(
        self, name: str, data: bytes, *, if_absent: bool = False, if_version: str | None = None
    ) -> ObjectInfo: ...

    def delete(self, name: str) -> None: ...

    def close(self) -> None: ...


class BucketStore(HttpReads, ABC):
    """The methods of a `Store` on a folder of a bucket."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._lock = threading.Lock()
        self._uploads: BucketUploads | None = None
        self._closed = False

    @property
    @abstractmethod
    def url(self) -> str: ...

    @property
    def follows_redirects(self) -> bool:
        """False: a redirect would need another signature."""
        return False

    @abstractmethod
    def _page(self, prefix: str, token: str | None) -> ListingPage:
        """One page of the objects whose keys begin with `prefix`; None: the first one."""

    @abstractmethod
    def _open_uploads(self) -> BucketUploads:
        """Import and make the writing side. Called once, under the lock."""

    @abstractmethod
    def _forget_credentials(self) -> None: ...

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """The objects, a page at a time. A folder without objects is empty, not missing."""
        folder = f"{self._prefix}/" if self._prefix else ""
        token: str | None = None
        for _ in range(MAX_PAGES):
            page = self._page(folder + prefix, token)
            for found in page.objects:
                name = found.key.removeprefix(folder)
                # Else a folder's own marker.
                if found.key.startswith(folder + prefix) and base.is_name(name):
                    yield ObjectInfo(name, *found[1:])
            token = page.next_token
            if token is None:
                return
        raise SourceError(f"{self.url} holds too many objects to be listed", source=self.url)

    def quiesce(self) -> None:
        super().quiesce()
        with self._lock:
            uploads = self._uploads
        if isinstance(uploads, base.Remote):
            uploads.quiesce()
        self._forget_credentials()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            uploads, self._uploads = self._uploads, None
        super().close()
        if uploads is not None:
            uploads.close()

    def create(self, name: str, *, if_absent: bool = False) -> Writer:
        check_name(name)
        return self._writing().create(name, if_absent=if_absent)

    def put(
        self, name: str, data: bytes, *, if_absent: bool = False, if_version: str | None = None
    ) -> ObjectInfo:
        check_name(name)
        return self._writing().put(name, data, if_absent=if_absent, if_version=if_version)

    def delete(self, name: str) -> None:
        check_name(name)
        self._writing().delete(name)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def _writing(self) -> BucketUploads:
        with self._lock:
            if self._closed:
                raise base.closed(self.url, "")
            if self._uploads is None:
                self._uploads = self._open_uploads()
            return self._uploads
