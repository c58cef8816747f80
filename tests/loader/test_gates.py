"""Gates: their opening, and the errors of waiting readers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.load import patience_s

from teneral.loader.errors import IntegrityError, LoadCancelledError
from teneral.loader.format.manifest import Tier
from teneral.loader.load.gates import Readiness


def settle(readiness: Readiness, number: int) -> bool:
    gates, was_last = readiness.settle(number)
    readiness.open(gates, (number,))
    return was_last


def test_a_group_without_parts_is_exact_at_once() -> None:
    readiness = Readiness(2, [(1, Tier.DRAFT)])
    readiness.wait(0, Tier.REFINE, timeout_s=0)
    assert readiness.is_open(0, Tier.DRAFT)
    assert not readiness.is_open(1, Tier.DRAFT)


def test_a_group_without_refinement_is_exact_with_its_draft() -> None:
    readiness = Readiness(1, [(0, Tier.DRAFT)])
    gates, was_last = readiness.settle(0)
    assert gates == [(0, Tier.DRAFT), (0, Tier.REFINE)]
    assert was_last


def test_there_is_no_sketch_before_the_draft_of_a_group_that_begins_with_one() -> None:
    readiness = Readiness(2, [(0, Tier.DRAFT), (0, Tier.REFINE), (1, Tier.SKETCH), (1, Tier.DRAFT)])
    assert not readiness.is_open(0, Tier.SKETCH)
    settle(readiness, 2)
    assert readiness.is_open(1, Tier.SKETCH)
    assert not readiness.is_open(1, Tier.DRAFT)
    gates, _ = readiness.settle(0)
    assert gates == [(0, Tier.DRAFT)]
    readiness.open(gates)
    assert [readiness.is_open(0, tier) for tier in Tier] == [True, True, False]


def test_a_group_that_is_whole_in_its_sketch_is_exact_with_it() -> None:
    readiness = Readiness(1, [(0, Tier.SKETCH)])
    gates, was_last = readiness.settle(0)
    assert gates == [(0, tier) for tier in Tier]
    assert was_last


def test_a_gate_is_closed_until_it_is_opened() -> None:
    readiness = Readiness(1, [(0, Tier.DRAFT)])
    gates, _ = readiness.settle(0)
    assert not readiness.is_open(0, Tier.DRAFT)
    readiness.open(gates)
    assert readiness.is_open(0, Tier.DRAFT)


@settings(deadline=None)
@given(st.data())
def test_gates_open_with_their_last_part_in_any_order(data: st.DataObject) -> None:
    num_groups = data.draw(st.integers(1, 4))
    parts = data.draw(st.lists(st.tuples(st.integers(0, num_groups - 1), st.sampled_from(Tier)), max_size=12))
    order = data.draw(st.permutations(range(len(parts))))
    readiness = Readiness(num_groups, parts)
    for done, number in enumerate(order, start=1):
        assert not readiness.are_there([number])
        was_last = settle(readiness, number)
        assert readiness.are_there(order[:done])
        assert was_last == (done == len(parts))
        left = [parts[each] for each in order[done:]]
        for other in range(num_groups):
            first = min((tier for group, tier in parts if group == other), default=Tier.SKETCH)
            for tier in Tier:
                stands_for = max(tier, first)
                is_due = not any((other, below) in left for below in Tier if below <= stands_for)
                assert readiness.is_open(other, tier) == is_due
    assert readiness.num_open(Tier.REFINE) == num_groups


def test_all_waiting_threads_go_on() -> None:
    readiness = Readiness(1, [(0, Tier.DRAFT), (0, Tier.REFINE)])
    waiting = threading.Barrier(5)

    def wait(tier: Tier) -> bool:
        waiting.wait()
        readiness.wait(0, tier, timeout_s=30)
        return readiness.is_open(0, tier)

    with ThreadPoolExecutor(4) as pool:
        waits = [pool.submit(wait, tier) for tier in (Tier.DRAFT, Tier.REFINE) * 2]
        waiting.wait()
        settle(readiness, 0)
        settle(readiness, 1)
        assert [each.result() for each in waits] == [True] * 4


def test_waiting_in_vain_ends_in_a_timeout_that_names_the_gate() -> None:
    readiness = Readiness(3, [(2, Tier.REFINE)])
    with pytest.raises(TimeoutError, match="group 2 did not hold its refine values"):
        readiness.wait(2, Tier.REFINE, timeout_s=0.01)


def test_a_failure_reaches_closed_gates_only() -> None:
    readiness = Readiness(2, [(0, Tier.DRAFT), (1, Tier.DRAFT)])
    settle(readiness, 0)
    assert readiness.fail(IntegrityError("part 1 is bad", where="part 1", hint="Pack again."))
    readiness.wait(0, Tier.REFINE, None)
    with pytest.raises(IntegrityError, match="part 1 is bad") as caught:
        readiness.wait(1, Tier.REFINE, None)
    assert caught.value.where == "part 1"
    assert caught.value.hint == "Pack again."


def test_each_waiting_thread_raises_its_own_copy() -> None:
    readiness = Readiness(1, [(0, Tier.DRAFT)])
    cause = ValueError("the reason")
    error = LoadCancelledError("stop")
    error.__cause__ = cause
    readiness.fail(error)
    caught = []
    for _ in range(2):
        with pytest.raises(LoadCancelledError) as raised:
            readiness.wait(0, Tier.DRAFT, None)
        caught.append(raised.value)
    assert caught[0] is not caught[1]
    assert all(each.__cause__ is cause for each in caught)


def test_the_first_failure_counts_and_a_finished_load_cannot_fail() -> None:
    readiness = Readiness(1, [(0, Tier.DRAFT)])
    assert readiness.fail(LoadCancelledError("first"))
    assert not readiness.fail(LoadCancelledError("second"))
    assert str(readiness.error) == "first"
    assert settle(readiness, 0) is False  # a part that was under way does not make it a success
    done = Readiness(1, [])
    assert not done.fail(LoadCancelledError("too late"))
    done.wait(0, Tier.REFINE, None)


def test_a_wait_for_some_parts_ends_with_the_last_of_them() -> None:
    readiness = Readiness(1, [(0, Tier.DRAFT)] * 3)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(readiness.wait_parts, [0, 2], 30)
        settle(readiness, 2)
        with pytest.raises(TimeoutError, match="2 parts were not there"):
            readiness.wait_parts([0, 2], timeout_s=0.01)
        settle(readiness, 0)
        waiting.result(patience_s(30))
    assert not readiness.is_open(0, Tier.DRAFT)
    readiness.wait_parts([0, 2], timeout_s=0)


def test_a_wait_for_parts_raises_the_failure() -> None:
    readiness = Readiness(1, [(0, Tier.DRAFT)] * 2)
    settle(readiness, 0)
    readiness.fail(LoadCancelledError("stop"))
    readiness.wait_parts([0], None)
    with pytest.raises(LoadCancelledError, match="stop"):
        readiness.wait_parts([0, 1], None)


def test_changes_are_gates_and_the_parts_that_are_watched() -> None:
    readiness = Readiness(2, [(0, Tier.DRAFT), (0, Tier.DRAFT), (1, Tier.DRAFT)])
    seen = readiness.wait_for_change(-1, timeout_s=0)
    settle(readiness, 0)
    assert readiness.wait_for_change(seen, timeout_s=0) == seen
    assert readiness.watched() == frozenset()
    readiness.watch([0, 1])
    assert readiness.wait_for_change(seen, timeout_s=30) > seen
    assert readiness.watched() == {0}
    seen = readiness.wait_for_change(-1, timeout_s=0)
    settle(readiness, 2)
    assert readiness.wait_for_change(seen, timeout_s=30) > seen
    assert readiness.is_open(1, Tier.REFINE)
