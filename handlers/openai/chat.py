"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web
from msgspec import UNSET, UnsetType

from ...runtime.step.requests import GenerationEvent, GenerationRequest
from ..http.json_bodies import encode
from ..http.service import BodyRoute, Service
from .chat_request import ChatRequest, FormatOfChat
from .deltas import Answer, AnswerToolCall, Delta, Finish, ReasoningDelta, TextDelta, ToolCallDelta
from .generation import SequenceOutcome, Step, StreamTokens, make_format, respond
from .parameters import answer_id, own_names
from .prompts import ChatSettings
from .responses import (
    ChatCall,
    ChatCallDelta,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatCustom,
    ChatCustomDelta,
    ChatDelta,
    ChatFunction,
    ChatFunctionDelta,
    ChatLogprobs,
    ChatMessage,
    ChunkExtras,
    PromptPlaces,
    Usage,
)
from .schemas import ChatBody
from .structured import has_schema

if TYPE_CHECKING:
    from ...runtime.text.tokenizer import TextTokenizer
    from .tools.custom import CustomCalls


class ChatRoute(BodyRoute[ChatBody]):
    kind = ChatBody

    async def _answer(self, request: web.Request, body: ChatBody, body_bytes: int) -> web.StreamResponse:
        service = self._service
        with own_names({"prompt": "messages"}):
            model = service.answering_as(body.model, body.lora)
            make = partial(ChatFormat, body, model=model, settings=chat_settings(service))
            fmt = await make_format(service, body_bytes, make, has_schema=has_schema(body))
            return await respond(service, request, fmt, body_bytes=body_bytes)


def chat_settings(service: Service) -> ChatSettings:
    config = service.instance.config
    return ChatSettings(
        config.tool_parser,
        config.reasoning_parser,
        config.trust_request_chat_template,
        service.limits.max_sequences,
        service.first_token,
    )


class ChatFormat(FormatOfChat):
    """One chat request's side of the wire. Raises `RequestError` for an invalid body."""

    def __init__(self, body: ChatBody, *, model: str, settings: ChatSettings) -> None:
        self._id = answer_id("chatcmpl", body)
        super().__init__(ChatRequest(body, request_id=self._id, settings=settings))
        self._model = model
        self._created = int(time.time())
        self._begun: dict[int, CustomCalls | None] = {}  # of the choices whose role was sent
        self._tokens = StreamTokens()

    def prepare(self, tokenizer: TextTokenizer, max_tokens: int | None) -> list[GenerationRequest]:
        self._tokenizer = tokenizer
        return self._chat.prepare(tokenizer, max_tokens)

    @property
    def looks_up_tokens(self) -> bool:
        return self._wants_logprobs or self.body.prompt_logprobs is not None

    def chunks(self, step: Step) -> list[bytes]:
        index, event = step
        self._tokens.add(index, event)
        deltas = self._shown(self._chat.read(index, event))
        chunks = []
        is_first = index not in self._begun
        if is_first:
            chunks.append(self._opening(index))
            self._begun[index] = self._custom_calls()
        if (custom := self._begun[index]) is not None:
            deltas = custom.shown(deltas)
        if is_first and (echo := self._echo()):
            deltas.insert(0, TextDelta(echo))
        logprobs = self._logprobs(event)
        ids = list(event.tokens) if self.body.return_token_ids else []
        if (logprobs is not None or ids) and all(isinstance(delta, Finish) for delta in deltas):
            deltas.insert(0, TextDelta(""))  # the text of these tokens is held back
        for delta in deltas:
            choice = ChatChunkChoice(
                index,
                *_wire_delta(delta),
                logprobs=logprobs,
                stop_reason=_stop_reason(delta, event),
                token_ids=ids or UNSET,
            )
            chunks.append(self._chunk(choice, self._tokens.take(index)))
            logprobs, ids = None, []
        return chunks

    def _opening(self, index: int) -> bytes:
        """The first chunk of a choice; that of the answer has what concerns all of it."""
        is_first = not self._begun
        choice = ChatChunkChoice(index, ChatDelta(role="assistant", content="", refusal=None))
        return self._chunk(
            choice,
            self._warnings() if is_first else UNSET,
            self._prompt_token_ids() if is_first else UNSET,
        )

    def usage_chunk(self, usage: Usage) -> bytes:
        usage = self._chat.with_reasoning(usage)
        return encode(ChatChunk(self._id, self._created, self._model, [], usage=usage))

    def whole(self, outcomes: Sequence[SequenceOutcome], usage: Usage) -> bytes:
        choices = [
            self._choice(index, outcome, self._chat.answer(outcome)) for index, outcome in enumerate(outcomes)
        ]
        places: PromptPlaces | UnsetType = UNSET
        if self.body.prompt_logprobs is not None and (prompt := outcomes[0].prompt_logprobs) is not None:
            from .logprobs import prompt_places  # of few requests

            places = prompt_places(prompt, self._bytes_of(), num_top=self.body.prompt_logprobs)
        return encode(
            ChatCompletion(
                self._id,
                self._created,
                self._model,
                choices,
                self._chat.with_reasoning(usage),
                prompt_logprobs=places,
                prompt_token_ids=self._prompt_token_ids(),
                teneral=self._warnings(),
            )
        )

    def _warnings(self) -> ChunkExtras | UnsetType:
        warnings = self._chat.warnings
        return ChunkExtras(warnings=list(warnings)) if warnings else UNSET

    def _prompt_token_ids(self) -> list[int] | UnsetType:
        return list(self._chat.prompt) if self.body.return_token_ids else UNSET

    def _echo(self) -> str:
        """The text in front of an answer's own: the last message, an assistant's."""
        last = self._chat.last_message
        return str(last["content"]) if self.body.echo and last["role"] == "assistant" else ""

    def _shown(self, deltas: list[Delta]) -> list[Delta]:
        if self._gives_reasoning:
            return deltas
        return [delta for delta in deltas if not isinstance(delta, ReasoningDelta)]

    def _custom_calls(self) -> CustomCalls | None:
        if not self._chat.custom_tools:
            return None
        from .tools.custom import CustomCalls  # of few requests

        return CustomCalls(self._chat.custom_tools)

    @property
    def _gives_reasoning(self) -> bool:
        body, options = self.body, self.body.reasoning
        is_excluded = body.reasoning_format == "hidden" or (options is not None and options.exclude)
        return body.include_reasoning is not False and not is_excluded

    @property
    def _wants_logprobs(self) -> bool:
        return self._chat.num_top_logprobs is not None

    def _choice(self, index: int, outcome: SequenceOutcome, answer: Answer) -> ChatChoice:
        calls = [_wire_call(call, self._chat.custom_tools) for call in answer.calls]
        reasoning = answer.reasoning or UNSET if self._gives_reasoning else UNSET
        text = self._echo() + answer.text
        message = ChatMessage(
            text if text or not calls else None,
            reasoning_content=reasoning,
            reasoning=reasoning,
            tool_calls=calls or UNSET,
        )
        return ChatChoice(
            index,
            message,
            finish_reason=answer.finish_reason,
            logprobs=self._logprobs(outcome) if self._wants_logprobs else None,
            stop_reason=UNSET if outcome.stopped_by is None else outcome.stopped_by,
            token_ids=outcome.tokens if self.body.return_token_ids else UNSET,
        )

    def _logprobs(self, part: GenerationEvent | SequenceOutcome) -> ChatLogprobs | None:
        if isinstance(part, GenerationEvent) and not part.logprobs:
            return None
        from .logprobs import chat_logprobs  # of few requests

        names_ids = bool(self.body.return_tokens_as_token_ids)
        return chat_logprobs(part.logprobs, self._bytes_of(), names_ids=names_ids)

    def _bytes_of(self) -> Callable[[int], bytes]:
        from .logprobs import token_bytes  # of few requests

        return partial(token_bytes, self._tokenizer)

    def _chunk(
        self,
        choice: ChatChunkChoice,
        teneral: ChunkExtras | UnsetType = UNSET,
        prompt_token_ids: list[int] | UnsetType = UNSET,
    ) -> bytes:
        return encode(
            ChatChunk(
                self._id,
                self._created,
                self._model,
                [choice],
                usage=self._tokens.usage(self.body, self.num_prompt_tokens),
                prompt_token_ids=prompt_token_ids,
                teneral=teneral,
            )
        )


def _stop_reason(delta: Delta, event: GenerationEvent) -> str | int | UnsetType:
    """With the delta that ends the answer."""
    return event.stopped_by if isinstance(delta, Finish) and event.stopped_by is not None else UNSET


def _wire_call(call: AnswerToolCall, custom_tools: frozenset[str]) -> ChatCall:
    if call.name in custom_tools:
        from .tools.custom import custom_input  # of few requests

        custom = ChatCustom(call.name, custom_input(call.arguments))
        return ChatCall(call.id, type="custom", custom=custom)
    return ChatCall(call.id, ChatFunction(call.name, call.arguments))


def _wire_delta(delta: Delta) -> tuple[ChatDelta, str | None]:
    """A delta as a chunk has it, and the reason why the answer ended."""
    match delta:
        case TextDelta(text):
            return ChatDelta(content=text), None
        case ReasoningDelta(text):
            return ChatDelta(reasoning_content=text, reasoning=text), None
        case ToolCallDelta(index, text, call_id, name, is_custom):
            kind = UNSET if not call_id else "custom" if is_custom else "function"
            function = UNSET if is_custom else ChatFunctionDelta(text, name or UNSET)
            custom = ChatCustomDelta(text, name or UNSET) if is_custom else UNSET
            call = ChatCallDelta(index, function, call_id or UNSET, kind, custom)
            return ChatDelta(tool_calls=[call]), None
        case Finish(reason):
            return ChatDelta(), reason
