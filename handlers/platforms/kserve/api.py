"""The route handlers of `routes`: the choice of the model, its readiness, and the answer's JSON."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from aiohttp import web

from ....runtime.errors import UnloadedError
from ...function.handler import Handler
from ...http.errors import ApiError, expected_wait_s, retry_after
from ...http.json_bodies import encode
from ...http.service import CALL, Service
from ...openai.generation import respond
from .inference import Inference
from .metadata import (
    VERSION,
    Counts,
    Repository,
    model_config,
    model_metadata,
    model_statistics,
    server_metadata,
)
from .schemas import Live, ModelReady, Ready
from .texts import (
    FRAMING,
    GenerateFormat,
    generation_body,
    options_of,
    read_generate,
    split_parameters,
    takes_prompt_back,
    timeout_s,
    wants_stream,
)

if TYPE_CHECKING:
    from ....runtime.onnx.spec import OnnxSpec


class KServeRoutes:
    """The routes of one server, made by the first request. Each method handles one route."""

    def __init__(self, service: Service, handler: Handler | None) -> None:
        self._service = service
        self._has_function = handler is not None
        self._inference = Inference(service, handler)
        self._repository = Repository(service)
        self._counts = Counts()

    # the server

    async def server_metadata(self, request: web.Request) -> web.Response:
        return _json(server_metadata())

    async def live(self, request: web.Request) -> web.Response:
        """200 while the event loop runs: a loading server must not be restarted."""
        return _json(Live(live=True))

    async def ready(self, request: web.Request) -> web.Response:
        ready = self._service.state.can_answer
        return self._readiness(Ready(ready), ready)

    # the model

    async def model_ready(self, request: web.Request) -> web.Response:
        name = self._model_of(request)
        ready = self._service.state.can_answer
        return self._readiness(ModelReady(name, ready), ready)

    async def model_metadata(self, request: web.Request) -> web.Response:
        return _json(model_metadata(self._model_of(request), self._kind(), self._spec()))

    async def config(self, request: web.Request) -> web.Response:
        name = self._model_of(request)
        most = self._service.limits.max_in_flight
        return _json(model_config(name, self._kind(), self._spec(), max_in_flight=most))

    async def stats(self, request: web.Request) -> web.Response:
        name = self._model_of(request) if "name" in request.match_info else self._service.instance.model_name
        return _json(model_statistics(name, self._counts))

    # work

    async def infer(self, request: web.Request) -> web.Response:
        name, counts, begin_ns = self._model_of(request), self._counts, time.monotonic_ns()
        try:
            response = await self._inference.answer(request, model=name, version=VERSION)
        except BaseException:  # also when the client goes away
            counts.failed += 1
            counts.failed_ns += time.monotonic_ns() - begin_ns
            raise
        counts.succeeded += 1
        counts.succeeded_ns += time.monotonic_ns() - begin_ns
        counts.last_unix_ms = time.time_ns() // 1_000_000
        return response

    async def generate(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, stream=False)

    async def generate_stream(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, stream=True)

    async def _generate(self, request: web.Request, *, stream: bool) -> web.StreamResponse:
        service, call, name = self._service, CALL.get(), self._model_of(request)
        async with service.admission.body(request) as data:
            text, given_id, given = read_generate(data)
            if (seconds := timeout_s(given)) is not None:
                call.limit(seconds)
            options = options_of({}, split_parameters(given))
            if wants_stream(options) and not stream:
                raise ApiError(
                    400, "generate returns one answer: use generate_stream for a stream", param="stream"
                )
            echo = takes_prompt_back(options)
            fmt = GenerateFormat(
                text,
                generation_body(options, stream=stream),
                first_token=service.first_token,
                request_id=call.request_id,
                model=name,
                version=VERSION,
                given_id=given_id,
                echo=echo,
            )
            return await respond(service, request, fmt, body_bytes=len(data), framing=FRAMING)

    # the repository

    async def index(self, request: web.Request) -> web.Response:
        return await self._repository.index(request, version=VERSION)

    async def change(self, request: web.Request) -> web.Response:
        self._check_name(request.match_info["name"])
        return await self._repository.change(request, request.match_info["action"])

    # which model

    def _model_of(self, request: web.Request) -> str:
        """The name of the model in the path, with or without a version. Raises 404 for another one."""
        given, name = request.match_info["name"], self._service.instance.model_name
        if given != name and given.startswith(f"{name}/versions/"):
            version = given.removeprefix(f"{name}/versions/")
            if version != VERSION:
                raise ApiError(
                    404, f"the model {name!r} has no version {version[:100]!r}; it has {VERSION!r}"
                )
            return name
        self._check_name(given)
        return name

    def _check_name(self, given: str) -> None:
        name = self._service.instance.model_name
        if given != name:
            raise ApiError(404, f"the model {given[:200]!r} does not exist here; this server has {name!r}")

    def _readiness(self, value: Any, ready: bool) -> web.Response:
        instance, headers = self._service.instance, {}
        if not ready:
            headers = retry_after(expected_wait_s(instance.progress()["fraction"], instance.timeline.now_s()))
        return web.Response(
            status=200 if ready else 503, body=encode(value), content_type="application/json", headers=headers
        )

    def _kind(self) -> str:
        """The kind of the model. Raises 503 while it is unknown."""
        if self._has_function:
            return "function"
        kind = self._service.instance.kind
        if not kind.done() or kind.exception() is not None:
            raise UnloadedError(f"the model {self._service.instance.model_name!r} is not loaded yet")
        return kind.result()

    def _spec(self) -> OnnxSpec | None:
        """The tensors of an ONNX model, once `_kind` has determined that."""
        return self._service.instance.onnx.result().spec if self._kind() == "onnx" else None


def _json(value: Any) -> web.Response:
    return web.Response(body=encode(value), content_type="application/json")
