"""The work queue: who gets what next, and when somebody has to wait."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet

import numpy as np
import pytest
from tests.support.artifacts import BuiltArtifact, build_artifact

from teneral.loader.format.manifest import Tier
from teneral.loader.stream.arena import Arena, as_array
from teneral.loader.stream.options import Order
from teneral.loader.stream.pace import Pace
from teneral.loader.stream.plan import Plan, Step, plan_load
from teneral.loader.stream.sizing import Budget, Position
from teneral.loader.stream.staging import Staging
from teneral.loader.stream.work import Read, WorkQueue

WAIT_S = 30


class OnePace(Pace):
    """Ranges of one size, for as many connections as a test has reads."""

    def __init__(self, range_bytes: int) -> None:
        super().__init__(Budget(range_bytes, connections=1, staging_bytes=1))
        self._range_bytes = range_bytes

    @property
    def connections(self) -> int:
        return 1000

    def range_bytes(self, position: Position) -> int:
        return self._range_bytes


def pace(range_bytes: int = 1 << 20) -> Pace:
    return OnePace(range_bytes)


def queue_of(
    built: BuiltArtifact, *, staging_bytes: int = 1 << 20, range_bytes: int = 1 << 20
) -> tuple[WorkQueue, Plan]:
    plan = plan_load(built.manifest, Order.EXACT)
    arena = Arena([group.slab_bytes for group in built.manifest.groups])
    return WorkQueue(plan, Staging(staging_bytes), arena.slabs, pace(range_bytes)), plan


def two_layers() -> BuiltArtifact:
    """Steps: layer 0 draft, refine, layer 1 draft, refine; one part each."""
    return build_artifact([(f"layers.{number}", {f"w{number}": ("BF16", (64, 64))}) for number in range(2)])


def take_all_reads(work: WorkQueue, plan: Plan) -> list[tuple[Read, memoryview]]:
    """Hands out until every byte of the plan has been."""
    taken: list[tuple[Read, memoryview]] = []
    while sum(piece.size_bytes for read, _ in taken for piece in read.pieces) < plan.stored_bytes:
        task = work.next_read()
        assert task is not None
        taken.append(task)
    return taken


def must_wait(waiting: Future[object]) -> None:
    with pytest.raises(NotYet):
        waiting.result(0.05)


def test_reads_come_in_plan_order_and_fill_their_part_from_end_to_end() -> None:
    work, plan = queue_of(two_layers(), range_bytes=1000)
    taken = take_all_reads(work, plan)
    steps = [piece.step for read, _ in taken for piece in read.pieces]
    assert steps == sorted(steps)
    for step in plan.steps:
        ours = [(read.pieces[0], memory) for read, memory in taken if read.pieces[0].step == step.number]
        assert len(ours) > 1
        assert [piece.start_bytes for piece, _ in ours] == [0, *(piece.end_bytes for piece, _ in ours[:-1])]
        assert ours[-1][0].end_bytes == step.part.size_bytes
        places = [as_array(memory).ctypes.data for _, memory in ours]
        assert [place - places[0] for place in places] == [piece.start_bytes for piece, _ in ours]


def test_a_part_has_arrived_with_its_last_range_whichever_that_is() -> None:
    work, plan = queue_of(two_layers(), range_bytes=1000)
    taken = take_all_reads(work, plan)
    first_part = [read for read, _ in taken if read.pieces[0].step == 0]
    assert len(first_part) > 2
    whole = [work.finish_read(read) for read in reversed(first_part)]
    assert whole[:-1] == [[]] * (len(first_part) - 1)
    assert [step for step, _ in whole[-1]] == [plan.steps[0]]


def test_of_the_parts_that_have_arrived_the_earliest_is_decoded_first() -> None:
    work, plan = queue_of(two_layers())
    for read, _ in reversed(take_all_reads(work, plan)):
        work.finish_read(read)
    order = []
    for _ in plan.steps:
        task = work.next_step()
        assert task is not None
        order.append(task[0].number)
        work.finish_step(task[0])
    assert order == [0, 1, 2, 3]
    assert work.next_step() is None
    assert work.next_read() is None


def test_a_refinement_is_not_handed_out_while_its_draft_is_being_decoded() -> None:
    work, plan = queue_of(two_layers())
    for read, _ in take_all_reads(work, plan)[:2]:
        work.finish_read(read)
    with ThreadPoolExecutor(1) as pool:
        draft = work.next_step()
        assert draft is not None
        waiting = pool.submit(work.next_step)
        must_wait(waiting)
        work.finish_step(draft[0])
        refinement = waiting.result(WAIT_S)
    assert refinement is not None
    assert refinement[0].part.tier is Tier.REFINE


def test_reading_waits_for_staging_and_goes_on_when_a_part_is_done() -> None:
    built = two_layers()
    work, _ = queue_of(built, staging_bytes=max(part.size_bytes for part in built.manifest.parts))
    first = work.next_read()
    assert first is not None
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(work.next_read)
        must_wait(waiting)
        work.finish_read(first[0])
        task = work.next_step()
        assert task is not None
        work.finish_step(task[0])
        second = waiting.result(WAIT_S)
    assert second is not None
    assert second[0].pieces[0].step == 1
    assert work.memory_wait_s > 0
    work.check_integrity()


def test_a_part_to_be_fetched_again_comes_before_all_others_and_keeps_its_memory() -> None:
    work, _ = queue_of(two_layers())
    first = work.next_read()
    assert first is not None
    read, memory = first
    work.finish_read(read)
    task = work.next_step()
    assert task is not None
    work.fetch_again(task[0])
    again = work.next_read()
    assert again is not None
    assert again[0].pieces == read.pieces
    assert as_array(again[1]).ctypes.data == as_array(memory).ctypes.data
    assert [step for step, _ in work.finish_read(again[0])] == [task[0]]
    assert work.next_step() is not None


def test_parts_without_a_digest_are_read_into_their_slab() -> None:
    built = build_artifact([("only", {"w": ("F32", (64, 4))})], packed=False)
    plan = plan_load(built.manifest, Order.EXACT)
    arena = Arena([group.slab_bytes for group in built.manifest.groups])
    work = WorkQueue(plan, Staging(0), arena.slabs, pace())
    task = work.next_read()
    assert task is not None
    assert np.shares_memory(as_array(task[1]), as_array(arena.slabs[0]))
    assert [step for step, _ in work.finish_read(task[0])] == [plan.steps[0]]
    work.finish_step(plan.steps[0])
    assert work.next_step() is None


def small_parts() -> BuiltArtifact:
    return build_artifact([("only", {"w": ("BF16", (100, 60))})], draft_elements=1_000, refine_elements=1_000)


def test_small_parts_that_lie_together_are_one_range_and_one_loan_until_the_last_is_done() -> None:
    built = small_parts()
    work, _ = queue_of(built)
    task = work.next_read()
    assert task is not None
    read, memory = task
    assert [piece.step for piece in read.pieces] == [0, 1, 2, 3, 4, 5]
    blob, _ = built.store.read(built.manifest.blobs[0].name, max_bytes=1 << 20)
    assert (read.start_bytes, read.end_bytes) == (0, len(blob))
    memory[:] = blob
    assert len(work.finish_read(read)) == 6
    for number in range(6):
        step = work.next_step()
        assert step is not None
        assert step[0].number == number
        part = step[0].part
        assert step[1] == blob[part.offset_bytes : part.offset_bytes + part.size_bytes]
        work.check_integrity()
        assert work._staging.used_bytes > 0
        work.finish_step(step[0])
    assert work._staging.used_bytes == 0


def test_where_staging_has_no_room_for_several_parts_one_is_read() -> None:
    built = small_parts()
    work, _ = queue_of(built, staging_bytes=max(part.size_bytes for part in built.manifest.parts))
    task = work.next_read()
    assert task is not None
    assert [piece.step for piece in task[0].pieces] == [0]


def test_a_step_that_is_asked_for_is_read_and_decoded_before_those_that_had_no_turn() -> None:
    work, plan = queue_of(two_layers())
    work.promote([3])
    taken = [read for read, _ in take_all_reads(work, plan)]
    assert [read.pieces[0].step for read in taken] == [2, 3, 0, 1]
    for read in reversed(taken):
        work.finish_read(read)
    order = []
    for _ in plan.steps:
        task = work.next_step()
        assert task is not None
        order.append(task[0].number)
        work.finish_step(task[0])
    assert order == [2, 3, 0, 1]


def test_no_more_threads_read_than_there_should_be_connections() -> None:
    built = two_layers()
    plan = plan_load(built.manifest, Order.EXACT)
    arena = Arena([group.slab_bytes for group in built.manifest.groups])
    work = WorkQueue(
        plan, Staging(1 << 20), arena.slabs, Pace(Budget(1000, connections=1, staging_bytes=1 << 20))
    )
    first = work.next_read()
    assert first is not None
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(work.next_read)
        must_wait(waiting)
        work.finish_read(first[0])
        second = work.next_read()  # as the thread does that has just finished
        assert second is not None
        must_wait(waiting)
        work.stop()
        assert waiting.result(WAIT_S) is None


def test_stopping_wakes_everybody() -> None:
    work, plan = queue_of(two_layers())
    take_all_reads(work, plan)
    with ThreadPoolExecutor(4) as pool:
        waiting: list[Future[object]] = [pool.submit(work.next_read) for _ in range(2)]
        waiting += [pool.submit(work.next_step) for _ in range(2)]
        must_wait(waiting[0])
        work.stop()
        assert [each.result(WAIT_S) for each in waiting] == [None] * 4


def test_the_end_wakes_those_who_hoped_for_more_and_gives_the_staging_back() -> None:
    built = two_layers()
    plan = plan_load(built.manifest, Order.EXACT)
    staging = Staging(1 << 20)
    work = WorkQueue(
        plan, staging, Arena([group.slab_bytes for group in built.manifest.groups]).slabs, pace()
    )
    steps: list[Step] = []
    for read, _ in take_all_reads(work, plan):
        work.finish_read(read)
    with ThreadPoolExecutor(2) as pool:
        reader = pool.submit(work.next_read)
        while len(steps) < len(plan.steps):
            task = work.next_step()
            assert task is not None
            steps.append(task[0])
            must_wait(reader)
            work.finish_step(task[0])
        assert reader.result(WAIT_S) is None
    work.check_integrity()
    assert (staging.used_bytes, staging.capacity_bytes) == (0, 0)
