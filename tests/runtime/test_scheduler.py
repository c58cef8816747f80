"""The members of the next step: plans from plain values, no tensors."""

import subprocess
import sys
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teneral.runtime.engine.scheduler import SchedulerLimits, make_way, plan_step

LIMITS = SchedulerLimits(max_running=4, max_step_tokens=64, max_prefill_tokens=16, block_size=4)
ROOMY = SchedulerLimits(max_running=4, max_step_tokens=1000, max_prefill_tokens=1000, block_size=4)


@dataclass(eq=False)
class Job:
    name: str
    num_tokens: int
    num_computed: int = 0
    num_blocks: int = 0
    num_left: int = 0  # tokens that it will still generate
    is_batch: bool = False
    queue_name: str = ""
    whole: tuple[int, int] = (0, 0)  # tokens that are computed at once

    def uncut(self, end):
        first, stop = self.whole
        return end if not first < end < stop else first if first > self.num_computed else stop

    def __repr__(self):
        return self.name


def decoding(name, num_tokens, *, is_batch=False):
    return Job(name, num_tokens, num_tokens - 1, blocks_for(num_tokens - 1), is_batch=is_batch)


def blocks_for(num_tokens):
    return -(-num_tokens // LIMITS.block_size)


def tokens_of(plan):
    return {share.sequence.name: share.num_tokens for share in plan.shares}


def test_nothing_to_do_is_an_empty_plan():
    plan = plan_step([], [], 10, LIMITS)
    assert (plan.preempted, plan.admitted, plan.shares) == ((), (), ())


def test_a_prompt_is_computed_whole_when_no_sequence_decodes():
    plan = plan_step([], [Job("a", 40)], 100, LIMITS)
    assert tokens_of(plan) == {"a": 40}
    assert plan.shares[0].is_last
    assert plan.shares[0].num_new_blocks == 10


def test_several_prompts_share_a_step_up_to_its_tokens():
    plan = plan_step([], [Job("a", 40), Job("b", 40), Job("c", 40)], 100, LIMITS)
    assert tokens_of(plan) == {"a": 40, "b": 24}
    assert [share.is_last for share in plan.shares] == [True, False]


def test_prompts_take_a_small_part_of_a_step_in_which_others_decode():
    plan = plan_step([decoding("a", 9), decoding("b", 5)], [Job("c", 40)], 100, LIMITS)
    assert tokens_of(plan) == {"a": 1, "b": 1, "c": 16}


def test_a_chunked_prompt_goes_on_where_it_stopped():
    plan = plan_step([decoding("a", 9), Job("b", 40, 16, 4)], [], 100, LIMITS)
    assert tokens_of(plan) == {"a": 1, "b": 16}
    assert not plan.shares[1].is_last
    last = plan_step([decoding("a", 10), Job("b", 40, 32, 8)], [], 100, LIMITS)
    assert tokens_of(last) == {"a": 1, "b": 8}
    assert last.shares[1].is_last


def test_a_chunk_ends_before_a_whole_and_takes_one_that_is_longer():
    running = [decoding("a", 9), Job("b", 60, whole=(6, 50))]
    assert tokens_of(plan_step(running, [], 100, LIMITS)) == {"a": 1, "b": 6}
    running[1] = Job("b", 60, 6, 2, whole=(6, 50))
    assert tokens_of(plan_step(running, [], 100, LIMITS)) == {"a": 1, "b": 44}
    # Blocks for a part of it are of no use.
    assert tokens_of(plan_step(running, [], 10, LIMITS)) == {"a": 1}


def test_a_new_block_is_asked_for_only_when_the_last_is_full():
    plan = plan_step([decoding("a", 8), decoding("b", 9)], [], 100, LIMITS)
    assert [share.num_new_blocks for share in plan.shares] == [0, 1]


def test_no_more_sequences_run_than_allowed():
    waiting = [Job(str(number), 3) for number in range(6)]
    plan = plan_step([], waiting, 100, LIMITS)
    assert list(plan.admitted) == waiting[:4]


def test_a_request_that_does_not_fit_waits_and_none_overtakes():
    running = [decoding("a", 8)]
    plan = plan_step(running, [Job("large", 60), Job("small", 2)], 10, LIMITS)
    assert plan.admitted == ()
    assert tokens_of(plan) == {"a": 1}


def test_admission_leaves_the_blocks_that_unfinished_prompts_still_need():
    running = [decoding("a", 9), Job("b", 12, 4, 1)]
    # a needs 1 now and b 2; b 1 for its next token; c 2 for 6 tokens and the next; a and b keep 1 each.
    assert plan_step(running, [Job("c", 6)], 7, LIMITS).admitted == ()
    assert plan_step(running, [Job("c", 6)], 8, LIMITS).admitted != ()


def test_the_last_admitted_gives_up_its_blocks_to_an_older_one():
    running = [decoding("a", 9), decoding("b", 9), decoding("c", 9)]
    plan = plan_step(running, [Job("d", 2)], 1, LIMITS)
    assert plan.preempted == (running[2],)
    assert plan.admitted == ()
    assert tokens_of(plan) == {"a": 1, "b": 1}


def test_the_last_admitted_itself_waits_rather_than_losing_what_it_has():
    running = [decoding("a", 7), decoding("b", 9)]
    plan = plan_step(running, [], 0, LIMITS)
    assert plan.preempted == ()
    assert tokens_of(plan) == {"a": 1}


def test_several_are_preempted_latest_first_when_one_is_not_enough():
    running = [Job("a", 9, 8, 2), Job("b", 9, 8, 2), Job("c", 2, 0, 0), Job("d", 2, 0, 0)]
    plan = plan_step(running, [], 0, LIMITS)
    assert plan.preempted == (running[3], running[2], running[1])
    assert tokens_of(plan) == {"a": 1}


def test_blocks_that_others_use_too_are_not_counted_as_freed():
    # c shares all but one of its blocks with a: preempting it gives one block, so b has to go, too
    running = [decoding("a", 9), decoding("b", 9), decoding("c", 13)]
    freed = {("c",): 1, ("c", "b"): 3}
    plan = plan_step(
        [*running[:2], running[2]], [], 0, LIMITS, freed_by=lambda jobs: freed[tuple(j.name for j in jobs)]
    )
    assert plan.preempted == (running[2],)
    assert tokens_of(plan) == {"a": 1}  # and b keeps what it has


# -- batch work ----------------------------------------------------------------------------------------------


def test_batch_work_gives_up_its_blocks_first_whenever_it_came():
    running = [decoding("batch", 9, is_batch=True), decoding("a", 9), decoding("b", 9)]
    plan = plan_step(running, [], 0, LIMITS)
    assert plan.preempted == (running[0],)
    assert tokens_of(plan) == {"a": 1, "b": 1}


def test_batch_work_never_takes_blocks_from_what_is_interactive():
    running = [decoding("batch", 9, is_batch=True), decoding("a", 7)]
    plan = plan_step(running, [], 0, LIMITS)
    assert plan.preempted == ()
    assert tokens_of(plan) == {"a": 1}


def test_prompts_of_batch_work_get_what_interactive_ones_leave():
    running = [decoding("a", 9), Job("batch", 40, 4, 1, is_batch=True)]
    plan = plan_step(running, [Job("b", 10), Job("waits", 10, is_batch=True)], 100, LIMITS)
    assert tokens_of(plan) == {
        "a": 1,
        "b": 10,
        "waits": 5,
        "batch": 1,
    }  # the shorter one first, of batch work, too
    assert [job.name for job in plan.admitted] == ["b", "waits"]


def test_batch_work_does_not_overtake_what_is_interactive_and_does_not_fit():
    plan = plan_step([decoding("a", 8)], [Job("large", 60), Job("small", 2, is_batch=True)], 10, LIMITS)
    assert plan.admitted == ()


def names_of(jobs):
    return [job.name for job in jobs]


def all_their_own(jobs):
    return sum(job.num_blocks for job in jobs)


def queue_of(*num_blocks):
    """Prompts that need this number of blocks each, for their tokens and the next one."""
    return [Job(f"w{number}", 4 * blocks - 1) for number, blocks in enumerate(num_blocks)]


def test_batch_work_makes_way_when_no_place_is_free():
    running = [
        decoding(name, 9, is_batch=name.startswith("batch")) for name in ("batch 1", "a", "batch 2", "b")
    ]
    assert names_of(make_way(running, queue_of(3), 100, LIMITS, all_their_own)) == ["batch 2"]
    assert names_of(make_way(running, queue_of(3, 3), 100, LIMITS, all_their_own)) == ["batch 2", "batch 1"]
    # a third one gets no place, whichever leaves
    assert names_of(make_way(running, queue_of(3, 3, 3), 100, LIMITS, all_their_own)) == [
        "batch 2",
        "batch 1",
    ]


def test_batch_work_makes_way_when_blocks_are_missing_and_only_then():
    running = [decoding("a", 9), decoding("batch", 9, is_batch=True)]
    # a and the batch work need one more block each now, and one each is kept for them
    assert make_way(running, queue_of(3), 7, LIMITS, all_their_own) == ()
    assert names_of(make_way(running, queue_of(3), 6, LIMITS, all_their_own)) == ["batch"]


def test_no_sequence_is_preempted_in_vain():
    running = [decoding("a", 9), decoding("batch", 9, is_batch=True)]
    assert make_way(running, queue_of(50), 6, LIMITS, all_their_own) == ()
    # nor for the second, when only the first can be helped
    assert names_of(make_way(running, queue_of(3, 50), 6, LIMITS, all_their_own)) == ["batch"]


def test_interactive_requests_are_never_preempted_for_others():
    assert (
        make_way([decoding(str(number), 9) for number in range(4)], queue_of(1), 0, LIMITS, all_their_own)
        == ()
    )


@settings(deadline=None)
@given(
    running=st.lists(st.tuples(st.integers(1, 30), st.booleans()), max_size=4),
    waiting=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 2)), min_size=1, max_size=5),
    num_free=st.integers(0, 20),
)
def test_batch_work_makes_way_for_as_many_as_are_then_admitted(running, waiting, num_free):
    running = [
        decoding(str(number), tokens, is_batch=batch) for number, (tokens, batch) in enumerate(running)
    ]
    queue = [
        Job(f"w{number}", tokens, queue_name=f"tenant {tenant}")
        for number, (tokens, tenant) in enumerate(waiting)
    ]
    leaving = make_way(running, queue, num_free, ROOMY, all_their_own)
    assert all(job.is_batch for job in leaving)
    before = plan_step(running, queue, num_free, ROOMY)
    if before.preempted:
        return  # running requests need the blocks themselves

    def num_admitted(without):
        staying = [job for job in running if job not in without]
        return len(plan_step(staying, queue, num_free + all_their_own(without), ROOMY).admitted)

    assert num_admitted(leaving) == num_admitted([job for job in running if job.is_batch]), (
        "more could be helped"
    )
    if leaving:
        assert num_admitted(leaving[:-1]) < num_admitted(leaving), "one made way in vain"


def test_batch_work_makes_way_for_prompts_of_one_tenant():
    running, queue = [decoding("batch", 1, is_batch=True)], [Job("a", 4), Job("b", 4), Job("c", 1)]
    leaving = make_way(running, queue, 4, ROOMY, all_their_own)
    admitted = plan_step([job for job in running if job not in leaving], queue, 4, ROOMY).admitted
    assert len(admitted) == len(plan_step([], queue, 4 + all_their_own(running), ROOMY).admitted)


def test_a_share_that_was_planned_for_a_preempted_sequence_is_taken_back():
    # b decodes and is planned before a's prompt; then a needs its blocks
    running = [Job("a", 12, 8, 2), decoding("b", 8)]
    plan = plan_step(running, [], 0, LIMITS)
    assert plan.preempted == (running[1],)
    assert tokens_of(plan) == {"a": 4}


def test_a_prompt_takes_what_blocks_there_are_without_preempting():
    running = [Job("a", 40, 0, 0), decoding("b", 7)]
    plan = plan_step(running, [], 2, LIMITS)
    assert plan.preempted == ()
    assert tokens_of(plan) == {"a": 8, "b": 1}


# -- long and short prompts ----------------------------------------------------------------------------------


def test_a_short_prompt_does_not_wait_behind_the_long_ones_of_its_tenant():
    running = [decoding("a", 9), Job("long", 1000, 16, 4)]
    plan = plan_step(running, [Job("long too", 1000), Job("short", 6)], 600, LIMITS)
    assert tokens_of(plan) == {"a": 1, "long": 10, "short": 6}
    assert names_of(plan.admitted) == ["short"]


def test_the_oldest_prompt_keeps_a_part_of_each_step_however_many_short_ones_come():
    long = Job("long", 160)
    running, num_steps = [decoding("a", 9), long], 0
    while long.num_computed < long.num_tokens:
        shorts = [Job(f"short {number}", 8) for number in range(2)]
        plan = plan_step(running, shorts, 1000, LIMITS)
        for share in plan.shares:
            if share.sequence is long:
                long.num_computed += share.num_tokens
                long.num_blocks += share.num_new_blocks
        num_steps += 1
    assert num_steps <= 4 * 160 // LIMITS.max_prefill_tokens
    waits = Job("waits", 160)  # one that is the oldest and waits has the same right
    plan = plan_step([decoding("a", 9)], [waits, *(Job(str(number), 8) for number in range(3))], 1000, LIMITS)
    assert tokens_of(plan) == {"a": 1, "0": 8, "1": 4, "waits": 4}


def test_short_prompts_overtake_only_within_their_tenant():
    running = [Job("long", 1000, 64, 16, queue_name="x")]
    queue = [Job("y", 100, queue_name="y"), Job("short", 8, queue_name="x")]
    plan = plan_step(running, queue, 1000, LIMITS)
    assert tokens_of(plan) == {"long": 16, "short": 8, "y": 40}  # the short one has its tenant's first turn
    other = plan_step(running, [Job("short", 8, queue_name="y")], 1000, LIMITS)
    assert tokens_of(other) == {"long": 64}


def test_who_overtakes_leaves_a_place_and_blocks_for_the_first_of_the_queue():
    running = [decoding("a", 9), Job("long", 400, 16, 4)]
    large, short = Job("large", 500), Job("short", 6)
    kept = 1 + blocks_for(401) - 4 + 2  # the new block of a, and what long needs; one each for the next token
    enough = kept + blocks_for(501) + blocks_for(7) + 1
    assert names_of(plan_step(running, [large, short], enough, LIMITS).admitted) == ["short"]
    assert names_of(plan_step(running, [large, short], enough - 1, LIMITS).admitted) == []
    full = [*running, decoding("b", 9)]
    assert names_of(plan_step(full, [large, short], 1000, LIMITS).admitted) == []
    assert names_of(plan_step(full, [short, large], 1000, LIMITS).admitted) == ["short"]


prompts = st.lists(st.tuples(st.integers(1, 200), st.sampled_from("xyz")), min_size=1, max_size=30)


@settings(deadline=None)
@given(prompts=prompts, num_blocks=st.integers(60, 200))
def test_tenants_get_the_turns_that_they_have_whatever_the_lengths(prompts, num_blocks):
    """Every step begins with a prompt of the tenant whose turn it is, and no token is left while a prompt is there."""
    waiting = [Job(str(n), size, queue_name=tenant) for n, (size, tenant) in enumerate(prompts)]
    running = []
    while waiting or running:
        candidates = [job for job in running if job.num_tokens - job.num_computed > 1] + waiting
        plan = plan_step(running, waiting, num_blocks - sum(job.num_blocks for job in running), LIMITS)
        assert not plan.preempted
        used = sum(share.num_tokens for share in plan.shares)
        missing = [job.num_tokens - job.num_computed for job in [*running, *plan.admitted]]
        num_decoding = sum(job.num_tokens - job.num_computed == 1 for job in running)
        most = num_decoding + LIMITS.max_prefill_tokens if num_decoding else LIMITS.max_step_tokens
        assert used == min(most, sum(missing))
        if candidates:
            first, served = candidates[0], {share.sequence.queue_name for share in plan.shares}
            num_held = sum(blocks_for(job.num_tokens + 1) + 1 for job in running)
            lacks_room = not plan.admitted and num_held + blocks_for(first.num_tokens + 1) > num_blocks
            assert first.queue_name in served or (first in waiting and lacks_room)
        for job in plan.admitted:
            waiting.remove(job)
            running.append(job)
        for share in plan.shares:
            share.sequence.num_computed += share.num_tokens
            share.sequence.num_blocks += share.num_new_blocks
            if share.is_last:
                running.remove(share.sequence)


@pytest.mark.parametrize("num_free", [0, 3, 10, 30])
def test_a_plan_never_uses_more_blocks_than_are_free(num_free):
    running = [decoding("a", 9), Job("b", 50, 8, 2), decoding("c", 13)]
    plan = plan_step(running, [Job("d", 10)], num_free, LIMITS)
    freed = sum(job.num_blocks for job in plan.preempted)
    assert sum(share.num_new_blocks for share in plan.shares) <= num_free + freed


wholes = st.tuples(st.integers(0, 29), st.integers(1, 30))
jobs = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 12), st.booleans(), wholes), min_size=1, max_size=12
)


@settings(deadline=None)
@given(jobs=jobs, num_blocks=st.integers(11, 30), join_every=st.integers(1, 4))
def test_every_sequence_ends_in_any_pool_that_holds_the_longest(jobs, num_blocks, join_every):
    """Runs plans to the end; whatever was preempted is computed again, and no whole is cut."""
    todo = [
        Job(str(number), prompt, num_left=new, is_batch=is_batch, whole=(first, min(stop, prompt)))
        for number, (prompt, new, is_batch, (first, stop)) in enumerate(jobs)
    ]
    first_come = [[job.name for job in todo if job.is_batch is is_batch] for is_batch in (False, True)]
    waiting, running, ended = [], [], []
    admissions = []
    for step in range(10_000):
        if todo and step % join_every == 0:
            waiting.append(todo.pop(0))
        if not (todo or waiting or running):
            break
        used = sum(job.num_blocks for job in running)
        waiting.sort(key=lambda job: job.is_batch)
        plan = plan_step(running, waiting, num_blocks - used, LIMITS)
        assert plan.shares or not (running or waiting), "somebody can always go on"
        for job in plan.preempted:
            assert job.is_batch or not any(other.is_batch for other in running)
            running.remove(job)
            job.num_blocks = job.num_computed = 0
            waiting.insert(0, job)
        for job in plan.admitted:
            assert job.is_batch or not waiting[0].is_batch
            waiting.remove(job)
            running.append(job)
            if job not in admissions:
                admissions.append(job)
        assert len(running) <= LIMITS.max_running
        beyond = sum(max(0, share.sequence.whole[1] - share.sequence.whole[0]) for share in plan.shares)
        assert sum(share.num_tokens for share in plan.shares) <= LIMITS.max_step_tokens + beyond
        for share in plan.shares:
            job = share.sequence
            assert not job.whole[0] < job.num_computed + share.num_tokens < job.whole[1]
            assert job in running
            job.num_computed += share.num_tokens
            job.num_blocks += share.num_new_blocks
            assert job.num_blocks == blocks_for(job.num_computed)
            assert share.is_last == (job.num_computed == job.num_tokens)
            if share.is_last:
                job.num_left -= 1
                job.num_tokens += 1
                if job.num_left == 0:
                    running.remove(job)
                    ended.append(job)
    assert len(ended) == len(jobs)
    for is_batch in (False, True):
        names = [job.name for job in admissions if job.is_batch is is_batch]
        assert sorted(names) == sorted(first_come[is_batch])


def test_planning_needs_no_torch():
    modules = (
        "engine.scheduler",
        "engine.sequence",
        "engine.generation",
        "text.detokenizer",
        "kv.blocks",
    )
    names = ", ".join(f"teneral.runtime.{name}" for name in modules)
    code = f"import sys, {names}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
