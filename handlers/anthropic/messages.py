"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web
from msgspec import UNSET

from ...runtime.step.requests import GenerationRequest
from ..http.errors import ApiError
from ..http.json_bodies import JsonDecoder, encode
from ..http.service import CALL, Service
from ..http.sse import Framing
from ..openai.chat import chat_settings
from ..openai.chat_request import ChatRequest, ChatSettings, FormatOfChat, log_warnings
from ..openai.deltas import Delta, Finish, ReasoningDelta, TextDelta, ToolCallDelta
from ..openai.fields import Fields
from ..openai.generation import SequenceOutcome, Step, make_format, respond
from ..openai.parameters import own_names
from ..openai.responses import Usage
from ..openai.schemas import Message
from .bodies import COUNT_TOKENS, MESSAGES, CountBody, MessagesBody, PromptBody, chat_of
from .context import apply_edits
from .errors import error_event

if TYPE_CHECKING:
    from ...runtime.text.tokenizer import TextTokenizer

Json = dict[str, Any]
OWN_NAMES = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "reasoning.max_tokens": "thinking.budget_tokens",
    "response_format.json_schema.schema": "output_config.format.schema",
    "content[].image_url": "content[].source",
    "tools[].function.name": "tools[].name",
    "tools[].function.parameters": "tools[].input_schema",
    "tools[].function.strict": "tools[].strict",
}


class MessageRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._messages = JsonDecoder(MessagesBody)
        self._count = JsonDecoder(CountBody)

    async def post(self, request: web.Request) -> web.StreamResponse:
        service = self._service
        async with service.admission.body(request) as data:
            body = self._messages.decode(data)
            with own_names(OWN_NAMES):
                fmt = await self._format(body, MESSAGES, len(data))
                return await respond(service, request, fmt, body_bytes=len(data), framing=FRAMING)

    async def count_tokens(self, request: web.Request) -> web.Response:
        service = self._service
        async with service.admission.body(request) as data:
            with own_names(OWN_NAMES):
                fmt = await self._format(self._count.decode(data), COUNT_TOKENS, len(data))
                tokenizer = await service.tokenizer()
                await service.text_threads.run(len(data), fmt.prepare, tokenizer, None)
        answer = encode(fmt.count())
        return web.Response(body=answer, content_type="application/json")

    async def _format(self, body: PromptBody, fields: Fields, body_bytes: int) -> MessagesFormat:
        service = self._service
        model = service.answering_as(body.model)
        make = partial(MessagesFormat, body, fields, model=model, settings=chat_settings(service))
        has_schema = bool(body.tools) or body.output_config is not None or body.output_format is not None
        return await make_format(service, body_bytes, make, has_schema=has_schema)


class MessagesFormat(FormatOfChat):
    """One request's side of the wire. Raises `RequestError` for an invalid body."""

    def __init__(self, body: PromptBody, fields: Fields, *, model: str, settings: ChatSettings) -> None:
        self._id = f"msg_{secrets.token_hex(12)}"
        self._warnings: list[str] = []
        chat = chat_of(body, fields, self._warnings)
        log_warnings(self._id, self._warnings)
        super().__init__(ChatRequest(chat, request_id=self._id, settings=settings))
        self._settings = settings
        self._management = body.context_management
        self._edits: list[Json] = []
        self._num_original_tokens = 0  # before the edits
        self._omits_thinking = body.thinking is not None and body.thinking.display == "omitted"
        self._model = model
        self._blocks = Blocks()
        self._has_begun = False
        self._stopped_by: str | int | None = None

    looks_up_tokens = False

    def prepare(self, tokenizer: TextTokenizer, max_tokens: int | None) -> list[GenerationRequest]:
        if self._management is not None:
            self._num_original_tokens = self._num_tokens(self.body.messages, tokenizer)
            applied = apply_edits(
                self.body.messages, self._management, lambda messages: self._num_tokens(messages, tokenizer)
            )
            self._edits = applied.report
            self._warnings += applied.warnings
            log_warnings(self._id, applied.warnings)
            self._chat = self._with(applied.messages)
        return self._chat.prepare(tokenizer, max_tokens)

    def _with(self, messages: Sequence[Message]) -> ChatRequest:
        chat = msgspec.structs.replace(self.body, messages=list(messages))
        return ChatRequest(chat, request_id=self._id, settings=self._settings)

    def _num_tokens(self, messages: Sequence[Message], tokenizer: TextTokenizer) -> int:
        text = self._with(messages).render(tokenizer)
        return len(tokenizer.encode(text, add_special_tokens=False))

    def count(self) -> Json:
        """The answer of /v1/messages/count_tokens."""
        original = {} if self._management is None else {"original_input_tokens": self._num_original_tokens}
        return {
            "input_tokens": self.num_prompt_tokens,
            **({"context_management": original} if original else {}),
        }

    def chunks(self, step: Step) -> list[bytes]:
        index, event = step
        events: list[Json] = []
        if not self._has_begun:
            self._has_begun = True
            events.append({"type": "message_start", "message": self._message([], None, None)})
        for delta in self._chat.read(index, event):
            events += self._blocks.add(self._shown(delta))
        self._stopped_by = event.stopped_by
        return [_named(each) for each in events]

    def usage_chunk(self, usage: Usage) -> bytes:
        """The last events: only here is known what they have to say."""
        reason, sequence = self._stop(usage)
        events = [
            *self._blocks.finish(),
            {
                "type": "message_delta",
                "delta": {"stop_reason": reason, "stop_sequence": sequence},
                "usage": _usage(self._chat.with_reasoning(usage)),
                **self._managed(),
            },
            {"type": "message_stop"},
        ]
        return b"\n\n".join(map(_named, events))

    def whole(self, outcomes: Sequence[SequenceOutcome], usage: Usage) -> bytes:
        (outcome,) = outcomes
        for delta in self._chat.read(0, outcome.as_event()):
            self._blocks.add(self._shown(delta))
        self._blocks.finish()
        self._stopped_by = outcome.stopped_by
        usage = self._chat.with_reasoning(usage)
        return encode(self._message(self._blocks.blocks, usage, self._stop(usage)))

    def _shown(self, delta: Delta) -> Delta:
        """The delta, without the text of reasoning that the client leaves out."""
        return TextDelta("") if self._omits_thinking and isinstance(delta, ReasoningDelta) else delta

    def _managed(self) -> Json:
        return {} if self._management is None else {"context_management": {"applied_edits": self._edits}}

    def _stop(self, usage: Usage) -> tuple[str, str | None]:
        """Why the answer ended, and the stop sequence where it was one."""
        reason = self._blocks.finish_reason
        if reason == "tool_calls":
            return "tool_use", None
        if reason == "length":
            is_limit = self.max_tokens is None or usage.completion_tokens >= self.max_tokens
            return "max_tokens" if is_limit else "model_context_window_exceeded", None
        if isinstance(self._stopped_by, str):
            return "stop_sequence", self._stopped_by
        return "end_turn", None

    def _message(self, content: list[Json], usage: Usage | None, stop: tuple[str, str | None] | None) -> Json:
        reason, sequence = stop or (None, None)
        warnings = [*self._warnings, *self._chat.warnings]
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": _usage(usage or Usage(self.num_prompt_tokens, 0, self.num_prompt_tokens)),
            **({} if usage is None else self._managed()),
            **({"teneral": {"warnings": warnings}} if warnings else {}),
        }


class Blocks:
    """An answer's content, block after block, and the events of a stream of it."""

    def __init__(self) -> None:
        self.blocks: list[Json] = []
        self.finish_reason = "stop"
        self._is_open = False
        self._pieces: list[str] = []  # of the last block

    def add(self, delta: Delta) -> list[Json]:
        match delta:
            case TextDelta(text):
                return self._more("text", "text", text) if text else []
            case ReasoningDelta(text):
                return self._more("thinking", "thinking", text) if text else []
            case ToolCallDelta(_, arguments, call_id, name):
                events: list[Json] = []
                if call_id:
                    block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                    events = [*self._end(), self._begin(block)]
                if arguments:
                    self._pieces.append(arguments)
                    events.append(self._delta({"type": "input_json_delta", "partial_json": arguments}))
                return events
            case Finish(reason):
                self.finish_reason = reason
        return []

    def finish(self) -> list[Json]:
        """The end of the last block."""
        return self._end()

    def _more(self, kind: str, field: str, text: str) -> list[Json]:
        events: list[Json] = []
        if not self._is_open or self.blocks[-1]["type"] != kind:
            block = {"type": kind, field: ""} | ({"signature": ""} if kind == "thinking" else {})
            events = [*self._end(), self._begin(block)]
        self._pieces.append(text)
        return [*events, self._delta({"type": f"{kind}_delta", field: text})]

    def _begin(self, block: Json) -> Json:
        self.blocks.append(block)
        self._is_open, self._pieces = True, []
        return {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}

    def _end(self) -> list[Json]:
        if not self._is_open:
            return []
        block, text = self.blocks[-1], "".join(self._pieces)
        self._is_open = False
        if block["type"] == "tool_use":
            block["input"] = _object(text)
        else:
            block[block["type"]] = text
        return [{"type": "content_block_stop", "index": len(self.blocks) - 1}]


def _object(text: str) -> Json:
    """A call's arguments; {} where `max_tokens` cut them off."""
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _usage(usage: Usage) -> Json:
    """Tokens of the prompt that the KV pool had are counted apart, as Anthropic does."""
    num_cached = usage.prompt_tokens_details.cached_tokens
    details = usage.completion_tokens_details
    num_reasoning = UNSET if details is UNSET else details.reasoning_tokens
    return {
        "input_tokens": usage.prompt_tokens - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": usage.completion_tokens,
        **({} if num_reasoning is UNSET else {"output_tokens_details": {"thinking_tokens": num_reasoning}}),
    }


def _named(event: Json) -> bytes:
    """The event as server-sent events have it, without the empty line behind it."""
    return b"event: %b\ndata: %b" % (event["type"].encode(), encode(event))


def _error_event(error: ApiError) -> bytes:
    call = CALL.get(None)
    return error_event(error, None if call is None else call.request_id)


FRAMING = Framing("text/event-stream", b"", b"\n\n", True, b"", _error_event)
