"""When the part cache stands aside for a load."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from teneral.loader.cache.writer import (
    MAX_REST_S,
    MIN_IDLE_CORES,
    PLACES,
    WAIT_S,
    WRITER_SHARE,
    ReadGate,
    is_crawling,
    rest_s,
)

MIB = 1024 * 1024


def test_on_a_slow_disk_readers_that_find_all_places_taken_go_to_the_store() -> None:
    gate = ReadGate()
    assert [gate.enter() for _ in range(PLACES)] == [True] * PLACES
    gate.note(4 * MIB, 1.0)
    assert not gate.enter()
    gate.leave()
    assert gate.enter()


def test_on_a_fast_disk_they_wait_for_their_turn() -> None:
    gate = ReadGate()
    for _ in range(PLACES):
        gate.enter()
    gate.note(4 * MIB, 0.001)
    threading.Timer(WAIT_S / 10, gate.leave).start()
    assert gate.enter()


@given(st.integers(0, 1 << 30), st.floats(0, 1e4), st.floats(0, 1e4))
def test_a_read_that_crawls_goes_on_crawling(size_bytes: int, sooner_s: float, later_s: float) -> None:
    sooner_s, later_s = sorted((sooner_s, later_s))
    assert is_crawling(size_bytes, later_s) or not is_crawling(size_bytes, sooner_s)


@given(st.floats(0.001, 0.01), st.floats(0, 0.01), st.floats(0, 10), st.floats(-1, 256))
def test_a_writer_keeps_to_its_share_of_the_idle_cores(
    cpu_s: float, delay_s: float, waited_s: float, idle_cores: float
) -> None:
    elapsed_s = cpu_s + delay_s + waited_s
    rest = rest_s(cpu_s, delay_s, elapsed_s, idle_cores)
    assert (
        rest == MAX_REST_S
        or cpu_s <= WRITER_SHARE * max(MIN_IDLE_CORES, idle_cores) * (elapsed_s + rest) * 1.001
    )


def test_a_writer_that_had_to_wait_for_its_core_rests_longer() -> None:
    assert (
        0 < rest_s(0.01, 0, 0.01, 2) < rest_s(0.01, 0.01, 0.02, 2) < rest_s(0.01, 0.03, 0.04, 2) <= MAX_REST_S
    )
    assert rest_s(0, 0, 0, 2) == 0
