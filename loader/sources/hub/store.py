"""A model repository of the Hugging Face Hub as a source: read only.

    list    GET api/models/…/revision/main?blobs=true     the commit, its files, their digests
    range   GET …/resolve/COMMIT/file → redirect → GET at the content network

Invariant: the revision is resolved to a commit once, and all that is read is of that commit. The
user's token goes to the Hub's host alone. Redirects lead to addresses that are signed for an hour:
ranges are read there directly for `LOCATION_S`, or until the content network refuses one, and then
the Hub is asked for a new one.

A model that the Hub's local cache has is a local folder (`cache.py`).
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

from ...errors import IntegrityError, NotFoundError, TeneralError
from .. import base
from ..base import ObjectInfo, Source, SourceOptions, check_name
from ..http.address import Origin
from ..http.bucket import HttpReads
from ..http.client import HttpClient
from ..http.head import Head, Headers, Request
from ..http.source import status_error
from ..http.tokens import bearer
from .address import file_target, find_token, list_target, parse_url, settings_from
from .answers import HubFile, Revision, explain, parse_revision
from .cache import CachedModel, find_snapshot, not_cached

MAX_LIST_BYTES = 32 << 20  # about 200 bytes a file
LOCATION_S = 300.0  # for which a redirect's address is used again; the Hub signs them for an hour


def open_hub(url: str, options: SourceOptions | None = None) -> Source:
    """The source of hf://…: a folder of the Hub's local cache if it has the model, else the Hub.

    Raises `UsageError`, and `NotFoundError` where HF_HUB_OFFLINE is set and the cache lacks the model.
    """
    options = options or SourceOptions()
    address, settings = parse_url(url), settings_from(options, os.environ)
    folder = find_snapshot(address, settings)
    if folder is not None:
        return CachedModel(folder, outside_links=options.outside_links)
    if settings.is_offline:
        raise not_cached(address, settings)
    return HubSource(url, options)


class _Location(NamedTuple):
    """A file's address at the content network."""

    origin: Origin
    target: str
    until_s: float  # on time.monotonic()'s clock


class HubSource(HttpReads):
    """A `Source` on a folder of a model repository."""

    def __init__(self, url: str, options: SourceOptions | None = None) -> None:
        """Raises `UsageError` for an invalid address or setting. Does not touch the network."""
        options = options or SourceOptions()
        self._address = parse_url(url)
        self._settings = settings_from(options, os.environ)
        self._prefix = f"{self._address.folder}/" if self._address.folder else ""
        self._token: str | None = None
        self._has_token = False  # as far as it was looked for
        self._revision: Revision | None = None
        self._locations: dict[str, _Location] = {}  # by name
        self._lock = threading.Lock()
        self._closed = False
        self._client = HttpClient(
            self, options, read_head=self._with_version, on_redirect=self._note_location
        )

    @property
    def url(self) -> str:
        """The folder's address, at its commit once that is known."""
        folder = self._address._replace(quantisation="")
        return folder.at(folder.revision if self._revision is None else self._revision.commit)

    @property
    def follows_redirects(self) -> bool:
        return True

    def stat(self, name: str) -> ObjectInfo:
        return self._info(name, self._file(check_name(name)))

    def read(self, name: str, *, max_bytes: int) -> tuple[bytes, ObjectInfo]:
        """The file, checked against the digest that the Hub states. Raises `IntegrityError`, too."""
        file = self._file(check_name(name))
        if file.size_bytes > max_bytes:
            raise base.too_large(self.url, name, file.size_bytes, max_bytes)
        data = b""
        if file.size_bytes:
            data, _ = super().read(name, max_bytes=max_bytes)
            if not _is_content(data, file):  # perhaps only on the way
                data, _ = super().read(name, max_bytes=max_bytes)
                _check_content(data, file, f"{self.url}/{name}")
        return data, self._info(name, file)

    def read_into(
        self, name: str, start: int, buffer: memoryview, *, version: str | None = None
    ) -> str | None:
        """Fill the buffer (`Source.read_into`). A range is not checked: only whole files have digests."""
        info = self._info(name, self._file(check_name(name)))
        if version not in (None, info.version):
            raise base.changed(self.url, name, f"version {version} was expected, {info.version} is there")
        end = start + len(buffer)
        if end > info.size_bytes:
            raise base.ended_early(self.url, name, start, end, info.size_bytes)
        return super().read_into(name, start, buffer, version=info.version)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        files = self._resolved().files.items()
        begin, skipped = self._prefix + prefix, len(self._prefix)
        return (self._info(name[skipped:], file) for name, file in files if name.startswith(begin))

    def quiesce(self) -> None:
        super().quiesce()
        self._locations.clear()

    def close(self) -> None:
        self._closed = True
        super().close()

    # ---- the server's side of `HttpClient` ----

    def request(self, name: str, extra: Headers) -> Request:
        location = self._locations.get(name)
        if location is not None and time.monotonic() < location.until_s:
            return Request("GET", location.origin, location.target, extra)
        target = file_target(self._settings, self._address.repo, self._resolved().commit, self._prefix + name)
        return self._to_hub(target, extra)

    def refusal(self, name: str, request: Request, head: Head, body: bytes) -> TeneralError | None:
        if request.origin != self._settings.origin:
            if head.status in (401, 403, 410):  # the address has expired
                self._locations.pop(name, None)
                return None
            return status_error(self.url, name, head.status, retry_after_s=head.retry_after_s)
        return explain(
            head,
            self._address,
            source=self.url,
            name=name,
            endpoint=f"{self._settings.origin}{self._settings.path}",
            has_token=self._has_token,
        )

    def _note_location(self, name: str, following: Request) -> None:
        if following.origin != self._settings.origin:
            until_s = time.monotonic() + LOCATION_S
            self._locations[name] = _Location(following.origin, following.target, until_s)

    def _with_version(self, head: Head) -> Head:
        """The head with the commit as its ETag: those of the Hub and of its content network differ. It
        is a weak one, so that no server is asked to compare it.
        """
        if self._revision is None:
            return head
        return head._replace(headers={**head.headers, "etag": _etag(self._revision.commit)})

    def _to_hub(self, target: str, headers: Headers = ()) -> Request:
        private = () if self._token is None else bearer(self._token)
        return Request("GET", self._settings.origin, target, headers, private)

    # ---- the revision ----

    def _resolved(self) -> Revision:
        """The revision's commit and its files, asked for once."""
        if self._closed:
            raise base.closed(self.url, "")
        if self._revision is None:
            with self._lock:
                if self._revision is None:
                    self._token = find_token(self._settings)
                    self._has_token = self._token is not None
                    target = list_target(self._settings, self._address)
                    document, _ = self._client.fetch(
                        "", lambda: self._to_hub(target), max_bytes=MAX_LIST_BYTES
                    )
                    self._revision = parse_revision(document, where=self.url)
        return self._revision

    def _file(self, name: str) -> HubFile:
        file = self._resolved().files.get(self._prefix + name)
        if file is None:
            raise NotFoundError(f"there is no {name} in {self.url}", source=self.url, name=name)
        return file

    def _info(self, name: str, file: HubFile) -> ObjectInfo:
        version = f"{file.size_bytes}/{_etag(self._resolved().commit)}"
        sha256 = None if file.sha256 is None else bytes.fromhex(file.sha256)
        return ObjectInfo(name, file.size_bytes, version, sha256=sha256)


def _etag(commit: str) -> str:
    return f'W/"{commit}"'


def _is_content(data: bytes, file: HubFile) -> bool:
    return _digest_of(data, file) == (file.sha256 or file.git_sha1)


def _digest_of(data: bytes, file: HubFile) -> str | None:
    """The digest of the kind that the file has; None where it has none."""
    if file.sha256 is not None:
        return hashlib.sha256(data).hexdigest()
    if file.git_sha1 is not None:
        header = f"blob {len(data)}\0".encode()
        return hashlib.sha1(header + data, usedforsecurity=False).hexdigest()
    return None


def _check_content(data: bytes, file: HubFile, where: str) -> None:
    if not _is_content(data, file):
        raise IntegrityError(
            f"{where} is damaged: its bytes are not those whose digest the Hub states",
            where=where,
            expected=str(file.sha256 or file.git_sha1),
            got=str(_digest_of(data, file)),
            hint="Start again. If that does not help, a proxy or a mirror changes the file.",
        )
