"""What takes part in the next step: plans from plain values, no tensors."""

import subprocess
import sys
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teneral.runtime.engine.scheduler import SchedulerLimits, plan_step

LIMITS = SchedulerLimits(max_running=4, max_step_tokens=64, max_prefill_tokens=16, block_size=4)


@dataclass(eq=False)
class Job:
    name: str
    num_tokens: int
    num_computed: int = 0
    num_blocks: int = 0
    num_left: int = 0  # tokens that it will still generate

    def __repr__(self):
        return self.name


def decoding(name, num_tokens):
    return Job(name, num_tokens, num_tokens - 1, blocks_for(num_tokens - 1))


def blocks_for(num_tokens):
    return -(-num_tokens // LIMITS.block_size)


def tokens_of(plan):
    return {share.sequence.name: share.num_tokens for share in plan.shares}


def test_nothing_to_do_is_an_empty_plan():
    plan = plan_step([], [], 10, LIMITS)
    assert (plan.preempted, plan.admitted, plan.shares) == ((), (), ())


def test_a_prompt_is_computed_whole_when_nobody_decodes():
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


def test_a_new_block_is_asked_for_only_when_the_last_is_full():
    plan = plan_step([decoding("a", 8), decoding("b", 9)], [], 100, LIMITS)
    assert [share.num_new_blocks for share in plan.shares] == [0, 1]


def test_no_more_sequences_run_than_allowed():
    waiting = [Job(str(number), 3) for number in range(6)]
    plan = plan_step([], waiting, 100, LIMITS)
    assert list(plan.admitted) == waiting[:4]


def test_who_does_not_fit_waits_and_nobody_overtakes():
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


@pytest.mark.parametrize("num_free", [0, 3, 10, 30])
def test_a_plan_never_uses_more_blocks_than_are_free(num_free):
    running = [decoding("a", 9), Job("b", 50, 8, 2), decoding("c", 13)]
    plan = plan_step(running, [Job("d", 10)], num_free, LIMITS)
    freed = sum(job.num_blocks for job in plan.preempted)
    assert sum(share.num_new_blocks for share in plan.shares) <= num_free + freed


jobs = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=12)


@settings(deadline=None)
@given(jobs=jobs, num_blocks=st.integers(11, 30), join_every=st.integers(1, 4))
def test_every_sequence_ends_in_any_pool_that_holds_the_longest(jobs, num_blocks, join_every):
    """Runs plans to the end; whatever was preempted is computed again."""
    todo = [Job(str(number), prompt, num_left=new) for number, (prompt, new) in enumerate(jobs)]
    waiting, running, ended = [], [], []
    admissions = []
    for step in range(10_000):
        if todo and step % join_every == 0:
            waiting.append(todo.pop(0))
        if not (todo or waiting or running):
            break
        used = sum(job.num_blocks for job in running)
        plan = plan_step(running, waiting, num_blocks - used, LIMITS)
        assert plan.shares or not (running or waiting), "somebody can always go on"
        for job in plan.preempted:
            assert job is running.pop()
            job.num_blocks = job.num_computed = 0
            waiting.insert(0, job)
        for job in plan.admitted:
            assert job is waiting.pop(0)
            running.append(job)
            if job not in admissions:
                admissions.append(job)
        assert len(running) <= LIMITS.max_running
        assert sum(share.num_tokens for share in plan.shares) <= LIMITS.max_step_tokens
        for share in plan.shares:
            job = share.sequence
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
    assert [job.name for job in admissions] == [str(number) for number in range(len(jobs))], (
        "first come first"
    )


def test_planning_needs_no_torch():
    modules = (
        "engine.scheduler",
        "engine.sequence",
        "engine.generation",
        "text.detokenizer",
        "text.stop",
        "kv.blocks",
    )
    names = ", ".join(f"teneral.runtime.{name}" for name in modules)
    code = f"import sys, {names}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
