"""Blocks in the pool before the weights are exact are computed no more: the exact lane begins
behind them.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from tests.support.early_rig import (
    BLOCK_SIZE,
    GREEDY,
    TIMEOUT_S,
    EarlyRig,
    exact_engine,
    exact_tokens,
    packed_tiny,
)

from teneral.loader.format.manifest import Tier
from teneral.runtime.step.requests import FirstToken, GenerationRequest

SEED = bytes(range(32))
SYSTEM = tuple(number % 50 + 3 for number in range(6 * BLOCK_SIZE))
PROMPT = (*SYSTEM, 7, 8, 9)
NUM_TOKENS = 8


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory) -> Path:
    return packed_tiny(tmp_path_factory.mktemp("early prefixes"))


@pytest.fixture(scope="module")
def computed():
    """The chain of the system prompt, and what its blocks hold."""
    engine = exact_engine(prefix_seed=SEED)
    engine.submit(GenerationRequest("r", SYSTEM, 1, sampling=GREEDY)).result(TIMEOUT_S)
    chain = engine.prefix_pool.chain(SYSTEM, salt="")
    content = engine.prefix_pool.get(chain)
    assert len(content) == len(chain) == 6
    assert engine.stop(TIMEOUT_S)
    return chain, content


@pytest.fixture(scope="module")
def expected():
    return exact_tokens(PROMPT, NUM_TOKENS)


def rig_with(artifact, computed, **options) -> EarlyRig:
    """The prefix is in its pool before anything is submitted."""
    rig = EarlyRig(artifact, prefix_seed=SEED, **options)
    chain, content = computed
    assert rig.engine.prefix_pool.put(chain, content) == len(chain)
    rig.engine.prefix_pool.hold(chain)
    return rig


@pytest.mark.parametrize("has_time", [True, False])
@pytest.mark.parametrize("first_token", list(FirstToken))
def test_only_the_rest_goes_through_the_exact_layers(artifact, computed, expected, has_time, first_token):
    with rig_with(artifact, computed) as rig:
        rig.arrival.has_time = has_time
        batches = []
        begin = rig.model.begin

        def noting(batch, kv, *, tier=Tier.REFINE, **options):
            if tier is Tier.REFINE:
                batches.append(batch)
            return begin(batch, kv, tier=tier, **options)

        rig.model.begin = noting
        rig.start()
        generation = rig.submit(PROMPT, first_token=first_token, max_tokens=NUM_TOKENS)
        events = generation.events(TIMEOUT_S)
        if has_time and first_token is not FirstToken.EXACT:
            next(events)  # which the draft chose
        rig.refine()
        result = generation.result(TIMEOUT_S)
        if result.num_drafted == 0:
            assert result.tokens == expected
        assert generation.num_cached_tokens == len(SYSTEM)
        positions = [position for batch in batches for position in batch.positions.tolist()]
        assert positions
        assert min(positions) == len(SYSTEM)
        assert rig.engine.statistics().prefix_hit_tokens_total == len(SYSTEM)


def test_what_comes_while_others_follow_the_weights_shares_the_prefix(artifact, computed, expected):
    with rig_with(artifact, computed) as rig:
        rig.start()
        first = rig.submit(PROMPT, max_tokens=NUM_TOKENS)
        rig.refine(*rig.groups[:2])
        second = rig.submit((*SYSTEM, 9, 9), max_tokens=NUM_TOKENS)
        other = rig.submit((5, 4, 3), max_tokens=NUM_TOKENS)
        rig.refine()
        assert first.result(TIMEOUT_S).tokens == expected
        assert second.result(TIMEOUT_S).tokens == exact_tokens((*SYSTEM, 9, 9), NUM_TOKENS)
        assert other.result(TIMEOUT_S).tokens == exact_tokens((5, 4, 3), NUM_TOKENS)
        assert (first.num_cached_tokens, second.num_cached_tokens, other.num_cached_tokens) == (24, 24, 0)


def test_who_leaves_the_prefix_in_the_middle_of_a_block_begins_there(artifact, computed):
    """Its tokens are known since the first one found it."""
    leaves = (*SYSTEM[:-2], 60, 61, 62)
    with rig_with(artifact, computed) as rig:
        rig.start()
        first = rig.submit(PROMPT, max_tokens=NUM_TOKENS)
        give_up_s = time.monotonic() + TIMEOUT_S
        while not rig.engine.statistics().running:
            assert time.monotonic() < give_up_s
            time.sleep(0.002)
        rig.refine(*rig.groups[:2])
        second = rig.submit(leaves, max_tokens=NUM_TOKENS)
        rig.refine()
        assert first.result(TIMEOUT_S).tokens == exact_tokens(PROMPT, NUM_TOKENS)
        assert second.result(TIMEOUT_S).tokens == exact_tokens(leaves, NUM_TOKENS)
        assert (first.num_cached_tokens, second.num_cached_tokens) == (len(SYSTEM), len(SYSTEM) - 2)


def test_another_salt_finds_nothing(artifact, computed, expected):
    with rig_with(artifact, computed) as rig:
        rig.start()
        generation = rig.submit(PROMPT, max_tokens=NUM_TOKENS, cache_salt="other")
        rig.refine()
        assert generation.result(TIMEOUT_S).tokens == expected
        assert generation.num_cached_tokens == 0


def test_who_leaves_early_leaves_the_prefix(artifact, computed, expected):
    with rig_with(artifact, computed) as rig:
        rig.start()
        left = rig.submit(PROMPT, max_tokens=NUM_TOKENS)
        rig.refine(*rig.groups[:2])
        left.cancel()
        stayed = rig.submit(PROMPT, max_tokens=NUM_TOKENS)
        rig.refine()
        assert stayed.result(TIMEOUT_S).tokens == expected
        assert stayed.num_cached_tokens == len(SYSTEM)


@pytest.mark.parametrize("num_blocks", [9, 12, 20])
def test_small_pools_hold_as_many_as_they_can(artifact, computed, expected, num_blocks):
    with rig_with(artifact, computed, num_blocks=num_blocks) as rig:
        rig.start()
        generations = [rig.submit(PROMPT, max_tokens=NUM_TOKENS) for _ in range(3)]
        rig.refine()
        for generation in generations:
            assert generation.result(TIMEOUT_S).tokens == expected
        rig.engine.check_integrity()


def test_what_is_put_while_weights_arrive_is_found_by_who_comes_then(artifact, computed, expected):
    chain, content = computed
    with EarlyRig(artifact, prefix_seed=SEED) as rig:
        rig.start()
        before = rig.submit(PROMPT, max_tokens=NUM_TOKENS)
        rig.refine(*rig.groups[:2])
        assert rig.engine.prefix_pool.put(chain, content) == len(chain)
        rig.engine.prefix_pool.hold(chain)
        after = rig.submit(PROMPT, max_tokens=NUM_TOKENS)
        rig.refine()
        assert before.result(TIMEOUT_S).tokens == after.result(TIMEOUT_S).tokens == expected
        assert after.num_cached_tokens == len(SYSTEM)
