"""Bringing a block back is never planned where computing it is faster, and never without having measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teneral.runtime.kv.spill.policy import (
    HERE,
    MARGIN,
    NOTHING,
    NUM_RECENT_READS,
    NUM_RECENT_STEPS,
    PrefillMeter,
    ReadMeter,
    ReadRate,
    is_worth_writing,
    plan_fetch,
)

BLOCK = {"block_bytes": 1_000_000, "block_tokens": 16}
FAST = ReadRate(bytes_s=1e9, latency_s=0.002)  # 1 ms a block
SLOW = ReadRate(bytes_s=1e7)  # 100 ms a block


def plan(rates, tokens_s: float | None = 1_600.0, **more):  # 10 ms a block
    return plan_fetch(rates, **BLOCK, prefill_tokens_s=tokens_s, **more)


def test_what_is_faster_than_computing_is_brought_back_as_a_whole():
    found = plan([FAST] * 8)
    assert found.num_blocks == 8
    assert found.predicted_s == pytest.approx(0.010)
    assert found.recompute_s == pytest.approx(0.080)


def test_what_is_slower_than_computing_is_not():
    assert plan([SLOW] * 8) == NOTHING
    assert plan([FAST] * 8, tokens_s=1e6) == NOTHING


@pytest.mark.parametrize("rates", [[], [None], [None, FAST, FAST]])
def test_without_a_measurement_nothing_is(rates):
    assert plan(rates) == NOTHING
    assert plan([FAST] * 8, tokens_s=None) == NOTHING


def test_a_chain_is_brought_back_up_to_where_it_stops_paying():
    assert plan([FAST, FAST, FAST, SLOW, SLOW]).num_blocks == 3
    assert plan([FAST, FAST, FAST, None, FAST]).num_blocks == 3
    assert plan([FAST] * 3 + [SLOW] + [FAST] * 40).num_blocks == 44  # the slow one leads to this number


def test_latency_counts_once_for_each_medium():
    near, far = ReadRate(1e9, latency_s=0.004), ReadRate(5e8, latency_s=0.006)
    assert plan([near, far, near, far]).predicted_s == pytest.approx(0.004 + 0.006 + 2 * 0.001 + 2 * 0.002)
    assert plan([ReadRate(1e9, latency_s=0.05)] * 4) == NOTHING
    assert plan([ReadRate(1e9, latency_s=0.05)] * 40).num_blocks == 40


def test_who_would_have_to_wait_for_others_computes():
    assert plan([FAST] * 4, ahead_s=0.01).num_blocks == 4
    assert plan([FAST] * 4, ahead_s=1.0) == NOTHING


def test_what_is_here_already_costs_nothing():
    assert plan([HERE, HERE]).predicted_s == 0
    assert plan([SLOW, *[HERE] * 30]).num_blocks == 31


rates = st.none() | st.builds(ReadRate, st.floats(1e3, 1e12), st.floats(0, 10)) | st.just(HERE)


@given(
    chain=st.lists(rates, max_size=30),
    block_bytes=st.integers(1, 1 << 26),
    tokens_s=st.none() | st.floats(0.01, 1e7),
    ahead_s=st.floats(0, 100),
)
def test_no_plan_is_slower_than_computing_by_what_was_measured(chain, block_bytes, tokens_s, ahead_s):
    found = plan_fetch(
        chain, block_bytes=block_bytes, block_tokens=16, prefill_tokens_s=tokens_s, ahead_s=ahead_s
    )
    assert MARGIN * found.predicted_s <= found.recompute_s
    assert None not in chain[: found.num_blocks]
    if found.num_blocks:
        assert tokens_s is not None
        assert found.recompute_s == pytest.approx(found.num_blocks * 16 / tokens_s)
        reading_s = sum(block_bytes / rate.bytes_s for rate in chain[: found.num_blocks])
        assert found.predicted_s >= ahead_s + reading_s * (1 - 1e-9)


def worth(rate, tokens_s=1_600.0):
    return is_worth_writing(rate, **BLOCK, prefill_tokens_s=tokens_s)


def test_only_what_would_come_back_sooner_than_computed_is_worth_writing():
    assert worth(FAST)
    assert not worth(SLOW)
    assert not worth(None)
    assert not worth(FAST, tokens_s=None)
    limit_bytes_s = MARGIN * BLOCK["block_bytes"] / 0.01
    assert worth(ReadRate(limit_bytes_s * 1.01))
    assert not worth(ReadRate(limit_bytes_s * 0.99))


def test_the_slowest_of_the_recent_reads_but_one_says_how_fast_a_medium_is():
    meter = ReadMeter()
    assert meter.rate is None
    meter.note_read(1_000, 1.0)
    meter.note_read(4_000, 1.0)
    assert meter.rate.bytes_s == 1_000
    for _ in range(NUM_RECENT_READS):
        meter.note_read(4_000, 1.0)
    assert meter.rate.bytes_s == 4_000
    meter.note_read(1_000, 10.0)  # once is bad luck
    assert meter.rate.bytes_s == 4_000
    meter.note_read(1_000, 5.0)
    assert meter.rate.bytes_s == 200
    for _ in range(NUM_RECENT_READS - 1):
        meter.note_read(4_000, 1.0)
    assert meter.rate.bytes_s == 4_000  # it has recovered


def test_the_longest_of_the_recent_latencies_but_one_counts():
    meter = ReadMeter()
    meter.note_read(1, 1.0)
    assert meter.rate.latency_s == 0
    for latency_s in (0.1, 0.3, 0.2):
        meter.note_latency(latency_s)
    assert meter.rate.latency_s == 0.2


def test_the_fastest_of_the_recent_steps_says_how_fast_prompts_are_computed():
    meter = PrefillMeter(min_tokens=32)
    meter.note_step(31, 1e-6)  # somebody's next token
    assert meter.tokens_s is None
    meter.note_step(100, 10.0)  # this one waited for weights
    meter.note_step(100, 0.1)
    meter.note_step(100, 0.2)
    assert meter.tokens_s == pytest.approx(1_000)
    for _ in range(NUM_RECENT_STEPS):
        meter.note_step(100, 1.0)
    assert meter.tokens_s == pytest.approx(100)
