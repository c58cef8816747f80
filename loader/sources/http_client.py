"""Asking a web server for objects and ranges of them, until the answer is right or asking is no use.

Answers are checked against what was asked for: status, range, length, version. A range that breaks off is
resumed at the byte reached. Whom to ask, with which signature, and what a refusal means is the business of
a `Door`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ..errors import ChangedError, FormatError, SourceError, TeneralError, UnavailableError, UsageError
from . import checks
from .base import ObjectInfo, SourceOptions, check_name
from .http1 import BodyTooLargeError, Connection, StaleConnectionError
from .http_head import Head, Headers, Request, redirected
from .http_pool import ConnectionPool
from .http_range import RangeRead
from .wire import WireError

MAX_REDIRECTS = 3
MAX_EXCERPT_BYTES = 16 * 1024  # of a body that explains an error
MAX_MENDS = 3  # times that a door may put right what one request was refused for
FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 5.0
MAX_RETRY_AFTER_S = 20.0
_FIRST_BYTE: Headers = (("Range", "bytes=0-0"),)
_REDIRECTS = (301, 302, 303, 307, 308)
_NO_CODINGS = ("", "identity", "aws-chunked")  # the last is how an upload came in, which some stores repeat

T = TypeVar("T")


class Door(Protocol):
    """What tells one kind of web store from another."""

    @property
    def url(self) -> str:
        """The store's address for people, without secrets."""

    @property
    def follows_redirects(self) -> bool: ...

    def request(self, name: str, extra: Headers) -> Request:
        """A GET request for an object, signed where need be, that carries the `extra` headers too."""

    def refusal(self, name: str, request: Request, head: Head, body: bytes) -> TeneralError | None:
        """What an answer without the object means; `UnavailableError` for what is worth another try.

        None says that the door has put right what was wrong: the request should be made anew, at once.
        """


@dataclass(frozen=True, slots=True)
class HttpStatistics:
    """What a web source has done so far."""

    requests: int
    retries: int
    received_bytes: int  # of bodies that were wanted
    connections_opened: int


class HttpClient:
    """Thread-safe. Blocks without the GIL. Raises what `Source` promises."""

    def __init__(self, door: Door, options: SourceOptions, *, ca_file: str | None = None) -> None:
        """Raises `UsageError` for time limits and numbers of attempts that are not positive."""
        for key in ("connect_timeout_s", "read_timeout_s", "max_attempts"):
            if not getattr(options, key) > 0:
                raise UsageError(f"{key} must be more than 0, not {getattr(options, key)}", key=key)
        self._door = door
        self._max_attempts = options.max_attempts
        self._pool = ConnectionPool(options, ca_file=ca_file)
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._requests = self._retries = self._received_bytes = 0

    def stat(self, name: str) -> ObjectInfo:
        """Asks for the first byte: the answer to a HEAD request would carry no explanation of an error."""
        check_name(name)

        def attempt() -> ObjectInfo:
            with self._answer(name, self._door.request(name, _FIRST_BYTE)) as (connection, head):
                connection.read_excerpt(1)
                given = head.content_range
                size_bytes = given.total if given else head.content_length if head.status == 200 else None
            if size_bytes is None:
                raise self._unavailable(name, f"{self._door.url} does not say how large {name} is")
            return ObjectInfo(name, size_bytes, head.version(size_bytes))

        try:
            return self._until_done(name, attempt)
        except ChangedError:  # there is no first byte
            return self.read(name, max_bytes=0)[1]

    def read(self, name: str, *, max_bytes: int) -> tuple[bytes, ObjectInfo]:
        check_name(name)
        body, head = self.fetch(name, lambda: self._door.request(name, ()), max_bytes=max_bytes)
        return body, ObjectInfo(name, len(body), head.version(len(body)))

    def fetch(self, name: str, build: Callable[[], Request], *, max_bytes: int) -> tuple[bytes, Head]:
        """The whole body that answers `build()`, which is called for each attempt; `name` is for messages."""

        def attempt() -> tuple[bytes, Head]:
            with self._answer(name, build()) as (connection, head):
                if head.status != 200:
                    message = f"{self._door.url} answers with a part where the whole of {name} was asked for"
                    raise self._unavailable(name, message)
                size_bytes = connection.body_length
                try:
                    body = connection.read_all(max_bytes)
                except BodyTooLargeError:
                    raise checks.too_large(self._door.url, name, size_bytes, max_bytes) from None
                self._count(received_bytes=len(body))
                return body, head

        return self._until_done(name, attempt)

    def read_into(self, name: str, start: int, buffer: memoryview, version: str | None) -> None:
        check_name(name)
        view = checks.byte_view(buffer)
        wanted = RangeRead(self._door.url, name, start, len(view), version)

        def attempt() -> None:
            with self._answer(name, self._door.request(name, wanted.headers())) as (connection, head):
                wanted.check(head)
                done_before = wanted.done
                try:
                    while count := connection.read_some(view[wanted.done :]):
                        wanted.done += count
                finally:
                    self._count(received_bytes=wanted.done - done_before)

        if view:
            self._until_done(name, attempt)

    def statistics(self) -> HttpStatistics:
        opened = self._pool.statistics().opened
        with self._lock:
            return HttpStatistics(self._requests, self._retries, self._received_bytes, opened)

    def close(self) -> None:
        """Whoever waits in here gives up with `SourceClosedError`. Idempotent."""
        self._closed.set()
        self._pool.close()

    def _until_done(self, name: str, attempt: Callable[[], T]) -> T:
        """Repeat the attempt while that is worth it, with longer and longer pauses."""
        failed, mends = 0, 0
        while True:
            if self._closed.is_set():
                raise checks.closed(self._door.url, name)
            try:
                return attempt()
            except _MendedError:
                mends += 1
                if mends <= MAX_MENDS:
                    continue
                failure = self._unavailable(name, f"{self._door.url} refuses {name} again and again")
            except WireError as error:
                failure = self._from_wire(name, error)
            except UnavailableError as error:
                failure = error
            failed += 1
            if self._closed.is_set():
                raise checks.closed(self._door.url, name) from failure
            if failed >= self._max_attempts:
                raise _given_up(failure, failed) from failure
            self._count(retries=1)
            self._closed.wait(pause_s(failed, failure.retry_after_s, _chance()))

    @contextmanager
    def _answer(self, name: str, request: Request) -> Iterator[tuple[Connection, Head]]:
        """A successful answer, redirects followed, its body unread. Gives the connection back in the end."""
        for _ in range(MAX_REDIRECTS + 1):
            connection, head = self._exchange(request)
            try:
                if head.status in (200, 206):
                    self._check_coding(name, head)
                    yield connection, head
                    return
                excerpt = connection.read_excerpt(MAX_EXCERPT_BYTES)
            finally:
                self._pool.give_back(connection)
            location = head.headers.get("location", "")
            if head.status not in _REDIRECTS or not location or not self._door.follows_redirects:
                error = self._door.refusal(name, request, head, excerpt)
                raise _MendedError if error is None else error
            request = self._redirected(name, request, location)
        raise self._unavailable(name, f"{self._door.url} redirects {name} more than {MAX_REDIRECTS} times")

    def _exchange(self, request: Request) -> tuple[Connection, Head]:
        while True:
            connection = self._pool.take(request.origin)
            self._count(requests=1)
            try:
                return connection, connection.exchange(request)
            except StaleConnectionError:
                # Each round uses up a kept connection: the last one is new, and a new one is never stale.
                self._pool.give_back(connection)
            except BaseException:
                self._pool.give_back(connection)
                raise

    def _redirected(self, name: str, request: Request, location: str) -> Request:
        following = redirected(request, location)
        if following is None:
            raise SourceError(
                f"{self._door.url} redirects {name} to an address that is not followed",
                source=self._door.url,
                name=name,
                hint="Redirects are followed to web addresses, and never from https to http.",
            )
        return following

    def _check_coding(self, name: str, head: Head) -> None:
        if head.headers.get("content-encoding", "").lower() not in _NO_CODINGS:
            raise FormatError(
                f"{self._door.url} sends {name} compressed, so that offsets in it mean nothing",
                where=name,
                hint="Store and serve it without a Content-Encoding.",
            )

    def _from_wire(self, name: str, error: WireError) -> UnavailableError:
        message = f"{name or 'the list'} could not be read from {self._door.url}: {error}"
        if error.is_final:
            hint = "Set SSL_CERT_FILE to the certificates to trust, or correct the address."
            raise SourceError(message, source=self._door.url, name=name, hint=hint) from error
        hint = "Check the address and the network; proxies (HTTPS_PROXY) are not used."
        failure = self._unavailable(name, message, hint=hint)
        failure.__cause__ = error
        return failure

    def _unavailable(self, name: str, message: str, *, hint: str = "") -> UnavailableError:
        return UnavailableError(message, source=self._door.url, name=name, hint=hint)

    def _count(self, *, requests: int = 0, retries: int = 0, received_bytes: int = 0) -> None:
        with self._lock:
            self._requests += requests
            self._retries += retries
            self._received_bytes += received_bytes


class _MendedError(Exception):
    """The door has put right what the server complained of."""


def pause_s(failed: int, retry_after_s: float | None, chance: float) -> float:
    """How long to wait before the next attempt, after `failed` of them; `chance` is in [0, 1).

    Full jitter: many containers that started together must not come back together. The server's own wish is
    honoured within a bound, and not undercut.
    """
    pause = chance * min(MAX_PAUSE_S, FIRST_PAUSE_S * (1 << failed))
    return pause if retry_after_s is None else min(max(0.0, retry_after_s), MAX_RETRY_AFTER_S) + pause


def _chance() -> float:
    import random  # only after a failure

    return random.uniform(0, 1)  # noqa: S311 - spreads pauses, keeps no secret


def _given_up(failure: UnavailableError, attempts: int) -> UnavailableError:
    return UnavailableError(
        f"{failure.message} (after {attempts} attempts)",
        source=failure.source,
        name=failure.name,
        hint=failure.hint,
        retry_after_s=failure.retry_after_s,
    )
