"""Sessions, tenants and priorities: which is kept, which is next, and which makes way."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable
from typing import Any

import pytest
from tests.support.engine_rig import BLOCK_SIZE, TIMEOUT_S, EngineRig, finish, seeded
from tests.support.inspection import state_of
from tests.support.toy_decoder import ToyDecoder

from teneral.runtime.engine.generation import Generation
from teneral.runtime.engine.scheduler import Preempted
from teneral.runtime.errors import CapacityError
from teneral.runtime.kv.sessions import Unpinned
from teneral.runtime.step.requests import FinishReason, Priority

PROMPT = tuple(number % 60 for number in range(5 * BLOCK_SIZE + 2))
BATCH = Priority.BATCH


def held_rig(**options: Any) -> EngineRig:
    """With a pass under way that waits, so that all that comes meanwhile is decided about together."""
    rig = EngineRig(**options)
    rig.model.gate.clear()
    rig.submit((63,), max_tokens=1, request_id="first")
    assert rig.model.entered.wait(TIMEOUT_S)
    return rig


def traffic(rig: EngineRig, prompts: Iterable[int]) -> None:
    for number in prompts:
        finish(rig.submit([number] * 30, max_tokens=2))


def starting_order(generations: Iterable[Generation]) -> list[str]:
    done = list(generations)
    for generation in done:
        finish(generation)
    started = sorted(done, key=lambda each: each.timings.started_s or 0.0)
    return [each.request.request_id for each in started]


# -- sessions ------------------------------------------------------------------------------------------------


def test_a_session_finds_its_conversation_after_traffic_that_has_everything_else_given_up() -> None:
    with EngineRig(num_blocks=20) as rig:
        answer = finish(rig.submit(PROMPT, max_tokens=6, session="mine")).tokens
        forgotten = (9, *PROMPT)
        finish(rig.submit(forgotten, max_tokens=6))
        traffic(rig, range(20))
        again = rig.submit((*PROMPT, *answer, 5), max_tokens=3, session="mine")
        assert finish(again).tokens == rig.expected((*PROMPT, *answer, 5), 3)
        assert again.num_cached_tokens == (len(PROMPT) + len(answer) - 1) // BLOCK_SIZE * BLOCK_SIZE
        other = rig.submit(forgotten, max_tokens=1)
        finish(other)
        assert other.num_cached_tokens == 0
        statistics = rig.engine.statistics()
        assert (statistics.sessions, statistics.pinned_blocks) == (1, 7)


def test_pins_never_block_a_request_for_the_whole_pool() -> None:
    with EngineRig(num_blocks=20, model=ToyDecoder(max_context=80)) as rig:
        for number in range(3):
            finish(rig.submit([number] * 12, max_tokens=1, session=f"s{number}"))
        assert rig.engine.statistics().pinned_blocks == 9
        large = rig.submit([50] * 60, max_tokens=20)
        assert finish(large).tokens == rig.expected([50] * 60, 20)
        statistics = rig.engine.statistics()
        assert statistics.preemptions_total == 0
        assert statistics.sessions_unpinned_total[Unpinned.PRESSURE] == 3


def test_sessions_are_given_up_before_anybody_is_preempted() -> None:
    with EngineRig(num_blocks=24) as rig:
        for number in range(4):
            finish(rig.submit([number] * 12, max_tokens=1, session=f"s{number}"))
        rig.model.gate.clear()
        generations = [rig.submit((number, 40), max_tokens=40) for number in range(2)]
        rig.model.gate.set()
        for number, generation in enumerate(generations):
            assert finish(generation).tokens == rig.expected((number, 40), 40)
        assert rig.engine.statistics().preemptions_total == 0


def test_an_idle_session_is_unpinned() -> None:
    with EngineRig(session_idle_s=0.0) as rig:
        finish(rig.submit(PROMPT, max_tokens=1, session="s"))
        finish(rig.submit((1,), max_tokens=1))
        assert rig.engine.statistics().sessions_unpinned_total == {Unpinned.IDLE: 1}


@pytest.mark.parametrize("scope", [{"tenant": "other"}, {"cache_salt": "other"}])
def test_the_same_name_of_somebody_else_is_another_session(scope: dict[str, str]) -> None:
    with EngineRig() as rig:
        finish(rig.submit(PROMPT, max_tokens=1, session="s"))
        finish(rig.submit((1, *PROMPT), max_tokens=1, session="s", **scope))
        assert rig.engine.statistics().sessions == 2


def test_a_session_pins_what_a_cancelled_request_had_computed() -> None:
    with EngineRig() as rig:
        two_tokens = threading.Event()
        generation = rig.submit(PROMPT, session="s", on_event=lambda event: two_tokens.set())
        assert two_tokens.wait(TIMEOUT_S)
        generation.cancel()
        finish(rig.submit((1,), max_tokens=1))
        assert rig.engine.statistics().pinned_blocks >= 5


def test_without_a_prefix_cache_there_are_no_sessions() -> None:
    with EngineRig(prefix_cache=False) as rig:
        finish(rig.submit(PROMPT, max_tokens=1, session="s"))
        assert rig.engine.statistics().sessions == 0


def test_the_share_that_sessions_may_pin_is_an_option() -> None:
    block_bytes = ToyDecoder().kv_block_bytes(BLOCK_SIZE)
    with EngineRig(session_kv_bytes=3 * block_bytes) as rig:
        finish(rig.submit(PROMPT, max_tokens=1, session="s"))
        assert rig.engine.statistics().pinned_blocks == 3


# -- tenants -------------------------------------------------------------------------------------------------


def test_one_request_waits_for_at_most_one_of_two_hundred_of_another_tenant() -> None:
    with held_rig(max_running=1, max_queued=256, max_queued_per_tenant=250) as rig:
        many = [rig.submit((1, 2), max_tokens=3, tenant="many", request_id="many") for _ in range(200)]
        one = rig.submit((3, 4), max_tokens=3, tenant="one", request_id="one")
        rig.model.gate.set()
        assert starting_order([*many, one]).index("one") <= 1


def test_tenants_share_tokens_not_requests() -> None:
    with held_rig(max_running=1) as rig:
        long = [rig.submit([1 + n] * 50, max_tokens=1, tenant="l", request_id="long") for n in range(4)]
        short = [rig.submit([20 + n] * 10, max_tokens=1, tenant="s", request_id="short") for n in range(20)]
        rig.model.gate.set()
        order = starting_order([*long, *short])
        first_half = order[: len(order) // 2]
        assert 2 <= first_half.count("long") <= 4
        assert first_half.count("short") >= 8


def test_without_a_tenant_the_salt_distinguishes_requests() -> None:
    with held_rig(max_running=1) as rig:
        many = [rig.submit((1,), max_tokens=2, cache_salt="a", request_id="many") for _ in range(20)]
        one = rig.submit((1,), max_tokens=2, cache_salt="b", request_id="one")
        rig.model.gate.set()
        assert starting_order([*many, one]).index("one") <= 1


def test_a_tenant_may_fill_half_of_the_queue_and_others_find_room() -> None:
    with EngineRig(max_running=2, max_queued=8, start=False) as rig:
        for _ in range(2 + 4):
            rig.submit(tenant="a")
        with pytest.raises(CapacityError, match="of this tenant") as caught:
            rig.submit(tenant="a")
        assert caught.value.retry_after_s >= 1
        rig.submit(tenant="b")
        assert rig.engine.statistics().tenants_waiting == 2


def test_who_names_no_tenant_may_fill_the_queue() -> None:
    with EngineRig(max_running=2, max_queued=8, start=False) as rig:
        for _ in range(10):
            rig.submit()
        with pytest.raises(CapacityError, match="the limit of this instance"):
            rig.submit()


# -- priorities ----------------------------------------------------------------------------------------------


def test_what_is_interactive_is_admitted_before_batch_work_that_came_earlier() -> None:
    with held_rig(max_running=1) as rig:
        names = ("batch", "batch", "a", "b")
        generations = [
            rig.submit(
                (1,),
                max_tokens=2,
                request_id=name,
                priority=BATCH if name == "batch" else Priority.INTERACTIVE,
            )
            for name in names
        ]
        assert rig.engine.statistics().queued_by_priority == {Priority.INTERACTIVE: 2, BATCH: 2}
        rig.model.gate.set()
        assert starting_order(generations) == ["a", "b", "batch", "batch"]


def test_batch_work_gives_its_place_to_what_is_interactive_and_loses_nothing() -> None:
    with EngineRig(max_running=2, num_blocks=64) as rig:
        rig.model.gate.clear()
        batch = [
            rig.submit((number, 7), max_tokens=60, priority=BATCH, sampling=seeded(number))
            for number in range(2)
        ]
        assert rig.model.entered.wait(TIMEOUT_S)
        interactive = [rig.submit((number,), max_tokens=5) for number in range(2)]
        rig.model.gate.set()
        for number, generation in enumerate(interactive):
            assert finish(generation).tokens == rig.expected((number,), 5)
            assert not any(each.ended for each in batch)
        statistics = rig.engine.statistics()
        assert statistics.preemptions_by_reason_total == {Preempted.PRIORITY: 2}
        results = [finish(each).tokens for each in batch]
        alone = [
            finish(rig.submit((number, 7), max_tokens=60, sampling=seeded(number))).tokens
            for number in range(2)
        ]
        assert results == alone


def test_what_preempted_batch_work_had_computed_is_found_again() -> None:
    with EngineRig(max_running=1, num_blocks=64) as rig:
        prompt = tuple(range(40))
        tokens = threading.Event()
        batch = rig.submit(prompt, max_tokens=40, priority=BATCH, on_event=lambda event: tokens.set())
        assert tokens.wait(TIMEOUT_S)
        finish(rig.submit((1,), max_tokens=2))
        assert finish(batch).tokens == rig.expected(prompt, 40)
        # All but the block that was not full: at most its tokens, and the next one, are computed twice.
        statistics = rig.engine.statistics()
        if statistics.preemptions_total:
            assert statistics.computed_tokens_total <= 79 + 2 + BLOCK_SIZE * statistics.preemptions_total


def test_batch_work_goes_on_while_nothing_else_wants_its_place() -> None:
    with EngineRig(max_running=4) as rig:
        batch = [rig.submit((number,), max_tokens=10, priority=BATCH) for number in range(3)]
        finish(rig.submit((9,), max_tokens=10))
        for number, generation in enumerate(batch):
            assert finish(generation).tokens == rig.expected((number,), 10)
        assert rig.engine.statistics().preemptions_total == 0


def test_batch_work_may_fill_half_of_the_queue() -> None:
    with EngineRig(max_running=1, max_queued=4, start=False) as rig:
        for _ in range(3):
            rig.submit(priority=BATCH)
        with pytest.raises(CapacityError, match="priority batch"):
            rig.submit(priority=BATCH)
        rig.submit()


# -- all of it -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_under_pressure_every_token_of_every_request_is_right(seed: int) -> None:
    chance = random.Random(seed)
    stems = [tuple(chance.randrange(60) for _ in range(chance.randrange(1, 30))) for _ in range(4)]
    options = {
        "num_blocks": chance.choice([16, 20, 40]),
        "max_running": chance.choice([1, 3, 6]),
        "max_step_tokens": chance.choice([8, 64]),
        "max_sessions": chance.choice([1, 3, 9]),
    }
    with EngineRig(model=ToyDecoder(max_context=60), **options) as rig:
        asked = []
        for _ in range(60):
            prompt = (*chance.choice(stems), *(chance.randrange(60) for _ in range(chance.randrange(4))))
            num_tokens = chance.randrange(1, 20)
            generation = rig.submit(
                prompt,
                max_tokens=num_tokens,
                session=chance.choice(["", "s", "t", "u"]),
                tenant=chance.choice(["", "a", "b", "c"]),
                cache_salt=chance.choice(["", "", "x"]),
                priority=chance.choice(list(Priority)),
            )
            asked.append((generation, prompt, num_tokens))
            if chance.random() < 0.3:
                chance.choice(asked)[0].cancel()
            if chance.random() < 0.1:
                finish(chance.choice(asked)[0])
            rig.engine.check_integrity()
        for generation, prompt, num_tokens in asked:
            result = finish(generation)
            expected = rig.expected(prompt, num_tokens)
            if result.finish_reason is FinishReason.CANCELLED:
                assert result.tokens == expected[: len(result.tokens)]
            else:
                assert result.tokens == expected
        assert rig.engine.statistics().sessions_unpinned_total


# -- leaving -------------------------------------------------------------------------------------------------


def test_cancelling_several_of_a_step_frees_their_blocks_with_that_step() -> None:
    with EngineRig(num_blocks=60, max_running=6) as rig:
        rig.model.gate.clear()
        generations = [rig.submit([number] * 9, max_tokens=20, tenant=f"t{number}") for number in range(6)]
        assert rig.model.entered.wait(TIMEOUT_S)
        waiting = rig.submit((7,), max_tokens=1)
        while rig.engine.statistics().running < 1:
            time.sleep(0.001)
        for generation in generations[::2]:
            generation.cancel()
        num_passes = rig.model.num_passes
        seen: list[tuple[int, int]] = []

        def look(number: int) -> None:
            with state_of(rig.engine).changed:
                running = state_of(rig.engine).running
                seen.append((number, sum(each.generation.ended for each in running)))

        rig.model.before_forward = look
        rig.model.gate.set()
        assert finish(waiting).finish_reason is FinishReason.LENGTH
        for number, generation in enumerate(generations):
            if number % 2:
                assert finish(generation).tokens == rig.expected([number] * 9, 20)
        # Requests that have left are there in the pass that was under way, and in no other.
        assert {number for number, num_ended in seen if num_ended} <= {num_passes - 1}
        rig.engine.check_integrity()


def test_a_short_prompt_is_answered_before_the_long_ones_that_came_first():
    with EngineRig(
        start=False, num_blocks=512, max_running=8, max_step_tokens=16, max_prefill_tokens=8
    ) as rig:
        order: list[str] = []
        lengths = {"long 1": 60, "long 2": 90, "long 3": 120, "short": 5}
        generations = [
            rig.submit(
                [1 + number % 7 for number in range(length)],
                max_tokens=1,
                request_id=name,
                on_event=lambda event, name=name: order.append(name) if event.finish_reason else None,
            )
            for name, length in lengths.items()
        ]
        rig.engine.start()
        for generation in generations:
            finish(generation)
        assert order == ["short", "long 1", "long 2", "long 3"]
