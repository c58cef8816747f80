"""A budget of tokens for the reasoning before an answer."""

from __future__ import annotations

import numpy as np
import pytest

from teneral.runtime.grammar.budget import ReasoningBudget, ReasoningTokens
from teneral.runtime.grammar.matcher import Matcher

OPEN, CLOSE, BREAK = 60, 61, 7
TOKENS = ReasoningTokens((OPEN,), (CLOSE,), (BREAK, CLOSE))
VOCAB = 70


def started(max_tokens: int, *, is_open: bool = True) -> Matcher:
    return ReasoningBudget(None, TOKENS, vocab_size=VOCAB, max_tokens=max_tokens, is_open=is_open).start()


def allowed(matcher: Matcher) -> list[int]:
    words = np.zeros(matcher.num_mask_words, dtype=np.uint32)
    matcher.mask_into(words)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_the_end_is_forced_once_the_budget_is_used(budget: int) -> None:
    matcher = started(budget)
    for _ in range(budget):
        assert allowed(matcher) == list(range(VOCAB))
        assert matcher.forced() == []
        matcher.accept(1)
    for left in ([BREAK, CLOSE], [CLOSE]):
        assert matcher.forced() == left
        assert matcher.copy().forced() == left
        assert allowed(matcher) == left[:1]
        matcher.accept(left[0])
    for _ in range(20):
        assert allowed(matcher) == list(range(VOCAB))
        matcher.accept(1)
    assert not matcher.is_finished


def test_reasoning_that_ends_by_itself_leaves_the_answer_free() -> None:
    matcher = started(5)
    for token in (1, 2, CLOSE, *range(20)):
        assert matcher.forced() == []
        matcher.accept(token)


def test_an_answer_without_reasoning_has_no_budget() -> None:
    matcher = started(2, is_open=False)
    for token in range(20):
        assert matcher.forced() == []
        matcher.accept(token)
    matcher.accept(OPEN)
    matcher.accept(1)
    matcher.accept(2)
    assert matcher.forced() == [BREAK, CLOSE]


def test_a_copy_goes_its_own_way() -> None:
    matcher = started(2)
    copy = matcher.copy()
    matcher.accept(1)
    matcher.accept(1)
    assert matcher.forced()
    assert not copy.forced()
