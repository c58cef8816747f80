"""Requests inside an event or a message, answered like a job's lines but without a job.

They share steps with all other work of the engine. An invalid request is answered with an error,
like an invalid line. Of a message with one request, the answer becomes an object, written once,
even for repeated messages; of others nothing is stored. This module does not know the source of
requests or the use of records, nor which messages fail.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from ....loader.errors import AlreadyExistsError, NotFoundError
from ....loader.sources.open import open_store
from ..answers import Answers, Record, answering
from ..index import JobIdentity, JobIndex
from ..input import Line, RawLine, parse_line, read_head
from ..worker import units_of
from .outputs import Outputs
from .parse import Asked, BatchRequest, EventError, JobFailedError, QueueMessage

if TYPE_CHECKING:
    from ....loader.sources.base import Store
    from ....runtime.instance.instance import Instance


MAX_LINE_BYTES = 1 << 20


def line_of(request: BatchRequest, number: int) -> Line:
    """The line of a request. Raises `EventError` if it is not a valid line."""
    return lines_of([request], first_number=number)[0]


def lines_of(requests: Sequence[BatchRequest], *, first_number: int = 1) -> list[Line]:
    """The lines of requests. A repeated `custom_id` is answered with an error. Raises `EventError`."""
    seen: set[object] = set()
    lines = []
    for number, request in enumerate(requests, start=first_number):
        raw = RawLine(number, 0, _encoded(request.fields, number))
        head = read_head(raw)
        custom_id = head.custom_id if head is not None else None
        lines.append(
            parse_line(
                raw,
                is_duplicate=custom_id is not None and custom_id in seen,
                job_is_openai=False,
                max_line_bytes=MAX_LINE_BYTES,
            )
        )
        seen.add(custom_id)
    return lines


def _encoded(fields: Mapping[str, Any], number: int) -> bytes | None:
    """The request as JSON; None if it is too long, which its line reports."""
    try:
        data = json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise EventError(f"request {number} is not JSON: {str(error)[:200]}") from error
    return data if len(data) <= MAX_LINE_BYTES else None


def number_of(message_id: str) -> int:
    """A number in place of a line's, from the message id: a redelivered message draws the same
    tokens.
    """
    return int.from_bytes(hashlib.sha256(message_id.encode()).digest()[:6], "big")


class Requests:
    """The requests of events. Lives on one event loop, in `answering_requests`."""

    def __init__(self, answers: Answers, *, window: int) -> None:
        self._answers = answers
        self._window = asyncio.Semaphore(window)

    async def answer(self, lines: Sequence[Line]) -> list[Record]:
        """A record for each line, in order. Raises the instance's own errors."""
        records: list[Record | None] = [None] * len(lines)

        async def some(indices: list[int]) -> None:
            async with self._window:
                chosen = [lines[index] for index in indices]
                answered = (
                    await self._answers.embed(chosen)
                    if len(chosen) > 1
                    else [await self._answers.one(chosen[0])]
                )
            for index, record in zip(indices, answered, strict=True):
                records[index] = record

        try:
            async with asyncio.TaskGroup() as group:
                for indices in units_of(lines):
                    group.create_task(some(indices))
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        return [record for record in records if record is not None]


@asynccontextmanager
async def answering_requests(host: Instance) -> AsyncIterator[Requests]:
    """Answer requests inside this context. The instance may still be loading."""
    config = host.config
    window = max(1, min(2 * config.max_running, config.max_running + (config.max_queued + 1) // 2))
    async with answering(host, _index_of(host), window=window) as answers:
        yield Requests(answers, window=window)


def _index_of(host: Instance) -> JobIndex:
    """An index that is never written, for the seeds and ids of records."""
    identity = JobIdentity("event", "", host.model_name, {})
    return JobIndex(
        identity=identity,
        key=identity.key,
        size_bytes=0,
        max_line_bytes=MAX_LINE_BYTES,
        num_lines=0,
        num_records=0,
        is_openai=False,
        parts=(),
        duplicates=b"",
    )


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class QueuedRequests:
    """The answers to messages. Lives on one event loop, in `open_queued_requests`."""

    def __init__(self, requests: Requests, store: Store, outputs: Outputs) -> None:
        self._requests = requests
        self._store = store
        self._outputs = outputs

    async def answer(self, message: QueueMessage, asked: Sequence[Asked | EventError]) -> None:
        """Answer a message; returns once the answer is stored.

        Raises `JobFailedError` for a message that is more than one request, and the errors of the
        instance or the store.
        """
        request = asked[0]
        if len(asked) != 1 or not isinstance(request, BatchRequest):
            raise JobFailedError("a message must have one request, or jobs")
        key = self._outputs.key_of_answer(message.queue, message.id)
        if await asyncio.to_thread(self._is_there, key):
            return
        fields = {"custom_id": message.id, **request.fields}
        (record,) = await self._requests.answer([line_of(BatchRequest(fields), number_of(message.id))])
        try:
            await asyncio.to_thread(self._store.put, key, record.data, if_absent=True)
        except AlreadyExistsError:
            return  # the same message was answered elsewhere

    def _is_there(self, key: str) -> bool:
        try:
            self._store.stat(key)
        except NotFoundError:
            return False
        return True


@asynccontextmanager
async def open_queued_requests(host: Instance, outputs: Outputs) -> AsyncIterator[QueuedRequests]:
    """Raises `JobFailedError` without a configured place for answers."""
    store = open_store(outputs.bucket_of_answers(), host.config.source_options)
    try:
        async with answering_requests(host) as requests:
            yield QueuedRequests(requests, store, outputs)
    finally:
        store.close()
