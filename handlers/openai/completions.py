"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache, partial
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web
from msgspec import UnsetType
from msgspec.structs import replace

from ...runtime.errors import RequestError
from ...runtime.step.requests import FirstToken, GenerationEvent, GenerationRequest, TokenLogprob
from ..http.json_bodies import encode
from ..http.service import BodyRoute
from .fields import COMPLETIONS, refuse_unsupported
from .generation import SequenceOutcome, Step, StreamTokens, make_format, respond
from .logprobs import completion_logprobs, prompt_places, token_bytes
from .parameters import (
    answer_id,
    check_extras,
    check_sequences,
    check_stream,
    check_top_logprobs,
    max_tokens_of,
    num_choices,
    prompt_tokens,
    sequences,
    split_prompt,
    wanted_first_token,
)
from .responses import Completion, CompletionChoice, CompletionLogprobs, PromptPlaces, Usage
from .schemas import CompletionBody
from .structured import grammar_of, has_schema

if TYPE_CHECKING:
    from ...runtime.text.tokenizer import TextTokenizer

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionRoute(BodyRoute[CompletionBody]):
    kind = CompletionBody

    async def _answer(
        self, request: web.Request, body: CompletionBody, body_bytes: int
    ) -> web.StreamResponse:
        service = self._service
        make = partial(
            CompletionFormat,
            body,
            model=service.answering_as(body.model, body.lora),
            max_sequences=service.limits.max_sequences,
            first_token=service.first_token,
        )
        fmt = await make_format(service, body_bytes, make, has_schema=has_schema(body))
        return await respond(service, request, fmt, body_bytes=body_bytes)


class CompletionFormat:
    """One completion request's side of the wire. Raises `RequestError` for an invalid body."""

    begins_with_grammar = None
    needs_context = False

    def __init__(
        self, body: CompletionBody, *, model: str, max_sequences: int, first_token: FirstToken
    ) -> None:
        check_stream(body)
        check_extras(body)
        _refuse_unsupported(body)
        self.body = body
        self.grammar = grammar_of(body)
        if body.suffix and body.echo:
            raise RequestError("echo and suffix contradict one another", param="echo")
        self.max_tokens = max_tokens_of(body, default=DEFAULT_MAX_TOKENS)
        self.first_token = wanted_first_token(body, default=first_token)
        self._prompts = split_prompt(body.prompt, param="prompt", max_prompts=max_sequences)
        self._n = num_choices(body, num_prompts=len(self._prompts), max_sequences=max_sequences)
        self._best_of = _best_of(body, self._n, num_prompts=len(self._prompts), max_sequences=max_sequences)
        self.num_sequences = self._best_of * len(self._prompts)
        self.num_prompt_tokens = 0
        self._model = model
        self._id = answer_id("cmpl", body)
        self._created = int(time.time())
        self._num_chars: dict[
            int, int
        ] = {}  # of each choice that has begun, its tokens' text given out so far
        self._tokens = StreamTokens()

    def prepare(self, tokenizer: TextTokenizer, max_tokens: int | None) -> list[GenerationRequest]:
        if self.body.suffix:
            self._fill_in(tokenizer, self.body.suffix)
        body = self.body
        prompts = [
            prompt_tokens(
                body,
                prompt,
                tokenizer,
                add_special_tokens=body.add_special_tokens is not False,
                max_prompt_tokens=max_tokens,
                max_tokens=self.max_tokens,
            )
            for prompt in self._prompts
        ]
        if body.truncate_prompt_tokens is not None:
            self._prompts = [list(prompt) for prompt in prompts]  # an echo is of what was computed
        self._first_tokens = [prompt[0] for prompt in prompts]
        if body.return_token_ids:
            self._prompt_tokens = [list(prompt) for prompt in prompts]
        self.num_prompt_tokens = sum(map(len, prompts))
        self._tokenizer = tokenizer
        self._bytes_of = cache(partial(token_bytes, tokenizer))  # of an echoed prompt many come again
        return sequences(
            body,
            prompts,
            tokenizer,
            request_id=self._id,
            n=self._best_of,
            max_tokens=self.max_tokens,
            num_top_logprobs=0 if body.logprobs is None and self._best_of > self._n else body.logprobs,
            num_prompt_logprobs=self._num_prompt_logprobs,
            first_token=self.first_token,
            grammar=None if self.grammar is None else tokenizer.compile_grammar(self.grammar),
        )

    def use_prompt(self, tokens: list[int], ends: list[int]) -> None:
        """Replace the prompt by tokens, whose answer these tokens end, too."""
        self._prompts = [tokens]
        self.body = replace(self.body, stop_token_ids=[*(self.body.stop_token_ids or []), *ends])

    def _fill_in(self, tokenizer: TextTokenizer, suffix: str) -> None:
        """Put the suffix into the prompt. Raises `RequestError` for a model that cannot."""
        from .fill_in import end_tokens, fill_prompt  # of few requests

        (prompt,) = self._prompts if len(self._prompts) == 1 else (None,)
        if not isinstance(prompt, str):
            raise RequestError("suffix needs a prompt that is one text", param="suffix")
        self.use_prompt(fill_prompt(tokenizer, prompt, suffix), end_tokens(tokenizer))

    counts_reasoning = False

    @property
    def looks_up_tokens(self) -> bool:
        body = self.body
        return body.logprobs is not None or bool(body.echo) or body.prompt_logprobs is not None

    @property
    def _num_prompt_logprobs(self) -> int | None:
        """Those that `prompt_logprobs` asks for, or as many as an echo shows."""
        body = self.body
        asked = [body.prompt_logprobs, body.logprobs if body.echo else None]
        return max((num for num in asked if num is not None), default=None)

    def chunks(self, step: Step) -> list[bytes]:
        index, event = step
        text = event.text
        self._tokens.add(index, event)
        is_first = index not in self._num_chars
        gives_ids = bool(self.body.return_token_ids)
        if is_first:
            self._num_chars[index] = 0
            text = self._echo(index) + text
        has_logprobs = event.logprobs or event.prompt_logprobs is not None
        has_ids = gives_ids and (is_first or event.tokens)
        if not text and not has_logprobs and not has_ids and event.finish_reason is None:
            return []
        choice = CompletionChoice(
            index,
            text,
            finish_reason=None if event.finish_reason is None else str(event.finish_reason),
            logprobs=self._logprobs(event, index),
            stop_reason=msgspec.UNSET if event.stopped_by is None else event.stopped_by,
            token_ids=list(event.tokens) if gives_ids else msgspec.UNSET,
            prompt_token_ids=self._prompt_tokens[index // self._n]
            if gives_ids and is_first
            else msgspec.UNSET,
        )
        usage = self._tokens.usage(self.body, self.num_prompt_tokens)
        teneral = self._tokens.take(index)
        return [
            encode(Completion(self._id, self._created, self._model, [choice], usage=usage, teneral=teneral))
        ]

    def usage_chunk(self, usage: Usage) -> bytes:
        return encode(Completion(self._id, self._created, self._model, [], usage=usage))

    def whole(self, outcomes: Sequence[SequenceOutcome], usage: Usage) -> bytes:
        gives_ids = bool(self.body.return_token_ids)
        choices = [
            CompletionChoice(
                index,
                self._echo(index) + outcome.text,
                finish_reason=str(outcome.finish_reason),
                logprobs=None if self.body.logprobs is None else self._logprobs(outcome, index),
                prompt_logprobs=self._prompt_places(outcome),
                stop_reason=msgspec.UNSET if outcome.stopped_by is None else outcome.stopped_by,
                token_ids=outcome.tokens if gives_ids else msgspec.UNSET,
                prompt_token_ids=self._prompt_tokens[index // self._n] if gives_ids else msgspec.UNSET,
            )
            for index, outcome in enumerate(self._best(outcomes))
        ]
        return encode(Completion(self._id, self._created, self._model, choices, usage=usage))

    def _best(self, outcomes: Sequence[SequenceOutcome]) -> list[SequenceOutcome]:
        """The choices to be answered with, prompt by prompt; of equals, those that come first."""
        if self._best_of == self._n:
            return list(outcomes)
        best: list[SequenceOutcome] = []
        for first in range(0, len(outcomes), self._best_of):
            own = outcomes[first : first + self._best_of]
            best += sorted(own, key=_mean_logprob, reverse=True)[: self._n]
        return best

    def _echo(self, index: int) -> str:
        """The text in front of a choice's own. Asked for only after the engine has checked the tokens."""
        if not self.body.echo:
            return ""
        prompt = self._prompts[index // self._n]
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    def _logprobs(self, part: GenerationEvent | SequenceOutcome, index: int) -> CompletionLogprobs | None:
        """Of the tokens of a choice's part, and before the first of them those of an echoed prompt."""
        entries: list[TokenLogprob] = list(part.logprobs)
        first_token: int | None = None
        if part.prompt_logprobs is not None and self.body.echo and self.body.logprobs is not None:
            first_token = self._first_tokens[index // self._n]
            num_top = self.body.logprobs
            entries = [*(replace(entry, top=entry.top[:num_top]) for entry in part.prompt_logprobs), *entries]
        elif not entries and isinstance(part, GenerationEvent):
            return None
        logprobs = completion_logprobs(
            entries,
            self._bytes_of,
            start=self._num_chars.get(index, 0),
            first_token=first_token,
            names_ids=bool(self.body.return_tokens_as_token_ids),
        )
        if logprobs.tokens:
            last_token = entries[-1].token if entries else first_token
            assert last_token is not None
            last = self._bytes_of(last_token).decode("utf-8", "replace")
            self._num_chars[index] = logprobs.text_offset[-1] + len(last)
        return logprobs

    def _prompt_places(self, outcome: SequenceOutcome) -> PromptPlaces | UnsetType:
        if self.body.prompt_logprobs is None or outcome.prompt_logprobs is None:
            return msgspec.UNSET
        return prompt_places(outcome.prompt_logprobs, self._bytes_of, num_top=self.body.prompt_logprobs)


def _best_of(body: CompletionBody, n: int, *, num_prompts: int, max_sequences: int) -> int:
    """The number of choices of a prompt that are generated."""
    best_of = n if body.best_of is None else body.best_of
    if best_of < n:
        raise RequestError(f"best_of is {best_of}, but n is {n}: it must be at least n", param="best_of")
    if best_of > n and body.stream:
        raise RequestError(
            "best_of cannot be streamed: the best is known in the end",
            param="best_of",
            hint="Leave out stream.",
        )
    check_sequences(best_of, num_prompts=num_prompts, max_sequences=max_sequences, param="best_of")
    return best_of


def _mean_logprob(outcome: SequenceOutcome) -> float:
    return sum(entry.logprob for entry in outcome.logprobs) / max(1, len(outcome.logprobs))


def _refuse_unsupported(body: CompletionBody) -> None:
    """Refuses fields that would change the answer and are not implemented."""
    refuse_unsupported(body, COMPLETIONS)
    if body.logprobs is not None:
        check_top_logprobs(body.logprobs, param="logprobs")
