"""Batch jobs started by events: `teneral serve MODEL --handler teneral.handlers.batch:handler`
(docs/batch.md).

An ordinary handler: events of S3, EventBridge, Cloud Storage and Event Grid, messages of SQS, SNS
and Pub/Sub, items of Step Functions, and jobs by name. Every job runs through `arun_job`, so the
same event may arrive any number of times, also concurrently. A second before its deadline, it
returns the unfinished work: as an error worth a retry, a failed message, or a report, in the form
that the event's sender understands.

Of a batch of SQS, messages without a group run concurrently. Those of a group run one after
another, and after the first failure the rest fail untried: they are redelivered in order. This
module knows no platform, and not the requests of a message.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import msgspec

from ....loader.errors import ChangedError, TeneralError
from ....runtime.errors import CancelledError
from ...function.lifetime import Lifetime
from ..job import arun_job
from ..spec import Status
from .outputs import Outputs
from .parse import (
    Asked,
    AwaitedCall,
    BatchRequest,
    EventError,
    Handshake,
    Ignored,
    Items,
    Job,
    JobFailedError,
    JobRetryError,
    Notice,
    Queue,
    QueueMessage,
    as_job_error,
    parse_event,
    parse_message,
)
from .requests import QueuedRequests, answering_requests, lines_of, open_queued_requests

if TYPE_CHECKING:
    from ....runtime.instance.instance import Instance
    from ...function.context import Context


HAND_BACK_S = 1.0  # before the deadline: the time to return the result
# At most this share of the time.
HAND_BACK_SHARE = 0.1

_log = logging.getLogger("teneral.batch")


async def handler(event: Any, context: Context) -> Any:
    """Handle an event. Returns a report or a record, a list of them, or SQS's partial batch
    response.

    Raises `EventError`, `JobRetryError` or `JobFailedError`, and no other expected error.
    """
    try:
        asked = parse_event(event)
        run = _Run(cast("Instance", context.host), _lifetime_of(context))
        match asked:
            case Queue(messages):
                return await run.queue(messages)
            case AwaitedCall(one):
                return (await run.all_of([one]))[0]
            case Items(several):
                return await run.all_of(several)
            case Notice(several):
                return {"results": await run.each_of(several)}
            case Handshake(code):
                return {"validationResponse": code}
    except TeneralError as error:
        found = as_job_error(error)
        if found is error:
            raise
        raise found from error


class _Run:
    """The handling of one event. Lives on one event loop."""

    def __init__(self, host: Instance, lifetime: Lifetime) -> None:
        self._host = host
        self._lifetime = lifetime
        self._outputs = Outputs.of(host.config.batch_output, host.config.batch_answers)
        # A job uses the whole engine; the next one starts after it.
        self._one_job = asyncio.Lock()

    async def all_of(self, asked: Sequence[Asked]) -> list[Any]:
        """Reports and records in the order of `asked`. An incomplete job is marked in its report.
        Raises the first error.
        """
        lines = iter(await self._records([of for of in asked if isinstance(of, BatchRequest)]))
        return [next(lines) if isinstance(of, BatchRequest) else await self._do(of) for of in asked]

    async def each_of(self, asked: Sequence[Asked | EventError]) -> list[Any]:
        """Reports and records for a sender that does not wait: everything is tried before an error
        is raised, and an incomplete job is an error.
        """
        results, errors = [], []
        for of in asked:
            try:
                results.append(self._complete(await self._do(of)))
            except TeneralError as error:
                errors.append(as_job_error(error))
        if errors:
            raised = next((error for error in errors if isinstance(error, JobRetryError)), errors[0])
            for other in errors:
                if other is not raised:
                    _log.error("%s", other)
            raise raised
        return results

    async def queue(self, messages: Sequence[QueueMessage]) -> dict[str, Any]:
        """The partial batch response."""
        asked = {message.id: _asked_by(message) for message in messages}
        has_requests = any(isinstance(of, BatchRequest) for parts in asked.values() for of in parts)
        async with AsyncExitStack() as stack:
            queued: QueuedRequests | None = None
            if has_requests and self._outputs.answers is not None:
                queued = await stack.enter_async_context(open_queued_requests(self._host, self._outputs))

            async def do(message: QueueMessage) -> None:
                parts = asked[message.id]
                if queued is not None and any(isinstance(of, BatchRequest) for of in parts):
                    async with self._in_time():
                        await queued.answer(message, parts)
                else:
                    await self.each_of(parts)

            return await work_off(messages, do)

    # asked

    async def _do(self, asked: Asked | EventError) -> dict[str, Any]:
        match asked:
            case EventError() as error:
                raise error
            case Job() as job:
                return await self._job(job)
            case Ignored(reason):
                _log.info("ignored: %s", reason)
                return {"status": "ignored", "reason": reason}
            case BatchRequest():
                raise JobFailedError(
                    "the answer to a request in this kind of event would be lost",
                    hint="Invoke the function with it, or send it to a queue and set TENERAL_BATCH_ANSWERS.",
                )

    async def _job(self, job: Job) -> dict[str, Any]:
        output = self._outputs.of_job(job)
        if isinstance(output, Ignored):
            return await self._do(output)
        spec = job.spec(output)
        async with self._one_job:
            try:
                report = await arun_job(spec, self._host, lifetime=self._lifetime)
            except ChangedError as error:
                if not (job.is_upload and f"{error.source.rstrip('/')}/{error.name}" == job.input.url):
                    raise
                _log.warning("%s", error)
                return {"status": "superseded", "input": job.input.url, "reason": error.message}
        return {"input": job.input.url, **report.as_json()}

    def _complete(self, result: dict[str, Any]) -> dict[str, Any]:
        """Raise `JobRetryError` if something is left to do."""
        if result["status"] != Status.INCOMPLETE:
            return result
        raise JobRetryError(
            f"{result['output']} has {result['records_done']} of {result['records']} records: {result['stopped_by']}",
            hint="Another run continues from there.",
        )

    async def _records(self, asked: Sequence[BatchRequest]) -> list[Any]:
        if not asked:
            return []
        lines = lines_of(asked)
        async with answering_requests(self._host) as requests, self._in_time():
            return [msgspec.json.decode(record.data) for record in await requests.answer(lines)]

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """Raise `JobRetryError` if the time is over first."""
        left_s = self._lifetime.remaining_s()
        try:
            async with asyncio.timeout(None if left_s == math.inf else left_s):
                yield
        except TimeoutError:
            raise JobRetryError("the time was over before all requests were answered") from None


def _asked_by(message: QueueMessage) -> Sequence[Asked | EventError]:
    """The requests of a message; an `EventError` in place of an invalid event, which fails only
    this message.
    """
    try:
        return parse_message(message.body)
    except EventError as error:
        return [error]


def _lifetime_of(context: Context) -> Lifetime:
    """A lifetime slightly shorter than the invocation's. Cancelling the invocation cancels the task
    that runs this.
    """
    left_s = context.remaining_time_s()
    if left_s == math.inf:
        return Lifetime()
    if left_s <= 0:
        raise CancelledError("the invocation has no time left")
    return Lifetime(left_s - min(HAND_BACK_S, HAND_BACK_SHARE * left_s))


async def work_off(
    messages: Sequence[QueueMessage], do: Callable[[QueueMessage], Awaitable[object]]
) -> dict[str, list[dict[str, str]]]:
    """Run `do` for all messages. Returns the partial batch response: the failed messages, in the
    order of the batch.

    Raises nothing except cancellation: an error of one message, of any kind, must not redeliver the
    others.
    """
    lanes: dict[str, list[QueueMessage]] = {}
    for number, message in enumerate(messages):
        name = f"message {number}" if message.group is None else f"group {message.group}"
        lanes.setdefault(name, []).append(message)
    failed: set[str] = set()

    async def work(lane: list[QueueMessage]) -> None:
        for done, message in enumerate(lane):
            try:
                await do(message)
            except Exception as error:  # noqa: BLE001 - as above
                _tell(message, error)
                failed.update(left.id for left in lane[done:])
                return

    async with asyncio.TaskGroup() as group:
        for lane in lanes.values():
            group.create_task(work(lane))
    return response_of([message.id for message in messages if message.id in failed])


def response_of(failed: Sequence[str]) -> dict[str, Any]:
    return {"batchItemFailures": [{"itemIdentifier": message_id} for message_id in failed]}


def _tell(message: QueueMessage, error: Exception) -> None:
    """Log the error, for the reader of a dead-letter queue."""
    if not isinstance(error, TeneralError):
        _log.error("message %s of %s failed", message.id, message.queue, exc_info=error)
        return
    found = as_job_error(error)
    if isinstance(found, JobFailedError):
        _log.error("message %s of %s can never succeed: %s", message.id, message.queue, found)
    else:
        _log.warning("message %s of %s will be redelivered: %s", message.id, message.queue, found)
