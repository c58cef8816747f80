"""The messages of one batch of SQS: which of them failed, as Lambda wants to hear it.

Messages without a group are worked on at the same time. Of a group, one comes after the other, and after the first that
fails the rest fail untried: they come again in their order. It does not know what a message asks for.
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
    """The partial batch response: the messages that `do` failed for are in it, in the order of the batch.

    Raises nothing but being cancelled: one message's trouble, of whatever kind, must not bring the others back.
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
    """In the log, where whoever finds the message in a dead-letter queue looks for the reason."""
    if not isinstance(error, TeneralError):
        _log.error("message %s of %s failed", message.id, message.queue, exc_info=error)
        return
    found = as_job_error(error)
    if isinstance(found, JobFailedError):
        _log.error("message %s of %s can never succeed: %s", message.id, message.queue, found)
    else:
        _log.warning("message %s of %s is to come again: %s", message.id, message.queue, found)
