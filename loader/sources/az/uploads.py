"""Writing to Blob Storage: Put Blob for small objects, blocks and a block list for streamed ones."""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress

from ...errors import NotFoundError, SourceError, TeneralError
from ..base import ObjectInfo, PartWriter, SourceOptions, lost
from ..http.head import Head, Headers, Request, is_strong_etag
from ..http.send import Reply, Sender
from .address import Query
from .answers import code_of, is_lost

BLOCK_BYTES = 8 * 1024 * 1024  # a blob has up to 50,000 of them
_BLOB = ("x-ms-blob-type", "BlockBlob")
_BINARY = ("Content-Type", "application/octet-stream")

# Method, name, query, headers, size of the body.
Build = Callable[[str, str, Query, Headers, int], Request]
Refusal = Callable[[str, Request, Head, bytes], TeneralError | None]


class Uploads:
    """The writing side of one store. Thread-safe. Names are relative to the prefix."""

    def __init__(self, url: str, options: SourceOptions, *, build: Build, refusal: Refusal) -> None:
        self.url = url
        self._build = build
        self._refusal = refusal
        self._sender = Sender(url, options)

    def create(self, name: str, *, if_absent: bool) -> AzWriter:
        return AzWriter(self, name, if_absent=if_absent)

    def put(
        self, name: str, data: bytes, *, if_absent: bool = False, if_version: str | None = None
    ) -> ObjectInfo:
        """One request, atomic. Raises `AlreadyExistsError` where a condition does not hold, which
        is also so where the answer to an attempt that succeeded was lost on the way.
        """
        condition = self._condition(name, if_absent, if_version)
        reply = self._send(
            name, "PUT", (), (_BINARY, _BLOB, *condition), data, is_conditional=bool(condition)
        )
        return self._info(name, len(data), reply)

    def delete(self, name: str) -> None:
        with suppress(NotFoundError):
            self._send(name, "DELETE", (), (), b"")

    def send_block(self, name: str, block: str, data: bytes) -> None:
        self._send(name, "PUT", (("comp", "block"), ("blockid", block)), (_BINARY,), data)

    def finish(self, name: str, blocks: list[str], num_bytes: int, *, if_absent: bool) -> ObjectInfo:
        """Make the object of these blocks, in order. Raises `AlreadyExistsError`."""
        listed = "".join(f"<Latest>{block}</Latest>" for block in blocks)
        document = f'<?xml version="1.0" encoding="utf-8"?><BlockList>{listed}</BlockList>'.encode()
        headers = (("Content-Type", "text/plain; charset=UTF-8"), *self._condition(name, if_absent, None))
        query = (("comp", "blocklist"),)
        reply = self._send(name, "PUT", query, headers, document, is_conditional=if_absent)
        return self._info(name, num_bytes, reply)

    def close(self) -> None:
        self._sender.close()

    def _send(
        self,
        name: str,
        method: str,
        query: Query,
        headers: Headers,
        data: bytes,
        *,
        is_conditional: bool = False,
    ) -> Reply:
        def explain(request: Request, reply: Reply) -> TeneralError | None:
            code = code_of(reply.body)
            # The first commit drops the blocks of all others.
            if is_conditional and (is_lost(reply.head.status, code) or code == "InvalidBlockList"):
                return lost(self.url, name)
            return self._refusal(name, request, reply.head, reply.body)

        def build() -> Request:
            return self._build(method, name, query, headers, len(data))

        return self._sender.authorized(name, build, data, explain)

    def _condition(self, name: str, if_absent: bool, if_version: str | None) -> Headers:
        if if_version is not None:
            if not is_strong_etag(if_version):
                raise lost(self.url, name)
            return (("If-Match", if_version),)
        return (("If-None-Match", "*"),) if if_absent else ()

    def _info(self, name: str, num_bytes: int, reply: Reply) -> ObjectInfo:
        etag = reply.head.headers.get("etag", "")
        if not is_strong_etag(etag):
            message = f"{self.url} does not say which version of {name} it keeps"
            raise SourceError(message, source=self.url, name=name)
        return ObjectInfo(name, num_bytes, etag)


class AzWriter(PartWriter):
    """An `ObjectWriter`. Holds one block in memory; a small object goes in a single request.

    Blocks without a list are no blob: Azure drops them after a week, or with the next write of that
    name.
    """

    def __init__(self, uploads: Uploads, name: str, *, if_absent: bool = False) -> None:
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
