"""The answers to invocations, from the function that is served, or for an HTTP request from the
HTTP application; each is sent to Lambda as a whole, in pieces, or as an error.

The function gets the event unchanged, and its result is the answer; an HTTP request goes through
the routes as if it had arrived over a socket. Whether an error can be the answer itself, or only
follow its pieces, depends on whether anything was sent. This module does not know the Runtime API.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING, Any, cast

from ....runtime.errors import CancelledError, RequestError
from ...function.context import Context
from ...function.handler import Handler, run, up_to
from .errors import MAX_RESPONSE_BYTES, ResponseTooLargeError, report
from .http_events import EventKind, kind_of_event
from .runtime_api import Invocation, RuntimeApi, RuntimeApiError, Stream

if TYPE_CHECKING:
    import aiohttp
    from aiohttp import web

    from ...function.context import ModelHost


logger = logging.getLogger("teneral.lambda")


class Reply:
    """An answer. For one task. An answer in pieces must be ended, or failed."""

    def __init__(self, api: RuntimeApi, invocation: Invocation) -> None:
        self._api = api
        self._invocation = invocation
        self._stream: Stream | None = None
        self._is_over = False

    @property
    def has_begun(self) -> bool:
        """True if anything was sent, so that an error can only follow it."""
        return self._stream is not None or self._is_over

    async def whole(self, body: bytes, content_type: str = "application/json") -> None:
        """Send the whole answer. Raises `ResponseTooLargeError`, with nothing sent, and
        `RuntimeApiError`.
        """
        if len(body) > MAX_RESPONSE_BYTES:
            raise ResponseTooLargeError(len(body))
        self._is_over = True
        asked = self._invocation
        try:
            await self._api.respond(asked.request_id, body, content_type, asked.invocation_id)
        except RuntimeApiError as error:
            _only_if_fatal(error)

    async def write(self, piece: bytes, content_type: str) -> None:
        """Send a piece; the first one begins the answer. Waits while Lambda is slow.

        Raises `RuntimeApiError` if it cannot begin, and `CancelledError` if Lambda accepts no more
        of it, which does not end the instance.
        """
        if self._stream is None:
            asked = self._invocation
            self._stream = await self._api.begin_stream(asked.request_id, content_type, asked.invocation_id)
        if piece:
            try:
                await self._stream.write(piece)
            except RuntimeApiError as error:
                self._is_over = True
                raise CancelledError("Lambda accepts no more of the answer") from error

    async def end(self) -> None:
        """End the pieces."""
        assert self._stream is not None
        self._is_over = True
        try:
            await self._stream.end()
        except RuntimeApiError as error:
            logger.warning("%s", error.message)  # as in `write`

    async def fail(self, error: BaseException) -> None:
        """Report an error: as the answer, or after the pieces sent. Does nothing once the answer is
        over. Raises `RuntimeApiError`.
        """
        if self._is_over:
            return
        self._is_over = True
        failure, asked = report(error), self._invocation
        body = failure.body(asked.request_id)
        try:
            if self._stream is not None:
                await self._stream.end(error_type=failure.error_type, error_body=body)
            else:
                await self._api.fail(
                    asked.request_id, body, failure.error_type, failure.cause(), asked.invocation_id
                )
        except RuntimeApiError as refused:
            if self._stream is None:
                _only_if_fatal(refused)


def _only_if_fatal(error: RuntimeApiError) -> None:
    """Raise only fatal errors: a refused answer, as of an invocation that Lambda has given up, does
    not end the instance.
    """
    if error.is_fatal:
        raise error
    logger.warning("%s", error.message)


STREAM_OF_VALUES = "application/x-ndjson"
STREAM_OF_BYTES = "application/octet-stream"
# AWS's runtime for Python uses this name.
BYTES = "application/unknown"
PIECE_BYTES = 64 << 10


class LoopAnswers:
    """The answers of one event loop, to any number of concurrent invocations. Close it with
    `close`.
    """

    def __init__(
        self,
        host: ModelHost,
        handler: Handler,
        make_app: Callable[[], web.Application],
        *,
        environment: Mapping[str, str],
        is_streaming: bool,
    ) -> None:
        """`make_app` is called by the first HTTP request: many functions never get one."""
        self._host = host
        self._handler = handler
        self._make_app = make_app
        self._environment = environment
        self._is_streaming = is_streaming
        self._inside: asyncio.Task[aiohttp.ClientSession] | None = None
        self._stack = AsyncExitStack()

    async def answer(self, invocation: Invocation, reply: Reply) -> None:
        """Answer one invocation. Raises the error that it failed with."""
        event = invocation.event()
        kind = kind_of_event(event)
        if kind.is_http:
            await self._answer_http(invocation, event, kind, reply)
        else:
            await self._answer_function(invocation, event, reply)

    async def close(self) -> None:
        if self._inside is not None:
            await asyncio.wait({self._inside})
        await self._stack.aclose()

    # the function

    async def _answer_function(self, invocation: Invocation, event: Any, reply: Reply) -> None:
        context = Context(
            self._host,
            request_id=invocation.request_id,
            timeout_s=invocation.timeout_s(),
            platform=invocation.facts(self._environment),
            trace_id=invocation.trace_id,
        )
        is_stream = asyncio.Event()  # set if it yields, whatever its definition
        values = cast(AsyncGenerator[Any, None], run(self._handler, event, context, on_stream=is_stream.set))
        async with aclosing(values):
            given = [value async for value in up_to(1, values)]
            is_several = self._handler.kind.is_generator
            if self._is_streaming:  # the first piece is sent at once
                is_several = is_several or is_stream.is_set()
            elif not is_several:
                given += [value async for value in up_to(1, values)]
                is_several = len(given) > 1
            if not is_several:
                value = given[0] if given else None
                await reply.whole(_encode(value), BYTES if isinstance(value, bytes) else "application/json")
            elif self._is_streaming:
                try:
                    # Also when Lambda does not read.
                    async with asyncio.timeout(invocation.timeout_s()):
                        await _stream(_chain(given, values), reply)
                except TimeoutError:
                    raise CancelledError(f"{self._handler.name} did not end before its deadline") from None
            else:
                await reply.whole(await _as_list(_chain(given, values)))

    # HTTP

    async def _answer_http(
        self, invocation: Invocation, event: dict[str, Any], kind: EventKind, reply: Reply
    ) -> None:
        from .http_events import ResponseHead, request_of, response_of

        timeout_s = invocation.timeout_s()
        try:
            async with asyncio.timeout(timeout_s):
                request = request_of(event, kind)
                if self._is_streaming and kind is EventKind.HTTP_V2:
                    await self._stream_http(invocation, request, reply)
                    return
                head, body = await self._ask_inside(invocation, request)
        except RequestError as error:
            head, body = (
                ResponseHead(400, _JSON),
                _error_body(error.message, "invalid_request_error", "bad_event"),
            )
        except TimeoutError:
            if timeout_s is None or reply.has_begun:
                raise CancelledError("the request did not end before its deadline") from None
            message = "the request exceeded the function's time limit"
            head, body = ResponseHead(504, _JSON), _error_body(message, "server_error", "request_timeout")
        answer = response_of(head, body, kind, event)
        if len(answer) > MAX_RESPONSE_BYTES:
            message = str(ResponseTooLargeError(len(answer)))
            answer = response_of(
                ResponseHead(500, _JSON),
                _error_body(message, "server_error", "response_too_large"),
                kind,
                event,
            )
        await reply.whole(answer)

    async def _ask_inside(self, invocation: Invocation, request: Any) -> tuple[Any, bytes]:
        from .http_events import ResponseHead

        async with await self._send(invocation, request) as response:
            body = bytearray()
            async for piece in response.content.iter_chunked(PIECE_BYTES):
                body += piece
                if len(body) > MAX_RESPONSE_BYTES:
                    message = str(ResponseTooLargeError(len(body)))
                    return ResponseHead(500, _JSON), _error_body(
                        message, "server_error", "response_too_large"
                    )
            return ResponseHead(response.status, list(response.headers.items())), bytes(body)

    async def _stream_http(self, invocation: Invocation, request: Any, reply: Reply) -> None:
        from .http_events import STREAM_CONTENT_TYPE, ResponseHead, prelude_of

        async with await self._send(invocation, request) as response:
            head = ResponseHead(response.status, list(response.headers.items()))
            await reply.write(prelude_of(head), STREAM_CONTENT_TYPE)
            async for piece in response.content.iter_any():
                await reply.write(piece, STREAM_CONTENT_TYPE)
        await reply.end()

    async def _send(self, invocation: Invocation, request: Any) -> aiohttp.ClientResponse:
        """Send the request to our own application, with the invocation's id and time by default."""
        from yarl import URL

        session = await self._session()
        headers = list(request.headers)
        if request.header("x-request-id") is None:
            headers.append(("x-request-id", invocation.request_id))
        timeout_s = invocation.timeout_s()
        if request.header("deadline-ms") is None and timeout_s is not None:
            headers.append(("deadline-ms", str(max(1, round(1000 * timeout_s)))))
        return await session.request(
            request.method,
            URL(request.target, encoded=True),
            headers=headers,
            data=request.body or None,
            allow_redirects=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
        )

    async def _session(self) -> aiohttp.ClientSession:
        """The client session of our own application, made on first use and then kept."""
        if self._inside is None:
            self._inside = asyncio.ensure_future(self._open_inside())
        return await asyncio.shield(self._inside)

    async def _open_inside(self) -> aiohttp.ClientSession:
        # A web server, which few functions need.
        from ...http.server import serving_inside

        return await self._stack.enter_async_context(serving_inside(self._make_app()))


_JSON = [("content-type", "application/json")]


def _encode(value: Any) -> bytes:
    """Encode like AWS's runtime for Python. `run` has checked that it is possible."""
    return value if isinstance(value, bytes) else json.dumps(value, ensure_ascii=False).encode()


async def _chain(first: list[Any], rest: AsyncIterator[Any]) -> AsyncIterator[Any]:
    for value in first:
        yield value
    async for value in rest:
        yield value


async def _as_list(values: AsyncIterator[Any]) -> bytes:
    """All values as one JSON list. Raises `RequestError` for bytes, which JSON cannot hold, and
    `ResponseTooLargeError` as soon as the list is too large.
    """
    pieces, total_bytes = [], 2
    async for value in values:
        if isinstance(value, bytes):
            raise RequestError(
                "a function that yields bytes needs response streaming: --lambda-streaming", param=""
            )
        pieces.append(_encode(value))
        total_bytes += len(pieces[-1]) + 2
        if total_bytes > MAX_RESPONSE_BYTES:
            raise ResponseTooLargeError(total_bytes)
    return b"[" + b", ".join(pieces) + b"]"


async def _stream(values: AsyncIterator[Any], reply: Reply) -> None:
    """Send each value as it is made: as a line of JSON, bytes unchanged."""
    content_type = STREAM_OF_VALUES
    async for value in values:
        if not reply.has_begun and isinstance(value, bytes):
            content_type = STREAM_OF_BYTES
        await reply.write(value if isinstance(value, bytes) else _encode(value) + b"\n", content_type)
    if not reply.has_begun:
        await reply.write(b"", content_type)
    await reply.end()


def _error_body(message: str, kind: str, code: str) -> bytes:
    """The JSON body of the application's errors."""
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()
