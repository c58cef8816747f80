"""The route handlers of `routes`: the choice of the model, its readiness, inference, and the answer's JSON.

POST /v2/models/{name}/infer takes tensors to the model, or to the user's function, and brings tensors back. The JSON
of request and response may be followed by bytes. `texts` converts the tensors of a decoder, and `tensors` those of
a function.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from aiohttp import web
from msgspec import UNSET, Struct

from ....runtime.errors import CancelledError, RequestError, UnloadedError
from ...function.context import Context
from ...function.handler import Handler, run
from ...http.errors import ApiError, expected_wait_s, retry_after
from ...http.invoke import SESSION_HEADER
from ...http.json_bodies import JsonDecoder, encode
from ...http.service import CALL, HttpCall, Service
from ...openai.generation import generate, make_format, respond
from ...openai.parameters import tokens_of
from ...openai.structured import has_schema
from .metadata import (
    VERSION,
    Counts,
    Repository,
    datatype_of,
    model_config,
    model_metadata,
    model_statistics,
    server_metadata,
)
from .schemas import (
    InferenceRequest,
    InferenceResponse,
    Live,
    ModelReady,
    Ready,
    RequestOutput,
    ResponseOutput,
)
from .tensors import BYTES, MAX_TENSORS, Tensor, binary_data, event_of, json_data, read_tensors, tensors_of
from .texts import (
    FRAMING,
    GenerateFormat,
    TextRequest,
    flag,
    generation_body,
    options_of,
    prompts_of,
    read_generate,
    split_parameters,
    takes_prompt_back,
    timeout_s,
    wants_stream,
)

if TYPE_CHECKING:
    from ....runtime.onnx.spec import OnnxSpec

# Of the JSON, if bytes follow it.
HEADER_LENGTH = "Inference-Header-Content-Length"
# Reading or writing more than this must not run on the event loop.
INLINE_BYTES = 64 << 10
MAX_RESULTS = 4_096  # values of a function that returns several


class InferRequest(Struct, frozen=True):
    """One parsed request."""

    request: InferenceRequest
    tensors: dict[str, Tensor]
    parameters: dict[str, Any]  # without the protocol's own


class Inference:
    """The handler of `infer`."""

    def __init__(self, service: Service, handler: Handler | None) -> None:
        self._service = service
        self._handler = handler
        self._decoder = JsonDecoder(InferenceRequest)

    async def answer(self, request: web.Request, *, model: str, version: str) -> web.Response:
        service, call = self._service, CALL.get()
        async with service.admission.body(request) as data:
            asked = await _apart(len(data), self._read, request, data)
            if (seconds := timeout_s(asked.request.parameters)) is not None:
                call.limit(seconds)
            outputs = await self._outputs(asked, call, request, len(data))
            num_bytes = sum(len(tensor.elements) * 8 for tensor in outputs)
            response: web.Response = await _apart(
                num_bytes, _response, asked.request, outputs, model, version
            )
            return response

    def _read(self, request: web.Request, data: bytearray) -> InferRequest:
        head, binary = _split(data, request.headers.get(HEADER_LENGTH))
        body = self._decoder.decode(head)
        if len(body.outputs or ()) > MAX_TENSORS:
            raise RequestError(f"at most {MAX_TENSORS} outputs are allowed", param="outputs")
        for output in body.outputs or ():
            _check_output(output)
        return InferRequest(body, read_tensors(body.inputs, binary), split_parameters(body.parameters))

    async def _outputs(
        self, asked: InferRequest, call: HttpCall, request: web.Request, body_bytes: int
    ) -> list[Tensor]:
        service = self._service
        if self._handler is not None:
            session = request.headers.get(SESSION_HEADER) or None
            result = await self._run(self._handler, asked, call, session)
            return await asyncio.to_thread(tensors_of, result)  # its size is unknown
        kind = await service.ready(service.instance.kind)
        if kind == "encoder":
            return await self._embed(asked, call, body_bytes)
        if kind == "onnx":
            return await self._compute(asked, call)
        return await self._generate(asked, call, body_bytes)

    async def _generate(self, asked: InferRequest, call: HttpCall, body_bytes: int) -> list[Tensor]:
        service, tensors = self._service, dict(asked.tensors)
        _, texts, shape = prompts_of(tensors, max_prompts=service.limits.max_sequences)
        options = options_of(tensors, asked.parameters)
        if wants_stream(options):
            raise RequestError(
                "infer returns whole texts", param="stream", hint="Use generate_stream for a stream."
            )
        echo = takes_prompt_back(options)
        body = generation_body(options, stream=False)
        make = partial(TextRequest, texts, body, first_token=service.first_token, request_id=call.request_id)
        wanted = await make_format(service, body_bytes, make, has_schema=has_schema(body))
        outcomes, _ = await generate(service, call, wanted, body_bytes)
        answers = [outcome.text for outcome in outcomes]
        if echo:
            answers = [prompt + answer for prompt, answer in zip(texts, answers, strict=True)]
        reasons = [str(outcome.finish_reason) for outcome in outcomes]
        return [_texts("text_output", shape, answers), _texts("finish_reason", shape, reasons)]

    async def _embed(self, asked: InferRequest, call: HttpCall, body_bytes: int) -> list[Tensor]:
        service, tensors = self._service, dict(asked.tensors)
        name, texts, _ = prompts_of(tensors, max_prompts=service.limits.max_embedding_inputs)
        if tensors or asked.parameters:
            unknown = next(iter([*tensors, *asked.parameters]))
            raise RequestError(f"a model that embeds has no parameter {unknown[:100]!r}", param=unknown[:100])
        with service.admission.waiting(1):
            tokenizer, embedder = await service.encoder()
            encode_text = partial(tokenizer.encode, max_tokens=embedder.max_tokens)
            token_lists = await service.text_threads.run(
                body_bytes, lambda: [tokens_of(text, encode_text, param=name) for text in texts]
            )
        call.prompt_tokens = sum(map(len, token_lists))
        service.metrics.prompt_taken(call.prompt_tokens)
        call.limit(service.limits.request_timeout_s)
        vectors = await asyncio.wrap_future(embedder.embed(token_lists))  # (N, dim) float32
        return [Tensor("embedding", "FP32", vectors.shape, vectors.reshape(-1))]

    async def _compute(self, asked: InferRequest, call: HttpCall) -> list[Tensor]:
        """Compute an ONNX model's outputs for the tensors."""
        if asked.parameters:
            raise RequestError(
                f"an ONNX model has no parameter {next(iter(asked.parameters))[:100]!r}", param="parameters"
            )
        runner = await self._service.ready(self._service.instance.onnx)
        call.limit(self._service.limits.request_timeout_s)
        types = {value.name: datatype_of(value.type) for value in runner.spec.inputs}
        outputs = runner.submit(
            {name: _as_array(tensor, types.get(name)) for name, tensor in asked.tensors.items()}
        )
        try:
            made = await asyncio.shield(asyncio.wrap_future(outputs))
        finally:
            runner.give_up(outputs)  # no effect once it is done
        kinds = {value.name: datatype_of(value.type) for value in runner.spec.outputs}
        return [_as_tensor(name, kinds[name], array) for name, array in made.items()]

    async def _run(self, handler: Handler, asked: InferRequest, call: HttpCall, session: str | None) -> Any:
        """The function's result; a list of several values. Raises `RequestError` for more than
        `MAX_RESULTS`.
        """
        num_bytes = sum(len(tensor.elements) * 8 for tensor in asked.tensors.values())
        event = await _apart(num_bytes, event_of, asked.tensors, asked.parameters)
        limit_s = self._service.limits.request_timeout_s
        context = Context(
            self._service.instance,
            request_id=call.request_id,
            timeout_s=call.time_left_s(limit_s),
            session=session,
            on_tokens=call.add_tokens,
        )
        values = cast(AsyncGenerator[Any, None], run(handler, event, context))
        results: list[Any] = []
        async with aclosing(values):
            try:
                async for value in values:
                    results.append(value)
                    if len(results) > MAX_RESULTS:
                        raise RequestError(f"the function returned more than {MAX_RESULTS} values")
            except CancelledError as error:
                if context.remaining_time_s() > 0:
                    raise
                raise call.overdue(error) from error
        return results[0] if len(results) == 1 else results


def _as_array(tensor: Tensor, wanted: str | None) -> np.ndarray[Any, Any]:
    """An input in the model's datatype. Raises `RequestError` for any other datatype."""
    if wanted is not None and tensor.datatype != wanted:
        raise RequestError(
            f"the input {tensor.name!r} is {tensor.datatype}, but the model takes {wanted}", param=tensor.name
        )
    if not isinstance(tensor.elements, list):
        return tensor.elements.reshape(tensor.shape)
    texts = np.empty(len(tensor.elements), dtype=object)
    texts[:] = tensor.texts()
    return texts.reshape(tensor.shape)


def _as_tensor(name: str, datatype: str, array: np.ndarray[Any, Any]) -> Tensor:
    if datatype == BYTES:
        return Tensor(name, BYTES, array.shape, [str(text).encode() for text in array.flat])
    return Tensor(name, datatype, array.shape, np.ascontiguousarray(array).reshape(-1))


def _split(data: bytearray, header: str | None) -> tuple[bytes, memoryview]:
    """The body's JSON, and the bytes after it. Raises `RequestError` for an invalid length."""
    length = len(data)
    if header is not None:
        text = header.strip()
        if not (text.isascii() and text.isdigit() and len(text) <= 12) or int(text) > length:
            raise RequestError(
                f"the header {HEADER_LENGTH} must be a length within the body", param=HEADER_LENGTH
            )
        length = int(text)
    view = memoryview(data)
    return bytes(view[:length]), view[length:]


def _check_output(output: RequestOutput) -> None:
    for name in ("shared_memory_region", "classification"):
        if (output.parameters or {}).get(name):
            raise RequestError(f"output {output.name[:100]!r}: {name} is not supported", param="outputs")


def _response(request: InferenceRequest, outputs: Sequence[Tensor], model: str, version: str) -> web.Response:
    """The requested outputs, in that order; all of them by default."""
    by_default = flag(request.parameters, "binary_data_output")
    by_name = {tensor.name: tensor for tensor in outputs}
    wanted = request.outputs or [RequestOutput(tensor.name) for tensor in outputs]
    heads, blobs = [], []
    for output in wanted:
        tensor = by_name.get(output.name)
        if tensor is None:
            raise RequestError(
                f"there is no output {output.name[:100]!r}", param="outputs", hint=_those(by_name)
            )
        blob = binary_data(tensor) if flag(output.parameters, "binary_data", default=by_default) else None
        heads.append(_head(tensor, blob))
        if blob is not None:
            blobs.append(blob)
    given_id = UNSET if request.id is None else request.id
    head = encode(InferenceResponse(model, version, heads, given_id))
    if not blobs:
        return web.Response(body=head, content_type="application/json")
    return web.Response(
        body=b"".join([head, *blobs]),
        content_type="application/octet-stream",
        headers={HEADER_LENGTH: str(len(head))},
    )


def _head(tensor: Tensor, blob: bytes | None) -> ResponseOutput:
    shape = list(tensor.shape)
    if blob is None:
        return ResponseOutput(tensor.name, tensor.datatype, shape, data=json_data(tensor))
    return ResponseOutput(tensor.name, tensor.datatype, shape, parameters={"binary_data_size": len(blob)})


def _those(outputs: Mapping[str, Tensor]) -> str:
    return f"There are {', '.join(list(outputs)[:20])}."


def _texts(name: str, shape: tuple[int, ...], texts: Sequence[str]) -> Tensor:
    return Tensor(name, BYTES, shape, [text.encode() for text in texts])


async def _apart(num_bytes: int, function: Any, *args: Any) -> Any:
    """Call the function, in a thread if there is much data."""
    return function(*args) if num_bytes <= INLINE_BYTES else await asyncio.to_thread(function, *args)


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
            body = generation_body(options, stream=stream)
            make = partial(
                GenerateFormat,
                text,
                body,
                first_token=service.first_token,
                request_id=call.request_id,
                model=name,
                version=VERSION,
                given_id=given_id,
                echo=echo,
            )
            fmt = await make_format(service, len(data), make, has_schema=has_schema(body))
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
