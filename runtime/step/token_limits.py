"""The tokens that a request allows next, independent of its model and grammar.

Three limits: a list of the only tokens allowed, bad words (sequences of tokens that must not be
completed), and the tokens that end an answer, which must not come before `min_tokens` others. A
mask depends only on the sequence's own tokens. This module knows nothing of text, logits or
scheduling.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..errors import GrammarError

if TYPE_CHECKING:
    from ..grammar.matcher import MaskWords
    from .requests import GenerationRequest


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
