"""How ranges are sized and connections counted: pure decisions, and the measurements that they rest on."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teneral.loader.load.link import (
    FIRST_CONNECTIONS,
    MIN_RANGE_BYTES,
    Link,
    LinkMeter,
    LinkTuner,
    PlanPosition,
    ReadLimits,
    Width,
    cut,
    first_width,
    range_bytes,
    widen,
)

MIB = 1 << 20
LIMITS = ReadLimits(range_bytes=16 * MIB, connections=32, staging_bytes=128 * MIB)
FAR_FROM_THE_END = PlanPosition(None, 10_000 * MIB)
SLOW = Link(first_byte_s=0.015, connection_bytes_per_s=25e6)
FAST = Link(first_byte_s=0.02, connection_bytes_per_s=125e6)

links = st.builds(
    Link,
    first_byte_s=st.floats(0, 5),
    connection_bytes_per_s=st.floats(0, 1e10),
)
budgets = st.builds(
    ReadLimits,
    range_bytes=st.integers(1, 64 * MIB),
    connections=st.integers(1, 256),
    staging_bytes=st.integers(0, 1 << 31),
)
positions = st.builds(
    PlanPosition, st.none() | st.integers(1, 1 << 31), st.integers(1, 1 << 40), st.booleans()
)


def test_a_range_takes_several_times_as_long_as_its_first_byte() -> None:
    assert range_bytes(FAR_FROM_THE_END, SLOW, 8, LIMITS) == int(16 * 0.015 * 25e6)


def test_a_fast_link_gets_larger_ranges_as_far_as_the_staging_allows() -> None:
    assert range_bytes(FAR_FROM_THE_END, FAST, 8, LIMITS) == 8 * MIB
    assert range_bytes(FAR_FROM_THE_END, FAST, 32, LIMITS) == 2 * MIB


def test_what_is_read_to_its_place_is_not_limited_by_the_staging() -> None:
    position = FAR_FROM_THE_END._replace(is_staged=False)
    assert (
        range_bytes(position, FAST, 8, LIMITS)
        == range_bytes(position, FAST, 32, LIMITS)
        == LIMITS.range_bytes
    )


def test_the_faster_the_link_the_larger_is_its_smallest_range() -> None:
    """So that asking takes a core a quarter of its time at most."""
    near_the_end = PlanPosition(None, 1, is_staged=False)
    for rate in (25e6, 125e6, 1e9):
        least_bytes = range_bytes(near_the_end, Link(0.001, rate / 8), 8, LIMITS)
        assert least_bytes == max(MIN_RANGE_BYTES, int(4e-3 * rate))


def test_what_somebody_waits_for_is_shared_by_all_connections() -> None:
    assert range_bytes(PlanPosition(8 * MIB, 1000 * MIB), SLOW, 8, LIMITS) == MIB
    assert range_bytes(PlanPosition(MIB, 1000 * MIB), SLOW, 8, LIMITS) == 4e-3 * 8 * 25e6
    assert range_bytes(PlanPosition(MIB, 1000 * MIB), Link(0.05, 5e6), 8, LIMITS) == MIN_RANGE_BYTES


def test_ranges_shrink_towards_the_end() -> None:
    left, sizes = 100 * MIB, []
    while left > 0:
        sizes.append(min(left, range_bytes(PlanPosition(None, left), FAST, 8, LIMITS)))
        left -= sizes[-1]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 6 * MIB
    assert sizes[-2] == 4 * 1000 * 1000


@given(positions, links, st.integers(1, 256), budgets)
def test_a_range_is_within_the_budget_whatever_was_measured(
    position: PlanPosition, link: Link, width: int, limits: ReadLimits
) -> None:
    size_bytes = range_bytes(position, link, width, limits)
    assert 1 <= size_bytes <= limits.range_bytes
    share_bytes = limits.staging_bytes // (2 * width)
    if position.is_staged and share_bytes:
        assert size_bytes <= max(MIN_RANGE_BYTES, share_bytes)


@given(st.integers(1, 100 * MIB), st.integers(1, 20 * MIB))
def test_cuts_are_even_and_end_exactly(size_bytes: int, most_bytes: int) -> None:
    left, cuts = size_bytes, []
    while left and len(cuts) < 50:
        cuts.append(cut(left, most_bytes))
        left -= cuts[-1]
    assert all(0 < each <= most_bytes for each in cuts)
    if not left:
        assert (
            len(cuts)
            <= -(-size_bytes // most_bytes) + (most_bytes % 4096 > 0) + size_bytes // most_bytes // 8
        )
        assert sum(cuts) == size_bytes


@given(
    first_byte_s=st.floats(0.001, 0.2),
    connection_bytes_per_s=st.floats(1e6, 1e9),
    sizes=st.lists(st.integers(MIN_RANGE_BYTES, 16 * MIB), min_size=4, max_size=40),
)
def test_latency_and_rate_are_separated_by_ranges_of_different_sizes(
    first_byte_s: float, connection_bytes_per_s: float, sizes: list[int]
) -> None:
    sizes = [*sizes, MIN_RANGE_BYTES, 16 * MIB]
    meter = LinkMeter()
    for size in sizes:
        meter.add(size, first_byte_s + size / connection_bytes_per_s)
    link = meter.link()
    assert link.first_byte_s == pytest.approx(first_byte_s, rel=0.01, abs=1e-5)
    assert link.connection_bytes_per_s == pytest.approx(connection_bytes_per_s, rel=0.01)


@given(st.lists(st.tuples(st.integers(1, 64 * MIB), st.floats(0, 100)), max_size=60))
def test_any_measurements_give_a_usable_link(reads: list[tuple[int, float]]) -> None:
    meter = LinkMeter()
    for size, took_s in reads:
        meter.add(size, took_s)
    link = meter.link()
    assert (link.connection_bytes_per_s > 0) == (len(reads) >= 4)
    assert 0 <= link.first_byte_s <= max([1e-6, *(took_s for _, took_s in reads)])
    assert range_bytes(FAR_FROM_THE_END, link, 8, LIMITS) >= MIN_RANGE_BYTES


def settled_width(rate_of: dict[int, float], limits: ReadLimits = LIMITS) -> int:
    """The number of connections found when these numbers give these rates."""
    width = first_width(limits)
    while not width.is_settled:
        width = widen(width, rate_of[width.connections], 100_000 * MIB, limits, is_fed=True)
    return width.connections


def test_eight_connections_are_enough_for_a_link_that_they_fill() -> None:
    assert settled_width({8: 200e6, 16: 201e6}) == 8


def test_where_the_store_limits_each_connection_more_are_opened() -> None:
    assert settled_width({8: 160e6, 16: 320e6, 32: 640e6}) == 32
    assert settled_width({8: 640e6, 16: 1.1e9, 32: 1.15e9}) == 16


def test_the_bound_holds_from_the_start() -> None:
    assert first_width(ReadLimits(MIB, 3, MIB)) == Width(3, is_settled=True)
    assert first_width(LIMITS).connections == FIRST_CONNECTIONS


def test_where_memory_is_what_is_missing_more_connections_are_not_tried() -> None:
    assert widen(Width(8), 100e6, 10_000 * MIB, LIMITS, is_fed=False) == Width(8)
    tuner = LinkTuner(LIMITS)
    for number in range(200):
        tuner.waited(0.02)
        tuner.arrived(MIB, number / 100, number / 100 + 0.05, 10_000 * MIB)
    assert tuner.statistics().most_connections == FIRST_CONNECTIONS


def test_a_short_wait_for_memory_settles_nothing() -> None:
    tuner = LinkTuner(LIMITS)
    tuner.waited(0.05)
    for number in range(200):
        tuner.arrived(MIB, number / 100, number / 100 + 0.05, 10_000 * MIB)
    assert tuner.statistics().most_connections > FIRST_CONNECTIONS


def test_near_the_end_nothing_is_tried_any_more() -> None:
    assert widen(Width(8), 100e6, 10 * MIB, LIMITS, is_fed=True) == Width(8, is_settled=True)


TICK_S = 0.002
LATENCY_S = (0.01, 0.03)


def simulate(
    tuner: LinkTuner, *, left_bytes: int, connection_bytes_per_s: float, link_bytes_per_s: float
) -> float:
    """The time of a load of that size whose connections share a link evenly, tick by tick."""
    now_s = 0.0
    latencies = random.Random(1)
    reads: list[list[float]] = []  # of those under way: size, bytes left, when it began, when its bytes come
    while left_bytes or reads:
        while left_bytes and len(reads) < tuner.connections:
            size_bytes = min(left_bytes, tuner.range_bytes(PlanPosition(None, left_bytes)))
            tuner.handed_out(size_bytes)
            left_bytes -= size_bytes
            reads.append([size_bytes, size_bytes, now_s, now_s + latencies.uniform(*LATENCY_S)])
        now_s += TICK_S
        flowing = [read for read in reads if now_s > read[3]]
        for read in flowing:
            read[1] -= TICK_S * min(connection_bytes_per_s, link_bytes_per_s / len(flowing))
            if read[1] <= 0:
                reads.remove(read)
                tuner.arrived(int(read[0]), read[2], now_s, left_bytes)
    return now_s


def test_a_load_over_many_slow_connections_uses_them_all() -> None:
    tuner = LinkTuner(LIMITS)
    took_s = simulate(tuner, left_bytes=1_000 * MIB, connection_bytes_per_s=20e6, link_bytes_per_s=1e9)
    statistics = tuner.statistics()
    assert statistics.connections == statistics.most_connections == 32
    assert took_s < 1_000 * MIB / 20e6 / 16
    assert statistics.smallest_range_bytes <= statistics.mean_range_bytes <= statistics.largest_range_bytes


def test_small_ranges_that_somebody_waits_for_are_no_trial() -> None:
    tuner = LinkTuner(LIMITS)
    for number in range(200):
        size_bytes = tuner.range_bytes(PlanPosition(MIB, 10_000 * MIB))
        tuner.arrived(size_bytes, number / 100, number / 100 + 0.05, 10_000 * MIB)
    assert tuner.statistics().most_connections == FIRST_CONNECTIONS


def test_a_load_over_a_shared_link_goes_back_to_what_was_enough() -> None:
    tuner = LinkTuner(LIMITS)
    took_s = simulate(tuner, left_bytes=1_000 * MIB, connection_bytes_per_s=1e9, link_bytes_per_s=200e6)
    assert took_s < 1.1 * 1_000 * MIB / 200e6
    assert tuner.connections == 8
    assert tuner.statistics().most_connections == 16
