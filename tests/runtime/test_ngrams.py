"""The proposer against a search through all tokens."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from tests.support.inspection import table_of

from teneral.runtime.engine.proposals import FEW_TOKENS, MAX_MATCH, MAX_SLOTS, NGRAM, NgramProposer, Proposal


def searched(tokens: Sequence[int], max_tokens: int) -> Proposal | None:
    last = tokens[-NGRAM:]
    for place in range(len(tokens) - 1, NGRAM - 1, -1):
        if tokens[place - NGRAM : place] == last:
            text = list(tokens)
            for number in range(max_tokens):
                text.append(text[place + number])
            num = NGRAM
            while num < min(place, MAX_MATCH) and tokens[place - num - 1] == tokens[-num - 1]:
                num += 1
            return Proposal(text[len(tokens) :], num)
    return None


def test_the_latest_earlier_place_is_continued() -> None:
    tokens = [1, 2, 3, 4, 5, 9, 1, 2, 3, 6, 7, 1, 2, 3]
    assert NgramProposer(tokens).propose(3) == Proposal([6, 7, 1], NGRAM)


def test_a_text_that_repeats_itself_goes_on_doing_so() -> None:
    assert NgramProposer([8, 1, 2, 1, 2, 1, 2]).propose(5) == Proposal([1, 2, 1, 2, 1], 4)


def test_without_a_match_nothing_is_proposed() -> None:
    for tokens in ([], [1], [1, 1, 1], [1, 2, 3, 4, 5]):
        assert NgramProposer(tokens).propose(4) is None
    assert NgramProposer([1, 1, 1, 1]).propose(0) is None


@given(
    st.lists(st.lists(st.integers(0, 2), max_size=3 * FEW_TOKENS), min_size=1, max_size=12),
    st.integers(1, 9),
)
def test_it_finds_what_a_search_finds_as_tokens_come(parts: list[list[int]], max_tokens: int) -> None:
    tokens: list[int] = []
    proposer = NgramProposer(tokens)
    for part in parts:
        tokens += part
        assert proposer.propose(max_tokens) == searched(tokens, max_tokens)


@given(st.lists(st.integers(0, (1 << 24) - 1), min_size=1, max_size=700))
def test_tokens_put_in_together_or_one_by_one_give_the_same(text: list[int]) -> None:
    text = [*text, *text]
    whole = NgramProposer(text).propose(5)
    growing: list[int] = []
    proposer = NgramProposer(growing)
    for token in text:
        growing.append(token)
        found = proposer.propose(5)
    assert whole == found
    assert found is None or found == searched(text, 5)  # a collision may hide it


def test_its_memory_is_bounded_and_later_tokens_take_the_place_of_earlier_ones() -> None:
    tokens = [(number * 7919) % 50_021 for number in range(3 * MAX_SLOTS)]
    proposer = NgramProposer(tokens)
    proposer.propose(1)
    assert table_of(proposer).nbytes == 4 * MAX_SLOTS
    tokens += tokens[-100:-90]
    assert proposer.propose(4) == searched(tokens, 4)
