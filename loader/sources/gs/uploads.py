"""Writing to Cloud Storage: single requests for small objects, resumable sessions for streamed
ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from ...errors import AlreadyExistsError, NotFoundError, SourceError, TeneralError, UnavailableError
from ..base import ObjectInfo, SourceOptions, Writer, lost
from ..http.address import Origin, parse_address
from ..http.head import Head, Headers, Request
from ..http.send import Reply, Sender
from ..http.source import RETRYABLE
from .address import Query, generation_of, object_target, upload_target
from .answers import parse_object

CHUNK_BYTES = 16 * 1024 * 1024  # of a session: a multiple of 256 KiB, as Cloud Storage asks
MAX_TARGET = 8192  # characters of a session's path and query
_RANGE = re.compile(r"bytes=0-(\d{1,19})")
_ABSENT = "0"  # the generation of an object that does not exist

Build = Callable[[str, str, Headers], Request]  # method, target, headers → a request with a token
Refusal = Callable[[str, Request, Head, bytes], TeneralError | None]


class Uploads:
    """The writing side of one store. Thread-safe. Names are relative to the prefix."""

    def __init__(
        self,
        url: str,
        bucket: str,
        prefix: str,
        options: SourceOptions,
        *,
        origin: Origin,
        build: Build,
        refusal: Refusal,
    ) -> None:
        self.url = url
        self._bucket = bucket
        self._prefix = prefix
        self._max_attempts = max(1, options.max_attempts)
        self._build = build
        self._refusal = refusal
        self._origin = origin
        self._sender = Sender(url, options)

    def create(self, name: str, *, if_absent: bool) -> GsWriter:
        return GsWriter(self, name, if_absent=if_absent)

    def put(
        self, name: str, data: bytes, *, if_absent: bool = False, if_version: str | None = None
    ) -> ObjectInfo:
        """One request, atomic. Raises `AlreadyExistsError` where a condition does not hold, which
        is also so where the answer to an attempt that succeeded was lost on the way.
        """
        condition = self._condition(name, if_absent, if_version)
        query = (("uploadType", "media"), ("name", self._key(name)), *condition)
        reply = self._send(
            name, "POST", upload_target(self._bucket, query), data, is_conditional=bool(condition)
        )
        return parse_object(reply.body, name, where=self.url)

    def delete(self, name: str) -> None:
        with suppress(NotFoundError):
            self._send(name, "DELETE", object_target(self._bucket, self._key(name), ()), b"")

    def begin(self, name: str, *, if_absent: bool) -> str:
        """The path and query of a new session. Raises `AlreadyExistsError`."""
        condition = self._condition(name, if_absent, None)
        query = (("uploadType", "resumable"), ("name", self._key(name)), *condition)
        reply = self._send(
            name, "POST", upload_target(self._bucket, query), b"", is_conditional=bool(condition)
        )
        # A session's address holds its right to write. Only its path is used: it is sent to the
        # store alone.
        address = parse_address(reply.head.headers.get("location", ""))
        if address is None or not address.query or len(address.target) > MAX_TARGET:
            raise SourceError(f"{self.url} begins no upload of {name}", source=self.url, name=name)
        return address.target

    def send_chunk(
        self, name: str, session: str, start: int, data: bytes, *, is_last: bool, is_conditional: bool
    ) -> ObjectInfo | None:
        """Bytes from `start` on; the object, once the last ones are there. Goes on where a broken
        attempt got to.
        """
        end, done, failed = start + len(data), start, 0
        total = str(end) if is_last else "*"
        while True:
            span = f"bytes {done}-{end - 1}/{total}" if done < end else f"bytes */{total}"
            reply, failed = self._attempt(name, session, span, data[done - start :], total, failed)
            if reply.head.status in (200, 201):
                if not is_last:
                    raise SourceError(f"{self.url} ended the upload of {name}", source=self.url, name=name)
                return self._finished(reply, name, end)
            if reply.head.status != 308:
                self._refuse(name, reply, is_conditional)
            reached = _reached(reply.head)
            if not start <= reached <= end:
                raise SourceError(f"{self.url} lost bytes of {name}", source=self.url, name=name)
            if reached == end and not is_last:
                return None
            failed += reached <= done or reached == end
            if failed >= self._max_attempts:
                raise self._unavailable(name, f"{self.url} takes no more of {name}")
            done = reached

    def cancel(self, name: str, session: str) -> None:
        """Drop an unfinished session."""
        self._sender.send(name, self._in_session("DELETE", session))

    def close(self) -> None:
        self._sender.close()

    def _finished(self, reply: Reply, name: str, size_bytes: int) -> ObjectInfo:
        info = parse_object(reply.body, name, where=self.url)
        if info.size_bytes != size_bytes:
            message = f"{self.url} keeps {info.size_bytes:,} bytes of {name}, not {size_bytes:,}"
            raise SourceError(message, source=self.url, name=name)
        return info

    def _attempt(
        self, name: str, session: str, span: str, data: bytes, total: str, failed: int
    ) -> tuple[Reply, int]:
        """The answer to a chunk, or to how far the session got where that one was lost; the
        failures so far.
        """
        try:
            reply = self._put(name, session, span, data)
            if reply.head.status not in RETRYABLE:
                return reply, failed
            failure = self._unavailable(name, f"{self.url} answers {reply.head.status} for {name}")
        except UnavailableError as error:
            failure = error
        while True:
            failed += 1
            if failed >= self._max_attempts:
                raise failure
            self._sender.pause(failed, None)
            state = self._ask_state(name, session, total)
            if state is not None:
                return state, failed

    def _ask_state(self, name: str, session: str, total: str) -> Reply | None:
        """How far a session got; None where the store does not say."""
        try:
            reply = self._put(name, session, f"bytes */{total}", b"")
        except UnavailableError:
            return None
        return None if reply.head.status in RETRYABLE else reply

    def _put(self, name: str, session: str, span: str, data: bytes) -> Reply:
        return self._sender.send(name, self._in_session("PUT", session, (("Content-Range", span),)), data)

    def _in_session(self, method: str, session: str, headers: Headers = ()) -> Request:
        """A request without a token: the session's address is one."""
        return Request(method, self._origin, session, headers)

    def _send(
        self, name: str, method: str, target: str, data: bytes, *, is_conditional: bool = False
    ) -> Reply:
        headers: Headers = (("Content-Type", "application/octet-stream"),) if data else ()

        def explain(request: Request, reply: Reply) -> TeneralError | None:
            if is_conditional and reply.head.status == 412:
                return lost(self.url, name)
            return self._refusal(name, request, reply.head, reply.body)

        return self._sender.authorized(name, lambda: self._build(method, target, headers), data, explain)

    def _refuse(self, name: str, reply: Reply, is_conditional: bool) -> NoReturn:
        if is_conditional and reply.head.status == 412:
            raise lost(self.url, name)
        if reply.head.status in (404, 410):
            raise self._unavailable(name, f"the upload of {name} to {self.url} has expired")
        error = self._refusal(name, self._in_session("PUT", "/"), reply.head, reply.body)
        raise error or self._unavailable(name, f"{self.url} refuses {name}")

    def _condition(self, name: str, if_absent: bool, if_version: str | None) -> Query:
        if if_version is not None:
            generation = generation_of(if_version)
            if generation is None:
                raise lost(self.url, name)
            return (("ifGenerationMatch", generation),)
        return (("ifGenerationMatch", _ABSENT),) if if_absent else ()

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def _unavailable(self, name: str, message: str) -> UnavailableError:
        return UnavailableError(message, source=self.url, name=name)


class GsWriter(Writer):
    """An `ObjectWriter`. Holds one chunk in memory; a small object goes in a single request."""

    def __init__(self, uploads: Uploads, name: str, *, if_absent: bool = False) -> None:
        super().__init__()
        self._uploads = uploads
        self._name = name
        self._if_absent = if_absent
        self._pending = bytearray()
        self._session: str | None = None
        self._sent_bytes = 0
        self._lost: AlreadyExistsError | None = None  # shown by `commit`, as of all stores

    def _append(self, data: bytes | bytearray | memoryview) -> None:
        rest = memoryview(data).cast("B")
        while rest and self._lost is None:
            if len(self._pending) == CHUNK_BYTES:
                try:
                    self._send(is_last=False)  # only now is it known not to be the last one
                except AlreadyExistsError as error:
                    self._lost = error
                    break
            taken = rest[: CHUNK_BYTES - len(self._pending)]
            self._pending += taken
            rest = rest[len(taken) :]

    def _finish(self) -> ObjectInfo:
        if self._lost is not None:
            raise self._lost
        if self._session is None:
            return self._uploads.put(self._name, bytes(self._pending), if_absent=self._if_absent)
        info = self._send(is_last=True)
        assert info is not None, "the last chunk makes the object"
        return info

    def _discard(self) -> None:
        self._pending = bytearray()
        if self._session is not None:
            # The error that led here is the one to show; a session expires in a week.
            with suppress(SourceError):
                self._uploads.cancel(self._name, self._session)

    def _send(self, *, is_last: bool) -> ObjectInfo | None:
        if self._session is None:
            self._session = self._uploads.begin(self._name, if_absent=self._if_absent)
        data, self._pending = bytes(self._pending), bytearray()
        info = self._uploads.send_chunk(
            self._name,
            self._session,
            self._sent_bytes,
            data,
            is_last=is_last,
            is_conditional=self._if_absent,
        )
        self._sent_bytes += len(data)
        return info


def _reached(head: Head) -> int:
    """The end of the bytes that a session has."""
    found = _RANGE.fullmatch(head.headers.get("range", ""))
    return int(found[1]) + 1 if found else 0
