"""POST /v2/models/{name}/infer: tensors to the model, or to the user's function, and tensors back.

The JSON of request and response may be followed by bytes. `texts` converts the tensors of a
decoder, and `values` those of a function.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
from aiohttp import web
from msgspec import UNSET

from ....runtime.errors import CancelledError, RequestError
from ...function.context import Context
from ...function.handler import Handler, run
from ...http.invoke import SESSION_HEADER
from ...http.json_bodies import Decoder, encode
from ...http.service import CALL, Call, Service
from ...openai.generation import generate
from ...openai.parameters import tokens_of
from .metadata import datatype_of
from .schemas import InferenceRequest, InferenceResponse, RequestOutput, ResponseOutput
from .tensors import BYTES, MAX_TENSORS, Tensor, binary_data, event_of, json_data, read_tensors, tensors_of
from .texts import (
    TextRequest,
    flag,
    generation_body,
    options_of,
    prompts_of,
    split_parameters,
    takes_prompt_back,
    timeout_s,
    wants_stream,
)

# Of the JSON, if bytes follow it.
HEADER_LENGTH = "Inference-Header-Content-Length"
# Reading or writing more than this must not run on the event loop.
INLINE_BYTES = 64 << 10
MAX_RESULTS = 4_096  # values of a function that returns several


@dataclass(frozen=True, slots=True)
class Asked:
    """One parsed request."""

    request: InferenceRequest
    tensors: dict[str, Tensor]
    parameters: dict[str, Any]  # without the protocol's own


class Inference:
    """The handler of `infer`."""

    def __init__(self, service: Service, handler: Handler | None) -> None:
        self._service = service
        self._handler = handler
        self._decoder = Decoder(InferenceRequest)

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

    def _read(self, request: web.Request, data: bytearray) -> Asked:
        head, binary = _split(data, request.headers.get(HEADER_LENGTH))
        body = self._decoder.decode(head)
        if len(body.outputs or ()) > MAX_TENSORS:
            raise RequestError(f"at most {MAX_TENSORS} outputs are allowed", param="outputs")
        for output in body.outputs or ():
            _check_output(output)
        return Asked(body, read_tensors(body.inputs, binary), split_parameters(body.parameters))

    async def _outputs(self, asked: Asked, call: Call, request: web.Request, body_bytes: int) -> list[Tensor]:
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

    async def _generate(self, asked: Asked, call: Call, body_bytes: int) -> list[Tensor]:
        service, tensors = self._service, dict(asked.tensors)
        _, texts, shape = prompts_of(tensors, max_prompts=service.limits.max_sequences)
        options = options_of(tensors, asked.parameters)
        if wants_stream(options):
            raise RequestError(
                "infer returns whole texts", param="stream", hint="Use generate_stream for a stream."
            )
        echo = takes_prompt_back(options)
        wanted = TextRequest(
            texts,
            generation_body(options, stream=False),
            first_token=service.first_token,
            request_id=call.request_id,
        )
        outcomes, _ = await generate(service, call, wanted, body_bytes)
        answers = [outcome.text for outcome in outcomes]
        if echo:
            answers = [prompt + answer for prompt, answer in zip(texts, answers, strict=True)]
        reasons = [str(outcome.finish_reason) for outcome in outcomes]
        return [_texts("text_output", shape, answers), _texts("finish_reason", shape, reasons)]

    async def _embed(self, asked: Asked, call: Call, body_bytes: int) -> list[Tensor]:
        service, tensors = self._service, dict(asked.tensors)
        name, texts, _ = prompts_of(tensors, max_prompts=service.limits.max_embedding_inputs)
        if tensors or asked.parameters:
            unknown = next(iter([*tensors, *asked.parameters]))
            raise RequestError(f"a model that embeds has no parameter {unknown[:100]!r}", param=unknown[:100])
        with service.admission.waiting(1):
            tokenizer = await service.tokenizer()
            embedder = await service.ready(service.instance.embedder)
            encode_text = partial(tokenizer.encode, max_tokens=embedder.max_tokens)
            token_lists = await service.text_threads.run(
                body_bytes, lambda: [tokens_of(text, encode_text, param=name) for text in texts]
            )
        service.metrics.prompt_taken(sum(map(len, token_lists)))
        call.limit(service.limits.request_timeout_s)
        vectors = await asyncio.wrap_future(embedder.embed(token_lists))  # (N, dim) float32
        return [Tensor("embedding", "FP32", vectors.shape, vectors.reshape(-1))]

    async def _compute(self, asked: Asked, call: Call) -> list[Tensor]:
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

    async def _run(self, handler: Handler, asked: Asked, call: Call, session: str | None) -> Any:
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
