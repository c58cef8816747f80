"""POST /v1/responses: OpenAI's Responses API without its store.

An answer grows by items, one after the other: reasoning, text and calls. Each is begun, continued
and ended by events whose `sequence_number`s count from 0. The same items are the whole answer's
output.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web

from ...runtime.step.requests import (
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    TokenLogprob,
)
from ..http.errors import ApiError
from ..http.json_bodies import encode
from ..http.service import BodyRoute
from ..http.sse import Framing
from .chat import chat_settings
from .chat_request import ChatRequest, ChatSettings, FormatOfChat
from .deltas import Delta, Finish, ReasoningDelta, TextDelta, ToolCallDelta
from .generation import SequenceOutcome, Step, make_format, respond
from .logprobs import chat_logprobs, token_bytes
from .parameters import own_names
from .responses import Usage
from .responses_body import ResponsesBody, chat_of
from .schemas import ChatBody
from .structured import has_schema

if TYPE_CHECKING:
    from ...runtime.text.tokenizer import TextTokenizer

Event = dict[str, Any]
Json = dict[str, Any]
COMPLETED, INCOMPLETE, IN_PROGRESS = "completed", "incomplete", "in_progress"
OWN_NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
    "tools[].function.name": "tools[].name",
    "tools[].function.parameters": "tools[].parameters",
    "tools[].function.strict": "tools[].strict",
}


class AnswerItems:
    """One answer's. Deltas in, events out."""

    def __init__(self) -> None:
        self.items: list[Json] = []
        self._num_events = 0
        self._is_open = False  # the last item
        self._pieces: list[str] = []  # of the last item
        self._logprobs: list[Json] = []  # of tokens whose text has not come yet
        self._own_logprobs: list[Json] = []  # of the last item

    @property
    def is_untouched(self) -> bool:
        """True before the first event."""
        return not self._num_events

    @property
    def reasoning(self) -> str:
        return "".join(
            part["text"] for item in self.items if item["type"] == "reasoning" for part in item["content"]
        )

    def event(self, kind: str, **fields: Any) -> Event:
        """The next event of the stream."""
        number, self._num_events = self._num_events, self._num_events + 1
        return {"type": kind, **fields, "sequence_number": number}

    def add(self, delta: Delta, logprobs: list[Json]) -> list[Event]:
        """The stream events of one delta; `logprobs` belong to its tokens."""
        self.hold(logprobs)
        match delta:
            case TextDelta(text):
                return self._more("message", text) if text or self._logprobs else []
            case ReasoningDelta(text):
                self._logprobs = []
                return self._more("reasoning", text)
            case ToolCallDelta(_, arguments, call_id, name):
                return self._call(arguments, call_id, name)
        return []

    def hold(self, logprobs: list[Json]) -> None:
        """Keeps them for the next text: that of their tokens has not come."""
        self._logprobs += logprobs

    def finish(self, status: str) -> list[Event]:
        """The end of the last item, and an empty message where there is none."""
        is_text = not self.items or (self._is_open and self.items[-1]["type"] == "message")
        events = self._more("message", "") if is_text and (self._logprobs or not self.items) else []
        return [*events, *self._end(status)]

    # -- text and reasoning

    def _more(self, kind: str, text: str) -> list[Event]:
        events: list[Event] = []
        if not self._is_open or self.items[-1]["type"] != kind:
            events = [*self._end(COMPLETED), *self._begin_text(kind)]
        self._pieces.append(text)
        place = self._place()
        if kind == "reasoning":
            return [*events, self.event("response.reasoning_text.delta", **place, delta=text)]
        logprobs, self._logprobs = self._logprobs, []
        self._own_logprobs += logprobs
        return [*events, self.event("response.output_text.delta", **place, delta=text, logprobs=logprobs)]

    def _begin_text(self, kind: str) -> list[Event]:
        if kind == "reasoning":
            item: Json = {"id": _id("rs"), "type": kind, "summary": [], "content": [], "status": IN_PROGRESS}
        else:
            item = {"id": _id("msg"), "type": kind, "role": "assistant", "content": [], "status": IN_PROGRESS}
        events = [self._begin(item)]
        return [*events, self.event("response.content_part.added", **self._place(), part=_part(kind, "", []))]

    def _end_text(self, item: Json) -> list[Event]:
        kind, text, place = item["type"], "".join(self._pieces), self._place()
        part = _part(kind, text, self._own_logprobs)
        item["content"] = [part]
        if kind == "reasoning":
            done = self.event("response.reasoning_text.done", **place, text=text)
        else:
            done = self.event("response.output_text.done", **place, text=text, logprobs=self._own_logprobs)
        return [done, self.event("response.content_part.done", **place, part=part)]

    def _place(self) -> Json:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, "content_index": 0}

    # -- calls

    def _call(self, arguments: str, call_id: str, name: str) -> list[Event]:
        events: list[Event] = []
        if call_id:
            item = {
                "id": _id("fc"),
                "type": "function_call",
                "call_id": call_id,
                "name": name,
                "arguments": "",
                "status": IN_PROGRESS,
            }
            events = [*self._end(COMPLETED), self._begin(item)]
        if arguments:
            self._pieces.append(arguments)
            events.append(
                self.event("response.function_call_arguments.delta", **self._call_place(), delta=arguments)
            )
        return events

    def _end_call(self, item: Json) -> list[Event]:
        item["arguments"] = "".join(self._pieces)
        return [
            self.event(
                "response.function_call_arguments.done",
                **self._call_place(),
                name=item["name"],
                arguments=item["arguments"],
            )
        ]

    def _call_place(self) -> Json:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    # -- all kinds

    def _begin(self, item: Json) -> Event:
        self.items.append(item)
        self._is_open, self._pieces, self._own_logprobs = True, [], []
        return self.event("response.output_item.added", output_index=len(self.items) - 1, item=dict(item))

    def _end(self, status: str) -> list[Event]:
        if not self._is_open:
            return []
        item, self._is_open = self.items[-1], False
        end: Callable[[Json], list[Event]] = (
            self._end_call if item["type"] == "function_call" else self._end_text
        )
        events = end(item)
        item["status"] = status
        index = len(self.items) - 1
        return [*events, self.event("response.output_item.done", output_index=index, item=dict(item))]


def _part(kind: str, text: str, logprobs: list[Json]) -> Json:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


class ResponsesRoute(BodyRoute[ResponsesBody]):
    kind = ResponsesBody

    async def _answer(self, request: web.Request, body: ResponsesBody, body_bytes: int) -> web.StreamResponse:
        service = self._service
        chat = chat_of(body)  # by this route's names
        with own_names(OWN_NAMES):
            model = service.answering_as(body.model)
            make = partial(ResponsesFormat, body, chat, model=model, settings=chat_settings(service))
            fmt = await make_format(service, body_bytes, make, has_schema=has_schema(chat))
            return await respond(service, request, fmt, body_bytes=body_bytes, framing=fmt.framing)


class ResponsesFormat(FormatOfChat):
    """One request's side of the wire. Raises `RequestError` for an invalid body."""

    def __init__(self, body: ResponsesBody, chat: ChatBody, *, model: str, settings: ChatSettings) -> None:
        """`chat` is the same request as a chat."""
        self._id = f"resp_{secrets.token_hex(16)}"
        super().__init__(ChatRequest(chat, request_id=self._id, settings=settings))
        self._asked = body
        self._model = model
        self._created = int(time.time())
        self._items = AnswerItems()
        self._finish: str | None = None
        self._may_reason = False

    @property
    def framing(self) -> Framing:
        """Of its stream, whose events have names. An error is an event with the next number."""
        return Framing("text/event-stream", b"", b"\n\n", True, b"", self._error)

    def prepare(self, tokenizer: TextTokenizer, max_tokens: int | None) -> list[GenerationRequest]:
        self._tokenizer = tokenizer
        self._bytes_of = partial(token_bytes, tokenizer)
        self._may_reason = self._chat.may_reason(tokenizer.templates)
        return self._chat.prepare(tokenizer, max_tokens)

    @property
    def looks_up_tokens(self) -> bool:
        return self._chat.num_top_logprobs is not None or self._may_reason

    def chunks(self, step: Step) -> list[bytes]:
        index, event = step
        events = self._opening() if self._items.is_untouched else []
        events += self._add(self._chat.read(index, event), event.logprobs)
        return [_named(each) for each in events]

    def usage_chunk(self, usage: Usage) -> bytes:
        """The last events: only here is known what they have to say."""
        events = self._items.finish(self._status)
        kind = f"response.{self._status}"
        events.append(self._items.event(kind, response=self._response(self._status, usage)))
        return b"\n\n".join(map(_named, events))

    def whole(self, outcomes: Sequence[SequenceOutcome], usage: Usage) -> bytes:
        (outcome,) = outcomes
        event = GenerationEvent(
            outcome.text, (), finish_reason=outcome.finish_reason, stopped_by=outcome.stopped_by
        )
        self._add(self._chat.read(0, event), outcome.logprobs)
        self._items.finish(self._status)
        return encode(self._response(self._status, usage))

    @property
    def _status(self) -> str:
        return INCOMPLETE if self._finish == FinishReason.LENGTH else COMPLETED

    def _add(self, deltas: Sequence[Delta], entries: Sequence[TokenLogprob]) -> list[Event]:
        logprobs: list[Json] = []
        if entries:
            logprobs = [_logprob(each) for each in chat_logprobs(entries, self._bytes_of).content]
        events: list[Event] = []
        for delta in deltas:
            if isinstance(delta, Finish):
                self._finish = delta.reason
            events += self._items.add(delta, logprobs)
            logprobs = []
        self._items.hold(logprobs)
        return events

    def _opening(self) -> list[Event]:
        response = self._response(IN_PROGRESS, None)
        return [
            self._items.event("response.created", response=response),
            self._items.event("response.in_progress", response=response),
        ]

    def _error(self, error: ApiError) -> bytes:
        """The stream's last event, where it ends by an error."""
        return _named(self._items.event("error", code=error.code, message=error.message, param=error.param))

    def _response(self, status: str, usage: Usage | None) -> Json:
        asked = self._asked
        text = {"format": {"type": "text"}} if asked.text is None or asked.text.format is None else asked.text
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == COMPLETED else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == INCOMPLETE else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": asked.max_tool_calls,
            "metadata": asked.metadata or {},
            "model": self._model,
            "output": [] if status == IN_PROGRESS else self._items.items,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {
                "effort": None if asked.reasoning is None else asked.reasoning.effort,
                "summary": None,
            },
            "service_tier": "default",
            "store": False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": text,
            "tool_choice": "auto" if asked.tool_choice is None else asked.tool_choice,
            "tools": asked.tools or [],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else self._usage(usage),
            "user": asked.user,
        }

    def _usage(self, usage: Usage) -> Json:
        reasoning = self._items.reasoning
        num_reasoning = len(self._tokenizer.encode(reasoning, add_special_tokens=False)) if reasoning else 0
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.prompt_tokens_details.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": min(num_reasoning, usage.completion_tokens)},
            "total_tokens": usage.total_tokens,
        }


def _logprob(entry: Any) -> Json:
    return {
        "token": entry.token,
        "logprob": entry.logprob,
        "bytes": entry.bytes,
        "top_logprobs": [
            {"token": top.token, "logprob": top.logprob, "bytes": top.bytes} for top in entry.top_logprobs
        ],
    }


def _named(event: Event) -> bytes:
    """The event as server-sent events have it, without the empty line behind it."""
    return b"event: %b\ndata: %b" % (event["type"].encode(), encode(event))
