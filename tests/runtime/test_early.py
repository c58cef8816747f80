"""Drafting ahead of the exact weights changes when tokens come, and never which; over real packed models."""

from __future__ import annotations

import time

import numpy as np
import pytest
from tests.support.early_rig import (
    GREEDY,
    TIMEOUT_S,
    EarlyRig,
    exact_engine,
    packed_tiny,
)
from tests.support.inspection import drafting_of, events_of, kv_of, state_of

from teneral.loader.tools.pack.plan import TierOptions
from teneral.runtime.engine.speculation import Acceptance, max_proposals
from teneral.runtime.kv.storage import by_block
from teneral.runtime.step.batch import Epoch
from teneral.runtime.step.requests import FinishReason, FirstToken, GenerationRequest, SamplingParams

PROMPTS = [tuple((number * 37 + index * 11) % 250 for index in range(3 + 9 * number)) for number in range(4)]
SEEDED = SamplingParams(temperature=1.0, top_p=0.95, seed=5)
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    return packed_tiny(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def expected():
    """The tokens of each prompt and sampling, by a model that was exact all along."""
    engine = exact_engine()
    table = {}
    for prompt in PROMPTS:
        for sampling in (GREEDY, SEEDED):
            request = GenerationRequest("r", prompt, NUM_TOKENS, sampling=sampling)
            table[prompt, sampling] = engine.submit(request).result(TIMEOUT_S).tokens
    engine.stop()
    return table


def wait_until(condition):
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come about"
        time.sleep(0.002)


def num_proposed(rig):
    """Proposals that are not checked yet."""
    lanes = [(each, each.draft) for each in state_of(rig.engine).running]
    return sum(len(lane.tokens) - each.num_tokens for each, lane in lanes if lane is not None)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_exact_tokens_are_those_of_the_exact_model_however_much_was_drafted(artifact, expected, sampling):
    with EarlyRig(artifact) as rig:
        rig.start()
        generations = [rig.submit(prompt, sampling=sampling) for prompt in PROMPTS]
        wait_until(lambda: num_proposed(rig) >= 4 * 8)
        assert not any(event for each in generations for event in events_of(each))
        rig.engine.check_integrity()
        rig.refine()
        results = [generation.result(TIMEOUT_S) for generation in generations]
        assert [result.tokens for result in results] == [expected[prompt, sampling] for prompt in PROMPTS]
        assert {result.finish_reason for result in results} == {FinishReason.LENGTH}
        statistics = rig.engine.statistics()
        assert statistics.accepted_proposals_total + statistics.rejected_proposals_total >= 4 * 8
        assert statistics.accepted_proposals_total > 0
        assert statistics.drafted_tokens_total == 0


def test_limits_of_tokens_hold_for_proposals_and_exact_tokens_alike(artifact):
    limits = {"allowed_tokens": tuple(range(60)), "bad_words": ((7,), (5, 9))}
    requests = [
        GenerationRequest(
            "r",
            PROMPTS[1],
            NUM_TOKENS,
            min_tokens=NUM_TOKENS - 2,
            stop_token_ids=frozenset(range(0, 60, 3)),
            sampling=SamplingParams(temperature=3.0, seed=seed, **limits),
        )
        for seed in range(3)
    ]
    engine = exact_engine()
    expected = [engine.submit(request).result(TIMEOUT_S).tokens for request in requests]
    engine.stop()
    with EarlyRig(artifact) as rig:
        rig.start()
        generations = [rig.engine.submit(request) for request in requests]
        wait_until(lambda: num_proposed(rig) >= 3 * 4)
        rig.refine()
        assert [generation.result(TIMEOUT_S).tokens for generation in generations] == expected
    for tokens in expected:
        assert set(tokens) <= set(range(60)) - {7}
        assert len(tokens) >= NUM_TOKENS - 1


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_pass_that_stops_at_every_layer_changes_no_token(artifact, expected, sampling):
    with EarlyRig(artifact) as rig:
        rig.start()
        first = rig.submit(PROMPTS[1], sampling=sampling)
        wait_until(lambda: num_proposed(rig) >= 3)
        rig.refine(0)
        late = rig.submit(PROMPTS[2], sampling=sampling)  # joins when the other's pass is on its way
        most = 2 * max_proposals(
            Acceptance().rate
        )  # where this thread gets no processor, the draft is there already
        for group in rig.groups[1:]:
            wanted = min(num_proposed(rig) + 2, most)
            wait_until(lambda wanted=wanted: num_proposed(rig) >= wanted)
            rig.arrival.has_time = group % 2 == 0  # now and then what was drafted has to catch up
            rig.refine(group)
            rig.load.wait(group, timeout_s=TIMEOUT_S)
            rig.arrival.has_time = True
        assert first.result(TIMEOUT_S).tokens == expected[PROMPTS[1], sampling]
        assert late.result(TIMEOUT_S).tokens == expected[PROMPTS[2], sampling]


def test_no_exact_token_uses_a_block_that_the_draft_has_written(artifact, expected):
    with EarlyRig(artifact) as rig:
        rig.start()
        generations = [rig.submit(prompt) for prompt in PROMPTS]
        wait_until(lambda: num_proposed(rig) >= 4 * 8)
        rig.arrival.has_time = False  # nothing is drafted any more
        allocator = state_of(rig.engine).blocks.allocator
        wait_until(lambda: not drafting_of(rig.engine))
        with state_of(rig.engine).changed:
            lanes = [each.draft for each in state_of(rig.engine).running]
            drafted = [block for lane in lanes for block in lane.blocks]
            assert drafted
            assert all(allocator.epoch(block) is Epoch.DRAFT for block in drafted)
        kv = kv_of(rig.engine)
        by_block(kv.data, kv.num_blocks)[drafted] = np.nan
        rig.refine()
        for prompt, generation in zip(PROMPTS, generations, strict=True):
            assert generation.result(TIMEOUT_S).tokens == expected[prompt, GREEDY]


def test_drafted_tokens_are_sent_at_once_and_what_follows_is_exact(artifact):
    with EarlyRig(artifact) as rig:
        rig.start()
        generation = rig.submit(PROMPTS[1], first_token=FirstToken.DRAFT, max_tokens=40)
        stream = generation.events(TIMEOUT_S)
        drafted = [next(stream) for _ in range(10)]
        assert all(event.num_drafted == len(event.tokens) == 1 for event in drafted)
        rig.refine()
        rest = list(stream)
        num_drafted = sum(event.num_drafted for event in (*drafted, *rest))
        assert [event.num_drafted for event in rest][-5:] == [0] * 5
        tokens = [token for event in (*drafted, *rest) for token in event.tokens]
        assert len(tokens) == 40
        assert rig.engine.statistics().drafted_tokens_total == num_drafted
    # Given that beginning, the exact model continues like this.
    engine = exact_engine()
    request = GenerationRequest("r", (*PROMPTS[1], *tokens[:num_drafted]), 40 - num_drafted, sampling=GREEDY)
    assert list(engine.submit(request).result(TIMEOUT_S).tokens) == tokens[num_drafted:]
    engine.stop()


def test_a_sequence_may_end_before_any_weight_is_exact(artifact):
    with EarlyRig(artifact) as rig:
        rig.start()
        result = rig.submit(first_token=FirstToken.DRAFT, max_tokens=7).result(TIMEOUT_S)
        assert (len(result.tokens), result.num_drafted) == (7, 7)
        wait_until(lambda: rig.engine.statistics().free_blocks == rig.engine.statistics().num_blocks)


def test_both_kinds_go_on_side_by_side(artifact, expected):
    with EarlyRig(artifact) as rig:
        rig.start()
        exact = rig.submit(PROMPTS[2])
        draft = rig.submit(PROMPTS[1], first_token=FirstToken.DRAFT, max_tokens=60)
        stream = draft.events(TIMEOUT_S)
        for _ in range(12):
            assert next(stream).num_drafted == 1
        assert not events_of(exact)
        rig.refine()
        assert exact.result(TIMEOUT_S).tokens == expected[PROMPTS[2], GREEDY]
        assert len(draft.result(TIMEOUT_S).tokens) == 60


def test_who_leaves_while_the_weights_arrive_frees_everything_within_a_step(artifact, expected):
    with EarlyRig(artifact) as rig:
        rig.start()
        stays, leaves = rig.submit(PROMPTS[1]), rig.submit(PROMPTS[2])
        wait_until(lambda: num_proposed(rig) >= 6)
        rig.refine(0, 1)
        leaves.cancel()
        wait_until(lambda: rig.engine.statistics().running == 1)
        rig.engine.check_integrity()
        rig.refine()
        assert stays.result(TIMEOUT_S).tokens == expected[PROMPTS[1], GREEDY]


def test_a_pool_with_no_room_for_a_draft_lane_still_answers_exactly(artifact, expected):
    with EarlyRig(artifact, num_blocks=20) as rig:
        rig.start()
        generations = [rig.submit(prompt) for prompt in PROMPTS]
        rig.refine()
        for prompt, generation in zip(PROMPTS, generations, strict=True):
            assert generation.result(TIMEOUT_S).tokens == expected[prompt, GREEDY]


@pytest.mark.parametrize("num_blocks", [24, 33, 47])
def test_a_pool_that_fills_up_stops_the_draft_and_changes_no_token(artifact, expected, num_blocks):
    with EarlyRig(artifact, num_blocks=num_blocks, max_step_tokens=16, max_running=4) as rig:
        rig.start()
        generations = [rig.submit(prompt) for prompt in PROMPTS]
        time.sleep(0.2)
        rig.engine.check_integrity()
        rig.refine()
        for prompt, generation in zip(PROMPTS, generations, strict=True):
            assert generation.result(TIMEOUT_S).tokens == expected[prompt, GREEDY]


def test_without_time_for_a_draft_nothing_is_drafted(artifact, expected):
    with EarlyRig(artifact) as rig:
        rig.arrival.has_time = False
        rig.start()
        generation = rig.submit(PROMPTS[1])
        time.sleep(0.05)
        rig.refine()
        assert generation.result(TIMEOUT_S).tokens == expected[PROMPTS[1], GREEDY]
        statistics = rig.engine.statistics()
        assert (statistics.accepted_proposals_total, statistics.rejected_proposals_total) == (0, 0)


def test_a_load_that_fails_ends_who_drafts_with_its_error(artifact):
    with EarlyRig(artifact) as rig:
        rig.start()
        generations = [
            rig.submit(PROMPTS[1]),
            rig.submit(PROMPTS[2], first_token=FirstToken.DRAFT, max_tokens=500),
        ]
        wait_until(lambda: num_proposed(rig) >= 3)
        rig.load.cancel()
        for generation in generations:
            with pytest.raises(Exception, match="cancelled"):
                generation.result(TIMEOUT_S)


def test_stopping_ends_who_drafts(artifact):
    with EarlyRig(artifact) as rig:
        rig.start()
        generation = rig.submit(PROMPTS[1])
        wait_until(lambda: num_proposed(rig) >= 3)
        assert rig.engine.stop(TIMEOUT_S)
        assert generation.finish_reason is FinishReason.ERROR


def test_an_end_token_of_the_draft_is_only_a_proposal(artifact, expected):
    tokens = expected[PROMPTS[1], GREEDY]
    with EarlyRig(artifact) as rig:
        rig.start()
        generation = rig.submit(PROMPTS[1], stop_token_ids=frozenset({tokens[6]}))
        first = tokens.index(tokens[6]) + 1
        wait_until(lambda: num_proposed(rig) >= min(first, 3))
        rig.refine()
        result = generation.result(TIMEOUT_S)
        assert result.tokens == tokens[:first]
        assert result.finish_reason is FinishReason.STOP


def test_the_timeline_has_the_draft_and_the_steps_after_it(artifact):
    with EarlyRig(artifact) as rig:
        rig.start()
        generation = rig.submit(PROMPTS[1])
        wait_until(lambda: num_proposed(rig) >= 3)
        rig.refine()
        generation.result(TIMEOUT_S)
        wait_until(lambda: any(span.name == "exact from here on" for span in rig.timeline.spans()))
        drafted = [span for span in rig.timeline.spans() if span.lane == "draft"]
        outcome = next(span for span in drafted if span.name == "exact from here on")
        assert outcome.attributes["num_draft_steps"] >= 3
        assert outcome.attributes["num_judged"] >= 1
        assert [span.name for span in drafted][:3] == ["embed", "layers.0", "layers.1"]


@pytest.fixture(scope="module")
def sketched(tmp_path_factory):
    return packed_tiny(tmp_path_factory.mktemp("sketched"), tiers=TierOptions(draft_bits=3, sketch_bits=1))


def test_a_sketch_answers_whom_it_will_do_before_the_draft_is_there(sketched, expected):
    with EarlyRig(sketched, holds_draft=True) as rig:
        rig.start()
        draft = rig.submit(PROMPTS[1], first_token=FirstToken.DRAFT, max_tokens=40)
        sketch = rig.submit(PROMPTS[2], first_token=FirstToken.SKETCH, max_tokens=40)
        exact = rig.submit(PROMPTS[3])
        stream = sketch.events(TIMEOUT_S)
        assert [next(stream).num_drafted for _ in range(6)] == [1] * 6
        wait_until(lambda: num_proposed(rig) >= 4)
        assert not events_of(draft)
        rig.draft_hold.release()
        assert next(draft.events(TIMEOUT_S)).num_drafted == 1
        rig.refine()
        assert exact.result(TIMEOUT_S).tokens == expected[PROMPTS[3], GREEDY]
        assert draft.result(TIMEOUT_S).num_drafted > 0
        assert sketch.result(TIMEOUT_S).num_drafted >= 6


def waits_for_the_draft(rig):
    """Once its first pass over the draft has come to weights that are held back."""
    wait_until(lambda: rig.engine.statistics().running and rig.draft_hold.num_reached)
    time.sleep(0.1)


def test_a_request_that_waits_for_the_draft_delays_no_other(sketched, expected):
    with EarlyRig(sketched, holds_draft=True) as rig:
        rig.start()
        draft = rig.submit(PROMPTS[1], first_token=FirstToken.DRAFT)
        waits_for_the_draft(rig)
        sketch = rig.submit(PROMPTS[2], first_token=FirstToken.SKETCH, max_tokens=6)
        assert sketch.result(TIMEOUT_S).num_drafted == 6
        assert not events_of(draft)
        rig.draft_hold.release()
        assert next(draft.events(TIMEOUT_S)).num_drafted == 1
        spans = [span.name for span in rig.timeline.spans() if span.lane == "draft"]
        assert [name for name in spans if name.startswith("draft step")][:6] == [
            f"draft step {number}" for number in range(6)
        ]
        rig.refine()
        assert draft.result(TIMEOUT_S).num_drafted > 0


@pytest.mark.parametrize("first_token", [FirstToken.EXACT, FirstToken.DRAFT])
def test_a_request_that_waits_for_the_draft_can_be_cancelled(artifact, expected, first_token):
    with EarlyRig(artifact, holds_draft=True) as rig:
        rig.start()
        generation = rig.submit(PROMPTS[1], first_token=first_token)
        waits_for_the_draft(rig)
        generation.cancel()
        wait_until(lambda: rig.engine.statistics().running == 0)
        other = rig.submit(PROMPTS[2])
        rig.draft_hold.release()
        rig.refine()
        assert other.result(TIMEOUT_S).tokens == expected[PROMPTS[2], GREEDY]


def test_stopping_does_not_wait_for_the_draft(artifact):
    with EarlyRig(artifact, holds_draft=True) as rig:
        rig.start()
        generation = rig.submit(PROMPTS[1])
        waits_for_the_draft(rig)
        assert rig.engine.stop(TIMEOUT_S)
        assert generation.finish_reason is FinishReason.ERROR


def test_without_a_sketch_the_draft_takes_its_place(artifact):
    with EarlyRig(artifact) as rig:
        rig.start()
        assert rig.submit(first_token=FirstToken.SKETCH, max_tokens=5).result(TIMEOUT_S).num_drafted == 5
