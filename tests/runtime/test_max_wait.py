"""The bound on the wait for a place: which requests are refused for it, and which are not."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import pytest
from tests.support.engine_rig import BLOCK_SIZE, TIMEOUT_S, EngineRig, finish
from tests.support.inspection import capacity_of, state_of
from tests.support.toy_decoder import ToyDecoder

from teneral.loader.errors import UsageError
from teneral.runtime.engine.capacity import MIN_MEANS, STEPS_OF_A_MEAN, Capacity
from teneral.runtime.engine.generation import Generation
from teneral.runtime.engine.options import EngineOptions
from teneral.runtime.errors import CapacityError
from teneral.runtime.step.requests import Priority

BATCH = Priority.BATCH
NUM_MEASURED = MIN_MEANS * STEPS_OF_A_MEAN


def know_step(rig: EngineRig, step_s: float) -> None:
    """Set the engine's measured time of a step."""
    state = state_of(rig.engine)
    with state.changed:
        for _ in range(NUM_MEASURED):
            capacity_of(rig.engine).step_times.add(step_s)


def full_rig(
    lengths: Iterable[int],
    *,
    step_s: float | None = 1.0,
    priority: Priority = Priority.INTERACTIVE,
    **options: Any,
) -> tuple[EngineRig, list[Generation]]:
    """With a first step under way, held, in which all that run have their whole answers before them."""
    lengths = list(lengths)
    rig = EngineRig(start=False, max_running=len(lengths), **options)
    rig.model.gate.clear()
    running = [rig.submit((number,), max_tokens=num, priority=priority) for number, num in enumerate(lengths)]
    rig.engine.start()
    assert rig.model.entered.wait(TIMEOUT_S)
    if step_s is not None:
        know_step(rig, step_s)
    return rig, running


def test_a_request_that_would_wait_longer_is_refused_with_the_time() -> None:
    rig, running = full_rig([20, 7, 12], max_wait_s=6.5)
    with rig:
        with pytest.raises(CapacityError, match=r"free in 7\.0 s, longer than .* of 6\.5 s") as caught:
            rig.submit(max_tokens=1)
        assert caught.value.retry_after_s == pytest.approx(7.0)
        assert rig.engine.statistics().queued == 0
        rig.model.gate.set()
        assert [len(finish(each).tokens) for each in running] == [20, 7, 12]


def test_waiting_requests_are_counted_with_what_they_will_take() -> None:
    rig, _ = full_rig([20, 7, 12], max_wait_s=9.5)
    with rig:
        rig.submit(max_tokens=2)  # from step 7 to 9
        rig.submit(max_tokens=30)
        with pytest.raises(CapacityError, match=r"12\.0 s"):
            rig.submit(max_tokens=1)
        with pytest.raises(CapacityError, match=r"12\.0 s"):
            rig.engine.require_room("", Priority.INTERACTIVE)


def test_prompts_that_are_not_computed_yet_take_steps_too() -> None:
    model = ToyDecoder()
    with EngineRig(model=model, start=False, max_running=1, max_prefill_tokens=4, max_wait_s=10.0) as rig:
        know_step(rig, 1.0)
        rig.submit(range(17), max_tokens=6)  # 5 steps, with the last of which comes the first of 6 tokens
        rig.submit(max_tokens=1)
        with pytest.raises(CapacityError, match=r"11\.0 s"):
            rig.submit(max_tokens=1)


def test_what_was_generated_is_not_counted_again() -> None:
    rig, (running,) = full_rig([40], max_wait_s=30.0)
    with rig:
        with pytest.raises(CapacityError):
            rig.submit(max_tokens=1)
        held_at = 15

        def hold(number: int) -> None:
            if number == held_at:
                rig.model.entered.clear()
                rig.model.gate.clear()
                reached.append(number)
                rig.model.gate.wait()

        reached: list[int] = []
        rig.model.before_forward = hold
        rig.model.gate.set()
        end_s = time.monotonic() + TIMEOUT_S
        while not reached and time.monotonic() < end_s:
            time.sleep(0.001)
        know_step(rig, 1.0)  # what was measured meanwhile is much less
        know_step(rig, 1.0)
        waiting = rig.submit(max_tokens=1)  # 25 steps
        rig.model.gate.set()
        finish(waiting)
        assert running.ended


def test_a_free_place_is_never_refused() -> None:
    rig, _ = full_rig([90], max_wait_s=0.0, step_s=100.0)
    with rig, pytest.raises(CapacityError):
        rig.submit(max_tokens=1)
    with EngineRig(start=False, max_running=3, max_wait_s=0.0) as rig:
        know_step(rig, 100.0)
        for _ in range(3):
            rig.submit(max_tokens=90)
        with pytest.raises(CapacityError):
            rig.submit(max_tokens=1)


def test_a_cancelled_sequence_counts_no_longer() -> None:
    rig, running = full_rig([50, 60], max_wait_s=5.0)
    with rig:
        running[1].cancel()
        rig.submit(max_tokens=1)


def test_while_no_step_was_measured_no_request_is_refused() -> None:
    rig, _ = full_rig([100], step_s=None, max_wait_s=0.0)
    with rig:
        for _ in range(20):
            rig.submit(max_tokens=100).cancel()


def test_without_a_bound_no_request_is_refused_for_it() -> None:
    rig, _ = full_rig([100], step_s=1e6)
    with rig:
        rig.submit(max_tokens=1).cancel()


def test_an_engine_measures_its_steps_with_all_that_is_between_them() -> None:
    with EngineRig(max_running=1, max_wait_s=0.1) as rig:
        rig.model.before_forward = lambda number: time.sleep(0.005)
        finish(rig.submit(max_tokens=NUM_MEASURED + 2))
        step_s = capacity_of(rig.engine).step_times.step_s
        assert step_s is not None
        assert step_s >= 0.005
        rig.model.gate.clear()
        rig.model.entered.clear()
        rig.submit(max_tokens=100)
        assert rig.model.entered.wait(TIMEOUT_S)
        with pytest.raises(CapacityError):
            rig.submit(max_tokens=1)


def test_time_without_anybody_is_no_step() -> None:
    with EngineRig(max_running=1) as rig:
        for _ in range(2 * NUM_MEASURED):
            finish(rig.submit(max_tokens=1))
        assert capacity_of(rig.engine).step_times.step_s is None


# -- not affected ----------------------------------------------------------------------------------------


def test_batch_work_may_wait_for_however_long() -> None:
    rig, _ = full_rig([100], max_wait_s=1.0)
    with rig:
        rig.submit(max_tokens=1, priority=BATCH)
        rig.engine.require_room("", BATCH)


def test_batch_work_delays_no_interactive_request() -> None:
    rig, _ = full_rig([100], priority=BATCH, max_wait_s=1.0)
    with rig:
        rig.submit((50,), max_tokens=1, priority=BATCH)
        interactive = rig.submit((51,), max_tokens=1)
        rig.model.gate.set()
        finish(interactive)


def test_of_another_tenant_those_are_counted_that_go_before() -> None:
    rig, _ = full_rig([5], max_wait_s=21.0)
    with rig:
        for _ in range(3):
            rig.submit(max_tokens=8, tenant="many")
        with pytest.raises(CapacityError, match=r"29\.0 s"):
            rig.submit(max_tokens=8, tenant="many")
        rig.submit(max_tokens=8, tenant="one")  # behind who runs, and one of them: 13 s
        with pytest.raises(CapacityError, match=r"29\.0 s"):
            rig.submit(max_tokens=8, tenant="one")


def test_who_belongs_to_a_request_that_was_taken_is_taken_too() -> None:
    rig, _ = full_rig([3], max_wait_s=3.5)
    with rig:
        first = rig.submit(max_tokens=50)
        with pytest.raises(CapacityError, match=r"53\.0 s"):
            rig.submit(max_tokens=50)
        rig.engine.submit(first.request, joins=True)
        assert rig.engine.statistics().queued == 2


def test_where_blocks_are_short_and_not_places_no_request_is_refused() -> None:
    num_blocks = 40 // BLOCK_SIZE
    model = ToyDecoder(max_context=40)
    with EngineRig(model=model, num_blocks=num_blocks, max_running=4, max_wait_s=0.0) as rig:
        model.gate.clear()
        rig.submit([1] * 30, max_tokens=10)
        assert model.entered.wait(TIMEOUT_S)
        large = [rig.submit([2 + number] * 30, max_tokens=10) for number in range(3)]
        model.before_forward = lambda number: know_step(
            rig, 10.0 * (number > 0)
        )  # once it was planned with them
        model.gate.set()
        # Places are free, but no blocks: the wait of these and of later requests is unknown.
        later = []
        while not all(each.ended for each in large):
            later.append(rig.submit((1,), max_tokens=1))
            later[-1].cancel()
            time.sleep(0.001)
        assert later


# -- the rest ------------------------------------------------------------------------------------------------


def test_an_invalid_bound_is_refused_by_name() -> None:
    with pytest.raises(UsageError) as caught:
        EngineOptions(kv_bytes=1, max_wait_s=-1.0)
    assert caught.value.key == "max_wait_s"


def test_the_time_to_come_back_is_no_longer_than_running_requests_may_take() -> None:
    rig, _ = full_rig([20, 7, 12])
    with rig:
        state = state_of(rig.engine)
        assert state.retry_after_s == pytest.approx(7.0)
        capacity_of(rig.engine).recent_ends_s.extend([0.0, 25.0])
        assert state.retry_after_s == pytest.approx(7.0)
        capacity_of(rig.engine).recent_ends_s.clear()
        capacity_of(rig.engine).recent_ends_s.extend([0.0, 2.0])
        assert state.retry_after_s == pytest.approx(2.0)


def test_a_time_without_anybody_says_nothing_of_how_often_places_become_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capacity = Capacity(EngineOptions(kv_bytes=1))
    now_s = 0.0
    monkeypatch.setattr("teneral.runtime.engine.capacity.time.monotonic", lambda: now_s)
    for _ in range(4):
        now_s += 3.0
        capacity.note_end()
    now_s += 3600.0
    capacity.note_arrival()
    now_s += 3.0
    capacity.note_end()
    assert capacity.retry_after_s == pytest.approx(3.0)


def test_an_engine_that_had_nothing_to_do_leaves_that_time_out() -> None:
    with EngineRig() as rig:
        capacity = capacity_of(rig.engine)
        long_ago_s = time.monotonic() - 7200.0
        capacity.recent_ends_s.extend([long_ago_s, long_ago_s + 3.0])
        finish(rig.submit(max_tokens=1))
        assert rig.engine.statistics().retry_after_s < 30.0
