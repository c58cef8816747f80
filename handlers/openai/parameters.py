"""Generation parameters and prompts: from a decoded body to one engine request for each sequence.

Pure; the prompt's tokens are given. Ranges that `SamplingParams` and `GenerationRequest` check are not checked again
here.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from msgspec.structs import replace

from ...runtime.errors import RequestError
from ...runtime.step.requests import (
    MAX_BAD_WORDS,
    MAX_TOP_LOGPROBS,
    FirstToken,
    GenerationRequest,
    Priority,
    SamplingParams,
    check_owner,
    queue_name,
)
from ..function.options import ParsedOptions, parse_options
from .schemas import Extras, GenerationBody, Prompt

if TYPE_CHECKING:
    from ...runtime.grammar.matcher import Grammar
    from ...runtime.step.images import PromptImage
    from ...runtime.text.tokenizer import TextTokenizer

MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORD_CHARS = 256
WHOLE_CONTEXT = -1  # of truncate_prompt_tokens: as many as there is room for
_INDEX = re.compile(r"\[\d+\]")
_SEED_SPAN = 1 << 64
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_SHARED_OPTIONS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "stop",
    "ignore_eos",
)
_OWN_OPTIONS = ("cache_salt", "session", "tenant", "priority")  # of the body's `teneral`

N = TypeVar("N", int, float)


def num_choices(body: GenerationBody, *, num_prompts: int, max_sequences: int) -> int:
    """`n`, checked: at least 1, and n × prompts within the bound."""
    n = 1 if body.n is None else body.n
    if n < 1:
        raise RequestError(f"n is {n}, but must be at least 1", param="n")
    check_sequences(n, num_prompts=num_prompts, max_sequences=max_sequences, param="n")
    return n


def check_sequences(num_choices: int, *, num_prompts: int, max_sequences: int, param: str) -> None:
    """Raises `RequestError` for more sequences than a request may have."""
    if num_choices * num_prompts > max_sequences:
        several = f" for {num_prompts} prompts" if num_prompts > 1 else ""
        raise RequestError(
            f"{param} asks for {num_choices} choices{several}; a request may have {max_sequences} sequences",
            param=param,
            hint="Send several requests.",
        )


@contextmanager
def own_names(names: Mapping[str, str]) -> Iterator[None]:
    """Has errors name a route's own fields, where they are about those of the chat that it comes to. A name with `[]`,
    which stands for any index, may be the end of a field's.
    """
    try:
        yield
    except RequestError as error:
        name = _own_name(error.param, names)
        if name is None:
            raise
        # Not of prose: "the prompt has 9 tokens".
        message = re.sub(rf"(?<!the ){re.escape(error.param)}\b", lambda _: name, error.message, count=1)
        raise type(error)(message, param=name, hint=error.hint) from error


def _own_name(param: str, names: Mapping[str, str]) -> str | None:
    if param in names:
        return names[param]
    general = _INDEX.sub("[]", param)
    for chats, own in names.items():
        if "[]" not in chats or not f".{general}".endswith(f".{chats}"):
            continue
        name = general.removesuffix(chats) + own
        for index in _INDEX.findall(param):
            name = name.replace("[]", index, 1)
        return name
    return None


def check_stream(body: GenerationBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options is for streams: set stream to true", param="stream_options")
    if body.prompt_logprobs is not None:
        check_top_logprobs(body.prompt_logprobs, param="prompt_logprobs")
        if body.stream:
            raise RequestError(
                "a stream has no prompt_logprobs", param="prompt_logprobs", hint="Leave out stream."
            )


def wanted_first_token(body: GenerationBody, *, default: FirstToken) -> FirstToken:
    """The request's value, or else the server's own."""
    asked = None if body.teneral is None else body.teneral.first_token
    return default if asked is None else asked


def extras_of(body: GenerationBody) -> Extras:
    """The body's `teneral`, with vLLM's names for its fields. Raises `RequestError` where they differ."""
    extras = body.teneral or Extras()
    vllm: dict[str, tuple[str, Any]] = {}
    if body.cache_salt is not None:
        vllm["cache_salt"] = ("cache_salt", body.cache_salt)
    if body.session_id is not None:
        vllm["session"] = ("session_id", body.session_id)
    if body.priority is not None:
        vllm["priority"] = ("priority", Priority.BATCH if body.priority > 0 else Priority.INTERACTIVE)
    for name, (param, value) in vllm.items():
        own = getattr(extras, name)
        if own is not None and own != value:
            raise RequestError(f"{param} and teneral.{name} contradict one another", param=param)
    return replace(extras, **{name: value for name, (_, value) in vllm.items()})


def check_extras(body: GenerationBody) -> None:
    """Raises `RequestError` for invalid names."""
    extras = extras_of(body)
    check_owner(session=extras.session or "", tenant=extras.tenant or "", cache_salt=extras.cache_salt or "")


def queue_of(body: GenerationBody) -> str:
    """`GenerationRequest.queue_name` of what is made of this body."""
    extras = extras_of(body)
    return queue_name(extras.tenant or "", extras.cache_salt or "")


def priority_of(body: GenerationBody) -> Priority:
    return extras_of(body).priority or Priority.INTERACTIVE


def max_tokens_of(body: GenerationBody, *, default: int | None) -> int | None:
    """The most tokens of an answer; None: until the context is full."""
    if body.max_tokens is not None or body.n_predict is None:
        return default if body.max_tokens is None else body.max_tokens
    return None if body.n_predict == -1 else body.n_predict


def answer_id(prefix: str, body: GenerationBody) -> str:
    """The `id` of an answer, which need not be unique. Raises `RequestError`."""
    if body.request_id is None:
        return f"{prefix}-{secrets.token_hex(12)}"
    if not _REQUEST_ID.fullmatch(body.request_id):
        raise RequestError(
            "request_id must be 1 to 128 letters, digits or characters of ._:/+=@- in ASCII",
            param="request_id",
        )
    return f"{prefix}-{body.request_id}"


def options_of(body: GenerationBody, bad_words: tuple[tuple[int, ...], ...] = ()) -> ParsedOptions:
    """The body's options as `context.model` has them, and the sampling parameters of vLLM alone.

    `bad_words` are the body's as tokens. Raises `RequestError` for values out of range.
    """
    extras = extras_of(body)
    options = parse_options(
        {"repetition_penalty": body.repeat_penalty}
        | {name: value for name in _SHARED_OPTIONS if (value := getattr(body, name)) is not None}
        | {"top_k": None if body.top_k == -1 else body.top_k}
        | {name: getattr(extras, name) for name in _OWN_OPTIONS}
    )
    if body.allowed_token_ids is None and not bad_words:
        return options
    allowed = None if body.allowed_token_ids is None else tuple(dict.fromkeys(body.allowed_token_ids))
    return replace(options, sampling=replace(options.sampling, allowed_tokens=allowed, bad_words=bad_words))


def bad_word_tokens(body: GenerationBody, tokenizer: TextTokenizer) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word as it begins a text, and as it stands after a space."""
    words = body.bad_words or []
    if len(words) > MAX_BAD_WORDS // 2 or any(not 0 < len(word) <= MAX_BAD_WORD_CHARS for word in words):
        raise RequestError(
            f"bad_words takes up to {MAX_BAD_WORDS // 2} words of 1 to {MAX_BAD_WORD_CHARS} characters",
            param="bad_words",
        )
    spellings = dict.fromkeys(
        tuple(tokenizer.encode(f"{space}{word.lstrip()}", add_special_tokens=False))
        for word in words
        for space in ("", " ")
    )
    return tuple(spelling for spelling in spellings if spelling)


def forced_text_may_change(body: GenerationBody) -> bool:
    """True if decoding options change the text of tokens that a grammar forces."""
    return bool(body.stop or body.stop_token_ids or body.bad_words or body.allowed_token_ids)


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
    tokenizer: TextTokenizer,
    *,
    request_id: str,
    n: int,
    max_tokens: int | None,
    num_top_logprobs: int | None,
    first_token: FirstToken,
    num_prompt_logprobs: int | None = None,
    grammar: Grammar | None = None,
    shown_tokens: Mapping[int, str] | None = None,
    images: tuple[PromptImage, ...] = (),
) -> list[GenerationRequest]:
    """One request for each choice of each prompt; sequence number i is choice i % n of prompt i // n."""
    options = options_of(body, bad_word_tokens(body, tokenizer))
    stop_token_ids = stop_tokens(body)
    return [
        GenerationRequest(
            request_id=f"{request_id}-{prompt_number * n + choice}",
            prompt_tokens=prompt,
            max_tokens=max_tokens,
            min_tokens=_given(body.min_tokens, 0),
            sampling=for_choice(options.sampling, choice),
            stop=options.stop,
            stop_token_ids=stop_token_ids,
            includes_stop=bool(body.include_stop_str_in_output),
            skips_special_tokens=body.skip_special_tokens is not False,
            ignore_eos=options.ignore_eos,
            num_top_logprobs=num_top_logprobs,
            num_prompt_logprobs=num_prompt_logprobs,
            grammar=grammar,
            shown_tokens=shown_tokens or {},
            first_token=first_token,
            cache_salt=options.cache_salt,
            images=images,
            session=options.session,
            tenant=options.tenant,
            priority=options.priority,
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


def prompt_tokens(
    body: GenerationBody,
    prompt: str | Sequence[int],
    tokenizer: TextTokenizer,
    *,
    max_prompt_tokens: int | None,
    max_tokens: int | None,
    add_special_tokens: bool = True,
    param: str = "prompt",
) -> tuple[int, ...]:
    """A prompt's tokens, the last `truncate_prompt_tokens` of them; -1 leaves room for `max_tokens`, or for one.

    Raises `RequestError` for none, and `ContextLengthError` for a text that surely has more than `max_prompt_tokens`
    where nothing is cut off.
    """
    keep = body.truncate_prompt_tokens
    encode = partial(
        tokenizer.encode,
        add_special_tokens=add_special_tokens,
        max_tokens=max_prompt_tokens if keep is None else None,
    )
    tokens = tokens_of(prompt, encode, param=param)
    if keep is None:
        return tokens
    if keep == WHOLE_CONTEXT and max_prompt_tokens is not None:
        keep = max_prompt_tokens - _given(max_tokens, 1)
    if keep < 1:
        raise RequestError(
            f"truncate_prompt_tokens is {body.truncate_prompt_tokens}, which leaves no token of the prompt",
            param="truncate_prompt_tokens",
            hint="Give at least 1, or -1 with a max_tokens that leaves room.",
        )
    return tokens[-keep:]


def check_truncation(keep: int | None) -> None:
    """Raises `RequestError` for a `truncate_prompt_tokens` of texts that is out of range."""
    if keep is not None and keep != WHOLE_CONTEXT and keep < 1:
        raise RequestError(
            f"truncate_prompt_tokens is {keep}, but must be at least 1, or -1 for all that the model takes",
            param="truncate_prompt_tokens",
        )


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
