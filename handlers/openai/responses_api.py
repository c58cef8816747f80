"""POST /v1/responses: OpenAI's Responses API without its store."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web

from ...runtime.grammar.spec import GrammarSpec
from ...runtime.step.requests import (
    FinishReason,
    FirstToken,
    GenerationEvent,
    GenerationRequest,
    TokenLogprob,
)
from ..http.errors import ApiError
from ..http.json_bodies import Decoder, encode
from ..http.service import Service
from ..http.sse import Framing
from .answer_items import COMPLETED, IN_PROGRESS, INCOMPLETE, AnswerItems, Event, Json
from .chat import chat_settings
from .chat_request import ChatRequest, ChatSettings
from .deltas import Delta, Finish
from .generation import Outcome, Step, respond
from .logprobs import chat_logprobs, token_bytes
from .parameters import own_names
from .responses import Usage
from .responses_body import ResponsesBody, chat_of

if TYPE_CHECKING:
    from ...runtime.text.settings import TextSettings
    from ...runtime.text.tokenizer import TextTokenizer


OWN_NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
}


class ResponsesRoute:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._decoder = Decoder(ResponsesBody)

    async def post(self, request: web.Request) -> web.StreamResponse:
        service = self._service
        async with service.admission.body(request) as data:
            body = self._decoder.decode(data)
            with own_names(OWN_NAMES):
                fmt = ResponsesFormat(
                    body,
                    model=service.answering_as(body.model),
                    max_sequences=service.limits.max_sequences,
                    first_token=service.first_token,
                    settings=chat_settings(service),
                )
                return await respond(service, request, fmt, body_bytes=len(data), framing=fmt.framing)


class ResponsesFormat:
    """One request's side of the wire. Raises `RequestError` for an invalid body."""

    def __init__(
        self,
        body: ResponsesBody,
        *,
        model: str,
        max_sequences: int,
        first_token: FirstToken,
        settings: ChatSettings | None = None,
    ) -> None:
        self._id = f"resp_{secrets.token_hex(16)}"
        self.body = chat_of(body)
        self._chat = ChatRequest(
            self.body,
            request_id=self._id,
            max_sequences=max_sequences,
            first_token=first_token,
            settings=settings,
        )
        self.max_tokens = self._chat.max_tokens
        self.first_token = self._chat.first_token
        self.num_sequences = self._chat.num_sequences
        self.grammar: GrammarSpec | None = self._chat.grammar
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
    def num_prompt_tokens(self) -> int:
        return self._chat.num_prompt_tokens

    @property
    def looks_up_tokens(self) -> bool:
        return self._chat.num_top_logprobs is not None or self._may_reason

    @property
    def begins_with_grammar(self) -> Callable[[TextSettings], bool]:
        return lambda settings: self._chat.begins_with_answer(settings.templates)

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

    def whole(self, outcomes: Sequence[Outcome], usage: Usage) -> bytes:
        (outcome,) = outcomes
        event = GenerationEvent(outcome.text, (), finish_reason=outcome.finish_reason)
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
