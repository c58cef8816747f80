"""The answers to requests, from the instance that serves the model.

Requests in OpenAI's form go through the HTTP API's own routes, inside this process, so that they
are answered as by a server; plain requests go to the model as a handler's do. An error of a line
becomes an error record; an error of the instance is raised. This module does not know parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import aiohttp
import msgspec

from ...loader.errors import TeneralError
from ...runtime.errors import CapacityError, ContextLengthError, ModelError, RequestError
from ...runtime.step.requests import Priority
from ..function.context import Context
from ..function.options import check_options
from ..http.keys import parse_keys
from . import records
from .index import JobIndex
from .lines import Call, Embed, Generate, Line, Problem
from .patience import LineFault, Patience
from .records import Record

if TYPE_CHECKING:
    import numpy as np

    from ...runtime.instance import Instance

# The job as a whole may have a deadline.
REQUEST_TIMEOUT_S = 86_400.0


class Answers:
    """The answers of one job. Lives on one event loop."""

    def __init__(self, host: Instance, session: aiohttp.ClientSession, index: JobIndex) -> None:
        self._host = host
        self._session = session
        self._index = index
        self._headers = {"Content-Type": "application/json"}
        if host.config.api_key is not None:
            self._headers["Authorization"] = f"Bearer {parse_keys(host.config.api_key)[0]}"
        self._patience = Patience(host, self._probe)

    async def one(self, line: Line) -> Record:
        """The record of any line. Raises the instance's own errors, `DrainingError` among them."""
        match line.request:
            case Problem() as problem:
                return self._failed(line, problem)
            case Call() as call:
                return await self._call(line, call)
            case Generate() as request:
                return await self._plain(line, lambda: self._generate(line, request))
            case Embed() as text:
                return await self._plain(line, lambda: self._embed(line, text))

    async def embed(self, lines: Sequence[Line]) -> list[Record]:
        """The records of lines to embed: in one call, or after an error, one by one."""
        texts = [line.request.text for line in lines if isinstance(line.request, Embed)]
        try:
            vectors = await self._context(lines[0]).model.aembed(texts)
        except (RequestError, CapacityError, ModelError):
            return [await self.one(line) for line in lines]
        return [records.embedded(line, vector) for line, vector in zip(lines, vectors, strict=True)]

    async def _generate(self, line: Line, request: Generate) -> Record:
        options = dict(request.options)
        check_options(options)
        if options.get("seed") is None:
            options["seed"] = self._index.seed(line.number)
        if options.get("priority") is None:
            options["priority"] = str(Priority.BATCH)
        completion = await self._context(line).model.agenerate(request.prompt, **options)
        return records.generated(line, completion)

    async def _embed(self, line: Line, request: Embed) -> Record:
        vectors: np.ndarray = await self._context(line).model.aembed([request.text])
        return records.embedded(line, vectors[0])

    async def _plain(self, line: Line, ask: Callable[[], Awaitable[Record]]) -> Record:
        try:
            return await self._patience.until_answered(ask)
        except LineFault as fault:
            return self._failed(line, _problem_of(fault.error))

    async def _call(self, line: Line, call: Call) -> Record:
        body = msgspec.json.encode(self._with_defaults(line, call))
        record_id = self._index.record_id(line.number)
        headers = {**self._headers, "x-request-id": f"req_{record_id}"}
        status, answer = 0, b""

        async def post() -> None:
            nonlocal status, answer
            try:
                async with self._session.post(call.url, data=body, headers=headers) as response:
                    status, answer = response.status, await response.read()
            except aiohttp.ClientError as error:
                raise ModelError(f"the instance did not answer: {error}") from error
            if status == 429:
                raise CapacityError("the instance is overloaded")
            if status >= 500:
                text = answer.decode(errors="replace")[:300]
                raise ModelError(f"the instance answered {status} to line {line.number}: {text}")

        try:
            await self._patience.until_answered(post)
        except LineFault as fault:
            if not answer:
                return self._failed(line, _problem_of(fault.error))
        return records.answered_call(line, record_id, status, answer)

    def _with_defaults(self, line: Line, call: Call) -> dict[str, object]:
        """The body with a default seed and the priority of batch work."""
        if call.url == "/v1/embeddings":
            return call.body
        body = dict(call.body)
        if body.get("seed") is None:
            body["seed"] = self._index.seed(line.number)
        extras = body.get("teneral")
        if extras is None or isinstance(extras, dict):
            given = extras or {}
            priority = given.get("priority") or str(Priority.BATCH)
            body["teneral"] = {**given, "priority": priority}
        return body

    async def _probe(self) -> None:
        """A request that the model can always answer."""
        model = Context(self._host, request_id="batch-probe").model
        engine = self._host.engine
        if engine.done() and engine.exception() is not None:
            await model.aembed(["a"])
        else:
            await model.agenerate("a", max_tokens=1, priority="batch")

    def _context(self, line: Line) -> Context:
        return Context(self._host, request_id=f"batch-{self._index.record_id(line.number)}")

    def _failed(self, line: Line, problem: Problem) -> Record:
        return records.failed(line, self._index.record_id(line.number), problem)


def _problem_of(error: TeneralError) -> Problem:
    message = f"{error.message}. {error.hint}" if error.hint else error.message
    if isinstance(error, ContextLengthError):
        return Problem("context_length_exceeded", message)
    if isinstance(error, CapacityError):
        return Problem("rate_limit_exceeded", message)
    if isinstance(error, RequestError):
        return Problem(getattr(error, "code", "invalid_request"), message)
    return Problem("failed", message)


@asynccontextmanager
async def answering(host: Instance, index: JobIndex, *, window: int) -> AsyncIterator[Answers]:
    """Answer requests inside this context. The instance may still be loading."""
    # A web server, which a job of plain lines does not need.
    from ..http.application import make_application
    from ..http.limits import Limits
    from ..http.server import serving_inside
    from ..openai.routes import openai_routes

    limits = Limits.from_config(host.config)
    max_body_bytes = max(limits.max_body_bytes, index.max_line_bytes + (1 << 16))
    limits = dataclasses.replace(
        limits,
        max_connections=max(limits.max_connections, 2 * window),
        max_in_flight=max(limits.max_in_flight, 2 * window),
        max_body_bytes=max_body_bytes,
        max_body_bytes_in_flight=max(limits.max_body_bytes_in_flight, 2 * max_body_bytes),
        request_timeout_s=REQUEST_TIMEOUT_S,
    )
    async with serving_inside(make_application(host, openai_routes, limits=limits)) as session:
        yield Answers(host, session, index)
