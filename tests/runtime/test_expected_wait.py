"""How long who comes now would have to wait: a bound from above, and no guess where nothing is known."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teneral.runtime.engine.capacity import (
    MIN_MEANS,
    NUM_MEANS,
    STEPS_OF_A_MEAN,
    StepTimes,
    steps_until_place,
)

NUM_PLACES = st.integers(1, 6)
LENGTHS = st.lists(st.integers(1, 20), max_size=8)


def simulated_wait(running: Sequence[int], before: Sequence[int], num_places: int) -> int:
    """The same, by taking the steps one by one."""
    left, queue, num_steps = list(running), deque(before), 0
    while True:
        while queue and len(left) < num_places:
            left.append(queue.popleft())
        if not queue and len(left) < num_places:
            return num_steps
        left = [each - 1 for each in left if each > 1]
        num_steps += 1


@given(running=LENGTHS, before=LENGTHS, num_places=NUM_PLACES)
def test_it_is_what_happens_when_everybody_takes_all_the_steps_that_they_may(
    running: list[int], before: list[int], num_places: int
) -> None:
    running = running[:num_places]
    expected = simulated_wait(running, before, num_places)
    assert steps_until_place(running, before, num_places) == expected


@given(running=LENGTHS, before=LENGTHS, num_places=NUM_PLACES, data=st.data())
def test_no_wait_grows_when_others_end_sooner(
    running: list[int], before: list[int], num_places: int, data: st.DataObject
) -> None:
    running = running[:num_places]
    sooner = [[data.draw(st.integers(1, each)) for each in lengths] for lengths in (running, before)]
    assert simulated_wait(*sooner, num_places) <= steps_until_place(running, before, num_places)


@given(running=LENGTHS, before=LENGTHS, num_places=NUM_PLACES)
def test_who_stands_further_back_never_waits_less(
    running: list[int], before: list[int], num_places: int
) -> None:
    running = running[:num_places]
    waits = [steps_until_place(running, before[:num], num_places) for num in range(len(before) + 1)]
    assert waits == sorted(waits)


@given(running=LENGTHS, before=LENGTHS, num_places=NUM_PLACES)
def test_there_is_no_wait_exactly_while_a_place_is_free(
    running: list[int], before: list[int], num_places: int
) -> None:
    running = running[:num_places]
    is_free = len(running) + len(before) < num_places
    assert (steps_until_place(running, before, num_places) == 0) is is_free


@given(running=st.lists(st.integers(1, 20), min_size=1, max_size=6), data=st.data())
def test_behind_requests_that_take_longer_than_all_the_next_to_end_counts(
    running: list[int], data: st.DataObject
) -> None:
    position = data.draw(st.integers(1, len(running)))
    assert steps_until_place(running, [1000] * (position - 1), len(running)) == sorted(running)[position - 1]


# -- how long a step takes -----------------------------------------------------------------------------------


def times_of(*means_s: float) -> StepTimes:
    times = StepTimes()
    for mean_s in means_s:
        for _ in range(STEPS_OF_A_MEAN):
            times.add(mean_s)
    return times


def test_nothing_is_known_before_there_were_enough_steps() -> None:
    assert StepTimes().step_s is None
    times = times_of(*[0.5] * (MIN_MEANS - 1))
    assert times.step_s is None
    for _ in range(STEPS_OF_A_MEAN):
        assert times.step_s is None
        times.add(0.5)
    assert times.step_s == pytest.approx(0.5)


def test_one_step_in_which_the_process_was_stopped_does_not_count() -> None:
    times = times_of(0.1, 0.1)
    times.add(3600.0)
    for _ in range(STEPS_OF_A_MEAN):
        times.add(0.1)
    assert times.step_s == pytest.approx(0.1)


def test_slow_steps_that_come_again_and_again_do() -> None:
    times = StepTimes()
    for number in range(NUM_MEANS * STEPS_OF_A_MEAN):
        times.add(0.9 if number % 8 == 0 else 0.1)
    assert times.step_s == pytest.approx(0.2)


def test_what_was_long_ago_is_forgotten() -> None:
    assert times_of(*[9.0] * NUM_MEANS, *[0.1] * NUM_MEANS).step_s == pytest.approx(0.1)
