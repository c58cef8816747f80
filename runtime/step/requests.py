"""Requests to the engine and its answers, as values, without text processing or HTTP."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct, field

from ...loader.errors import TeneralError
from ..errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ..grammar.matcher import Grammar
    from .images import PromptImage

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1_024
MAX_TOP_LOGPROBS = 20
MAX_CACHE_SALT_CHARS = 256
MAX_NAME_CHARS = 128  # of a session or a tenant
# Of a prompt: its tokens, times the top tokens of each.
MAX_PROMPT_LOGPROBS = 1 << 18
MAX_ALLOWED_TOKENS = 1 << 16
MAX_BAD_WORDS = 512  # sequences of tokens
MAX_BAD_WORD_TOKENS = 64
_NAME = re.compile(rf"[A-Za-z0-9._:/+=@-]{{1,{MAX_NAME_CHARS}}}")


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    CANCELLED = "cancelled"
    ERROR = "error"


class FirstToken(enum.StrEnum):
    """The weights that may choose a client's first tokens while weights are still arriving."""

    # Exact weights only: all tokens sent are those of the finished model.
    EXACT = "exact"
    # Weights of the draft tier, until the exact ones have arrived.
    DRAFT = "draft"
    # Weights of the sketch tier, if the artifact has one; else the draft's.
    SKETCH = "sketch"

    @property
    def sends_drafts(self) -> bool:
        """True if a client may get tokens that exact weights have not confirmed."""
        return self is not FirstToken.EXACT


class Priority(enum.StrEnum):
    """The scheduling class of a request."""

    # A user waits for each token.
    INTERACTIVE = "interactive"
    # Uses the capacity left by interactive requests, and yields it to them.
    BATCH = "batch"


class SamplingParams(Struct, frozen=True):
    """Parameters of choosing the next token. The defaults are plain sampling from the model's
    distribution.

    Order of application: logit bias, repetition/presence/frequency penalties, temperature, top-k,
    top-p, min-p.
    """

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None  # the same seed, prompt and parameters give the same tokens on the same machine
    allowed_tokens: tuple[int, ...] | None = None  # None: all
    # Sequences of tokens that an answer never completes.
    bad_words: tuple[tuple[int, ...], ...] = ()
    # The first of a speech model's tokens of times: where these are likelier together than any other token that may
    # come next, one of them does.
    times_from: int | None = None
    # Log-probabilities are those among the tokens that may come next.
    masks_logprobs: bool = False

    def __post_init__(self) -> None:
        _in_range("temperature", self.temperature, 0.0, 100.0)
        _in_range("top_k", self.top_k, 0, 1 << 31)
        _in_range("top_p", self.top_p, 0.0, 1.0)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _in_range("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        for _, bias in self.logit_bias:
            _in_range("logit_bias", bias, -100.0, 100.0)
        if self.allowed_tokens is not None and not 0 < len(self.allowed_tokens) <= MAX_ALLOWED_TOKENS:
            raise RequestError(
                f"allowed_token_ids must have 1 to {MAX_ALLOWED_TOKENS} tokens, not {len(self.allowed_tokens)}",
                param="allowed_token_ids",
            )
        if len(self.bad_words) > MAX_BAD_WORDS or any(
            not 0 < len(word) <= MAX_BAD_WORD_TOKENS for word in self.bad_words
        ):
            raise RequestError(
                f"bad_words must have up to {MAX_BAD_WORDS} spellings of 1 to {MAX_BAD_WORD_TOKENS} tokens",
                param="bad_words",
            )

    @property
    def named_tokens(self) -> dict[str, tuple[int, ...]]:
        """The token ids in the request, which the vocabulary must contain, by their field."""
        return {
            "logit_bias": tuple(token for token, _ in self.logit_bias),
            "allowed_token_ids": self.allowed_tokens or (),
            "bad_words": tuple(token for word in self.bad_words for token in word),
            "times_from": () if self.times_from is None else (self.times_from,),
        }


class GenerationRequest(Struct, frozen=True):
    """One sequence to generate. The prompt includes its special tokens."""

    request_id: str
    prompt_tokens: tuple[int, ...]
    max_tokens: int | None = None  # None: until the context is full
    sampling: SamplingParams = field(default_factory=SamplingParams)
    # Before that, no end-of-sequence token comes, and no stop token or string counts.
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    # The returned text ends with the stop string, or the stop token's text.
    includes_stop: bool = False
    skips_special_tokens: bool = True  # skipped tokens have no text
    ignore_eos: bool = False
    num_top_logprobs: int | None = None  # None: no logprobs; 0: of the chosen token only
    num_prompt_logprobs: int | None = None  # the same of the prompt's tokens
    grammar: Grammar | None = None  # the grammar of the answer
    # Special tokens that have a text in this answer.
    shown_tokens: Mapping[int, str] = field(default_factory=dict)
    first_token: FirstToken = FirstToken.EXACT
    # Requests with different salts share no keys and values.
    cache_salt: str = ""
    images: tuple[PromptImage, ...] = ()  # whose places have the model's image token
    # The name of the LoRA adapter that computes it; '': none.
    adapter: str = ""
    # The session whose keys and values are kept for its next request; '': none.
    session: str = ""
    # Tenants share the queue fairly; '': requests with the same salt are one tenant.
    tenant: str = ""
    priority: Priority = Priority.INTERACTIVE

    def __post_init__(self) -> None:
        if not self.prompt_tokens:
            raise RequestError("the prompt is empty", param="prompt")
        if self.max_tokens is not None:
            _in_range("max_tokens", self.max_tokens, 0, 1 << 31)
        _in_range("min_tokens", self.min_tokens, 0, 1 << 31 if self.max_tokens is None else self.max_tokens)
        if len(self.stop) > MAX_STOP_STRINGS or any(
            not 0 < len(text) <= MAX_STOP_STRING_CHARS for text in self.stop
        ):
            raise RequestError(
                f"stop must have up to {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_STRING_CHARS} characters",
                param="stop",
            )
        if self.images:
            from .images import check_images  # imports numpy, which few requests need here

            check_images(self.images, len(self.prompt_tokens))
        check_owner(session=self.session, tenant=self.tenant, cache_salt=self.cache_salt)
        if self.num_top_logprobs is not None:
            _in_range("top_logprobs", self.num_top_logprobs, 0, MAX_TOP_LOGPROBS)
        if self.num_prompt_logprobs is not None:
            _in_range("prompt_logprobs", self.num_prompt_logprobs, 0, MAX_TOP_LOGPROBS)
            if len(self.prompt_tokens) * (1 + self.num_prompt_logprobs) > MAX_PROMPT_LOGPROBS:
                raise RequestError(
                    f"{len(self.prompt_tokens)} tokens with {self.num_prompt_logprobs} log-probabilities for each "
                    f"are more than {MAX_PROMPT_LOGPROBS}",
                    param="prompt_logprobs",
                    hint="Request fewer of them, or send a shorter prompt.",
                )

    @property
    def queue_name(self) -> str:
        """The fair queue of this request, shared by all requests of a tenant."""
        return queue_name(self.tenant, self.cache_salt)

    @property
    def session_key(self) -> tuple[str, str, str] | None:
        """The session's key, unique across tenants and salts; None without a session."""
        return (self.tenant, self.cache_salt, self.session) if self.session else None


class TokenLogprob(Struct, frozen=True):
    """Natural logarithms under the model's own distribution (after penalties and bias, before temperature
    and filters; with `SamplingParams.masks_logprobs` after the grammar's).
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token, logprob), best first


class PromptLogprobs(Struct, frozen=True, eq=False):
    """Log probabilities of the N tokens of a prompt after the first, each with the k best
    alternatives.
    """

    tokens: npt.NDArray[np.int32]  # (N,)
    logprobs: npt.NDArray[np.float32]  # (N,)
    ranks: npt.NDArray[np.int32]  # (N,), from 1: one more than the number of likelier tokens
    top_tokens: npt.NDArray[np.int32]  # (N, k), best first
    top_logprobs: npt.NDArray[np.float32]  # (N, k)

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[TokenLogprob]:
        for token, logprob, others, values in zip(
            self.tokens.tolist(),
            self.logprobs.tolist(),
            self.top_tokens.tolist(),
            self.top_logprobs.tolist(),
            strict=True,
        ):
            pairs = zip(others, values, strict=True)
            yield TokenLogprob(
                token, logprob, tuple((other, value) for other, value in pairs if value > -math.inf)
            )


class GenerationEvent(Struct, frozen=True):
    """The progress of one sequence. `text` is whole characters only; it may be '' while a character
    or a possible stop string is incomplete. The last event has a `finish_reason`; with ERROR it has
    the `error`.

    `num_drafted` of its tokens were chosen by weights that were not exact yet, with the request's
    permission. The other two count the proposals, of the draft or of look-ahead, that were verified
    in this step: the accepted ones, and those from the first rejected one on. `prompt_logprobs` come with
    the first event of a request for them.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: TeneralError | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    num_rejected: int = 0
    prompt_logprobs: PromptLogprobs | None = None
    # The request's stop string or stop token that ended it; None: another reason.
    stopped_by: str | int | None = None


def check_owner(*, session: str = "", tenant: str = "", cache_salt: str = "") -> None:
    """Raise RequestError for an invalid name; '' is none. A salt may be any text."""
    for param, name in (("session", session), ("tenant", tenant)):
        if name and not _NAME.fullmatch(name):
            raise RequestError(
                f"{param} must be 1 to {MAX_NAME_CHARS} letters, digits or characters of ._:/+=@- in ASCII",
                param=param,
                hint="Send a digest of the name instead.",
            )
    if len(cache_salt) > MAX_CACHE_SALT_CHARS:
        raise RequestError(f"cache_salt may have {MAX_CACHE_SALT_CHARS} characters", param="cache_salt")
    try:
        cache_salt.encode()
    except UnicodeEncodeError:
        raise RequestError("cache_salt contains a lone surrogate", param="cache_salt") from None


def queue_name(tenant: str, cache_salt: str) -> str:
    """The fair queue of this tenant and salt; a tenant's differs from any salt's."""
    if tenant:
        return f"tenant:{tenant}"
    return f"salt:{cache_salt}" if cache_salt else ""


def _in_range(name: str, value: float, low: float, high: float) -> None:
    # The comparison is written so that NaN is rejected.
    if isinstance(value, bool) or not low <= value <= high:
        shown = [f"{bound:,}" if isinstance(bound, int) else f"{bound:g}" for bound in (low, high)]
        raise RequestError(f"{name} is {value!r}, but must be from {shown[0]} to {shown[1]}", param=name)
