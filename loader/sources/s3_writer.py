"""Streaming one object of unknown length into S3: a multipart upload, or a single put while it is small."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, wait
from contextlib import suppress

from ..errors import SourceError
from .base import ObjectInfo
from .s3_uploads import S3Uploads
from .writer import Writer

PART_BYTES = 8 * 1024 * 1024  # S3 takes 10,000 parts, so this reaches to 80 GB
MAX_IN_FLIGHT = 4  # parts of one object being sent: with the pending one, the memory that a writer takes


class S3Writer(Writer):
    """An `ObjectWriter`. Holds at most `MAX_IN_FLIGHT + 1` parts in memory; `write` waits for them to go."""

    def __init__(self, uploads: S3Uploads, name: str, *, if_absent: bool = False) -> None:
        super().__init__()
        self._if_absent = if_absent
        self._uploads = uploads
        self._name = name
        self._pending = bytearray()
        self._upload_id: str | None = None
        self._in_flight: deque[Future[str]] = deque()
        self._etags: list[str] = []
        self._size_bytes = 0

    def _append(self, data: bytes | bytearray | memoryview) -> None:
        rest = memoryview(data).cast("B")
        self._size_bytes += len(rest)
        while rest:
            taken = rest[: PART_BYTES - len(self._pending)]
            self._pending += taken
            rest = rest[len(taken) :]
            if len(self._pending) == PART_BYTES:
                self._send_pending()

    def _finish(self) -> ObjectInfo:
        if self._upload_id is None:
            return self._uploads.put(self._name, bytes(self._pending), if_absent=self._if_absent)
        if self._pending:
            self._send_pending()
        while self._in_flight:
            self._etags.append(self._in_flight.popleft().result())
        etag = self._uploads.finish(self._name, self._upload_id, self._etags, if_absent=self._if_absent)
        return ObjectInfo(self._name, self._size_bytes, etag)

    def _discard(self) -> None:
        for part in self._in_flight:
            part.cancel()
        wait(self._in_flight)  # a part that arrives after the abort would stay, and be paid for
        self._pending = bytearray()
        if self._upload_id is not None:
            with suppress(
                SourceError
            ):  # the error that led here is the one to show; a lifecycle rule tidies up
                self._uploads.abort(self._name, self._upload_id)

    def _send_pending(self) -> None:
        if self._upload_id is None:
            self._upload_id = self._uploads.begin(self._name)
        while len(self._in_flight) >= MAX_IN_FLIGHT:
            self._etags.append(self._in_flight.popleft().result())
        number = len(self._etags) + len(self._in_flight) + 1
        data, self._pending = bytes(self._pending), bytearray()
        self._in_flight.append(self._uploads.send_part(self._name, self._upload_id, number, data))
