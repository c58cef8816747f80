"""Messages with one request each: the answer becomes an object, written once, even for repeated
messages.

This module does not decide which messages fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from ....loader.errors import AlreadyExistsError, NotFoundError
from ....loader.sources.open import open_store
from .errors import EventError, JobFailedError
from .outputs import Outputs
from .parse import Asked, Message, Request
from .requests import Requests, answering_requests, line_of, number_of

if TYPE_CHECKING:
    from ....loader.sources.base import Store
    from ....runtime.instance import Instance


class Desk:
    """The answers to messages. Lives on one event loop, in `open_desk`."""

    def __init__(self, requests: Requests, store: Store, outputs: Outputs) -> None:
        self._requests = requests
        self._store = store
        self._outputs = outputs

    async def answer(self, message: Message, asked: Sequence[Asked | EventError]) -> None:
        """Answer a message; returns once the answer is stored.

        Raises `JobFailedError` for a message that is more than one request, and the errors of the
        instance or the store.
        """
        request = asked[0]
        if len(asked) != 1 or not isinstance(request, Request):
            raise JobFailedError("a message must have one request, or jobs")
        key = self._outputs.key_of_answer(message.queue, message.id)
        if await asyncio.to_thread(self._is_there, key):
            return
        fields = {"custom_id": message.id, **request.fields}
        (record,) = await self._requests.answer([line_of(Request(fields), number_of(message.id))])
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
async def open_desk(host: Instance, outputs: Outputs) -> AsyncIterator[Desk]:
    """Raises `JobFailedError` without a configured place for answers."""
    store = open_store(outputs.bucket_of_answers(), host.config.source_options)
    try:
        async with answering_requests(host) as requests:
            yield Desk(requests, store, outputs)
    finally:
        store.close()
