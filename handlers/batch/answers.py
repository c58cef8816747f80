"""The answers to a job's lines, from the instance that serves the model, and their records.

Requests in OpenAI's form go through the HTTP API's own routes, inside this process, so that they
are answered as by a server, in the form of OpenAI's batch output; plain requests go to the model as
a handler's do, and become small flat records; files of sound go through the routes, too. A record is one line of
JSON, which shows whether it is an error.

A line refused by an overloaded instance is retried with growing delays. After an error of the
instance, the line is retried without other failed lines in parallel: a line that breaks the model
breaks the step that others share. If it still fails, the error is the line's own if the model
answers a simple request at that moment; otherwise the instance is broken, and its error is raised.
This module does not know parts, nor where records are written.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
import msgspec

from ...loader.errors import AccessDeniedError, ChangedError, NotFoundError, TeneralError
from ...runtime.errors import (
    WEIGHTS_LOST,
    CapacityError,
    ContextLengthError,
    DrainingError,
    ModelError,
    RequestError,
)
from ...runtime.state import State
from ...runtime.step.requests import Priority
from ..function.context import Context
from ..function.options import check_options
from ..http.keys import parse_keys
from .index import JobIndex
from .input import TRANSCRIPTIONS, Embed, Generate, Line, LineProblem, RouteCall, Transcribe
from .sounds import SILENCE, Files
from .spec import ModelBrokenError

if TYPE_CHECKING:
    import numpy as np

    from ...runtime.instance.instance import Instance
    from ..function.streams import Completion


# The job as a whole may have a deadline.
REQUEST_TIMEOUT_S = 86_400.0
MAX_FILES_HELD = 4  # in memory, each until its answer is there


class Answers:
    """The answers of one job. Lives on one event loop."""

    def __init__(
        self,
        host: Instance,
        session: aiohttp.ClientSession,
        index: JobIndex,
        *,
        files: Files | None = None,
        max_file_bytes: int = 0,
    ) -> None:
        """`files` are those that lines may name; None: none."""
        self._host = host
        self._session = session
        self._index = index
        self._files = files
        self._max_file_bytes = max_file_bytes
        self._files_held = asyncio.Semaphore(MAX_FILES_HELD)
        self._headers: dict[str, str] = {}
        if host.config.api_key is not None:
            self._headers["Authorization"] = f"Bearer {parse_keys(host.config.api_key)[0]}"
        self._retrier = LineRetrier(host, self.probe)

    async def one(self, line: Line) -> Record:
        """The record of any line. Raises the instance's own errors, `DrainingError` among them."""
        match line.request:
            case LineProblem() as problem:
                return self._failed(line, problem)
            case RouteCall() as call:
                return await self._call(line, call)
            case Generate() as request:
                return await self._plain(line, lambda: self._generate(line, request))
            case Embed() as text:
                return await self._plain(line, lambda: self._embed(line, text))
            case Transcribe() as sound:
                async with self._files_held:
                    return await self.transcribe(line, sound)

    async def embed(self, lines: Sequence[Line]) -> list[Record]:
        """The records of lines to embed: in one call, or after an error, one by one."""
        texts = [line.request.text for line in lines if isinstance(line.request, Embed)]
        try:
            vectors = await self._context(lines[0]).model.aembed(texts)
        except (RequestError, CapacityError, ModelError):
            return [await self.one(line) for line in lines]
        return [embedded(line, vector) for line, vector in zip(lines, vectors, strict=True)]

    async def _generate(self, line: Line, request: Generate) -> Record:
        options = dict(request.options)
        check_options(options)
        if options.get("seed") is None:
            options["seed"] = self._index.seed(line.number)
        if options.get("priority") is None:
            options["priority"] = str(Priority.BATCH)
        completion = await self._context(line).model.agenerate(request.prompt, **options)
        return generated(line, completion)

    async def _embed(self, line: Line, request: Embed) -> Record:
        vectors: np.ndarray = await self._context(line).model.aembed([request.text])
        return embedded(line, vectors[0])

    async def _plain(self, line: Line, ask: Callable[[], Awaitable[Record]]) -> Record:
        try:
            return await self._retrier.until_answered(ask)
        except LineError as fault:
            return self._failed(line, _problem_of(fault.error))

    async def _call(self, line: Line, call: RouteCall) -> Record:
        body = msgspec.json.encode(self._with_defaults(line, call))
        return await self._post(line, call.url, lambda: body, {"Content-Type": "application/json"})

    async def transcribe(self, line: Line, request: Transcribe) -> Record:
        files = self._files
        if files is None:
            return self._failed(line, LineProblem("invalid_request", "files are answered in jobs alone"))
        read = partial(files.read, request.file, request.version, max_bytes=self._max_file_bytes)
        try:
            sound = await asyncio.to_thread(read)
        except (NotFoundError, AccessDeniedError, RequestError, ChangedError) as error:
            if isinstance(error, ChangedError) and files.are_input:
                raise
            return self._failed(line, LineProblem("unreadable_file", error.message))
        given = dict(request.fields)
        defaults = {"seed": str(self._index.seed(line.number)), "teneral[priority]": str(Priority.BATCH)}
        more = [(name, value) for name, value in defaults.items() if name not in given]
        return await self._post(line, request.url, lambda: _form(sound, [*request.fields, *more]), {})

    async def _post(
        self, line: Line, url: str, make_data: Callable[[], bytes | aiohttp.FormData], more: dict[str, str]
    ) -> Record:
        """The record of the route's answer. `make_data` is called for each try."""
        record_id = self._index.record_id(line.number)
        headers = {**self._headers, **more, "x-request-id": f"req_{record_id}"}
        status, answer = 0, b""

        async def post() -> None:
            nonlocal status, answer
            try:
                async with self._session.post(url, data=make_data(), headers=headers) as response:
                    status, answer = response.status, await response.read()
            except aiohttp.ClientError as error:
                raise ModelError(f"the instance did not answer: {error}") from error
            if status == 429:
                raise CapacityError("the instance is overloaded")
            if status >= 500:
                text = answer.decode(errors="replace")[:300]
                raise ModelError(f"the instance answered {status} to line {line.number}: {text}")

        try:
            await self._retrier.until_answered(post)
        except LineError as fault:
            if not answer:
                return self._failed(line, _problem_of(fault.error))
        answered = answered_call if line.is_openai else transcribed
        return answered(line, record_id, status, answer)

    def _with_defaults(self, line: Line, call: RouteCall) -> dict[str, object]:
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

    async def probe(self) -> None:
        """A request that the model can always answer."""
        model = Context(self._host, request_id="batch-probe").model
        engine = self._host.engine
        if await self._takes_sound():
            data = _form(SILENCE, [("teneral[priority]", str(Priority.BATCH))])
            async with self._session.post(TRANSCRIPTIONS, data=data, headers=self._headers) as response:
                if response.status != 200:
                    raise ModelError(f"the instance answered {response.status}")
            return
        if engine.done() and engine.exception() is not None:
            await model.aembed(["a"])
        else:
            await model.agenerate("a", max_tokens=1, priority="batch")

    async def _takes_sound(self) -> bool:
        with suppress(TeneralError):
            tokenizer = await asyncio.shield(asyncio.wrap_future(self._host.tokenizer))
            return tokenizer.speech is not None
        return False

    def _context(self, line: Line) -> Context:
        return Context(self._host, request_id=f"batch-{self._index.record_id(line.number)}")

    def _failed(self, line: Line, problem: LineProblem) -> Record:
        return failed(line, self._index.record_id(line.number), problem)


def _problem_of(error: TeneralError) -> LineProblem:
    message = f"{error.message}. {error.hint}" if error.hint else error.message
    if isinstance(error, ContextLengthError):
        return LineProblem("context_length_exceeded", message)
    if isinstance(error, CapacityError):
        return LineProblem("rate_limit_exceeded", message)
    if isinstance(error, RequestError):
        return LineProblem(getattr(error, "code", "invalid_request"), message)
    return LineProblem("failed", message)


@asynccontextmanager
async def answering(
    host: Instance, index: JobIndex, *, window: int, files: Files | None = None
) -> AsyncIterator[Answers]:
    """Answer requests inside this context; lines may name `files`. The instance may still be loading."""
    # A web server, which a job of plain lines does not need.
    from ..http.application import make_application
    from ..http.limits import Limits
    from ..http.server import serving_inside
    from ..http.service import later, web_routes
    from ..openai.routes import ROUTES

    limits = Limits.from_config(host.config)
    max_body_bytes = max(limits.max_body_bytes, index.max_line_bytes + (1 << 16))
    limits = msgspec.structs.replace(
        limits,
        max_connections=max(limits.max_connections, 2 * window),
        max_in_flight=max(limits.max_in_flight, 2 * window),
        max_body_bytes=max_body_bytes,
        max_body_bytes_in_flight=max(limits.max_body_bytes_in_flight, 2 * max_body_bytes),
        request_timeout_s=REQUEST_TIMEOUT_S,
    )
    app = make_application(host, lambda service: web_routes(ROUTES, partial(later, service)), limits=limits)
    async with serving_inside(app) as session:
        yield Answers(host, session, index, files=files, max_file_bytes=max_body_bytes)


@dataclass(frozen=True, slots=True)
class Record:
    """A record. `data` ends with a line end."""

    data: bytes
    is_failed: bool
    num_tokens: int = 0  # generated tokens


class _AnswerUsage(msgspec.Struct):
    completion_tokens: int = 0


class _Body(msgspec.Struct):
    usage: _AnswerUsage | None = None


_BODY = msgspec.json.Decoder(_Body)


def answered_call(line: Line, record_id: str, status: int, body: bytes) -> Record:
    """The record of an HTTP API answer. `body` is its unchanged JSON on one line."""
    try:
        usage = _BODY.decode(body).usage
    # Our own routes never return that.
    except (msgspec.DecodeError, UnicodeDecodeError):
        usage, body = None, msgspec.json.encode(body.decode(errors="replace"))
    response = {"status_code": status, "request_id": f"req_{record_id}", "body": msgspec.Raw(body)}
    return Record(
        _line(_openai(line, record_id, response, None)),
        is_failed=status != 200,
        num_tokens=usage.completion_tokens if usage is not None else 0,
    )


def transcribed(line: Line, record_id: str, status: int, body: bytes) -> Record:
    """The flat record of a transcript's JSON, or of its error's."""
    fields: dict[str, Any] = msgspec.json.decode(body)
    if status != 200:
        error = fields["error"]
        return failed(line, record_id, LineProblem(error.get("code") or "invalid_request", error["message"]))
    return Record(_line({"custom_id": line.custom_id, **fields}), is_failed=False)


def _form(sound: bytes | bytearray, fields: Sequence[tuple[str, str]]) -> aiohttp.FormData:
    form = aiohttp.FormData()
    form.add_field("file", sound, filename="sound", content_type="application/octet-stream")
    for name, value in fields:
        form.add_field(name, value)
    return form


def generated(line: Line, completion: Completion) -> Record:
    record = {"custom_id": line.custom_id, **completion.to_dict()}
    return Record(_line(record), is_failed=False, num_tokens=completion.usage.completion_tokens)


def embedded(line: Line, vector: np.ndarray) -> Record:
    return Record(_line({"custom_id": line.custom_id, "embedding": vector.tolist()}), is_failed=False)


def failed(line: Line, record_id: str, problem: LineProblem) -> Record:
    error = {"code": problem.code, "message": problem.message}
    if line.is_openai:
        return Record(_line(_openai(line, record_id, None, error)), is_failed=True)
    return Record(_line({"custom_id": line.custom_id, "error": error}), is_failed=True)


def _openai(
    line: Line, record_id: str, response: dict[str, Any] | None, error: dict[str, str] | None
) -> dict[str, Any]:
    return {
        "id": f"batch_req_{record_id}",
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
    }


def _line(record: dict[str, Any]) -> bytes:
    return msgspec.json.encode(record) + b"\n"


MAX_TRIES_AS_SUSPECT = 2
# The time in which a failed instance reports it.
SUSPECT_PAUSE_S = 0.05
# Of a line that finds no capacity although no other request of the job uses any.
MAX_TRIES_ALONE = 20
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 5.0

T = TypeVar("T")


class LineError(Exception):
    """A line's own error: `error`."""

    def __init__(self, error: TeneralError) -> None:
        super().__init__(error.message)
        self.error = error


class LineRetrier:
    """The retry policy of one job. Lives on one event loop. `probe` sends a request that the model
    can always answer.
    """

    def __init__(self, host: Instance, probe: Callable[[], Awaitable[object]]) -> None:
        self._host = host
        self._probe = probe
        self._suspects = asyncio.Lock()
        self._num_asking = 0

    async def until_answered(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Call `ask` until it has a result.

        Raises `LineError`, or the error that keeps this instance from answering any line:
        `DrainingError`, its failure, or `ModelBrokenError`.
        """
        try:
            return await self._once(ask)
        except (LineError, DrainingError):
            raise
        except TeneralError as error:
            last = error
        async with self._suspects:
            for _ in range(MAX_TRIES_AS_SUSPECT):
                await asyncio.sleep(SUSPECT_PAUSE_S)
                self._check_host(last)
                try:
                    return await self._once(ask)
                except (LineError, DrainingError):
                    raise
                except TeneralError as error:
                    last = error
            self._check_host(last)
            await self._check_model(last)
        raise LineError(last)

    async def _once(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Retry until there is capacity.

        `CapacityError` is the line's own error only if it repeats while no other request of this
        job uses any capacity: the line then needs more than there is.
        """
        pause_s, num_alone = FIRST_PAUSE_S, 0
        self._num_asking += 1
        try:
            while True:
                try:
                    return await ask()
                except CapacityError as error:
                    num_alone += self._num_asking == 1
                    if num_alone >= MAX_TRIES_ALONE:
                        raise LineError(error) from error
                except RequestError as error:
                    raise LineError(error) from error
                except ModelError as error:
                    if not self._is_refused(error):
                        raise
                    raise LineError(RequestError(error.message, hint=error.hint)) from error
                # jittered, to not retry all at once
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
        finally:
            self._num_asking -= 1

    def _is_refused(self, error: ModelError) -> bool:
        """True if this kind of model does not support the request: a retry cannot help."""
        parts: tuple[Future[Any], ...] = (self._host.engine, self._host.embedder)
        return error is not self._host.failure and any(
            part.done() and part.exception() is error for part in parts
        )

    def _check_host(self, error: TeneralError) -> None:
        """Raise if the instance itself reports that it cannot answer."""
        if self._host.failure is not None:
            raise self._host.failure
        if isinstance(error, WEIGHTS_LOST):
            raise error
        if self._host.state is State.DRAINING:
            raise DrainingError("the instance is shutting down")

    async def _check_model(self, error: TeneralError) -> None:
        """Raise `ModelBrokenError` if the model does not answer the simple request either."""
        try:
            await self._once(self._probe)
        except DrainingError:
            raise
        except (LineError, TeneralError) as failure:
            self._check_host(error)
            raise ModelBrokenError(
                f"the model has stopped answering: {error.message}",
                hint="Finished parts are kept: run the job again, here or on another machine.",
            ) from failure
