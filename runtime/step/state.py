"""The sampling state of a sequence, the tokens that its request allows next, and the result of a
choice.

Three limits are independent of model and grammar: a list of the only tokens allowed, bad words
(sequences of tokens that must not be completed), and the tokens that end an answer, which must not
come before `min_tokens` others. A mask depends only on the sequence's own tokens.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from ..errors import GrammarError, ModelError
from .requests import GenerationRequest, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from ..grammar.matcher import MaskWords, Matcher


class TokenLimits:
    """The limits of one request. Immutable except for a mask that is made once the vocabulary's
    size is known.
    """

    def __init__(self, request: GenerationRequest, end_tokens: frozenset[int]) -> None:
        params = request.sampling
        self._allowed = params.allowed_tokens
        self._bad_words = params.bad_words
        self._end_tokens = end_tokens
        self._min_tokens = request.min_tokens
        self._allowed_words: MaskWords | None = None
        # The number of last outputs that a mask depends on.
        self.tail_length = max((len(word) - 1 for word in self._bad_words), default=0)

    @classmethod
    def of(cls, request: GenerationRequest, end_tokens: frozenset[int]) -> TokenLimits | None:
        """The limits of a request; None if it has none."""
        params = request.sampling
        limited = params.allowed_tokens is not None or params.bad_words or (request.min_tokens and end_tokens)
        return cls(request, end_tokens) if limited else None

    def mask(
        self, words: MaskWords | None, vocab_size: int, tail: Sequence[int], num_outputs: int
    ) -> MaskWords:
        """`words` (ceil(vocab_size / 32),), None being all tokens, without the excluded ones.
        Read-only.

        `tail` holds the last `tail_length` outputs, or all of them. End tokens stay if nothing else
        is left: a grammar's answer may be complete earlier. Raises `GrammarError` if bad words and
        the allowed tokens leave nothing.
        """
        if self._allowed_words is None:
            self._allowed_words = _words_of(self._allowed, vocab_size)
        words = self._allowed_words if words is None else words & self._allowed_words
        banned = [word[-1] for word in self._bad_words if _ends_with(tail, word[:-1])]
        if banned:
            words = _without(words, banned)
        if not words.any():
            raise GrammarError(
                "no token may come next: bad_words, allowed_token_ids and the form of the answer exclude "
                "each other",
                param="allowed_token_ids" if self._allowed is not None else "bad_words",
            )
        if num_outputs < self._min_tokens:
            going_on = _without(words, self._end_tokens)
            return going_on if going_on.any() else words
        return words


def _words_of(tokens: tuple[int, ...] | None, vocab_size: int) -> MaskWords:
    """The mask (ceil(vocab_size / 32),) uint32 of these tokens, all below `vocab_size`; None: all,
    and no bit beyond them.
    """
    flags = np.zeros(-(-vocab_size // 32) * 32, dtype=np.bool_)
    flags[slice(vocab_size) if tokens is None else np.array(tokens, dtype=np.int64)] = True
    return np.packbits(flags, bitorder="little").view(np.uint32)


def _without(words: MaskWords, tokens: Iterable[int]) -> MaskWords:
    left = words.copy()
    for token in tokens:
        if token >> 5 < len(left):  # a tokenizer may have more tokens than the model
            left[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)
    return left


def _ends_with(tail: Sequence[int], tokens: tuple[int, ...]) -> bool:
    return not tokens or tuple(tail[-len(tokens) :]) == tokens


class SamplingState:
    """The inputs of the choice of a sequence's next token, except its logits."""

    __slots__ = (
        "_is_all_computed",
        "_limits",
        "_needs_outputs",
        "_tail",
        "grammar",
        "is_plain_greedy",
        "num_outputs",
        "num_top_logprobs",
        "output_counts",
        "params",
        "seed",
        "seen",
    )

    def __init__(self, request: GenerationRequest, end_tokens: frozenset[int] = frozenset()) -> None:
        """`end_tokens` are the tokens that end the sequence."""
        params = request.sampling
        self._limits = TokenLimits.of(request, end_tokens)
        # Log probabilities come from computed logits, so every token must be computed.
        self._is_all_computed = (
            request.num_top_logprobs is not None or request.num_prompt_logprobs is not None
        )
        self._tail: list[int] = []  # the last outputs, as many as the limits need
        self.params: SamplingParams = params
        # The position in the request's grammar, which follows the added tokens.
        self.grammar: Matcher | None = None if request.grammar is None else request.grammar.start()
        self.num_top_logprobs = request.num_top_logprobs
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.num_outputs = 0
        # Of the tokens generated so far; only penalties need them.
        self.output_counts: dict[int, int] = {}
        # Tokens of prompt and output; only the repetition penalty needs them, and a prompt may be
        # long.
        self.seen: dict[int, None] = (
            dict.fromkeys(request.prompt_tokens) if params.repetition_penalty != 1.0 else {}
        )
        has_penalties = (
            params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
        )
        has_tail = self._limits is not None and self._limits.tail_length > 0
        # The choice depends on the outputs themselves, not only on their number.
        self._needs_outputs = bool(has_penalties or has_tail or self.grammar is not None)
        self.is_plain_greedy = (
            params.temperature == 0
            and not params.logit_bias
            and params.repetition_penalty == 1.0
            and params.presence_penalty == params.frequency_penalty == 0
            and request.num_top_logprobs is None
            and request.grammar is None
            and self._limits is None
        )

    def for_draft(self) -> SamplingState:
        """An independent copy for the draft, without log probabilities."""
        other = copy.copy(self)
        other.num_top_logprobs, other._is_all_computed = None, False
        other.output_counts, other.seen = dict(self.output_counts), dict(self.seen)
        other._tail = list(self._tail)
        other.grammar = None if self.grammar is None else self.grammar.copy()
        return other

    def possible(self, tokens: Sequence[int]) -> list[int]:
        """The first of these tokens, as far as the grammar allows them next, `tokens` being a guess.
        Where it forces other ones, these are the last.
        """
        if self.grammar is None:
            return list(tokens)
        matcher, allowed = self.grammar.copy(), list[int]()
        try:
            while allowed == tokens[: len(allowed)] and len(allowed) < len(tokens):
                if matcher.is_finished:
                    break
                forced = matcher.forced() if self._may_force else []
                following = forced or [tokens[len(allowed)]]
                for token in following:
                    matcher.accept(token)
                allowed += following
        except GrammarError:  # the answer meets it where it is chosen
            pass
        return allowed[: len(tokens)]

    def add(self, token: int) -> None:
        """Append a chosen token. Raises `GrammarError` for one that the request's grammar does not
        allow.
        """
        self.num_outputs += 1
        if not self._needs_outputs:
            return
        if self.grammar is not None:
            self.grammar.accept(token)
        self.output_counts[token] = self.output_counts.get(token, 0) + 1
        if self.params.repetition_penalty != 1.0:
            self.seen[token] = None
        if self._limits is not None and self._limits.tail_length:
            self._tail.append(token)
            del self._tail[: -self._limits.tail_length]

    def mask(self, vocab_size: int) -> MaskWords | None:
        """The mask of tokens that may come next, (ceil(vocab_size / 32),) uint32; None: all of
        them.

        Tokens that only the model knows are not in a grammar's mask. Raises `GrammarError`.
        """
        words: MaskWords | None = None
        if self.grammar is not None:
            own = np.zeros(self.grammar.num_mask_words, dtype=np.uint32)
            self.grammar.mask_into(own)
            words = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
            words[: len(own)] = own[: len(words)]
        if self._limits is None:
            return words
        return self._limits.mask(words, vocab_size, self._tail, self.num_outputs)

    def forced(self) -> list[int]:
        """The tokens that the grammar determines, which need not be computed.

        Empty with log probabilities, which only computing gives, and with other limits, which may
        exclude them.
        """
        if self.grammar is None or self.grammar.is_finished or not self._may_force:
            return []
        return self.grammar.forced()

    @property
    def _may_force(self) -> bool:
        return not self._is_all_computed and self._limits is None


class Choice(Struct, frozen=True):
    """A token chosen for a sequence."""

    token: int
    logprob: TokenLogprob | None = None


Chosen = Choice | ModelError | GrammarError
"""A sequence's result of a step: a token, or an error."""
