"""The work queue: who gets what next, and when somebody has to wait."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.artifacts import BuiltArtifact, build_artifact
from tests.support.inspection import staging_of
from tests.support.load import patience_s

from teneral.loader.format.manifest import Tier
from teneral.loader.load import queue
from teneral.loader.load.link import LinkTuner, PlanPosition, ReadLimits
from teneral.loader.load.options import Order
from teneral.loader.load.plan import Plan, Step, plan_load
from teneral.loader.load.queue import Read, WorkQueue
from teneral.loader.memory.arena import Arena, as_array
from teneral.loader.memory.staging import Staging

WAIT_S = patience_s(30)


class OnePace(LinkTuner):
    """Ranges of one size, for as many connections as a test has reads."""

    def __init__(self, range_bytes: int) -> None:
        super().__init__(ReadLimits(range_bytes, connections=1, staging_bytes=1))
        self._range_bytes = range_bytes

    @property
    def connections(self) -> int:
        return 1000

    def range_bytes(self, position: PlanPosition) -> int:
        return self._range_bytes


def tuner(range_bytes: int = 1 << 20) -> LinkTuner:
    return OnePace(range_bytes)


def queue_of(
    built: BuiltArtifact,
    *,
    staging_bytes: int = 1 << 20,
    range_bytes: int = 1 << 20,
    order: Order = Order.EXACT,
) -> tuple[WorkQueue, Plan]:
    plan = plan_load(built.manifest, order)
    arena = Arena([group.slab_bytes for group in built.manifest.groups])
    return WorkQueue(plan, Staging(staging_bytes), arena.slabs, tuner(range_bytes)), plan


def two_layers() -> BuiltArtifact:
    """PollCoroutine: layer 0 draft, refine, layer 1 draft, refine; one part each."""
    return build_artifact([(f"layers.{number}", {f"w{number}": ("BF16", (64, 64))}) for number in range(2)])


def take_all_reads(work: WorkQueue, plan: Plan) -> list[tuple[Read, memoryview]]:
    """Hands out until every byte of the plan has been."""
    taken: list[tuple[Read, memoryview]] = []
    while sum(piece.size_bytes for read, _ in taken for piece in read.pieces) < plan.stored_bytes:
        task = work.next_read()
        assert task is not None
        taken.append(task)
    return taken


def decode_all(work: WorkQueue, plan: Plan) -> list[int]:
    """Finishes every step, and returns their numbers in the order in which they were handed out."""
    order: list[int] = []
    for _ in plan.steps:
        task = work.next_step()
        assert task is not None
        order.append(task[0].number)
        work.finish_step(task[0])
    return order


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
    assert decode_all(work, plan) == [0, 1, 2, 3]
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
    work = WorkQueue(plan, Staging(0), arena.slabs, tuner())
    task = work.next_read()
    assert task is not None
    assert np.shares_memory(as_array(task[1]), as_array(arena.slabs[0]))
    assert [step for step, _ in work.finish_read(task[0])] == [plan.steps[0]]
    work.finish_step(plan.steps[0])
    assert work.next_step() is None


def test_all_connections_share_the_first_group_even_where_it_is_one_part() -> None:
    """Or the first layer would come as late as a few connections bring it, while others read what comes later."""
    layers = [(f"layers.{number}", {f"w{number}": ("F32", (1024, 1024))}) for number in range(2)]
    built = build_artifact(layers, packed=False, draft_elements=1024 * 1024)
    plan = plan_load(built.manifest, Order.EXACT)
    assert [step.part.group for step in plan.steps] == [0, 1]
    arena = Arena([group.slab_bytes for group in built.manifest.groups])
    limits = ReadLimits(range_bytes=1 << 24, connections=8, staging_bytes=1 << 26)
    work = WorkQueue(plan, Staging(0), arena.slabs, LinkTuner(limits))
    reads = [task[0] for _ in range(8) if (task := work.next_read())]
    sizes = [read.end_bytes - read.start_bytes for read in reads]
    assert {read.pieces[0].step for read in reads} == {0}
    assert sum(sizes) == plan.steps[0].part.size_bytes
    assert max(sizes) == min(sizes) == 512 * 1024


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
        assert staging_of(work).used_bytes > 0
        work.finish_step(step[0])
    assert staging_of(work).used_bytes == 0


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
    assert decode_all(work, plan) == [2, 3, 0, 1]


def mixture_queue(num_experts: int = 4) -> tuple[WorkQueue, Plan]:
    """One part a group: the layer first, then its experts."""
    experts = [
        (f"layers.0.experts.{number}", {f"e{number}": ("I8", (64, 64))}) for number in range(num_experts)
    ]
    built = build_artifact([("embed", {"n": ("I8", (64,))}), ("layers.0", {"w": ("I8", (64, 64))}), *experts])
    plan = plan_load(built.manifest, Order.EXACT, on_demand=True)
    arena = Arena([group.slab_bytes for group in built.manifest.groups])
    return WorkQueue(plan, Staging(1 << 20), arena.slabs, tuner()), plan


def read_and_decode(work: WorkQueue) -> int:
    task = work.next_read()
    assert task is not None
    work.finish_read(task[0])
    decoding = work.next_step()
    assert decoding is not None
    work.finish_step(decoding[0])
    return decoding[0].number


def test_while_experts_are_asked_for_no_others_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "HOLD_S", 1e9)
    monkeypatch.setattr(queue, "MAX_HOLD_S", 1e9)
    work, _plan = mixture_queue()
    work.promote([4])
    assert [read_and_decode(work) for _ in range(3)] == [4, 0, 1], "what every pass needs is not held back"
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(read_and_decode, work)
        must_wait(waiting)
        work.promote([5])
        assert waiting.result(WAIT_S) == 5
        waiting = pool.submit(read_and_decode, work)
        must_wait(waiting)
        work.stop()
        with pytest.raises(AssertionError):
            waiting.result(WAIT_S)


def test_soon_after_the_last_expert_that_was_asked_for_the_others_follow() -> None:
    work, plan = mixture_queue()
    work.promote([5])
    assert [read_and_decode(work) for _ in plan.steps] == [5, 0, 1, 2, 3, 4]


def test_experts_that_were_there_or_on_their_way_hold_nothing_back_for_ever() -> None:
    work, _plan = mixture_queue()
    done = [read_and_decode(work) for _ in range(3)]
    task = work.next_read()
    assert task is not None
    work.promote([*done[2:], 3])  # there, and on its way
    work.finish_read(task[0])
    decoding = work.next_step()
    assert decoding is not None
    work.finish_step(decoding[0])
    assert [read_and_decode(work) for _ in range(2)] == [4, 5]


def test_no_more_threads_read_than_there_should_be_connections() -> None:
    built = two_layers()
    plan = plan_load(built.manifest, Order.EXACT)
    arena = Arena([group.slab_bytes for group in built.manifest.groups])
    work = WorkQueue(
        plan, Staging(1 << 20), arena.slabs, LinkTuner(ReadLimits(1000, connections=1, staging_bytes=1 << 20))
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


def test_the_end_wakes_idle_threads_and_gives_the_staging_back() -> None:
    built = two_layers()
    plan = plan_load(built.manifest, Order.EXACT)
    staging = Staging(1 << 20)
    work = WorkQueue(
        plan, staging, Arena([group.slab_bytes for group in built.manifest.groups]).slabs, tuner()
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
    assert task[1].nbytes
    work.discard_staging()
    assert not as_array(task[1]).any()


def test_unrequested_bytes_are_counted_by_tier_without_those_in_flight() -> None:
    work, plan = queue_of(two_layers(), range_bytes=1000, order=Order.DRAFT_FIRST)
    sizes = [step.part.size_bytes for step in plan.steps]
    assert work.left_bytes() == [0, sizes[0] + sizes[1], sizes[2] + sizes[3]]
    task = work.next_read()  # the first range of the first part: that part counts no longer
    assert task is not None
    assert work.left_bytes() == [0, sizes[1], sizes[2] + sizes[3]]
    work.finish_read(task[0])
    assert work.left_bytes() == [0, sizes[1], sizes[2] + sizes[3]]
    work.reorder(Order.EXACT)
    assert work.left_bytes() == [0, sizes[1], sizes[2] + sizes[3]]


def test_a_new_order_holds_from_the_next_part_on() -> None:
    work, plan = queue_of(two_layers(), range_bytes=1000, order=Order.AUTO)
    begun = work.next_read()
    assert begun is not None
    work.reorder(Order.EXACT)
    rest = take_all_reads_after(work, plan, begun[0])
    assert first_seen([begun[0], *rest]) == [0, 2, 1, 3]  # layer 0 whole, which its order would not have
    assert [plan.steps[number].part.group for number in (0, 2, 1, 3)] == [0, 0, 1, 1]


def take_all_reads_after(work: WorkQueue, plan: Plan, begun: Read) -> list[Read]:
    taken: list[Read] = []
    while sum(each.end_bytes - each.start_bytes for each in (begun, *taken)) < plan.stored_bytes:
        task = work.next_read()
        assert task is not None
        taken.append(task[0])
    return taken


def first_seen(reads: list[Read]) -> list[int]:
    """PollCoroutine by their first reads."""
    return list(dict.fromkeys(piece.step for read in reads for piece in read.pieces))


class Workers:
    """Threads that read and decode everything, and change the order after some reads. No bytes are moved."""

    def __init__(self, work: WorkQueue, changes: Mapping[int, Order]) -> None:
        self.pieces: list[tuple[int, int, int]] = []
        self.decoded: list[int] = []
        self._work = work
        self._changes = changes
        self._lock = threading.Lock()

    def run(self, num_readers: int, num_decoders: int) -> None:
        """Raises `TimeoutError` when they do not end."""
        with ThreadPoolExecutor(num_readers + num_decoders) as pool:
            ends = [pool.submit(self._read) for _ in range(num_readers)]
            ends += [pool.submit(self._decode) for _ in range(num_decoders)]
            try:
                for end in ends:
                    end.result(WAIT_S)
            finally:
                self._work.stop()

    def _read(self) -> None:
        while (task := self._work.next_read()) is not None:
            read, _ = task
            with self._lock:
                self.pieces += read.pieces
                change = self._changes.get(len(self.pieces))
            if change is not None:
                self._work.reorder(change)
            for step, _ in self._work.finish_read(read):
                if step.slab_offset_bytes is not None:
                    self._finish(step)

    def _decode(self) -> None:
        while (task := self._work.next_step()) is not None:
            self._finish(task[0])

    def _finish(self, step: Step) -> None:
        with self._lock:
            self.decoded.append(step.number)
        self._work.finish_step(step)


@settings(max_examples=60, deadline=None)
@given(
    order=st.sampled_from(Order),
    packed=st.booleans(),
    cuts=st.tuples(st.integers(500, 9_000), st.integers(500, 9_000)),
    range_bytes=st.integers(300, 20_000),
    changes=st.dictionaries(st.integers(1, 60), st.sampled_from(Order), max_size=6),
    num_readers=st.integers(1, 3),
    num_decoders=st.integers(1, 2),
)
def test_whenever_the_order_changes_each_byte_is_read_once_and_nothing_waits_for_ever(
    order: Order,
    packed: bool,
    cuts: tuple[int, int],
    range_bytes: int,
    changes: dict[int, Order],
    num_readers: int,
    num_decoders: int,
) -> None:
    layout = [(f"layers.{number}", {f"w{number}": ("BF16", (64, 96))}) for number in range(4)]
    built = build_artifact(layout, packed=packed, draft_elements=cuts[0], refine_elements=cuts[1])
    smallest_staging = max(part.size_bytes for part in built.manifest.parts)
    work, plan = queue_of(built, staging_bytes=smallest_staging, range_bytes=range_bytes, order=order)
    workers = Workers(work, changes)
    workers.run(num_readers, num_decoders)
    work.check_integrity()
    assert sorted(workers.decoded) == list(range(len(plan.steps)))
    place = {number: index for index, number in enumerate(workers.decoded)}
    for step in plan.steps:
        assert all(place[needed] < place[step.number] for needed in step.needs)
        read = sorted(piece[1:] for piece in workers.pieces if piece[0] == step.number)
        assert [start for start, _ in read] == [0, *(end for _, end in read[:-1])]
        assert read[-1][1] == step.part.size_bytes
    assert work.left_bytes() == [0, 0, 0]
