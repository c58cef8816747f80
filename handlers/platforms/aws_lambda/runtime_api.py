"""A client of Lambda's Runtime API (version 2018-06-01): invocations in, answers out, over one
persistent connection.

All reads are bounded. A connection that the other side has closed while idle is reopened, once, and
the request sent again: the API accepts one answer for an invocation, so a second one has no effect.
An invocation is a pure translation of headers and body. This module knows neither the purpose of an
event, nor how long an answer takes.

Source: "Using the Lambda runtime API for custom runtimes" and "Building a custom runtime" in AWS's
documentation.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Mapping
from typing import Any, Self

from msgspec import Struct

from .... import __version__
from ....loader.errors import TeneralError, UsageError
from .errors import InputError

VERSION = "2018-06-01"
# Of an answer; client contexts are headers.
MAX_HEAD_BYTES = 256 << 10
MAX_EVENT_BYTES = 64 << 20  # ten times what Lambda sends
MAX_CAUSE_BYTES = 64 << 10  # of X-Ray's header
ERROR_CONTENT_TYPE = "application/vnd.aws.lambda.error+json"
TYPE_HEADER = "Lambda-Runtime-Function-Error-Type"
BODY_TRAILER = "Lambda-Runtime-Function-Error-Body"
# Of an attempt; sent back unchanged.
INVOCATION_ID_HEADER = "Lambda-Runtime-Invocation-Id"
# Reserved of an invocation's time, so that its result still reaches Lambda after its deadline: an
# invocation that Lambda itself ends takes the whole instance with it, and its weights.
MARGIN_S = 0.2
MARGIN_SHARE = 0.1  # at most this share of the time

# Name in `Context.platform` → Lambda's variable.
_FACTS = {
    "function_name": "AWS_LAMBDA_FUNCTION_NAME",
    "function_version": "AWS_LAMBDA_FUNCTION_VERSION",
    "memory_limit_in_mb": "AWS_LAMBDA_FUNCTION_MEMORY_SIZE",
    "log_group_name": "AWS_LAMBDA_LOG_GROUP_NAME",
    "log_stream_name": "AWS_LAMBDA_LOG_STREAM_NAME",
}


class RuntimeApiError(TeneralError):
    """The Runtime API is unreachable, violated the protocol, or refused a request. `status` is 0
    without an answer.
    """

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message, hint="Lambda starts another instance when this one ends.")
        self.status = status

    @property
    def is_fatal(self) -> bool:
        """True if the instance cannot continue: a refusal of one answer (4xx) is not fatal."""
        return not 400 <= self.status < 500


class RuntimeAnswer(Struct, frozen=True):
    """An answer. `headers` have lower-case names; of several with one name, the last."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class RuntimeApi:
    """A connection, request after request: for one task at a time. Close it with `close`, or use it
    as a context manager.
    """

    def __init__(self, address: str) -> None:
        """`address` is HOST:PORT, from `AWS_LAMBDA_RUNTIME_API`. Raises `UsageError`."""
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise UsageError(
                f"{address!r} is not an address of a Runtime API",
                key="AWS_LAMBDA_RUNTIME_API",
                hint="Use HOST:PORT; Lambda sets it, and so does aws-lambda-rie.",
            )
        self._host, self._port = host.strip("[]"), int(port)
        self._common = f"Host: {address}\r\nUser-Agent: teneral/{__version__}\r\n"
        self._next = self._head("GET", "invocation/next", {})
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def next(self) -> RuntimeAnswer:
        """Wait for the next invocation. Raises `RuntimeApiError`."""
        return _expect(await self._exchange(self._next), "/invocation/next")

    async def respond(
        self, request_id: str, body: bytes, content_type: str, invocation_id: str | None
    ) -> None:
        """Send the whole answer to an invocation. Raises `RuntimeApiError`."""
        headers = {"Content-Type": content_type} | _echoed(invocation_id)
        await self._post(f"invocation/{request_id}/response", headers, body)

    async def fail(
        self, request_id: str, body: bytes, error_type: str, cause: str, invocation_id: str | None
    ) -> None:
        """Send an invocation's error, if nothing of an answer was sent; `cause` is X-Ray's. Raises
        `RuntimeApiError`.
        """
        headers = {"Content-Type": ERROR_CONTENT_TYPE, TYPE_HEADER: _one_line(error_type)}
        if len(cause) <= MAX_CAUSE_BYTES:
            headers["Lambda-Runtime-Function-XRay-Error-Cause"] = cause
        await self._post(f"invocation/{request_id}/error", headers | _echoed(invocation_id), body)

    async def begin_stream(self, request_id: str, content_type: str, invocation_id: str | None) -> Stream:
        """Begin a streamed answer: end it with `Stream.end`. Raises `RuntimeApiError`."""
        head = self._head(
            "POST",
            f"invocation/{request_id}/response",
            {
                "Content-Type": content_type,
                "Lambda-Runtime-Function-Response-Mode": "streaming",
                "Transfer-Encoding": "chunked",
                "Trailer": f"{TYPE_HEADER}, {BODY_TRAILER}",
            }
            | _echoed(invocation_id),
        )
        try:
            if self._writer is None or self.is_cut:
                await self._connect()
            assert self._writer is not None
            self._writer.write(head)
        except OSError as error:
            raise self._lost(error) from error
        return Stream(self, self._writer)

    async def init_error(self, body: bytes, error_type: str) -> None:
        """Report that the instance could not start. Raises `RuntimeApiError`."""
        await self._post("init/error", {"Content-Type": ERROR_CONTENT_TYPE, TYPE_HEADER: error_type}, body)

    async def restore_next(self) -> None:
        """Wait for the restore of this process from a snapshot. Raises `RuntimeApiError`."""
        _expect(await self._exchange(self._head("GET", "restore/next", {})), "/restore/next")

    async def restore_error(self, body: bytes, error_type: str) -> None:
        await self._post("restore/error", {"Content-Type": ERROR_CONTENT_TYPE, TYPE_HEADER: error_type}, body)

    @property
    def is_cut(self) -> bool:
        """True if the other side has closed the connection."""
        return self._reader is None or self._reader.at_eof()

    def close(self) -> None:
        """Close the connection. Idempotent. A running request fails."""
        writer, self._reader, self._writer = self._writer, None, None
        if writer is not None:
            # Not `close`, which waits until everything is sent, even without a reader.
            writer.transport.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
        # The event loop closes it in its next iteration.
        await asyncio.sleep(0)

    # requests

    def _head(self, method: str, path: str, headers: Mapping[str, str]) -> bytes:
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"{method} /{VERSION}/runtime/{path} HTTP/1.1\r\n{self._common}{lines}\r\n"
        return head.encode("utf-8", "replace")

    async def _post(self, path: str, headers: Mapping[str, str], body: bytes) -> None:
        head = self._head("POST", path, {**headers, "Content-Length": str(len(body))})
        _expect(await self._exchange(head + body), f"/{path}")

    async def _exchange(self, request: bytes) -> RuntimeAnswer:
        """Send a request and read its answer.

        Retried once, on a new connection, if the connection is lost without any answer: it was
        closed while idle, or the process is a copy of the one that it belonged to.
        """
        try:
            try:
                return await self._ask(request)
            except (ConnectionError, asyncio.IncompleteReadError) as error:
                if isinstance(error, asyncio.IncompleteReadError) and error.partial:
                    raise  # the request was received
                self.close()
            return await self._ask(request)
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            raise self._lost(error) from error
        except asyncio.CancelledError:
            # The answer may still arrive, and would be taken for the next one's.
            self.close()
            raise

    async def _ask(self, request: bytes) -> RuntimeAnswer:
        if self._writer is None:
            await self._connect()
        assert self._writer is not None
        self._writer.write(request)
        await self._writer.drain()
        return await self.read_answer()

    async def _connect(self) -> None:
        self.close()
        self._reader, self._writer = await asyncio.open_connection(
            self._host, self._port, limit=MAX_HEAD_BYTES
        )
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _lost(self, error: BaseException) -> RuntimeApiError:
        self.close()
        return RuntimeApiError(f"the Runtime API at {self._host}:{self._port} is lost: {_text_of(error)}")

    # answers

    async def read_answer(self) -> RuntimeAnswer:
        """The next answer on the connection. Raises `OSError`, `EOFError` or `ValueError` for an
        invalid one.
        """
        assert self._reader is not None
        head = await self._reader.readuntil(b"\r\n\r\n")
        status_line, *lines = head[:-4].decode("utf-8", "replace").split("\r\n")
        status = int(status_line.partition(" ")[2].partition(" ")[0])
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        body = await self._read_body(self._reader, headers)
        if headers.get("connection", "").lower() == "close":
            self.close()
        return RuntimeAnswer(status, headers, body)

    async def _read_body(self, reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
        if "chunked" in headers.get("transfer-encoding", "").lower():
            return await self._read_chunks(reader)
        size_bytes = int(headers.get("content-length", 0))
        if not 0 <= size_bytes <= MAX_EVENT_BYTES:
            raise ValueError(f"an event of {size_bytes} bytes, more than {MAX_EVENT_BYTES}")
        return await reader.readexactly(size_bytes) if size_bytes else b""

    async def _read_chunks(self, reader: asyncio.StreamReader) -> bytes:
        pieces, total_bytes = [], 0
        while size_bytes := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
            total_bytes += size_bytes
            if size_bytes < 0 or total_bytes > MAX_EVENT_BYTES:
                raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
            pieces.append((await reader.readexactly(size_bytes + 2))[:-2])
        while await reader.readuntil(b"\r\n") != b"\r\n":
            pass  # trailers
        return b"".join(pieces)


class Stream:
    """A streamed answer. End it with `end`, once."""

    def __init__(self, api: RuntimeApi, writer: asyncio.StreamWriter) -> None:
        self._api = api
        self._writer = writer

    async def write(self, data: bytes) -> None:
        """Send a piece, which must not be empty. Waits while Lambda is slow. Raises
        `RuntimeApiError`.
        """
        try:
            if self._api.is_cut:
                raise ConnectionResetError("closed by the other side")
            self._writer.write(b"%x\r\n%b\r\n" % (len(data), data))
            await self._writer.drain()
        except OSError as error:
            raise self._api._lost(error) from error

    async def end(self, *, error_type: str = "", error_body: bytes = b"") -> None:
        """End the answer, or report the error that ended it. Closes the connection, as Lambda
        requires. Raises `RuntimeApiError`.
        """
        trailers = b""
        if error_type:
            import base64  # errors are rare

            body = base64.b64encode(error_body).decode()
            trailers = f"{TYPE_HEADER}: {_one_line(error_type)}\r\n{BODY_TRAILER}: {body}\r\n".encode()
        try:
            self._writer.write(b"0\r\n" + trailers + b"\r\n")
            await self._writer.drain()
            _expect(await self._api.read_answer(), "/invocation/response")
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            raise self._api._lost(error) from error
        finally:
            self._api.close()


def _expect(answer: RuntimeAnswer, path: str) -> RuntimeAnswer:
    if 200 <= answer.status < 300:
        return answer
    text = answer.body[:500].decode("utf-8", "replace")
    raise RuntimeApiError(f"the Runtime API answered {answer.status} to {path}: {text}", status=answer.status)


def _echoed(invocation_id: str | None) -> dict[str, str]:
    return {INVOCATION_ID_HEADER: invocation_id} if invocation_id else {}


def _one_line(text: str) -> str:
    """A valid header value: users choose the names of their exceptions."""
    return "".join(char if " " <= char != "\x7f" else " " for char in text)[:256]


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class Invocation(Struct, frozen=True):
    request_id: str
    body: bytes
    content_type: str | None = None
    deadline_unix_ms: int | None = None
    function_arn: str | None = None
    trace_id: str | None = None
    client_context_json: str | None = None
    cognito_identity_json: str | None = None
    tenant_id: str | None = None
    # Of this attempt, where Lambda distinguishes attempts.
    invocation_id: str | None = None

    @classmethod
    def of(cls, answer: RuntimeAnswer) -> Invocation:
        """Parse an answer. Raises `InputError` without a request id, because it could not be
        answered.
        """
        headers = answer.headers
        request_id = headers.get("lambda-runtime-aws-request-id")
        if not request_id or "/" in request_id:
            raise InputError("Runtime.UnmarshalError", "the invocation has no request id")
        deadline = headers.get("lambda-runtime-deadline-ms", "")
        return cls(
            request_id,
            answer.body,
            headers.get("content-type"),
            int(deadline) if deadline.isdecimal() else None,
            headers.get("lambda-runtime-invoked-function-arn"),
            headers.get("lambda-runtime-trace-id"),
            headers.get("lambda-runtime-client-context"),
            headers.get("lambda-runtime-cognito-identity"),
            headers.get("lambda-runtime-aws-tenant-id"),
            headers.get(INVOCATION_ID_HEADER.lower()),
        )

    def event(self) -> Any:
        """The event: JSON, or bytes with another content type. Raises `InputError`."""
        if (self.content_type or "application/json") != "application/json":
            return self.body
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise InputError("Runtime.UnmarshalError", f"Unable to unmarshal input: {error}") from error

    def timeout_s(self) -> float | None:
        """The remaining time of the invocation; None without a limit.

        By the wall clock, like Lambda's: only that goes on while the instance is frozen.
        """
        if self.deadline_unix_ms is None:
            return None
        left_s = max(0.0, self.deadline_unix_ms / 1000 - time.time())
        return left_s - min(MARGIN_S, MARGIN_SHARE * left_s)

    def facts(self, environment: Mapping[str, str]) -> dict[str, Any]:
        """The content of `Context.platform`. Raises `InputError`."""
        facts: dict[str, Any] = {name: environment.get(variable) for name, variable in _FACTS.items()}
        client_context = _json(self.client_context_json, "Client Context")
        identity = _json(self.cognito_identity_json, "Cognito Identity")
        facts.update(
            name="lambda",
            invoked_function_arn=self.function_arn,
            deadline_unix_ms=self.deadline_unix_ms,
            client_context=client_context,
            identity=identity,
            tenant_id=self.tenant_id,
        )
        return facts


def _json(header: str | None, name: str) -> Any:
    if not header:
        return None
    try:
        return json.loads(header)
    except (ValueError, RecursionError) as error:
        raise InputError(
            "Runtime.LambdaContextUnmarshalError", f"Unable to parse {name} JSON: {error}"
        ) from error
