"""A budget of tokens for the reasoning before an answer, as a grammar around that of the answer.

Once the budget is used up, the closing tag is forced. It works on tokens alone and needs no library:
an answer without a form stays free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from .matcher import Grammar, Matcher

if TYPE_CHECKING:
    from .matcher import MaskWords

_ALL = 0xFFFFFFFF


class ReasoningTokens(Struct, frozen=True):
    """The beginning and the end of a model's reasoning."""

    open: tuple[int, ...]
    close: tuple[int, ...]
    forced: tuple[int, ...]  # the end as the server writes it, with `close` in it


class ReasoningBudget:
    """A `Grammar`: that of the answer, or none, with reasoning of up to `max_tokens` tokens before it."""

    def __init__(
        self,
        grammar: Grammar | None,
        tokens: ReasoningTokens,
        *,
        vocab_size: int,
        max_tokens: int,
        is_open: bool,
    ) -> None:
        """`is_open` says that the prompt ends inside of the reasoning."""
        self._grammar = grammar
        self._tokens = tokens
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._is_open = is_open

    def start(self) -> Matcher:
        inner = None if self._grammar is None else self._grammar.start()
        left = self._max_tokens if self._is_open else None
        return BudgetMatcher(inner, self._tokens, self._vocab_size, self._max_tokens, left)


class BudgetMatcher:
    """A `Matcher`."""

    __slots__ = (
        *("_forced", "_is_over", "_left", "_matcher", "_max_tokens", "_tail", "_tokens", "_vocab_size"),
        "num_mask_words",
    )

    def __init__(
        self,
        matcher: Matcher | None,
        tokens: ReasoningTokens,
        vocab_size: int,
        max_tokens: int,
        left: int | None,
    ) -> None:
        """`left` are the tokens that the reasoning may still have; None: it has not begun."""
        self._matcher = matcher
        self._tokens = tokens
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._left = left
        self._is_over = False
        self._tail: tuple[int, ...] = ()
        self._forced: tuple[int, ...] = ()  # of the end, what has not come yet
        self.num_mask_words = -(-vocab_size // 32) if matcher is None else matcher.num_mask_words
        self._force()

    @property
    def is_finished(self) -> bool:
        return not self._forced and self._matcher is not None and self._matcher.is_finished

    def mask_into(self, words: MaskWords) -> None:
        if self._forced:
            token = self._forced[0]
            words[:] = 0
            words[token >> 5] = 1 << (token & 31)
        elif self._matcher is not None:
            self._matcher.mask_into(words)
        else:
            words[:] = _ALL
            if rest := self._vocab_size % 32:
                words[-1] = (1 << rest) - 1

    def accept(self, token: int) -> None:
        if self._matcher is not None:
            self._matcher.accept(token)
        if self._forced:
            self._forced = self._forced[1:]
            self._is_over = not self._forced
        elif not self._is_over:
            self._count(token)

    def forced(self) -> list[int]:
        if self._forced:
            return list(self._forced)
        return [] if self._matcher is None else self._matcher.forced()

    def copy(self) -> BudgetMatcher:
        copy = BudgetMatcher(
            None if self._matcher is None else self._matcher.copy(),
            self._tokens,
            self._vocab_size,
            self._max_tokens,
            self._left,
        )
        copy._is_over, copy._tail, copy._forced = self._is_over, self._tail, self._forced
        return copy

    def _count(self, token: int) -> None:
        longest = max(len(self._tokens.open), len(self._tokens.close))
        self._tail = (*self._tail, token)[-longest:]
        if self._left is None:
            if self._ends_with(self._tokens.open):
                self._left = self._max_tokens
                self._force()
            return
        if self._ends_with(self._tokens.close):
            self._is_over = True
            return
        self._left -= 1
        self._force()

    def _force(self) -> None:
        if self._left is not None and self._left <= 0 and not self._is_over:
            self._forced = self._tokens.forced

    def _ends_with(self, tokens: tuple[int, ...]) -> bool:
        return self._tail[-len(tokens) :] == tokens
