"""The stored entries that a request to the Responses API continues, and the one that it leaves."""

from __future__ import annotations

import logging

from ...runtime.errors import RequestError
from ..http.json_bodies import encode
from ..http.service import Service
from .response_items import InputItem, as_item, stored_items
from .response_objects import ResponseObjects
from .response_output import COMPLETED, INCOMPLETE
from .response_store import (
    IN_PROGRESS,
    QUEUED,
    Conversation,
    Json,
    MemoryResponses,
    ResponseStore,
    StoredItems,
    find_item,
    not_found,
)
from .responses_body import CountTokensBody, ResponsesBody

logger = logging.getLogger("teneral.http")

MAX_HISTORY_BYTES = 8 << 20  # of the items before those of a request, as JSON


def response_store(service: Service) -> ResponseStore:
    """The server's store. For `service.shared`."""
    config = service.instance.config
    max_bytes, max_idle_s = config.responses_bytes, config.responses_idle_s
    store: ResponseStore = MemoryResponses(max_bytes=max_bytes, max_idle_s=max_idle_s)
    if config.responses_store is not None:
        store = ResponseObjects(
            config.responses_store, config.source_options, max_bytes=max_bytes, max_idle_s=max_idle_s
        )
    service.figures["responses"] = store.statistics
    return store


class Keeper:
    """One request's."""

    def __init__(self, store: ResponseStore, owner: bytes, body: ResponsesBody | CountTokensBody) -> None:
        self._store, self._owner = store, owner
        self.previous: StoredItems | None = None
        self.conversation: StoredItems | None = None
        self.items: str | list[InputItem] = []
        self.entry: StoredItems | None = None
        stores = isinstance(body, ResponsesBody) and body.store is not False
        if isinstance(body, ResponsesBody) and body.store and not store.max_bytes:
            raise RequestError(
                "store is not supported on this server",
                param="store",
                hint="Its operator can set --responses-bytes.",
            )
        self.is_storing = stores and store.max_bytes > 0

    @classmethod
    async def open(cls, store: ResponseStore, owner: bytes, body: ResponsesBody | CountTokensBody) -> Keeper:
        """Raises `ApiError` 404 for what is not there."""
        keeper = cls(store, owner, body)
        previous = await keeper._entry(body.previous_response_id, "response", "previous_response_id")
        if previous is not None and not previous.is_complete:
            raise RequestError("the previous response is not complete yet", param="previous_response_id")
        keeper.previous = previous
        keeper.conversation = await keeper._entry(body.conversation_id, "conversation", "conversation")
        keeper.items = body.input or []
        if isinstance(body.input, list):
            keeper.items = [
                await keeper._item(item, number) if item.is_reference else item
                for number, item in enumerate(body.input)
            ]
        return keeper

    def history(self) -> list[InputItem]:
        """The items before those of the request. Raises `RequestError` where they are too many."""
        turns = [] if self.previous is None else self.previous.turns()
        if self.conversation is not None:
            turns = [self.conversation]
        if sum(turn.size_bytes for turn in turns) > MAX_HISTORY_BYTES:
            raise RequestError(
                f"the conversation is longer than {MAX_HISTORY_BYTES} bytes", param="previous_response_id"
            )
        return [as_item(item) for turn in turns for item in turn.own_items()]

    async def put(self, response: Json) -> bool:
        """Keep this response, and add a complete one to the conversation. False where it is not kept."""
        items = stored_items(self.items, response["id"])
        is_complete = response["status"] not in (QUEUED, IN_PROGRESS)
        if self.conversation is not None and response["status"] in (COMPLETED, INCOMPLETE):
            added = [*items, *response["output"]]

            def extended(entry: StoredItems) -> tuple[bytes, bytes]:
                return encode([*entry.own_items(), *added]), entry.body

            if not await self._store.change(self._owner, self.conversation, extended):
                logger.warning("conversation %s is full: nothing was added", self.conversation.id)
        if not self.is_storing:
            return False
        body = encode(response)
        if self.entry is None:
            self.entry = StoredItems(response["id"], encode(items), body, self.previous)
            return await self._store.put(self._owner, self.entry)

        def replaced(entry: StoredItems) -> tuple[bytes, bytes]:
            # A late renewal of the lease changes nothing.
            return entry.items, body if is_complete or not entry.is_complete else entry.body

        return await self._store.change(self._owner, self.entry, replaced)

    async def _entry(self, name: str | None, kind: str, param: str) -> StoredItems | None:
        if name is None:
            return None
        entry = await self._store.get(self._owner, name)
        if entry is None or isinstance(entry, Conversation) is not (kind == "conversation"):
            raise not_found(kind, name, self._store, param=param)
        return entry

    async def _item(self, item: InputItem, number: int) -> InputItem:
        found = await find_item(self._store, self._owner, item.id or "")
        if found is None:
            raise not_found("item", item.id or "", self._store, param=f"input[{number}]")
        return as_item(found)
