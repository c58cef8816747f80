"""POST /v1/chat/completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from ...runtime.errors import RequestError
from ...runtime.step.requests import FirstToken, GenerationEvent, GenerationRequest
from ..http.json_bodies import Decoder, check_shape, encode
from ..http.service import Service
from .fields import CHAT, refuse_unsupported
from .generation import Outcome, Step, Untold, respond
from .logprobs import chat_logprobs, token_bytes
from .parameters import (
    check_extras,
    check_stream,
    check_top_logprobs,
    num_choices,
    sequences,
    wanted_first_token,
)
from .responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    ChunkExtras,
    Usage,
)
from .schemas import ChatBody, Message, ToolCall
from .structured import grammar_of

if TYPE_CHECKING:
    from ...runtime.text.tokenizer import TextTokenizer

# Of tool calls that the model is told of. They are JSON in a text of the body, so its own bounds do not count them.
MAX_ARGUMENTS_CHARS = 1 << 20  # of all calls of a request
MAX_ARGUMENT_ITEMS = 1 << 16  # values in one call's


class ChatRoute:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._decoder = Decoder(ChatBody)

    async def post(self, request: web.Request) -> web.StreamResponse:
        async with self._service.admission.body(request) as data:
            return await self.answer(request, data)

    async def answer(self, request: web.Request, data: bytes | bytearray) -> web.StreamResponse:
        """As `post`, with a body that was read already."""
        service = self._service
        body = self._decoder.decode(data)
        service.check_model(body.model)
        fmt = ChatFormat(
            body,
            model=service.instance.model_name,
            max_sequences=service.limits.max_sequences,
            first_token=service.first_token,
        )
        return await respond(service, request, fmt, body_bytes=len(data))


class ChatFormat:
    """One chat request's side of the wire. Raises `RequestError` for an invalid body."""

    def __init__(self, body: ChatBody, *, model: str, max_sequences: int, first_token: FirstToken) -> None:
        check_stream(body)
        check_extras(body)
        _refuse_unsupported(body)
        self.body = body
        self.grammar = grammar_of(body)
        self.max_tokens = (
            body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        )
        self.first_token = wanted_first_token(body, default=first_token)
        self.num_sequences = num_choices(body, num_prompts=1, max_sequences=max_sequences)
        self.num_prompt_tokens = 0
        self._messages = [template_message(message, index) for index, message in enumerate(body.messages)]
        self._num_top_logprobs = _num_top_logprobs(body)
        self._model = model
        self._id = f"chatcmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._begun: set[int] = set()  # choices whose role was sent
        self._untold = Untold()

    def prepare(self, tokenizer: TextTokenizer, max_tokens: int | None) -> list[GenerationRequest]:
        tools = self.body.tools if self.body.tool_choice != "none" else None
        text = tokenizer.chat(self._messages, tools=tools)
        # The template wrote the special tokens.
        prompt = tuple(tokenizer.encode(text, add_special_tokens=False, max_tokens=max_tokens))
        self.num_prompt_tokens = len(prompt)
        self._bytes_of = partial(token_bytes, tokenizer)
        body = self.body
        return sequences(
            body,
            [prompt],
            request_id=self._id,
            n=self.num_sequences,
            max_tokens=self.max_tokens,
            num_top_logprobs=self._num_top_logprobs,
            first_token=self.first_token,
            grammar=None if self.grammar is None else tokenizer.compile_grammar(self.grammar),
        )

    @property
    def looks_up_tokens(self) -> bool:
        return self._num_top_logprobs is not None

    def chunks(self, step: Step) -> list[bytes]:
        index, event = step
        self._untold.add(index, event)
        chunks = []
        if index not in self._begun:
            self._begun.add(index)
            chunks.append(
                self._chunk(ChatChunkChoice(index, ChatDelta(role="assistant", content="", refusal=None)))
            )
        if event.text or event.logprobs:
            chunks.append(self._chunk(self._text_choice(index, event), self._untold.take(index)))
        if event.finish_reason is not None:
            last = ChatChunkChoice(index, ChatDelta(), finish_reason=str(event.finish_reason))
            chunks.append(self._chunk(last, self._untold.take(index)))
        return chunks

    def usage_chunk(self, usage: Usage) -> bytes:
        return encode(ChatChunk(self._id, self._created, self._model, [], usage=usage))

    def whole(self, outcomes: Sequence[Outcome], usage: Usage) -> bytes:
        choices = [
            ChatChoice(
                index,
                ChatMessage(outcome.text),
                finish_reason=str(outcome.finish_reason),
                logprobs=chat_logprobs(outcome.logprobs, self._bytes_of) if self._wants_logprobs else None,
            )
            for index, outcome in enumerate(outcomes)
        ]
        return encode(ChatCompletion(self._id, self._created, self._model, choices, usage))

    @property
    def _wants_logprobs(self) -> bool:
        return self._num_top_logprobs is not None

    def _text_choice(self, index: int, event: GenerationEvent) -> ChatChunkChoice:
        logprobs = chat_logprobs(event.logprobs, self._bytes_of) if event.logprobs else None
        return ChatChunkChoice(index, ChatDelta(content=event.text), logprobs=logprobs)

    def _chunk(self, choice: ChatChunkChoice, teneral: ChunkExtras | UnsetType = UNSET) -> bytes:
        usage = None if self.body.includes_usage else UNSET
        return encode(ChatChunk(self._id, self._created, self._model, [choice], usage=usage, teneral=teneral))


def template_message(message: Message, index: int) -> dict[str, Any]:
    """A message as chat templates want it: text for content, objects for the arguments of tool calls."""
    where = f"messages[{index}]"
    content = _text_content(message, where)
    if content is None and not (message.role == "assistant" and message.tool_calls):
        raise RequestError(f"{where}.content is missing", param=f"{where}.content")
    # Templates know the older name of the developer's role.
    result: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": content or "",
    }
    if message.name is not None:
        result["name"] = message.name
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        result["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{number}]")
            for number, call in enumerate(message.tool_calls)
        ]
    return result


def _text_content(message: Message, where: str) -> str | None:
    """The message's text; several parts are joined by line breaks."""
    if message.content is None or isinstance(message.content, str):
        return message.content
    texts = []
    for number, part in enumerate(message.content):
        param = f"{where}.content[{number}]"
        if part.type != "text":
            raise RequestError(
                f"{param} is of type {part.type[:50]!r}; this model takes text only", param=param
            )
        if part.text is None:
            raise RequestError(f"{param}.text is missing", param=f"{param}.text")
        texts.append(part.text)
    return "\n".join(texts)


def _tool_call(call: ToolCall, where: str) -> dict[str, Any]:
    param = f"{where}.function.arguments"
    data = (call.function.arguments or "{}").encode()
    try:
        check_shape(data, max_items=MAX_ARGUMENT_ITEMS)
        arguments = msgspec.json.decode(data, type=dict[str, Any])
    except RequestError as error:
        raise RequestError(f"{param} is refused: {error.message}", param=param) from None
    except msgspec.DecodeError as error:
        raise RequestError(f"{param} is not a JSON object: {error}", param=param) from None
    function = {"name": call.function.name, "arguments": arguments}
    return {"type": "function", "function": function} | ({"id": call.id} if call.id is not None else {})


def _num_top_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return check_top_logprobs(body.top_logprobs or 0, param="top_logprobs") if body.logprobs else None


def _refuse_unsupported(body: ChatBody) -> None:
    """Refuses fields that would change the answer and are not implemented."""
    refuse_unsupported(body, CHAT)
    if not body.messages:
        raise RequestError("messages is empty", param="messages")
    calls = [call for message in body.messages for call in message.tool_calls or []]
    if sum(len(call.function.arguments) for call in calls) > MAX_ARGUMENTS_CHARS:
        raise RequestError(
            f"the arguments of all tool calls together may have {MAX_ARGUMENTS_CHARS} characters",
            param="messages",
        )
    if body.tool_choice not in (None, "none", "auto"):
        raise RequestError("tool_choice other than 'none' and 'auto' is not supported", param="tool_choice")
    if any(modality != "text" for modality in body.modalities or []):
        raise RequestError("modalities other than 'text' are not supported", param="modalities")
