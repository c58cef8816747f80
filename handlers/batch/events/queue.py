"""The messages of one batch of SQS, and the report of the failed ones for Lambda.

Messages without a group run concurrently. Those of a group run one after another, and after the
first failure the rest fail untried: they are redelivered in order. This module does not know the
requests of a message.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ....loader.errors import TeneralError
from .errors import JobFailedError, as_job_error
from .parse import Message

_log = logging.getLogger("teneral.batch")


async def work_off(
    messages: Sequence[Message], do: Callable[[Message], Awaitable[object]]
) -> dict[str, list[dict[str, str]]]:
    """Run `do` for all messages. Returns the partial batch response: the failed messages, in the
    order of the batch.

    Raises nothing except cancellation: an error of one message, of any kind, must not redeliver the
    others.
    """
    lanes: dict[str, list[Message]] = {}
    for number, message in enumerate(messages):
        name = f"message {number}" if message.group is None else f"group {message.group}"
        lanes.setdefault(name, []).append(message)
    failed: set[str] = set()

    async def work(lane: list[Message]) -> None:
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


def _tell(message: Message, error: Exception) -> None:
    """Log the error, for the reader of a dead-letter queue."""
    if not isinstance(error, TeneralError):
        _log.error("message %s of %s failed", message.id, message.queue, exc_info=error)
        return
    found = as_job_error(error)
    if isinstance(found, JobFailedError):
        _log.error("message %s of %s can never succeed: %s", message.id, message.queue, found)
    else:
        _log.warning("message %s of %s will be redelivered: %s", message.id, message.queue, found)
