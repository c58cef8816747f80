"""Writing to Blob Storage: Put Blob for small objects, blocks and a block list for streamed ones."""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress

from ...errors import NotFoundError, SourceError
from ..base import ObjectInfo, PartWriter, SourceOptions, lost
from ..http.client import ObjectServer
from ..http.head import Head, Headers, Request, is_strong_etag
from ..http.uploads import HttpUploads
from .address import Query
from .answers import is_lost

BLOCK_BYTES = 8 * 1024 * 1024  # a blob has up to 50,000 of them
_BLOB = ("x-ms-blob-type", "BlockBlob")
_BINARY = ("Content-Type", "application/octet-stream")

Build = Callable[[str, str, Query, Headers, bytes], Request]  # method, name, query, headers, body


class AzUploads(HttpUploads):
    """The writing side of one store. Thread-safe. Names are relative to the prefix."""

    def __init__(self, server: ObjectServer, options: SourceOptions, *, build: Build) -> None:
        super().__init__(server, options)
        self._build = build

    def create(self, name: str, *, if_absent: bool) -> AzWriter:
        return AzWriter(self, name, if_absent=if_absent)

    def put(
        self, name: str, data: bytes, *, if_absent: bool = False, if_version: str | None = None
    ) -> ObjectInfo:
        """One request, atomic. Raises `AlreadyExistsError` where a condition does not hold, which
        is also so where the answer to an attempt that succeeded was lost on the way.
        """
        condition = self._condition(name, if_absent, if_version)
        head = self._put(name, (), (_BINARY, _BLOB, *condition), data, is_conditional=bool(condition))
        return self._info(name, len(data), head)

    def delete(self, name: str) -> None:
        with suppress(NotFoundError):
            self._send(name, lambda: self._build("DELETE", name, (), (), b""))

    def send_block(self, name: str, block: str, data: bytes) -> None:
        self._put(name, (("comp", "block"), ("blockid", block)), (_BINARY,), data)

    def finish(self, name: str, blocks: list[str], num_bytes: int, *, if_absent: bool) -> ObjectInfo:
        """Make the object of these blocks, in order. Raises `AlreadyExistsError`."""
        listed = "".join(f"<Latest>{block}</Latest>" for block in blocks)
        document = f'<?xml version="1.0" encoding="utf-8"?><BlockList>{listed}</BlockList>'.encode()
        headers = (("Content-Type", "text/plain; charset=UTF-8"), *self._condition(name, if_absent, None))
        head = self._put(name, (("comp", "blocklist"),), headers, document, is_conditional=if_absent)
        return self._info(name, num_bytes, head)

    def _put(
        self, name: str, query: Query, headers: Headers, data: bytes, *, is_conditional: bool = False
    ) -> Head:
        def build() -> Request:
            return self._build("PUT", name, query, headers, data)

        return self._send(name, build, is_lost=lambda head, body: is_conditional and is_lost(head, body))[0]

    def _condition(self, name: str, if_absent: bool, if_version: str | None) -> Headers:
        if if_version is not None:
            if not is_strong_etag(if_version):
                raise lost(self.url, name)
            return (("If-Match", if_version),)
        return (("If-None-Match", "*"),) if if_absent else ()

    def _info(self, name: str, num_bytes: int, head: Head) -> ObjectInfo:
        etag = head.headers.get("etag", "")
        if not is_strong_etag(etag):
            message = f"{self.url} does not say which version of {name} it keeps"
            raise SourceError(message, source=self.url, name=name)
        return ObjectInfo(name, num_bytes, etag)


class AzWriter(PartWriter):
    """An `ObjectWriter`. Holds one block in memory; a small object goes in a single request.

    Blocks without a list are no blob: Azure drops them after a week, or with the next write of that
    name.
    """

    def __init__(self, uploads: AzUploads, name: str, *, if_absent: bool = False) -> None:
        super().__init__(BLOCK_BYTES)
        self._uploads = uploads
        self._name = name
        self._if_absent = if_absent
        self._own = os.urandom(8).hex()  # so that another writer's blocks are never taken for ours
        self._blocks: list[str] = []

    def _finish(self) -> ObjectInfo:
        if not self._blocks:
            return self._uploads.put(self._name, bytes(self._pending), if_absent=self._if_absent)
        if self._pending:
            self._send_pending()
        return self._uploads.finish(self._name, self._blocks, self._num_bytes, if_absent=self._if_absent)

    def _discard(self) -> None:
        self._pending = bytearray()

    def _send_part(self, data: bytes) -> None:
        block = b64encode(f"{self._own}-{len(self._blocks):06}".encode()).decode()
        self._uploads.send_block(self._name, block, data)
        self._blocks.append(block)
