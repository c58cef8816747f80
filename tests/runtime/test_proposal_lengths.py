"""The rule for the number of proposals, over measured times and earlier outcomes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from teneral.runtime.engine.proposals import (
    MAX_PAUSE,
    MAX_SLOWDOWN,
    MIN_PAUSE,
    Chance,
    MatchAcceptance,
    RowCosts,
    proposal_lengths,
)


def costing(share: float) -> Callable[[int], float]:
    return lambda num_added: share * num_added


def test_cheap_rows_get_long_proposals_and_dear_ones_only_likely_ones() -> None:
    assert proposal_lengths([Chance(0.9, 32)], 1, 100, costing(0.01))[0] > 12
    [likely] = proposal_lengths([Chance(0.9, 32)], 1, 100, costing(0.2))
    [unlikely] = proposal_lengths([Chance(0.4, 32)], 1, 100, costing(0.2))
    assert unlikely < likely < 10
    assert proposal_lengths([Chance(0.9, 32)], 1, 100, costing(1.0)) == [0]


def test_rows_that_only_cost_from_the_first_one_on_are_used_well() -> None:
    """Tiles cost like this: one row takes half of a step, and fifteen no more."""
    assert proposal_lengths([Chance(0.95, 15)], 1, 100, lambda num_added: 0.5) == [15]


def test_the_likeliest_sequence_gets_most() -> None:
    few, many = proposal_lengths([Chance(0.3, 9), Chance(0.95, 9)], 2, 100, costing(0.05))
    assert few < many


def test_sequences_without_proposals_are_not_slowed_down_much() -> None:
    [alone] = proposal_lengths([Chance(0.98, 32)], 1, 100, costing(0.05))
    [shared] = proposal_lengths([Chance(0.98, 32)], 2, 100, costing(0.05))
    assert shared == round((MAX_SLOWDOWN - 1) / 0.05) < alone


@given(
    st.lists(st.builds(Chance, st.floats(0.01, 0.98), st.integers(0, 32)), max_size=6),
    st.integers(0, 6),
    st.integers(0, 40),
    st.floats(0, 2),
)
def test_bounds_are_kept(chances: list[Chance], num_others: int, max_added: int, share: float) -> None:
    num = len(chances) + num_others
    lengths = proposal_lengths(chances, num, max_added, costing(share))
    assert len(lengths) == len(chances)
    assert all(0 <= length <= chance.num for length, chance in zip(lengths, chances, strict=True))
    assert sum(lengths) <= max_added


def test_acceptance_follows_what_is_accepted_for_each_length_of_a_match() -> None:
    acceptance = MatchAcceptance()
    before = acceptance.rate(3), acceptance.rate(16)
    for _ in range(20):
        acceptance.add(3, 4, 0)
    assert acceptance.rate(3) < 0.2 < before[0]
    assert acceptance.rate(16) == before[1]
    for _ in range(20):
        acceptance.add(3, 4, 4)
    assert acceptance.rate(3) > 0.85


def test_a_proposal_after_a_wrong_one_is_not_judged() -> None:
    long, short = MatchAcceptance(), MatchAcceptance()
    long.add(3, 9, 1)
    short.add(3, 2, 1)
    assert long.rate(3) == short.rate(3)


def test_trials_become_rare_where_nothing_is_accepted() -> None:
    acceptance = MatchAcceptance()
    trials = []
    for match in range(2_000):
        if acceptance.skip():
            acceptance.add(3, 1, 0)
            trials.append(match)
    gaps = [after - before for before, after in itertools.pairwise(trials)]
    assert trials[0] == MIN_PAUSE - 1
    assert gaps == sorted(gaps)
    assert gaps[-1] == MAX_PAUSE


def test_the_cost_of_rows_is_learnt_from_steps_with_and_without_proposals() -> None:
    times = RowCosts()
    assert times.added(1, 4) == 0.4  # what is assumed
    for _ in range(60):
        times.add(1, 0, 0.050)
        times.add(1, 4, 0.056)
    assert abs(times.added(1, 4) - 0.12) < 0.02
    assert abs(times.added(1, 8) - 0.24) < 0.04  # in proportion, until it is measured
    assert times.added(8, 1) != times.added(1, 1)


def test_one_slow_step_changes_little() -> None:
    times = RowCosts()
    for _ in range(20):
        times.add(1, 0, 0.050)
        times.add(1, 4, 0.060)
    before = times.added(1, 4)
    times.add(1, 4, 5.0)
    assert times.added(1, 4) < before + 0.3


def test_a_slow_first_step_does_not_make_rows_free() -> None:
    times = RowCosts()
    times.add(1, 0, 5.0)
    for _ in range(50):
        times.add(1, 4, 0.060)
    assert times.added(1, 32) >= 0.5
