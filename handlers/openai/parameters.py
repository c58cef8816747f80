"""Generation parameters and prompts: from a decoded body to one engine request for each sequence.

Pure; the prompt's tokens are given. Ranges that `SamplingParams` and `GenerationRequest` check are not checked again
here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar, cast

from ...runtime.errors import RequestError
from ...runtime.grammar.matcher import Grammar
from ...runtime.step.requests import (
    MAX_TOP_LOGPROBS,
    FirstToken,
    GenerationRequest,
    Priority,
    SamplingParams,
    check_owner,
    queue_name,
)
from .schemas import Extras, GenerationBody, Prompt

MAX_LOGIT_BIASES = 1024
MAX_STOP_TOKEN_IDS = 1024
_SEED_SPAN = 1 << 64

N = TypeVar("N", int, float)


def num_choices(body: GenerationBody, *, num_prompts: int, max_sequences: int) -> int:
    """`n`, checked: at least 1, and n × prompts within the bound."""
    n = 1 if body.n is None else body.n
    if n < 1:
        raise RequestError(f"n is {n}, but must be at least 1", param="n")
    if n * num_prompts > max_sequences:
        asked = f"{n} choices for {num_prompts} prompts" if num_prompts > 1 else f"{n} choices"
        raise RequestError(
            f"{asked} are more than the {max_sequences} sequences a request may have",
            param="n",
            hint="Send several requests.",
        )
    return n


def check_stream(body: GenerationBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options is for streams: set stream to true", param="stream_options")


def wanted_first_token(body: GenerationBody, *, default: FirstToken) -> FirstToken:
    """The request's value, or else the server's own."""
    asked = None if body.teneral is None else body.teneral.first_token
    return default if asked is None else asked


def check_extras(body: GenerationBody) -> None:
    """Raises `RequestError` for invalid names."""
    extras = body.teneral or Extras()
    check_owner(session=extras.session or "", tenant=extras.tenant or "", cache_salt=extras.cache_salt or "")


def queue_of(body: GenerationBody) -> str:
    """`GenerationRequest.queue_name` of what is made of this body."""
    extras = body.teneral or Extras()
    return queue_name(extras.tenant or "", extras.cache_salt or "")


def priority_of(body: GenerationBody) -> Priority:
    return (body.teneral and body.teneral.priority) or Priority.INTERACTIVE


def sampling(body: GenerationBody) -> SamplingParams:
    """Raises `RequestError` for values out of range."""
    biases = body.logit_bias or {}
    if len(biases) > MAX_LOGIT_BIASES:
        raise RequestError(f"logit_bias may have {MAX_LOGIT_BIASES} entries", param="logit_bias")
    return SamplingParams(
        temperature=_given(body.temperature, 1.0),
        top_k=_given(body.top_k, 0),
        top_p=_given(body.top_p, 1.0),
        min_p=_given(body.min_p, 0.0),
        repetition_penalty=_given(body.repetition_penalty, 1.0),
        presence_penalty=_given(body.presence_penalty, 0.0),
        frequency_penalty=_given(body.frequency_penalty, 0.0),
        logit_bias=tuple(biases.items()),
        seed=body.seed,
    )


def stop_strings(body: GenerationBody) -> tuple[str, ...]:
    if body.stop is None:
        return ()
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)


def stop_tokens(body: GenerationBody) -> frozenset[int]:
    tokens = body.stop_token_ids or []
    if len(tokens) > MAX_STOP_TOKEN_IDS:
        raise RequestError(f"stop_token_ids may have {MAX_STOP_TOKEN_IDS} entries", param="stop_token_ids")
    return frozenset(tokens)


def check_top_logprobs(count: int, *, param: str) -> int:
    if not 0 <= count <= MAX_TOP_LOGPROBS:
        raise RequestError(f"{param} is {count}, but must be from 0 to {MAX_TOP_LOGPROBS}", param=param)
    return count


def sequences(
    body: GenerationBody,
    prompts: Sequence[tuple[int, ...]],
    *,
    request_id: str,
    n: int,
    max_tokens: int | None,
    num_top_logprobs: int | None,
    first_token: FirstToken,
    grammar: Grammar | None = None,
) -> list[GenerationRequest]:
    """One request for each choice of each prompt; sequence number i is choice i % n of prompt i // n."""
    params = sampling(body)
    stop = stop_strings(body)
    stop_token_ids = stop_tokens(body)
    extras = body.teneral or Extras()
    return [
        GenerationRequest(
            request_id=f"{request_id}-{prompt_number * n + choice}",
            prompt_tokens=prompt,
            max_tokens=max_tokens,
            sampling=for_choice(params, choice),
            stop=stop,
            stop_token_ids=stop_token_ids,
            ignore_eos=bool(body.ignore_eos),
            num_top_logprobs=num_top_logprobs,
            grammar=grammar,
            first_token=first_token,
            cache_salt=extras.cache_salt or "",
            session=extras.session or "",
            tenant=extras.tenant or "",
            priority=priority_of(body),
        )
        for prompt_number, prompt in enumerate(prompts)
        for choice in range(n)
    ]


def for_choice(params: SamplingParams, choice: int) -> SamplingParams:
    """The parameters of one of n choices: with one seed for all, they would all be the same text."""
    if params.seed is None or choice == 0:
        return params
    seed = (params.seed + choice + _SEED_SPAN // 2) % _SEED_SPAN - _SEED_SPAN // 2  # wraps as an int64 does
    return replace(params, seed=seed)


def _given(value: N | None, default: N) -> N:
    return default if value is None else value


def split_prompt(prompt: Prompt, *, param: str, max_prompts: int) -> list[str | list[int]]:
    """The single prompts, each a text or its tokens. Raises `RequestError` for an empty, mixed or too long
    list.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError(f"{param} is empty", param=param)
    if all(isinstance(item, int) for item in prompt):
        return [cast(list[int], prompt)]
    if len(prompt) > max_prompts:
        raise RequestError(
            f"{param} has {len(prompt)} items, but may have {max_prompts}",
            param=param,
            hint="Send several requests.",
        )
    if all(isinstance(item, str) for item in prompt) or all(isinstance(item, list) for item in prompt):
        return cast(list[str | list[int]], prompt)
    raise RequestError(f"{param} mixes texts and tokens", param=param)


def tokens_of(
    prompt: str | Sequence[int], encode: Callable[[str], Sequence[int]], *, param: str
) -> tuple[int, ...]:
    """A prompt's tokens; whether the model has those that were given is the engine's to say. Raises
    `RequestError` for none.
    """
    tokens = tuple(encode(prompt)) if isinstance(prompt, str) else tuple(prompt)
    if not tokens:
        raise RequestError(f"{param} is empty", param=param)
    return tokens
