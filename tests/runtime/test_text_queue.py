"""The waiting texts that share a pass."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from teneral.runtime.engine.text_queue import PASS_TOKENS, TextQueue

PLENTY = 1 << 20  # tokens of a pass
LENGTHS = st.lists(st.integers(1, 400), min_size=1, max_size=12)


def queue_of(*calls: list[int]) -> TextQueue[str]:
    """Calls "0", "1" and so on, with texts of these lengths."""
    queue: TextQueue[str] = TextQueue()
    for number, lengths in enumerate(calls):
        queue.add(str(number), lengths)
    return queue


def test_texts_of_one_length_share_a_pass_whatever_call_they_are_of() -> None:
    queue = queue_of([9, 9], [9], [9])
    assert queue.take(PLENTY) == [("0", 0), ("0", 1), ("1", 0), ("2", 0)]
    assert queue.take(PLENTY) == []


def test_a_short_text_is_not_padded_to_a_long_one() -> None:
    queue = queue_of([300], [5], [6])
    assert queue.take(PLENTY) == [("0", 0)]
    assert sorted(queue.take(PLENTY)) == [("1", 0), ("2", 0)]


def test_a_length_joins_while_its_padding_is_cheaper_than_a_pass() -> None:
    near, far = 200 - PASS_TOKENS, 200 - PASS_TOKENS - 1
    assert len(queue_of([200], [near]).take(PLENTY)) == 2
    assert len(queue_of([200], [far]).take(PLENTY)) == 1
    # Two of them would be padded, or the one by twice as much.
    assert len(queue_of([200], [near, near]).take(PLENTY)) == 1
    assert len(queue_of([near, near], [200]).take(PLENTY)) == 2


def test_the_oldest_text_goes_first_and_its_call_s_longest() -> None:
    queue = queue_of([10, 300], [100], [100], [100])
    assert queue.take(PLENTY) == [("0", 1)]
    assert queue.take(PLENTY) == [("0", 0)]
    assert len(queue.take(PLENTY)) == 3


def test_of_one_length_the_oldest_are_taken_when_there_are_too_many() -> None:
    queue = queue_of([10], [10], [10], [10])
    assert queue.take(30) == [("0", 0), ("1", 0), ("2", 0)]
    assert queue.take(30) == [("3", 0)]


def test_a_text_larger_than_a_pass_goes_alone() -> None:
    assert queue_of([50], [50]).take(10) == [("0", 0)]


def test_a_call_that_was_discarded_is_never_taken() -> None:
    queue = queue_of([10, 20, 30], [20])
    queue.discard("0")
    assert len(queue) == 1
    assert queue.take(PLENTY) == [("1", 0)]
    queue.discard("0")
    queue.discard("1")
    assert len(queue) == 0


@given(
    calls=st.lists(LENGTHS, max_size=8), max_tokens=st.integers(1, 1000), discarded=st.sets(st.integers(0, 7))
)
def test_each_text_is_taken_once_in_passes_that_fit(
    calls: list[list[int]], max_tokens: int, discarded: set[int]
) -> None:
    queue = queue_of(*calls)
    for number in discarded:
        queue.discard(str(number))
    left = {
        (str(number), index): length
        for number, lengths in enumerate(calls)
        if number not in discarded
        for index, length in enumerate(lengths)
    }
    while left:
        assert len(queue) == len(left)
        oldest = min(left, key=lambda text: int(text[0]))[0]
        taken = queue.take(max_tokens)
        assert oldest in {owner for owner, _ in taken}
        lengths = [left.pop(text) for text in taken]
        assert len(lengths) == 1 or len(lengths) * max(lengths) <= max_tokens
    assert queue.take(max_tokens) == []


@given(calls=st.lists(LENGTHS, min_size=1, max_size=8))
def test_padding_is_never_dearer_than_the_passes_that_it_spares(calls: list[list[int]]) -> None:
    queue = queue_of(*calls)
    while queue:
        lengths = [calls[int(owner)][index] for owner, index in queue.take(PLENTY)]
        padding = len(lengths) * max(lengths) - sum(lengths)
        assert padding <= PASS_TOKENS * (len(set(lengths)) - 1)
