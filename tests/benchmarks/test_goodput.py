"""The count of goodput."""

from __future__ import annotations

import pytest
from benchmarks.goodput import Outcome, Window, level, quantiles, time_to_wait_s

WINDOW = Window(10.0, 20.0)


def answered(ended_s: float, *, first_s: float = 0.1, token_s: float = 0.05) -> Outcome:
    times_s = tuple(first_s + number * token_s for number in range(3))
    return Outcome(ended_s - times_s[-1], 200, ended_s, times_s)


def refused(ended_s: float, *, retry_after: bool = True) -> Outcome:
    return Outcome(ended_s - 0.002, 429, ended_s, retry_after=retry_after)


def test_what_ends_outside_the_window_does_not_count() -> None:
    assert WINDOW.rate([answered(9.0), answered(11.0), answered(20.0), answered(21.0)]) == pytest.approx(0.2)


def test_only_answers_in_time_are_goodput() -> None:
    outcomes = [
        answered(12.0),
        answered(13.0, first_s=0.35),
        answered(14.0, token_s=0.3),
        refused(15.0),
    ]
    row = level(outcomes, WINDOW, [2, 4], first_s=0.1, token_s=0.05)
    assert row["answers_s"] == pytest.approx(0.3)
    assert row["goodput_s"] == pytest.approx({"2": 0.1, "4": 0.2})


def test_refusals_are_counted_with_how_soon_they_came_and_whether_they_say_when_to_return() -> None:
    outcomes = [refused(12.0), refused(13.0, retry_after=False), Outcome(14.0, 500, 14.1)]
    row = level(outcomes, WINDOW, [2], first_s=0.1, token_s=0.05)
    assert (row["refused"], row["refused_without_retry_after"], row["otherwise"]) == (2, 1, 1)
    assert row["refusal_ms"]["p50"] == pytest.approx(2.0)
    assert row["first_s"] == {}


def test_quantiles_are_of_what_there_is() -> None:
    assert quantiles([]) == {}
    assert quantiles([3.0, 1.0, 2.0]) == {"p50": 2.0, "p99": 3.0}


def test_who_is_to_be_in_time_may_wait_for_what_the_first_token_leaves() -> None:
    assert time_to_wait_s([3, 2], 0.4) == pytest.approx(0.4)
    assert time_to_wait_s([1], 0.4) == time_to_wait_s([0.5], 0.4) == 0.0
