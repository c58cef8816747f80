"""Asking a web server for objects and ranges of them, until the answer is right or asking is no
use.

Answers are checked against what was asked for: status, range, length, version. A range that breaks
off is resumed at the byte reached; one that is behind the others is asked for a second time
(`stragglers.py`). Whom to ask, with which signature, and what a refusal means is the business of an
`ObjectServer`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from ...errors import ChangedError, FormatError, SourceError, TeneralError, UsageError
from .. import base
from ..base import ObjectInfo, SourceOptions, check_name
from .connections import BodyTooLargeError, Connection, ConnectionPool, StaleConnectionError
from .head import Head, Headers, RangeRead, Request, WrongAnswerError, redirected
from .outage import HttpStatistics, HttpTally, Note
from .poll_coroutines import PollCoroutine, run
from .retry import MendedError, Retrying, Throttle
from .stragglers import HedgedRead, RangeAnswer, Stragglers, first_to_answer

MAX_REDIRECTS = 3
MAX_EXCERPT_BYTES = 16 * 1024  # of a body that explains an error
MAX_SENT_ANSWER_BYTES = 1024 * 1024  # of the answer to a request that writes
_FIRST_BYTE: Headers = (("Range", "bytes=0-0"),)
_REDIRECTS = (301, 302, 303, 307, 308)
_BUSY = (429, 503)
# The last is how an upload came in, which some stores repeat.
_NO_CODINGS = ("", "identity", "aws-chunked")

T = TypeVar("T")
# The error that a refusal means for one request; None: the one that it means for all.
Explain = Callable[[Head, bytes], TeneralError | None]


class ObjectServer(Protocol):
    """The side of a web store that differs from kind to kind: its addresses, signatures and
    refusals.
    """

    @property
    def url(self) -> str:
        """The store's address for people, without secrets."""

    @property
    def follows_redirects(self) -> bool: ...

    def request(self, name: str, extra: Headers) -> Request:
        """A GET request for an object, signed where need be, that carries the `extra` headers too."""

    def refusal(self, name: str, request: Request, head: Head, body: bytes) -> TeneralError | None:
        """The error that an answer without the object means; `UnavailableError` where a retry may
        help.

        None says that the server has put right what was wrong: the request should be made anew, at
        once.
        """


class HttpClient:
    """Thread-safe. Blocks without the GIL. Raises what `Source` promises."""

    def __init__(
        self,
        server: ObjectServer,
        options: SourceOptions,
        *,
        ca_file: str | None = None,
        read_head: Callable[[Head], Head] | None = None,
        on_redirect: Callable[[str, Request], None] | None = None,
        verb: str = "read from",
    ) -> None:
        """`read_head` translates a store's own fields, such as an object's version, to those of
        HTTP. `on_redirect` takes an object's name and the request that a redirect led to. `verb`
        says what is done with objects, for messages.

        Raises `UsageError` for invalid time limits, rates and numbers.
        """
        _check_limits(options)
        self._read_head = read_head
        self._on_redirect = on_redirect
        self._server = server
        self._tally = HttpTally()
        self._throttle = Throttle()
        self._stragglers = Stragglers(options.hedge_after_s, self._throttle)
        self._pool = ConnectionPool(options, ca_file=ca_file)
        self._retrying = Retrying(server.url, options, self._throttle, self._tally, verb=verb)

    def stat(self, name: str) -> ObjectInfo:
        """Asks for the first byte: the answer to a HEAD request would carry no explanation of an
        error.
        """
        check_name(name)

        def attempt(fresh: bool) -> PollCoroutine[ObjectInfo]:
            connection, head = yield from self._answer(name, self._server.request(name, _FIRST_BYTE), fresh)
            try:
                yield from connection.read_excerpt(1)
                given = head.content_range
                size_bytes = given.total if given else head.content_length if head.status == 200 else None
            finally:
                self._pool.give_back(connection)
            if size_bytes is None:
                raise self._unavailable(name, f"{self._server.url} does not say how large {name} is")
            return ObjectInfo(name, size_bytes, head.version(size_bytes))

        try:
            return self._until_done(name, attempt)
        except ChangedError:  # there is no first byte
            return self.read(name, max_bytes=0)[1]

    def read(self, name: str, *, max_bytes: int) -> tuple[bytes, ObjectInfo]:
        check_name(name)
        body, head = self.fetch(name, lambda: self._server.request(name, ()), max_bytes=max_bytes)
        return body, ObjectInfo(name, len(body), head.version(len(body)))

    def fetch(self, name: str, build: Callable[[], Request], *, max_bytes: int) -> tuple[bytes, Head]:
        """The whole body that answers `build()`, which is called for each request; `name` is for
        messages.
        """

        def attempt(fresh: bool) -> PollCoroutine[tuple[bytes, Head]]:
            connection, head = yield from self._answer(name, build(), fresh)
            try:
                if head.status != 200:
                    message = (
                        f"{self._server.url} answers with a part where the whole of {name} was asked for"
                    )
                    raise self._unavailable(name, message)
                size_bytes = connection.body_length
                body = yield from connection.read_all(max_bytes)
            except BodyTooLargeError:
                raise base.too_large(self._server.url, name, size_bytes, max_bytes) from None
            finally:
                self._pool.give_back(connection)
            self._tally.add(received_bytes=len(body))
            return body, head

        return self._until_done(name, attempt)

    def send(
        self, name: str, build: Callable[[], Request], explain: Explain | None = None
    ) -> tuple[Head, bytes]:
        """The head and body of the good answer to `build()`, a request that writes.

        It is sent again after a failure, so it must bear repetition, but never twice at the same
        time. `explain` goes before the server's `refusal`, where it gives an error.
        """

        def attempt(fresh: bool) -> tuple[Head, bytes]:
            return run(self._sent(name, build(), fresh, explain))

        return self._retrying.until_done(name, attempt)

    def read_into(self, name: str, start: int, buffer: memoryview, version: str | None) -> str | None:
        check_name(name)
        view = base.byte_view(buffer)
        wanted = RangeRead(self._server.url, name, start, len(view), version)
        read = HedgedRead(
            wanted,
            view,
            ask=lambda fresh: self._ask_range(wanted, fresh),
            pool=self._pool,
            stragglers=self._stragglers,
            tally=self._tally,
        )
        if view:
            self._retrying.until_done(name, lambda fresh: read.run(fresh=fresh), lambda: wanted.done)
        return wanted.version

    def statistics(self) -> HttpStatistics:
        return self._tally.counts()._replace(connections_opened=self._pool.statistics().opened)

    def on_outage(self, note: Note) -> None:
        self._retrying.outage.watch(note)

    def quiesce(self) -> None:
        self._pool.quiesce()

    def close(self) -> None:
        """Waiting readers give up with `SourceClosedError`. Idempotent."""
        self._retrying.close()
        self._pool.close()

    def _until_done(self, name: str, attempt: Callable[[bool], PollCoroutine[T]]) -> T:
        def run(fresh: bool) -> T:
            with self._stragglers.watching() as watch:
                return first_to_answer(attempt(fresh), lambda: attempt(True), watch, self._tally)

        return self._retrying.until_done(name, run)

    def _ask_range(self, wanted: RangeRead, fresh: bool) -> PollCoroutine[RangeAnswer]:
        """A right answer with what is missing of a range, its first byte there."""
        done, asked_s = wanted.done, time.monotonic()
        request = self._server.request(wanted.name, wanted.headers())
        connection, head = yield from self._answer(wanted.name, request, fresh)
        try:
            begin = wanted.check(head, done)
            yield from connection.wait_for_body()
        except BaseException:  # also where another request was sooner
            self._pool.give_back(connection)
            raise
        self._stragglers.answered(time.monotonic() - asked_s)
        if begin:
            self._tally.add(resumed=1)
        return RangeAnswer(connection, begin)

    def _answer(self, name: str, request: Request, fresh: bool) -> PollCoroutine[tuple[Connection, Head]]:
        """A successful answer, redirects followed, its body unread. The connection is the caller's
        then.
        """
        for _ in range(MAX_REDIRECTS + 1):
            asked_s = time.monotonic()
            connection, head = yield from self._exchange(request, fresh)
            is_right = False
            try:
                if head.status in (200, 206):
                    if self._read_head is not None:
                        head = self._read_head(head)
                    self._check_coding(name, head)
                    is_right = True
                    self._throttle.succeeded()
                    return connection, head
                excerpt = yield from connection.read_excerpt(MAX_EXCERPT_BYTES)
            finally:
                if not is_right:
                    self._pool.give_back(connection)
            location = head.headers.get("location", "")
            if head.status not in _REDIRECTS or not location or not self._server.follows_redirects:
                raise self._refused(name, request, head, excerpt, asked_s)
            request = self._redirected(name, request, location)
        raise self._unavailable(name, f"{self._server.url} redirects {name} more than {MAX_REDIRECTS} times")

    def _sent(
        self, name: str, request: Request, fresh: bool, explain: Explain | None
    ) -> PollCoroutine[tuple[Head, bytes]]:
        asked_s = time.monotonic()
        connection, head = yield from self._exchange(request, fresh)
        is_good = head.status < 300 or head.status == 308  # by which Cloud Storage asks for more
        try:
            if is_good:
                body = yield from connection.read_all(MAX_SENT_ANSWER_BYTES)
            else:
                body = yield from connection.read_excerpt(MAX_EXCERPT_BYTES)
        except BodyTooLargeError:
            raise base.too_large(self._server.url, name, None, MAX_SENT_ANSWER_BYTES) from None
        finally:
            self._pool.give_back(connection)
        if not is_good:
            error = explain(head, body) if explain else None
            raise error or self._refused(name, request, head, body, asked_s)
        self._throttle.succeeded()
        return head, body

    def _exchange(self, request: Request, fresh: bool) -> PollCoroutine[tuple[Connection, Head]]:
        while True:
            connection = self._pool.take(request.origin, fresh=fresh)
            self._tally.add(requests=1)
            try:
                return connection, (yield from connection.exchange(request))
            except StaleConnectionError:
                # Each round uses up a kept connection: the last one is new, and a new one is never
                # stale.
                self._pool.give_back(connection)
            except BaseException:
                self._pool.give_back(connection)
                raise

    def _refused(self, name: str, request: Request, head: Head, body: bytes, asked_s: float) -> Exception:
        error = self._server.refusal(name, request, head, body)
        if error is None:
            return MendedError()
        if head.status in _BUSY:
            self._tally.add(throttled=1)
            self._throttle.refused(asked_s=asked_s, wish_s=head.retry_after_s)
        return error

    def _redirected(self, name: str, request: Request, location: str) -> Request:
        following = redirected(request, location)
        if following is None:
            raise SourceError(
                f"{self._server.url} redirects {name} to an address that is not followed",
                source=self._server.url,
                name=name,
                hint="Redirects are followed to web addresses, and never from https to http.",
            )
        if self._on_redirect is not None:
            self._on_redirect(name, following)
        return following

    def _check_coding(self, name: str, head: Head) -> None:
        if head.headers.get("content-encoding", "").lower() not in _NO_CODINGS:
            raise FormatError(
                f"{self._server.url} sends {name} compressed, so that offsets in it mean nothing",
                where=name,
                hint="Store and serve it without a Content-Encoding.",
            )

    def _unavailable(self, name: str, message: str) -> WrongAnswerError:
        return WrongAnswerError(message, source=self._server.url, name=name)


def _check_limits(options: SourceOptions) -> None:
    for key in ("connect_timeout_s", "read_timeout_s", "max_attempts", "max_connections"):
        if not getattr(options, key) > 0:
            raise UsageError(f"{key} must be more than 0, not {getattr(options, key)}", key=key)
    for key in ("hedge_after_s", "min_rate_bytes_s", "outage_s"):
        if not getattr(options, key) >= 0:
            raise UsageError(f"{key} must be 0 or more, not {getattr(options, key)}", key=key)
