"""POST /v1/completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from ...runtime.errors import RequestError
from ...runtime.step.requests import FirstToken, GenerationRequest, TokenLogprob
from ..http.json_bodies import Decoder, encode
from ..http.service import Service
from .fields import COMPLETIONS, refuse_unsupported
from .generation import Outcome, Step, Untold, respond
from .logprobs import completion_logprobs, token_bytes
from .parameters import (
    check_extras,
    check_stream,
    check_top_logprobs,
    num_choices,
    sequences,
    split_prompt,
    tokens_of,
    wanted_first_token,
)
from .responses import Completion, CompletionChoice, CompletionLogprobs, Usage
from .schemas import CompletionBody
from .structured import grammar_of

if TYPE_CHECKING:
    from ...runtime.text.tokenizer import TextTokenizer

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionRoute:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._decoder = Decoder(CompletionBody)

    async def post(self, request: web.Request) -> web.StreamResponse:
        async with self._service.admission.body(request) as data:
            return await self.answer(request, data)

    async def answer(self, request: web.Request, data: bytes | bytearray) -> web.StreamResponse:
        """As `post`, with a body that was read already."""
        service = self._service
        body = self._decoder.decode(data)
        service.check_model(body.model)
        fmt = CompletionFormat(
            body,
            model=service.instance.model_name,
            max_sequences=service.limits.max_sequences,
            first_token=service.first_token,
        )
        return await respond(service, request, fmt, body_bytes=len(data))


class CompletionFormat:
    """One completion request's side of the wire. Raises `RequestError` for an invalid body."""

    def __init__(
        self, body: CompletionBody, *, model: str, max_sequences: int, first_token: FirstToken
    ) -> None:
        check_stream(body)
        check_extras(body)
        _refuse_unsupported(body)
        self.body = body
        self.grammar = grammar_of(body)
        self.max_tokens: int | None = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        self.first_token = wanted_first_token(body, default=first_token)
        self._prompts = split_prompt(body.prompt, param="prompt", max_prompts=max_sequences)
        self._n = num_choices(body, num_prompts=len(self._prompts), max_sequences=max_sequences)
        self.num_sequences = self._n * len(self._prompts)
        self.num_prompt_tokens = 0
        self._model = model
        self._id = f"cmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._num_chars: dict[
            int, int
        ] = {}  # of each choice that has begun, its tokens' text given out so far
        self._untold = Untold()

    def prepare(self, tokenizer: TextTokenizer, max_tokens: int | None) -> list[GenerationRequest]:
        body = self.body
        encode_prompt = partial(tokenizer.encode, max_tokens=max_tokens)
        prompts = [tokens_of(prompt, encode_prompt, param="prompt") for prompt in self._prompts]
        self.num_prompt_tokens = sum(map(len, prompts))
        self._tokenizer = tokenizer
        self._bytes_of = partial(token_bytes, tokenizer)
        return sequences(
            body,
            prompts,
            request_id=self._id,
            n=self._n,
            max_tokens=self.max_tokens,
            num_top_logprobs=body.logprobs,
            first_token=self.first_token,
            grammar=None if self.grammar is None else tokenizer.compile_grammar(self.grammar),
        )

    @property
    def looks_up_tokens(self) -> bool:
        return self.body.logprobs is not None or bool(self.body.echo)

    def chunks(self, step: Step) -> list[bytes]:
        index, event = step
        text = event.text
        self._untold.add(index, event)
        if index not in self._num_chars:
            self._num_chars[index] = 0
            text = self._echo(index) + text
        if not text and not event.logprobs and event.finish_reason is None:
            return []
        choice = CompletionChoice(
            index,
            text,
            finish_reason=None if event.finish_reason is None else str(event.finish_reason),
            logprobs=self._logprobs(event.logprobs, index) if event.logprobs else None,
        )
        usage = None if self.body.includes_usage else msgspec.UNSET
        teneral = self._untold.take(index)
        return [
            encode(Completion(self._id, self._created, self._model, [choice], usage=usage, teneral=teneral))
        ]

    def usage_chunk(self, usage: Usage) -> bytes:
        return encode(Completion(self._id, self._created, self._model, [], usage=usage))

    def whole(self, outcomes: Sequence[Outcome], usage: Usage) -> bytes:
        choices = [
            CompletionChoice(
                index,
                self._echo(index) + outcome.text,
                finish_reason=str(outcome.finish_reason),
                logprobs=None if self.body.logprobs is None else self._logprobs(outcome.logprobs, index),
            )
            for index, outcome in enumerate(outcomes)
        ]
        return encode(Completion(self._id, self._created, self._model, choices, usage=usage))

    def _echo(self, index: int) -> str:
        """The text in front of a choice's own. Asked for only after the engine has checked the tokens."""
        if not self.body.echo:
            return ""
        prompt = self._prompts[index // self._n]
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    def _logprobs(self, entries: Sequence[TokenLogprob], index: int) -> CompletionLogprobs:
        logprobs = completion_logprobs(entries, self._bytes_of, start=self._num_chars.get(index, 0))
        self._num_chars[index] = logprobs.text_offset[-1] + len(logprobs.tokens[-1]) if entries else 0
        return logprobs


def _refuse_unsupported(body: CompletionBody) -> None:
    """Refuses fields that would change the answer and are not implemented."""
    refuse_unsupported(body, COMPLETIONS)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError("best_of is supported only where it equals n", param="best_of")
    if body.logprobs is not None:
        check_top_logprobs(body.logprobs, param="logprobs")
        if body.echo:
            raise RequestError("logprobs of an echoed prompt are not supported", param="logprobs")
