"""The routes of responses and conversations: how one is made, given, changed and deleted."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from ...runtime.errors import RequestError
from ..http.errors import ApiError
from ..http.json_bodies import JsonDecoder, encode
from ..http.service import BodyRoute, Service
from .chat import chat_settings
from .chat_request import ChatRequest
from .generation import make_format, respond
from .parameters import own_names
from .response_background import BackgroundResponses
from .response_items import InputItem, stored_items
from .response_keeper import Keeper, response_store
from .response_store import (
    Conversation,
    Edit,
    Json,
    StoredItems,
    listed,
    new_id,
    not_found,
    owner_of,
)
from .responses_api import make_response
from .responses_body import OWN_NAMES, CountTokensBody, ResponsesBody, chat_of, check_fields, tools_of

MAX_CONVERSATION_ITEMS = 20  # of one request, as OpenAI has it
MAX_METADATA = 16


class ConversationBody(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    items: list[InputItem] | None = None
    metadata: dict[str, str] | None = None


class _Background(msgspec.Struct):
    background: bool = False


class ItemsBody(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    items: list[InputItem]


def _json(value: Any) -> web.Response:
    return web.Response(body=encode(value), content_type="application/json")


class ResponsesRoute(BodyRoute[ResponsesBody]):
    kind = ResponsesBody

    async def _answer(self, request: web.Request, body: ResponsesBody, body_bytes: int) -> web.StreamResponse:
        service = self._service
        check_fields(body)
        keeper = await Keeper.open(service.shared(response_store), owner_of(request), body)
        history = keeper.history()
        model = service.answering_as(body.model)
        make = partial(make_response, body, history, keeper, model=model, settings=chat_settings(service))
        with own_names(OWN_NAMES):
            fmt = await make_format(
                service, body_bytes, make, has_schema=bool(body.tools) or body.text is not None
            )
            if body.background:
                return await service.shared(BackgroundResponses).begin(request, fmt, keeper, body_bytes)
            return await respond(
                service, request, fmt, body_bytes=body_bytes, framing=fmt.framing, keep=fmt.keep
            )


class StoredRoutes:
    """The routes of stored responses and conversations, of one API key each."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._store = service.shared(response_store)
        self._background = service.shared(BackgroundResponses)
        self._conversation = JsonDecoder(ConversationBody)
        self._items = JsonDecoder(ItemsBody)

    # -- responses

    async def get(self, request: web.Request) -> web.StreamResponse:
        """The stored response in its present state; with `stream`, its events after number `starting_after`."""
        entry = await self._response(request)
        if request.query.get("stream", "").lower() not in ("true", "1"):
            return web.Response(body=entry.body, content_type="application/json")
        after = request.query.get("starting_after", "-1")
        if after != "-1" and not (after.isascii() and after.isdigit() and len(after) < 10):
            raise ApiError(400, "starting_after must be the number of an event", param="starting_after")
        return await self._background.resume(request, entry.id, int(after))

    async def delete(self, request: web.Request) -> web.Response:
        entry = await self._response(request)
        await self._background.cancel(entry.id)
        self._background.forget(entry.id)
        await self._store.remove(owner_of(request), entry.id)
        return _json({"id": entry.id, "object": "response", "deleted": True})

    async def input_items(self, request: web.Request) -> web.Response:
        """Of the request and of those that it continues."""
        *before, last = (await self._response(request)).turns()
        items = [item for turn in before for item in turn.own_items()]
        items += msgspec.json.decode(last.items, type=list[Json])
        return _json(listed(items, request.query))

    async def cancel(self, request: web.Request) -> web.Response:
        """End a response that is made in the background; one that is complete stays as it is."""
        entry = await self._response(request)
        if not msgspec.json.decode(entry.body, type=_Background).background:
            raise ApiError(
                400, f"the response {entry.id!r} is not made in the background", param="response_id"
            )
        if await self._background.cancel(entry.id):
            entry = await self._response(request)
        elif not entry.is_complete:
            raise ApiError(
                409, f"the response {entry.id!r} is made by another instance of this server", code="conflict"
            )
        return web.Response(body=entry.body, content_type="application/json")

    # -- conversations

    async def create_conversation(self, request: web.Request) -> web.Response:
        async with self._service.admission.body(request) as data:
            body = self._conversation.decode(data or b"{}")
            _check(body.items, body.metadata)
            made: Json = {
                "id": new_id("conv"),
                "object": "conversation",
                "created_at": int(time.time()),
                "metadata": body.metadata or {},
            }
            conversation = Conversation(made["id"], encode(made))
            conversation.items = encode(stored_items(body.items or [], conversation.id))
        if not await self._store.put(owner_of(request), conversation):
            raise self._too_large()
        return _json(made)

    async def get_conversation(self, request: web.Request) -> web.Response:
        return web.Response(body=(await self._found(request)).body, content_type="application/json")

    async def update_conversation(self, request: web.Request) -> web.Response:
        async with self._service.admission.body(request) as data:
            body = self._conversation.decode(data)
        if body.items is not None:
            raise RequestError("items are added at /v1/conversations/{id}/items", param="items")
        _check(None, body.metadata)
        metadata = body.metadata or {}

        def edit(entry: StoredItems) -> tuple[bytes, bytes]:
            return entry.items, encode({**msgspec.json.decode(entry.body), "metadata": metadata})

        conversation = await self._changed(request, edit)
        return web.Response(body=conversation.body, content_type="application/json")

    async def delete_conversation(self, request: web.Request) -> web.Response:
        conversation = await self._found(request)
        await self._store.remove(owner_of(request), conversation.id)
        return _json({"id": conversation.id, "object": "conversation.deleted", "deleted": True})

    async def conversation_items(self, request: web.Request) -> web.Response:
        return _json(listed(list((await self._found(request)).own_items()), request.query))

    async def add_items(self, request: web.Request) -> web.Response:
        async with self._service.admission.body(request) as data:
            body = self._items.decode(data)
            _check(body.items, None)
            added = stored_items(body.items, request.match_info["id"])

        def edit(entry: StoredItems) -> tuple[bytes, bytes]:
            return encode([*entry.own_items(), *added]), entry.body

        await self._changed(request, edit)
        return _json(listed(added, {"order": "asc"}))

    async def get_item(self, request: web.Request) -> web.Response:
        return _json(_item(request, await self._found(request)))

    async def delete_item(self, request: web.Request) -> web.Response:
        """Answers with the conversation, as OpenAI does."""

        def edit(entry: StoredItems) -> tuple[bytes, bytes]:
            item = _item(request, entry)
            return encode([each for each in entry.own_items() if each != item]), entry.body

        conversation = await self._changed(request, edit)
        return web.Response(body=conversation.body, content_type="application/json")

    async def _response(self, request: web.Request) -> StoredItems:
        name = request.match_info["id"]
        entry = await self._store.get(owner_of(request), name)
        if entry is None or isinstance(entry, Conversation):
            raise not_found("response", name, self._store, param="response_id")
        return entry

    async def _found(self, request: web.Request) -> Conversation:
        name = request.match_info["id"]
        entry = await self._store.get(owner_of(request), name)
        if not isinstance(entry, Conversation):
            raise not_found("conversation", name, self._store, param="conversation_id")
        return entry

    async def _changed(self, request: web.Request, edit: Edit) -> Conversation:
        conversation = await self._found(request)
        if not await self._store.change(owner_of(request), conversation, edit):
            raise self._too_large()
        return conversation

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the conversation is larger than the {self._store.max_bytes} bytes that this server keeps",
            code="request_too_large",
        )


def _item(request: web.Request, conversation: StoredItems) -> Json:
    name = request.match_info["item"]
    found = next((each for each in conversation.own_items() if each.get("id") == name), None)
    if found is None:
        raise ApiError(404, f"the conversation has no item {name[:100]!r}", param="item_id", code="not_found")
    return found


def _check(items: list[InputItem] | None, metadata: dict[str, str] | None) -> None:
    if items is not None and len(items) > MAX_CONVERSATION_ITEMS:
        raise RequestError(f"items may have {MAX_CONVERSATION_ITEMS} entries", param="items")
    for number, item in enumerate(items or []):
        if item.is_reference:
            raise RequestError(f"items[{number}] must be an item and no reference", param=f"items[{number}]")
    if metadata is not None and len(metadata) > MAX_METADATA:
        raise RequestError(f"metadata may have {MAX_METADATA} entries", param="metadata")


class CountInputTokensRoute(BodyRoute[CountTokensBody]):
    """POST /v1/responses/input_tokens."""

    kind = CountTokensBody

    async def _answer(self, request: web.Request, body: CountTokensBody, body_bytes: int) -> web.Response:
        service = self._service
        service.check_model(body.model)
        keeper = await Keeper.open(service.shared(response_store), owner_of(request), body)
        with own_names(OWN_NAMES):
            make = partial(_chat_of, body, keeper, service)
            chat = await make_format(
                service, body_bytes, make, has_schema=bool(body.tools) or body.text is not None
            )
            tokenizer = await service.tokenizer()
            await service.text_threads.run(body_bytes, chat.prepare, tokenizer, None)
        return _json({"object": "response.input_tokens", "input_tokens": chat.num_prompt_tokens})


def _chat_of(body: CountTokensBody, keeper: Keeper, service: Service) -> ChatRequest:
    asked = ResponsesBody(
        input=keeper.items,
        instructions=body.instructions,
        tools=body.tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        text=body.text,
        reasoning=body.reasoning,
    )
    warnings: list[str] = []
    history = keeper.history()
    chat = chat_of(asked, history, tools_of(asked, history, warnings), warnings)
    return ChatRequest(chat, request_id="input_tokens", settings=chat_settings(service))
