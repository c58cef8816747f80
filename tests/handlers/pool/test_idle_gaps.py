"""The hybrid policy's histogram: what it expects of regular, sparse, scattered and changing arrivals."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teneral.handlers.pool.deployment import Deployment
from teneral.handlers.pool.policy import (
    BIN_S,
    MAX_GAPS,
    NUM_BINS,
    Demand,
    Idle,
    IdleGaps,
    Quiet,
    Window,
    desired,
    idle_limit_s,
    to_end,
)
from teneral.handlers.pool.repository import Release
from teneral.handlers.pool.values import Model
from teneral.runtime.config import ServeConfig

HYBRID = Model("m", "/m", policy="hybrid", idle_timeout_s=300)


def gaps_of(*seconds: float) -> IdleGaps:
    gaps = IdleGaps()
    for each in seconds:
        gaps.observe(each)
    return gaps


def test_a_regular_gap_is_expected_in_its_minute() -> None:
    assert gaps_of(*[20 * 60 + 5] * 10).window() == Window(20 * 60, 21 * 60)


def test_the_window_is_from_the_5th_to_the_99th_percentile() -> None:
    gaps = gaps_of(*[30] * 4, *[5 * 60 + 1] * 94, *[30 * 60 + 1], *[200 * 60])
    assert gaps.window() == Window(5 * 60, 31 * 60), "4 % are earlier, 1 % later"
    assert gaps_of(*[30] * 5, *[5 * 60 + 1] * 95).window() == Window(0, 6 * 60)


def test_too_few_gaps_say_nothing() -> None:
    gaps = gaps_of(*[60] * 9)
    assert gaps.window() is None
    gaps.observe(60)
    assert gaps.window() == Window(60, 120)


def test_gaps_that_are_mostly_longer_than_the_histogram_say_nothing() -> None:
    gaps = gaps_of(*[60] * 10, *[BIN_S * NUM_BINS] * 10)
    assert gaps.window() is not None
    gaps.observe(1e9)
    assert gaps.window() is None


def test_a_flat_histogram_says_nothing() -> None:
    assert gaps_of(*(BIN_S * number for number in range(NUM_BINS))).window() is None
    assert gaps_of(*(BIN_S * number for number in range(NUM_BINS // 8))).window() is not None


def test_old_habits_are_forgotten() -> None:
    gaps = gaps_of(*[60] * MAX_GAPS)
    for _ in range(4 * MAX_GAPS):
        gaps.observe(600)
    assert gaps.window() == Window(600, 660)


def test_a_copy_goes_its_own_way() -> None:
    gaps = gaps_of(*[60] * 10)
    other = gaps.copy()
    for _ in range(1000):
        other.observe(600)
    assert (gaps.window(), other.window()) == (Window(60, 120), Window(600, 660))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 20_000), max_size=200))
def test_a_window_covers_the_gaps_that_were_counted(seconds: list[float]) -> None:
    window = gaps_of(*seconds).window()
    counted = sorted(each for each in seconds if each < BIN_S * NUM_BINS)
    if window is None:
        return
    assert 0 <= window.prewarm_s < window.keep_s <= BIN_S * NUM_BINS
    early = sum(each < window.prewarm_s for each in counted)
    late = sum(each >= window.keep_s for each in counted)
    assert early <= 0.05 * len(counted)
    assert late <= 0.01 * len(counted) + 1e-6


QUIET = Quiet(0.0, Window(600, 660))


@pytest.mark.parametrize(("idle_s", "wanted"), [(0, 0), (599, 0), (600, 1), (659, 1), (660, 0)])
def test_an_idle_model_has_an_instance_while_a_request_is_expected(idle_s: float, wanted: int) -> None:
    quiet = QUIET._replace(idle_s=idle_s)
    assert desired(HYBRID, Demand(0, 0), quiet) == wanted
    ended = to_end(HYBRID, Demand(0, 0), ready=1, idle=[Idle("a", 1.0)], quiet=quiet)
    assert ended == ([] if wanted else ["a"]), "it does not wait for idle_timeout_s"


def test_instances_beyond_the_one_have_their_usual_time() -> None:
    quiet = Quiet(10.0, Window(0, 600))
    idle = [Idle("a", 10.0), Idle("b", 299.0), Idle("c", 300.0)]
    assert to_end(HYBRID, Demand(0, 0), ready=3, idle=idle, quiet=quiet) == ["c"]
    assert idle_limit_s(HYBRID, None) == 300


def test_the_least_and_the_demand_come_first() -> None:
    warm = Model("m", "/m", policy="hybrid", min_warm=2)
    assert desired(warm, Demand(0, 0), QUIET) == 2
    assert desired(HYBRID, Demand(9, 0), QUIET) == 2, "8 are aimed at"


def test_a_deployment_counts_the_gaps_between_its_requests(tmp_path: Path) -> None:
    release = Release(None, str(tmp_path), "1", 0)
    deployment = Deployment(HYBRID, release, ServeConfig(model=str(tmp_path)))
    for number in range(11):
        assert deployment.quiet(1000.0 * number) is None, "nothing is expected yet"
        deployment.request_began(1000.0 * number)
        deployment.request_ended(1000.0 * number + 100)
    quiet = deployment.quiet(1000.0 * 10 + 100 + 870)
    assert quiet == Quiet(870.0, Window(900, 960))
    assert not quiet.expects
    fixed = dataclasses.replace(HYBRID, policy="fixed")
    deployment.model = fixed
    assert deployment.quiet(1e6) is None
