"""Slow requests, by the figures alone: a clock that the test turns, and no sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teneral.loader.sources.http.retry import Throttle, TokenBucket
from teneral.loader.sources.http.stragglers import FREE_HEDGES, HEDGE_SHARE, Stragglers, Watch

AFTER_S = 0.25
MIB = 1024 * 1024


class Readers:
    """Eight readers of one source, on a clock of their own."""

    def __init__(self, stack: ExitStack, number: int = 8, after_s: float = AFTER_S) -> None:
        self.now_s = 100.0
        self.throttle = Throttle()
        self.stragglers = Stragglers(after_s, self.throttle, clock=lambda: self.now_s)
        self._stack, self._number = stack, number
        self.watches = self._begin()

    def _begin(self) -> list[Watch]:
        return [self._stack.enter_context(self.stragglers.watching()) for _ in range(self._number)]

    def finish(self) -> None:
        """End all reads and begin the next ones."""
        self._stack.close()
        self.watches = self._begin()

    def pass_time(self, seconds: float, rates_bytes_s: dict[int, float]) -> list[int]:
        """Let readers get bytes at these rates; who wanted a hedge, in ticks of a tenth of a second."""
        wanted = []
        for _ in range(round(seconds * 10)):
            self.now_s += 0.1
            for number, watch in enumerate(self.watches):
                watch.received(int(rates_bytes_s.get(number, 0) / 10), wanted=MIB)
            wanted += [number for number, watch in enumerate(self.watches) if watch.wants_hedge()]
        return wanted


@pytest.fixture
def readers() -> Iterator[Callable[..., Readers]]:
    with ExitStack() as stack:
        yield lambda **options: Readers(stack, **options)


def all_at(rate_bytes_s: float, number: int = 8, **others: float) -> dict[int, float]:
    return dict.fromkeys(range(number), rate_bytes_s) | {int(name[1:]): rate for name, rate in others.items()}


def test_a_reader_that_gets_nothing_while_others_do_is_behind(readers: Callable[..., Readers]) -> None:
    assert set(readers().pass_time(0.5, all_at(20 * MIB, _3=0))) == {3}


def test_a_trickle_during_a_flood_is_behind(readers: Callable[..., Readers]) -> None:
    assert set(readers().pass_time(1, all_at(20 * MIB, _3=10_000))) == {3}


def test_a_connection_half_as_fast_as_others_is_left_alone(readers: Callable[..., Readers]) -> None:
    assert readers().pass_time(10, all_at(5 * MIB, _3=2.5 * MIB)) == []


@pytest.mark.parametrize("rate_bytes_s", [1_000, 20_000, 125_000, 5_000_000])
def test_on_a_slow_link_where_all_are_slow_none_is_behind(
    readers: Callable[..., Readers], rate_bytes_s: float
) -> None:
    assert readers().pass_time(60, all_at(rate_bytes_s)) == []


def test_on_a_slow_link_a_silence_means_something_only_when_the_others_got_enough(
    readers: Callable[..., Readers],
) -> None:
    made = readers()
    assert made.pass_time(1.5, all_at(125_000, _3=0)) == []
    assert set(made.pass_time(1.5, all_at(125_000, _3=0))) == {3}


def test_where_the_whole_store_pauses_one_reader_tries_for_all(readers: Callable[..., Readers]) -> None:
    made = readers()
    made.pass_time(1, all_at(5 * MIB))
    wanted = made.pass_time(3, {})
    assert len(set(wanted)) == 1
    assert len(wanted) <= 3  # its patience doubles
    made.pass_time(0.1, {wanted[0]: 5 * MIB})  # it was right: the others' connections are dead
    assert len(set(made.pass_time(3, {wanted[0]: 5 * MIB}))) == 7


def test_a_single_reader_may_ask_again_with_growing_patience(readers: Callable[..., Readers]) -> None:
    assert readers(number=1).pass_time(2, {}) == [0, 0, 0]


def test_a_single_reader_is_held_against_what_was_usual(readers: Callable[..., Readers]) -> None:
    made = readers(number=1)
    made.pass_time(1, {0: 20_000_000})
    made.finish()
    assert made.pass_time(0.5, {0: 5_000_000}) == []
    assert made.pass_time(0.5, {0: 50_000}) == [0]


def test_patience_grows_with_the_times_to_the_first_byte_that_are_usual(
    readers: Callable[..., Readers],
) -> None:
    made = readers()
    for _ in range(20):
        made.stragglers.answered(0.4)
    assert made.stragglers.patience_s() == pytest.approx(1.2)
    assert made.pass_time(1.1, all_at(20 * MIB, _3=0)) == []
    assert 3 in made.pass_time(0.3, all_at(20 * MIB, _3=0))


def test_hedges_stay_a_small_share_of_all_requests() -> None:
    with ExitStack() as stack:
        made = Readers(stack, number=1)
        hedges = 0
        for _ in range(2000):
            with made.stragglers.watching() as watch:
                made.now_s += 10
                hedges += watch.wants_hedge()
        assert hedges == pytest.approx(FREE_HEDGES + HEDGE_SHARE * 2000, abs=2)


def test_zero_turns_hedging_off(readers: Callable[..., Readers]) -> None:
    assert readers(after_s=0).pass_time(60, all_at(20 * MIB, _3=0)) == []


def test_no_range_is_requested_twice_while_the_store_is_busy(readers: Callable[..., Readers]) -> None:
    made = readers()
    made.throttle.refused(asked_s=0, wish_s=20)
    assert made.pass_time(5, all_at(20 * MIB, _3=0)) == []


def test_a_reader_that_left_is_no_longer_counted() -> None:
    with ExitStack() as stack:
        made = Readers(stack, number=2)
        with made.stragglers.watching():
            assert made.stragglers.num_readers == 3
        assert made.stragglers.num_readers == 2


@settings(deadline=None)
@given(
    st.lists(st.floats(1_000, 50_000_000), min_size=2, max_size=12),
    st.floats(0.2, 5),
)
def test_readers_within_a_factor_of_eight_are_never_behind(rates: list[float], seconds: float) -> None:
    mean = sum(rates) / len(rates)
    close = {number: min(max(rate, mean / 4), mean * 1.5) for number, rate in enumerate(rates)}
    with ExitStack() as stack:
        assert Readers(stack, number=len(rates)).pass_time(seconds, close) == []


def test_a_budget_earns_a_share_and_spends_whole_tokens() -> None:
    budget = TokenBucket(at_first=1, share=0.5, most=2)
    assert [budget.spend(), budget.spend()] == [True, False]
    budget.earn()
    assert budget.spend() is False
    for _ in range(100):
        budget.earn()
    assert [budget.spend() for _ in range(3)] == [True, True, False]


def test_a_watch_belongs_to_its_pace() -> None:
    stragglers = Stragglers(AFTER_S, Throttle())
    with stragglers.watching() as watch:
        assert isinstance(watch, Watch)
        watch.received(10, wanted=MIB)
        assert stragglers.received_bytes == 10
