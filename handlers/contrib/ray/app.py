"""Applications for Ray Serve's configuration file: `app`, one model; `ingress`, the address of all of them.

    import_path: teneral.handlers.contrib.ray.app:app        args: {settings: {…}}
    import_path: teneral.handlers.contrib.ray.app:ingress    args: {models: {name: {application: weight}}}

`teneral pool render ray` writes them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from .replica import Replica

MAX_BODY_BYTES = 8 << 20
PREFIX_CHARACTERS = 256  # of a prompt: requests that share them go to the same replica
READY_PATHS = frozenset({"/health", "/readyz", "/livez"})


class RayReplica(Replica):
    """The deployment: Ray's hooks, and nothing else. Ray awaits the constructor."""

    async def __init__(self, settings: Mapping[str, Any]) -> None:  # type: ignore[misc]
        super().__init__(settings)
        await self.prepare()

    async def __del__(self) -> None:
        await self.close()


class Ingress:
    """The address of all models: finds the model in the request's body, and a replica that knows its prefix."""

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
        body = await request.body()
        if len(body) > MAX_BODY_BYTES:
            return _error(413, "the body is too large", "request_too_large")
        fields = _fields(body)
        name = fields.get("model") or (next(iter(self._models)) if len(self._models) == 1 else None)
        if name not in self._models:
            return _error(404, f"unknown model {name!r}", "model_not_found")
        key = session_key(request.headers.get("x-session-id"), fields)
        handle = self._handle(chosen(self._models[name], key)).options(
            method_name="request", stream=True, session_id=key
        )
        query = f"?{request.url.query}" if request.url.query else ""
        pieces = handle.remote(request.method, path + query, list(request.headers.items()), body)
        return await _streamed(pieces)

    def _handle(self, application: str) -> DeploymentHandle[Any]:
        if application not in self._handles:
            self._handles[application] = serve.get_deployment_handle("Replica", app_name=application)
        return self._handles[application]


async def _streamed(pieces: Any) -> Response:
    status, headers = await anext(pieces)

    async def rest() -> AsyncIterator[bytes]:
        try:
            async for piece in pieces:
                yield piece
        finally:
            pieces.cancel()  # of no effect on what has ended

    response = StreamingResponse(rest(), status_code=status)
    response.raw_headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
    return response


def session_key(header: str | None, fields: Mapping[str, Any]) -> str:
    """The session, or else the tenant's salt and how the prompt begins: what a replica may have in its KV pool."""
    ours = fields.get("teneral")
    extra: Mapping[str, Any] = ours if isinstance(ours, dict) else {}
    session = extra.get("session") or header or fields.get("user")
    if session:
        return f"session-{hashlib.blake2b(str(session).encode(), digest_size=16).hexdigest()}"
    prompt = fields.get("messages") or fields.get("prompt") or fields.get("input") or ""
    start = (prompt if isinstance(prompt, str) else json.dumps(prompt))[:PREFIX_CHARACTERS]
    salt = str(extra.get("cache_salt") or fields.get("cache_salt") or "")
    return hashlib.blake2b(f"{salt}\0{start}".encode(), digest_size=16).hexdigest()


def chosen(weights: Mapping[str, int], key: str) -> str:
    """The application of one version, by weighted rendezvous: another weight moves only the share that it must."""
    import math

    def score(application: str) -> float:
        digest = hashlib.blake2b(f"{application}\0{key}".encode(), digest_size=8).digest()
        draw = (int.from_bytes(digest, "big") + 1) / (2**64 + 1)
        return -weights[application] / math.log(draw) if weights[application] else -1.0

    return max(weights, key=score)


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _error(status: int, message: str, code: str) -> Response:
    return JSONResponse(
        {"error": {"message": message, "type": "invalid_request_error", "code": code}}, status
    )


def _deployment(kind: type, name: str) -> Any:
    return serve.deployment(name=name)(kind)


def app(args: Mapping[str, Any]) -> serve.Application:
    """One version of one model, without an address of its own."""
    return _deployment(RayReplica, "Replica").bind(args["settings"])


def ingress(args: Mapping[str, Any]) -> serve.Application:
    return _deployment(Ingress, "Ingress").bind(args["models"])
