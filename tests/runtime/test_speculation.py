"""How far a draft runs ahead: further where it is right more often, and never past the time to catch up."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from teneral.runtime.engine.speculation import (
    MAX_PROPOSALS,
    ROW_SHARE,
    USUAL_ACCEPTANCE,
    Acceptance,
    catch_up_s,
    max_proposals,
    may_draft,
)

MAX_RATE = 0.999

shares = st.floats(1e-6, MAX_RATE)
counts = st.integers(0, 10_000)
times = st.floats(1e-4, 100)


def acceptance_of(*judged: bool) -> Acceptance:
    acceptance = Acceptance()
    for is_right in judged:
        acceptance.add(is_right)
    return acceptance


def test_before_anything_is_judged_the_usual_is_assumed() -> None:
    assert Acceptance().rate == USUAL_ACCEPTANCE


def test_what_is_judged_outweighs_the_assumption_in_time() -> None:
    assert acceptance_of(*[False] * 1000).rate < 0.02
    assert acceptance_of(*[True] * 1000).rate > 0.99
    assert abs(acceptance_of(*[True, False] * 1000).rate - 0.5) < 0.01


def test_judgements_are_counted() -> None:
    acceptance = acceptance_of(True, True, False)
    assert (acceptance.num_judged, acceptance.num_accepted) == (3, 2)


@given(counts, counts)
def test_the_rate_is_one_that_can_be_computed_with(num_right: int, num_wrong: int) -> None:
    acceptance = Acceptance(num_right + num_wrong, num_right)
    assert 0 < acceptance.rate < 1
    before = acceptance.rate
    acceptance.add(True)
    after = acceptance.rate
    assert after >= before
    acceptance.add(False)
    assert acceptance.rate < after or after == MAX_RATE


@given(shares, shares)
def test_a_better_draft_runs_further_ahead_within_bounds(one: float, other: float) -> None:
    worse, better = sorted([one, other])
    assert 1 <= max_proposals(worse) <= max_proposals(better) <= MAX_PROPOSALS


@given(shares)
def test_the_last_proposal_is_right_often_enough_to_pay_for_its_row(acceptance: float) -> None:
    number = max_proposals(acceptance)
    assert number == 1 or acceptance**number >= ROW_SHARE * (1 - 1e-9)
    if number < MAX_PROPOSALS:  # and one more would not be
        assert acceptance ** (number + 1) < ROW_SHARE * (1 + 1e-9)


def test_some_drafts() -> None:
    assert [max_proposals(rate) for rate in (0.01, 0.5, 0.9, 0.95, 0.999)] == [1, 3, 21, 44, 64]


@given(counts, times)
def test_more_rows_take_longer_and_each_less_than_a_step(num_rows: int, step_s: float) -> None:
    assert catch_up_s(0, step_s) == step_s
    more_s = catch_up_s(num_rows + 1, step_s) - catch_up_s(num_rows, step_s)
    assert math.isclose(more_s, ROW_SHARE * step_s, rel_tol=1e-6)


@given(counts, st.floats(0, 1000), times, st.integers(0, 100), st.floats(0, 100))
def test_less_time_or_more_that_is_pending_never_allows_more(
    num_pending: int, left_s: float, step_s: float, more_pending: int, less_s: float
) -> None:
    if not may_draft(num_pending, left_s, step_s):
        assert not may_draft(num_pending + more_pending, left_s - less_s, step_s)


@given(counts, times)
def test_there_is_time_for_a_step_only_if_it_can_catch_up_too(num_pending: int, step_s: float) -> None:
    needed_s = step_s + catch_up_s(num_pending + 1, step_s)
    assert not may_draft(num_pending, needed_s, step_s)
    assert may_draft(num_pending, needed_s * 1.001, step_s)


def test_without_an_end_in_sight_there_is_time_and_at_the_end_there_is_none() -> None:
    assert may_draft(100, math.inf, 0.05)
    assert not may_draft(0, 0.0, 0.05)
