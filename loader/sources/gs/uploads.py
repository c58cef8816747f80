"""Writing to Cloud Storage: single requests for small objects, resumable sessions for streamed
ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress

from ...errors import AlreadyExistsError, NotFoundError, SourceError, UnavailableError
from ..base import ObjectInfo, PartWriter, SourceOptions, lost
from ..http.address import Origin, parse_address
from ..http.client import ObjectServer
from ..http.head import Head, Headers, Request
from ..http.uploads import HttpUploads
from .address import Query, generation_of, object_target, upload_target
from .answers import parse_object

CHUNK_BYTES = 16 * 1024 * 1024  # of a session: a multiple of 256 KiB, as Cloud Storage asks
MAX_TARGET = 8192  # characters of a session's path and query
MAX_STALLS = 6  # answers to a chunk by which the store has kept nothing of it
_RANGE = re.compile(r"bytes=0-(\d{1,19})")
_ABSENT = "0"  # the generation of an object that does not exist

Build = Callable[[str, str, Headers, bytes], Request]  # method, target, headers, body → with a token


class GsUploads(HttpUploads):
    """The writing side of one store. Thread-safe. Names are relative to the prefix."""

    def __init__(
        self,
        server: ObjectServer,
        bucket: str,
        prefix: str,
        options: SourceOptions,
        *,
        origin: Origin,
        build: Build,
    ) -> None:
        super().__init__(server, options)
        self._bucket = bucket
        self._prefix = prefix
        self._origin = origin
        self._build = build

    def create(self, name: str, *, if_absent: bool) -> GsWriter:
        return GsWriter(self, name, if_absent=if_absent)

    def put(
        self, name: str, data: bytes, *, if_absent: bool = False, if_version: str | None = None
    ) -> ObjectInfo:
        """One request, atomic. Raises `AlreadyExistsError` where a condition does not hold, which
        is also so where the answer to an attempt that succeeded was lost on the way.
        """
        condition = self._condition(name, if_absent, if_version)
        return parse_object(self._upload(name, "media", condition, data)[1], name, where=self.url)

    def delete(self, name: str) -> None:
        target = object_target(self._bucket, self._key(name), ())
        with suppress(NotFoundError):
            self._send(name, lambda: self._build("DELETE", target, (), b""))

    def begin(self, name: str, *, if_absent: bool) -> str:
        """The path and query of a new session. Raises `AlreadyExistsError`."""
        head, _ = self._upload(name, "resumable", self._condition(name, if_absent, None), b"")
        # A session's address holds its right to write. Only its path is used: it is sent to the
        # store alone.
        address = parse_address(head.headers.get("location", ""))
        if address is None or not address.query or len(address.target) > MAX_TARGET:
            raise SourceError(f"{self.url} begins no upload of {name}", source=self.url, name=name)
        return address.target

    def send_chunk(
        self, name: str, session: str, start: int, data: bytes, *, is_last: bool, is_conditional: bool
    ) -> ObjectInfo | None:
        """Send bytes from `start` on; the object, once the last ones are there.

        A chunk whose answer was lost is sent again: Cloud Storage ignores what it has of it already.
        """
        end, done, stalls = start + len(data), start, 0
        total = str(end) if is_last else "*"
        while stalls < MAX_STALLS:
            span = f"bytes {done}-{end - 1}/{total}" if done < end else f"bytes */{total}"
            request = Request(
                "PUT", self._origin, session, (("Content-Range", span),), body=data[done - start :]
            )
            head, body = self._send_in_session(name, request, is_conditional)
            if head.status != 308:
                if not is_last:
                    raise SourceError(f"{self.url} ended the upload of {name}", source=self.url, name=name)
                return self._finished(body, name, end)
            reached = _reached(head)
            if not start <= reached <= end:
                raise SourceError(f"{self.url} lost bytes of {name}", source=self.url, name=name)
            if reached == end and not is_last:
                return None
            stalls += reached <= done
            done = reached
        raise UnavailableError(f"{self.url} takes no more of {name}", source=self.url, name=name)

    def cancel(self, name: str, session: str) -> None:
        """Drop an unfinished session."""
        self._send_in_session(name, Request("DELETE", self._origin, session))

    def _finished(self, body: bytes, name: str, size_bytes: int) -> ObjectInfo:
        info = parse_object(body, name, where=self.url)
        if info.size_bytes != size_bytes:
            message = f"{self.url} keeps {info.size_bytes:,} bytes of {name}, not {size_bytes:,}"
            raise SourceError(message, source=self.url, name=name)
        return info

    def _send_in_session(
        self, name: str, request: Request, is_conditional: bool = False
    ) -> tuple[Head, bytes]:
        """The good answer to a request without a token: the session's address is one."""

        def explain(head: Head, _: bytes) -> SourceError | None:
            if head.status in (404, 410):
                message = f"the upload of {name} to {self.url} has expired"
                return SourceError(message, source=self.url, name=name, hint="Start again.")
            return lost(self.url, name) if is_conditional and head.status == 412 else None

        return self._client.send(name, lambda: request, explain)

    def _upload(self, name: str, kind: str, condition: Query, data: bytes) -> tuple[Head, bytes]:
        query = (("uploadType", kind), ("name", self._key(name)), *condition)
        target = upload_target(self._bucket, query)
        headers: Headers = (("Content-Type", "application/octet-stream"),) if data else ()
        return self._send(
            name,
            lambda: self._build("POST", target, headers, data),
            is_lost=lambda head, _: bool(condition) and head.status == 412,
        )

    def _condition(self, name: str, if_absent: bool, if_version: str | None) -> Query:
        if if_version is not None:
            generation = generation_of(if_version)
            if generation is None:
                raise lost(self.url, name)
            return (("ifGenerationMatch", generation),)
        return (("ifGenerationMatch", _ABSENT),) if if_absent else ()

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name


class GsWriter(PartWriter):
    """An `ObjectWriter`. Holds one chunk in memory; a small object goes in a single request."""

    def __init__(self, uploads: GsUploads, name: str, *, if_absent: bool = False) -> None:
        super().__init__(CHUNK_BYTES)
        self._uploads = uploads
        self._name = name
        self._if_absent = if_absent
        self._session: str | None = None
        self._sent_bytes = 0
        self._lost: AlreadyExistsError | None = None  # shown by `commit`, as of all stores

    def _finish(self) -> ObjectInfo:
        if self._lost is not None:
            raise self._lost
        data = bytes(self._pending)
        if self._session is None:
            return self._uploads.put(self._name, data, if_absent=self._if_absent)
        info = self._send_chunk(data, is_last=True)
        assert info is not None, "the last chunk makes the object"
        return info

    def _discard(self) -> None:
        self._pending = bytearray()
        if self._session is not None:
            # The error that led here is the one to show; a session expires in a week.
            with suppress(SourceError):
                self._uploads.cancel(self._name, self._session)

    def _send_part(self, data: bytes) -> None:
        if self._lost is None:
            try:
                self._send_chunk(data, is_last=False)
            except AlreadyExistsError as error:
                self._lost = error

    def _send_chunk(self, data: bytes, *, is_last: bool) -> ObjectInfo | None:
        if self._session is None:
            self._session = self._uploads.begin(self._name, if_absent=self._if_absent)
        start, self._sent_bytes = self._sent_bytes, self._sent_bytes + len(data)
        return self._uploads.send_chunk(
            self._name, self._session, start, data, is_last=is_last, is_conditional=self._if_absent
        )


def _reached(head: Head) -> int:
    """The end of the bytes that a session has."""
    found = _RANGE.fullmatch(head.headers.get("range", ""))
    return int(found[1]) + 1 if found else 0
