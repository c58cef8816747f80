"""Drafting ahead of the exact weights changes when tokens come, and never which; over real packed models."""

from __future__ import annotations

import time

import pytest
import torch
from tests.support.early_rig import (
    GREEDY,
    TIMEOUT_S,
    EarlyRig,
    exact_engine,
    packed_tiny,
)

from teneral.runtime.engine.requests import FinishReason, FirstToken, GenerationRequest, SamplingParams
from teneral.runtime.kv.blocks import Epoch

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
    """Proposals that nobody has judged yet."""
    lanes = [(each, each.draft) for each in rig.engine._roster.running]
    return sum(len(lane.tokens) - each.num_tokens for each, lane in lanes if lane is not None)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_exact_tokens_are_those_of_the_exact_model_however_much_was_drafted(artifact, expected, sampling):
    with EarlyRig(artifact) as rig:
        rig.start()
        generations = [rig.submit(prompt, sampling=sampling) for prompt in PROMPTS]
        wait_until(lambda: num_proposed(rig) >= 4 * 8)
        assert not any(event for each in generations for event in each._events)
        rig.engine.check_integrity()
        rig.refine()
        results = [generation.result(TIMEOUT_S) for generation in generations]
        assert [result.tokens for result in results] == [expected[prompt, sampling] for prompt in PROMPTS]
        assert {result.finish_reason for result in results} == {FinishReason.LENGTH}
        statistics = rig.engine.statistics()
        assert statistics.accepted_proposals_total + statistics.rejected_proposals_total >= 4 * 8
        assert statistics.accepted_proposals_total > 0
        assert statistics.drafted_tokens_total == 0
