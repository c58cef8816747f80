"""Requests with a body: uploads to a web store, and the exchange of credentials for a token.

Reading goes over `http_client`. Writing is never in a hurry: each request has a connection of its
own, made by the standard library, and its body is in memory. Imported where something is sent, not
on the way of a cold start.
"""

from __future__ import annotations

import http.client
import ssl
import threading
from collections.abc import Callable
from typing import NamedTuple

from ...errors import SourceError, TeneralError, UnavailableError
from .. import base
from ..base import SourceOptions
from .head import Head, Request
from .retry import pause_s
from .source import RETRYABLE

MAX_ANSWER_BYTES = 1024 * 1024
MIN_TIMEOUT_S = 60.0  # a store may be silent for long while it puts an object together


class Reply(NamedTuple):
    head: Head
    body: bytes


class Sender:
    """The requests to one store. Thread-safe."""

    def __init__(self, source: str, options: SourceOptions) -> None:
        """`source` is its address, for messages."""
        self._source = source
        self._max_attempts = max(1, options.max_attempts)
        self._timeout_s = max(MIN_TIMEOUT_S, options.read_timeout_s)
        self._closing = threading.Event()
        self._tls: ssl.SSLContext | None = None

    def close(self) -> None:
        """Refuse further requests, and end the pauses between attempts. Idempotent."""
        self._closing.set()

    def until_answered(self, name: str, build: Callable[[], Request], body: bytes = b"") -> Reply:
        """The answer to `build()`, repeated while the store is busy. The request must bear
        repetition.

        Raises `UnavailableError` after the last attempt, and `SourceClosedError`.
        """
        failed = 0
        while True:
            try:
                reply = self.send(name, build(), body)
                if reply.head.status not in RETRYABLE or failed + 1 >= self._max_attempts:
                    return reply
                wish_s = reply.head.retry_after_s
            except UnavailableError:
                if failed + 1 >= self._max_attempts:
                    raise
                wish_s = None
            failed += 1
            self.pause(failed, wish_s)

    def authorized(
        self,
        name: str,
        build: Callable[[], Request],
        body: bytes,
        explain: Callable[[Request, Reply], TeneralError | None],
    ) -> Reply:
        """The answer of success to `build()`, as `until_answered`.

        Raises the error that `explain` makes of another one. None means that other credentials are
        worth a try: once more.
        """
        for _ in range(2):
            made: list[Request] = []

            def built(made: list[Request] = made) -> Request:
                made.append(build())
                return made[-1]

            reply = self.until_answered(name, built, body)
            if 200 <= reply.head.status < 300:
                return reply
            error = explain(made[-1], reply)
            if error is not None:
                raise error
        raise UnavailableError(
            f"{self._source} refuses {name} again and again", source=self._source, name=name
        )

    def pause(self, failed: int, wish_s: float | None) -> None:
        """Wait before the next attempt, after `failed` of them."""
        self._closing.wait(pause_s(min(failed, 10), wish_s))

    def send(self, name: str, request: Request, body: bytes = b"") -> Reply:
        """One attempt. Raises `UnavailableError` where no whole answer came, and
        `SourceClosedError`.
        """
        if self._closing.is_set():
            raise base.closed(self._source, name)
        connection = self._connection(request)
        headers = {
            "User-Agent": "teneral",
            "Accept-Encoding": "identity",
            "Content-Length": str(len(body)),
            **dict((*request.headers, *request.private_headers)),
        }
        try:
            connection.request(request.method, request.target, body=body, headers=headers)
            answer = connection.getresponse()
            content = answer.read(MAX_ANSWER_BYTES + 1)
        except ssl.SSLCertVerificationError as error:
            message = f"{request.origin} has no valid certificate: {error}"
            hint = "Set SSL_CERT_FILE to the certificates to trust, or correct the address."
            raise SourceError(message, source=self._source, name=name, hint=hint) from error
        except (OSError, http.client.HTTPException) as error:
            message = f"{name or 'a request'} could not be sent to {self._source}: {error!r}"
            hint = "Check the address and the network; proxies (HTTPS_PROXY) are not used."
            raise UnavailableError(message, source=self._source, name=name, hint=hint) from error
        finally:
            connection.close()
        if len(content) > MAX_ANSWER_BYTES:
            message = f"{self._source} answers with more than {MAX_ANSWER_BYTES:,} bytes"
            raise SourceError(message, source=self._source, name=name)
        fields = {field.lower(): value for field, value in answer.getheaders()}
        return Reply(Head(answer.status, fields, keeps_alive=False), content)

    def _connection(self, request: Request) -> http.client.HTTPConnection:
        origin = request.origin
        if origin.scheme == "http":
            return http.client.HTTPConnection(origin.host, origin.port, timeout=self._timeout_s)
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return http.client.HTTPSConnection(
            origin.host, origin.port, timeout=self._timeout_s, context=self._tls
        )
