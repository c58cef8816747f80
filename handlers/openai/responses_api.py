"""A response of /v1/responses as it is made, whole or as the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from ...runtime.errors import ContextLengthError
from ...runtime.step.requests import (
    FinishReason,
    GenerationRequest,
    TokenLogprob,
)
from ..http.errors import ApiError
from ..http.json_bodies import encode
from ..http.sse import Framing
from .chat_request import ChatRequest, ChatSettings, FormatOfChat, log_warnings
from .deltas import Delta, Finish
from .generation import SequenceOutcome, Step
from .logprobs import chat_logprobs, token_bytes
from .response_items import CallableTool, InputItem
from .response_keeper import Keeper
from .response_output import COMPLETED, INCOMPLETE, AnswerItems, Event
from .response_store import IN_PROGRESS, Json, new_id
from .responses import Usage
from .responses_body import ResponsesBody, chat_of, tools_of
from .schemas import ChatBody

if TYPE_CHECKING:
    from ...runtime.text.tokenizer import TextTokenizer


def make_response(
    body: ResponsesBody, history: Sequence[InputItem], keeper: Keeper, *, model: str, settings: ChatSettings
) -> ResponsesFormat:
    """Raises `RequestError` by this route's names."""
    warnings: list[str] = []
    asked = msgspec.structs.replace(body, input=keeper.items)
    tools = tools_of(asked, history, warnings)
    chat = chat_of(asked, history, tools, warnings)
    return ResponsesFormat(body, chat, keeper, tools.callable, warnings, model=model, settings=settings)


class ResponsesFormat(FormatOfChat):
    """One request's side of the wire. Raises `RequestError` for an invalid body."""

    def __init__(
        self,
        body: ResponsesBody,
        chat: ChatBody,
        keeper: Keeper,
        tools: Mapping[str, CallableTool],
        warnings: list[str],
        *,
        model: str,
        settings: ChatSettings,
    ) -> None:
        """`chat` is the same request as a chat, whose functions have the names in `tools`."""
        self.id = new_id("resp")
        super().__init__(ChatRequest(chat, request_id=self.id, settings=settings))
        self._settings = settings
        self._asked = body
        self._keeper = keeper
        self._model = model
        self._created = int(time.time())
        self._items = AnswerItems(self.id, tools)
        self._warnings = warnings
        log_warnings(self.id, warnings)
        self._finish: str | None = None
        self._has_begun = self._is_queued = False  # the stream
        self._final: Json | None = None
        self._last: list[Event] = []  # of a stream
        self.needs_context = body.truncation == "auto"

    @property
    def framing(self) -> Framing:
        """Of its stream, whose events have names. An error is an event with the next number."""
        return Framing("text/event-stream", b"", b"\n\n", True, b"", self._error)

    def prepare(self, tokenizer: TextTokenizer, max_tokens: int | None) -> list[GenerationRequest]:
        self._bytes_of = partial(token_bytes, tokenizer)
        if self.needs_context and max_tokens is not None:
            return self._fitting(tokenizer, max_tokens)
        return self._chat.prepare(tokenizer, max_tokens)

    def _fitting(self, tokenizer: TextTokenizer, max_tokens: int) -> list[GenerationRequest]:
        """The prompt without as many of its oldest messages as is needed for it to fit."""
        messages = self.body.messages
        num_first = next(
            (n for n, each in enumerate(messages) if each.role not in ("system", "developer")), 0
        )
        # From a user's message on: calls and their results stay together.
        starts = [n for n, each in enumerate(messages) if n > num_first and each.role == "user"]
        room = max_tokens - min(self.max_tokens or 1, max_tokens // 4)

        def attempt(start: int) -> list[GenerationRequest] | None:
            kept = msgspec.structs.replace(self.body, messages=[*messages[:num_first], *messages[start:]])
            chat = ChatRequest(kept, request_id=self.id, settings=self._settings)
            try:
                requests = chat.prepare(tokenizer, max_tokens)
            except ContextLengthError:
                return None
            if chat.num_prompt_tokens > room:
                return None
            self._chat = chat
            return requests

        if (requests := attempt(num_first)) is not None:
            return requests
        low, high = 0, len(starts)  # the first of `starts` that fits
        best: list[GenerationRequest] | None = None
        while low < high:
            middle = (low + high) // 2
            if (requests := attempt(starts[middle])) is not None:
                best, high = requests, middle
            else:
                low = middle + 1
        if best is None:
            return self._chat.prepare(tokenizer, max_tokens)
        self._warnings.append(
            f"the context is full: the {starts[high] - num_first} oldest messages are left out"
        )
        return best

    async def keep(self, last: bytes) -> bytes:
        """Leave the complete response in the store, before the client knows of its end. `last` is the end of its
        stream, or all of it; returned is what is sent, which says if it could not be kept.
        """
        if self._final is None:
            return last
        try:
            is_kept = await self._keeper.put(self._final)
            warning = "the response is larger than what this server keeps"
        except ApiError as error:
            is_kept, warning = False, error.message
        if is_kept or not self._keeper.is_storing:
            return last
        self._final["store"] = False
        warnings = [*self._final.get("teneral", {}).get("warnings", []), f"not stored: {warning}"]
        self._final["teneral"] = {"warnings": warnings}
        return b"\n\n".join(map(_named, self._last)) if self._last else encode(self._final)

    @property
    def looks_up_tokens(self) -> bool:
        return self._chat.num_top_logprobs is not None

    def chunks(self, step: Step) -> list[bytes]:
        index, event = step
        events = [] if self._has_begun else self._opening()
        events += self._add(self._chat.read(index, event), event.logprobs)
        return [_named(each) for each in events]

    def usage_chunk(self, usage: Usage) -> bytes:
        """The last events: only here is known what they have to say."""
        events = self._items.finish(self._status)
        kind = f"response.{self._status}"
        self._final = self.response(self._status, usage)
        events.append(self._items.event(kind, response=self._final))
        self._last = events
        return b"\n\n".join(map(_named, events))

    def whole(self, outcomes: Sequence[SequenceOutcome], usage: Usage) -> bytes:
        (outcome,) = outcomes
        self._add(self._chat.read(0, outcome.as_event()), outcome.logprobs)
        self._items.finish(self._status)
        self._final = self.response(self._status, usage)
        return encode(self._final)

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

    def queued(self, response: Json) -> list[bytes]:
        """The first events of a stream that is made in the background."""
        self._is_queued = True
        return [self.event(kind, response=response) for kind in ("response.created", "response.queued")]

    def event(self, kind: str, **fields: Any) -> bytes:
        """The next event of the stream."""
        return _named(self._items.event(kind, **fields))

    def _opening(self) -> list[Event]:
        self._has_begun = True
        kinds = ("response.in_progress",) if self._is_queued else ("response.created", "response.in_progress")
        response = self.response(IN_PROGRESS, None)
        return [self._items.event(kind, response=response) for kind in kinds]

    def _error(self, error: ApiError) -> bytes:
        """The stream's last event, where it ends by an error."""
        return self.event("error", code=error.code, message=error.message, param=error.param)

    def response(self, status: str, usage: Usage | None, *, error: Json | None = None) -> Json:
        """The response as it is now."""
        asked = self._asked
        warnings = [*self._warnings, *self._chat.warnings]
        text = {"format": {"type": "text"}} if asked.text is None or asked.text.format is None else asked.text
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == COMPLETED else None,
            "status": status,
            "background": bool(asked.background),
            "conversation": None if asked.conversation_id is None else {"id": asked.conversation_id},
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == INCOMPLETE else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": asked.max_tool_calls,
            "metadata": asked.metadata or {},
            "model": self._model,
            "output": self._items.items if status in (COMPLETED, INCOMPLETE) else [],
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "reasoning": {
                "effort": None if asked.reasoning is None else asked.reasoning.effort,
                "summary": None,
            },
            "service_tier": "default",
            "store": self._keeper.is_storing,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": text,
            "tool_choice": "auto" if asked.tool_choice is None else asked.tool_choice,
            "tools": asked.tools or [],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": asked.truncation or "disabled",
            "usage": None if usage is None else self._usage(usage),
            "user": asked.user,
            **({"teneral": {"warnings": warnings}} if warnings else {}),
        }

    def _usage(self, usage: Usage) -> Json:
        details = self._chat.with_reasoning(usage).completion_tokens_details
        num_reasoning = 0 if details is UNSET else details.reasoning_tokens or 0
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.prompt_tokens_details.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
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
