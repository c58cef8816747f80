"""Applications for Ray Serve's configuration file: `app`, one model; `ingress`, the address of all
models.

    import_path: teneral.handlers.contrib.ray.app:app        args: {settings: {…}}
    import_path: teneral.handlers.contrib.ray.app:ingress    args: {models: {name: {application: weight}}}

`teneral pool render ray` writes them. No answer is truncated silently: if a replica, its server or
its node dies before the first byte, the request is retried once, elsewhere; later, a stream ends
with an error event, and any other answer with a broken connection.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

import aiohttp
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from ...api_document.routes import has_route
from ...http.edge import request_id_of
from ...http.errors import INVALID_REQUEST, SERVER_ERROR, ApiError
from ...platforms import shaped_response
from ...pool.protocols import StreamEnd
from .replica import Replica

MAX_BODY_BYTES = 8 << 20
PREFIX_CHARACTERS = 256  # of a prompt: requests that share them go to the same replica
READY_PATHS = frozenset({"/health", "/v1/health", "/readyz", "/livez"})
# Of an answer that is not a stream: it is read to its end before the client gets any of it.
MAX_WHOLE_BYTES = 1 << 20
# Functions may have side effects, and are not retried.
ACTING_PATHS = frozenset({"/invoke", "/invocations", "/events", "/"})
# The errors of a dead replica, server or node.
LOST = (RayError, RayServeException, aiohttp.ClientError, ConnectionError, StopAsyncIteration)
# Ray's proxy adds it to every answer: with the client's id, or its own, which it puts into the request.
OWN_HEADER = "x-request-id"

_log = logging.getLogger("teneral.ray")


class RayReplica(Replica):
    """The deployment: Ray's hooks only. Ray awaits the constructor."""

    async def __init__(self, settings: Mapping[str, Any]) -> None:  # type: ignore[misc]
        super().__init__(settings)
        await self.prepare()

    async def __del__(self) -> None:
        await self.close()


class Ingress:
    """The address of all models: routes by the model in the request's body, and to a replica that
    may have its prefix.
    """

    def __init__(self, models: Mapping[str, Mapping[str, int]]) -> None:
        self._models = {name: dict(applications) for name, applications in models.items()}
        self._handles: dict[str, DeploymentHandle[Any]] = {}

    async def __call__(self, request: Request) -> Response:
        path = request.url.path
        if path in READY_PATHS:
            return JSONResponse({"status": "ok"})
        if path == "/v1/models":
            return JSONResponse(
                {"object": "list", "data": [{"id": name, "object": "model"} for name in self._models]}
            )
        if not has_route(path):  # which would wake a model for nothing
            return _error(request, 404, "there is no such route here", "unknown_url")
        body = await _body(request)
        if body is None:
            return _error(request, 413, "the body is too large", "request_too_large")
        fields = _fields(body)
        name = fields.get("model") or (next(iter(self._models)) if len(self._models) == 1 else None)
        # An adapter's name stays in the body: the instance knows it.
        served = name.partition(":")[0] if isinstance(name, str) else ""
        if served not in self._models:
            return _error(request, 404, f"unknown model {str(name)[:200]!r}", "model_not_found")
        key = session_key(request.headers.get("x-session-id"), fields)
        handle = self._handle(chosen(self._models[served], key)).options(
            method_name="request", stream=True, session_id=key
        )
        query = f"?{request.url.query}" if request.url.query else ""
        asked = (request.method, path + query, list(request.headers.items()), body)
        attempts = 1 if path in ACTING_PATHS else 2
        for attempt in range(1, attempts + 1):
            pieces = handle.remote(*asked)
            try:
                return await _answer(pieces, StreamEnd(path, _id_of(request)))
            except BackPressureError:
                return _error(request, 503, "too many requests wait", "overloaded", {"Retry-After": "1"})
            except LOST as error:
                _log.warning("attempt %d of %d: no answer: %s", attempt, attempts, type(error).__name__)
            except asyncio.CancelledError:
                pieces.cancel()
                raise
        return _error(
            request, 502, "the instance ended before it answered", "instance_lost", {"Retry-After": "1"}
        )

    def _handle(self, application: str) -> DeploymentHandle[Any]:
        if application not in self._handles:
            self._handles[application] = serve.get_deployment_handle("Replica", app_name=application)
        return self._handles[application]


async def _answer(pieces: Any, end: StreamEnd) -> Response:
    """The replica's answer. Raises one of `LOST` if it is lost before the client has any of it."""
    status, headers = await anext(pieces)
    raw = [
        (name.lower().encode(), value.encode("utf-8", "surrogateescape"))
        for name, value in headers
        if name.lower() != OWN_HEADER
    ]
    is_stream = any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in raw)
    first = [] if is_stream else await _beginning(pieces)
    response = StreamingResponse(_rest(first, pieces, end if is_stream else None), status_code=status)
    response.raw_headers = raw
    return response


async def _beginning(pieces: Any) -> list[bytes]:
    """All of a short answer."""
    first: list[bytes] = []
    size_bytes = 0
    while size_bytes <= MAX_WHOLE_BYTES:
        try:
            piece = await anext(pieces)
        except StopAsyncIteration:
            break
        first.append(piece)
        size_bytes += len(piece)
    return first


async def _rest(first: list[bytes], pieces: Any, end: StreamEnd | None) -> AsyncIterator[bytes]:
    """`first` and the pieces after it; with `end` a stream, which it ends where the replica is lost."""
    try:
        for piece in first:
            yield piece
        async for piece in pieces:
            yield piece
            if end is not None:
                end.passed(piece)
    except LOST as error:
        lost = ApiError(502, "the instance ended while it answered", kind=SERVER_ERROR, code="instance_lost")
        if end is None:
            raise ConnectionResetError(lost.message) from error
        yield end.event(lost)
    finally:
        pieces.cancel()  # no effect after the end


def session_key(header: str | None, fields: Mapping[str, Any]) -> str:
    """The session, or else the tenant's salt and the prompt's prefix: the key of a replica's KV
    pool.
    """
    ours = fields.get("teneral")
    extra: Mapping[str, Any] = ours if isinstance(ours, dict) else {}
    session = extra.get("session") or header or fields.get("user")
    if session:
        return f"session-{_digest(str(session))}"
    prompt = fields.get("messages") or fields.get("prompt") or fields.get("input") or ""
    start = (prompt if isinstance(prompt, str) else json.dumps(prompt))[:PREFIX_CHARACTERS]
    salt = str(extra.get("cache_salt") or fields.get("cache_salt") or "")
    return _digest(f"{salt}\0{start}")


def _digest(text: str) -> str:
    """Of any text of JSON's, lone surrogates included."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def chosen(weights: Mapping[str, int], key: str) -> str:
    """The application of one version, by weighted rendezvous hashing: a changed weight moves only
    the necessary share.
    """
    import math

    def score(application: str) -> float:
        digest = hashlib.blake2b(f"{application}\0{key}".encode(), digest_size=8).digest()
        draw = (int.from_bytes(digest, "big") + 1) / (2**64 + 1)
        return -weights[application] / math.log(draw) if weights[application] else -1.0

    return max(weights, key=score)


async def _body(request: Request) -> bytes | None:
    """The body; None for one that is too large, of which no more is read."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            return None
    return bytes(body)


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _error(
    request: Request, status: int, message: str, code: str, headers: Mapping[str, str] | None = None
) -> Response:
    kind = SERVER_ERROR if status >= 500 else INVALID_REQUEST
    error = ApiError(status, message, kind=kind, code=code, headers=dict(headers or {}))
    shaped = shaped_response(request.url.path, request.headers, error, _id_of(request))
    kept = {name: value for name, value in shaped.headers.items() if name.lower() != OWN_HEADER}
    return Response(cast(bytes, shaped.body), status, kept)


def _id_of(request: Request) -> str:
    return request_id_of(cast(Any, request))  # which reads its headers alone


def _deployment(kind: type, name: str) -> Any:
    return serve.deployment(name=name)(kind)


def app(args: Mapping[str, Any]) -> serve.Application:
    """One version of one model, without an address of its own."""
    return _deployment(RayReplica, "Replica").bind(args["settings"])


def ingress(args: Mapping[str, Any]) -> serve.Application:
    return _deployment(Ingress, "Ingress").bind(args["models"])
