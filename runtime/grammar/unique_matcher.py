"""A matcher over another one, for arrays whose items must differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..errors import GrammarError
from .json_schema.unique_items import Position, RepeatedItemError, TokenTexts, UniqueItems

if TYPE_CHECKING:
    from .matcher import MaskWords, Matcher

MAX_LOOKED_AHEAD = 64  # tokens of a step that lead towards a known item
MAX_DEPTH = 8  # tokens behind each


class UniqueItemsMatcher:
    """A `Matcher` that also lets the items of some arrays differ."""

    __slots__ = ("_matcher", "_position", "_texts", "_unique", "num_mask_words")

    def __init__(self, matcher: Matcher, unique: UniqueItems, texts: TokenTexts) -> None:
        self._matcher, self._unique, self._texts = matcher, unique, texts
        self._position = Position()
        self.num_mask_words = matcher.num_mask_words

    @property
    def is_finished(self) -> bool:
        return self._matcher.is_finished

    def mask_into(self, words: MaskWords) -> None:
        self._mask_repeats(words)
        # Where an item's form is narrow, a beginning may be left that only a known item has.
        for token in self._texts.towards_known(self._position)[:MAX_LOOKED_AHEAD]:
            if _allows(words, token) and self._is_dead_end(token, MAX_DEPTH):
                _forbid(words, token)
        if not words.any():
            raise GrammarError("no item is left that differs from the others of its array")

    def accept(self, token: int) -> None:
        self._matcher.accept(token)
        try:
            self._position = self._unique.advance(self._position, self._texts.texts[token])
        except RepeatedItemError:
            raise GrammarError("an array has the same item twice") from None

    def forced(self) -> list[int]:
        tokens = self._matcher.forced()
        position = self._position
        for number, token in enumerate(tokens):
            try:
                position = self._unique.advance(position, self._texts.texts[token])
            except RepeatedItemError:
                return tokens[:number]
        return tokens

    def copy(self) -> UniqueItemsMatcher:
        other = UniqueItemsMatcher(self._matcher.copy(), self._unique, self._texts)
        other._position = self._position
        return other

    def _mask_repeats(self, words: MaskWords) -> None:
        """The grammar's mask without tokens that repeat an item."""
        self._matcher.mask_into(words)
        for token in self._texts.may_repeat(self._position):
            if _allows(words, token) and self._repeats(token):
                _forbid(words, token)

    def _is_dead_end(self, token: int, depth: int) -> bool:
        """True if behind this token nothing follows but repeated items."""
        other = self.copy()
        other.accept(token)
        if other.is_finished:
            return False
        words = np.zeros(self.num_mask_words, dtype=np.uint32)
        other._mask_repeats(words)
        known = [each for each in self._texts.towards_known(other._position) if _allows(words, each)]
        for each in known:
            _forbid(words, each)
        if words.any() or not depth:
            return False
        return all(other._is_dead_end(each, depth - 1) for each in known[:MAX_LOOKED_AHEAD])

    def _repeats(self, token: int) -> bool:
        try:
            self._unique.advance(self._position, self._texts.texts[token])
        except RepeatedItemError:
            return True
        return False


def _allows(words: MaskWords, token: int) -> bool:
    return bool(words[token >> 5] >> (token & 31) & 1)


def _forbid(words: MaskWords, token: int) -> None:
    words[token >> 5] &= ~(1 << (token & 31)) & 0xFFFFFFFF
