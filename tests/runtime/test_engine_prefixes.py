"""Blocks of past sequences are found again: less is computed, and nothing else changes."""

from __future__ import annotations

import random

import pytest
import torch
from tests.support.decoding import oracle_greedy
from tests.support.engine_rig import BLOCK_SIZE, GREEDY, TIMEOUT_S, EngineRig, finish
from tests.support.models import DictWeights, build_model
from tests.support.tiny_models import config_json, tensors_of, tiny_model
from tests.support.toy_decoder import ToyTokenizer

from teneral.runtime.engine.engine import Engine, EngineOptions
from teneral.runtime.errors import RequestError
from teneral.runtime.step.backend import host_backend
from teneral.runtime.step.requests import MAX_CACHE_SALT_CHARS, GenerationRequest

PROMPT = tuple(number % 60 for number in range(5 * BLOCK_SIZE + 2))


def test_a_prompt_that_was_seen_is_not_computed_again():
    with EngineRig() as rig:
        first = rig.submit(PROMPT, max_tokens=4)
        assert finish(first).tokens == rig.expected(PROMPT, 4)
        second = rig.submit((*PROMPT, 7, 8), max_tokens=4)
        assert finish(second).tokens == rig.expected((*PROMPT, 7, 8), 4)
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, len(PROMPT))
        assert rig.model.batch_tokens[4] == 2  # of 24
        statistics = rig.engine.statistics()
        assert (statistics.prefix_hit_tokens_total, statistics.prefix_lookup_tokens_total) == (22, 46)
        assert statistics.cached_blocks == statistics.idle_blocks > 0


def test_at_least_one_token_is_left_to_compute():
    with EngineRig() as rig:
        prompt = PROMPT[: 4 * BLOCK_SIZE]  # the last block is there, and all but its last token is copied
        for expected in (0, len(prompt) - 1):
            generation = rig.submit(prompt, max_tokens=2)
            assert finish(generation).tokens == rig.expected(prompt, 2)
            assert generation.num_cached_tokens == expected


def test_a_continued_conversation_keeps_its_own_answer():
    with EngineRig() as rig:
        answer = finish(rig.submit(PROMPT, max_tokens=10)).tokens
        again = rig.submit((*PROMPT, *answer, 5), max_tokens=3)
        assert finish(again).tokens == rig.expected((*PROMPT, *answer, 5), 3)
        # All but what stood in a block that was not full, or was never computed: the last token.
        assert again.num_cached_tokens == (len(PROMPT) + len(answer) - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_sequences_that_run_share_their_beginning():
    with EngineRig(num_blocks=12) as rig:
        rig.submit(PROMPT, max_tokens=1).result(TIMEOUT_S)
        rig.model.gate.clear()
        generations = [rig.submit((*PROMPT, number), max_tokens=6) for number in range(3)]
        rig.model.gate.set()
        for number, generation in enumerate(generations):
            assert finish(generation).tokens == rig.expected((*PROMPT, number), 6)
            assert generation.num_cached_tokens == 5 * BLOCK_SIZE
        assert rig.engine.statistics().preemptions_total == 0  # alone, each would need 8 of the 12 blocks


def test_who_gives_another_salt_shares_nothing():
    with EngineRig() as rig:
        for salt in ("", "a", "b"):
            generation = rig.submit(PROMPT, max_tokens=2, cache_salt=salt)
            finish(generation)
            assert generation.num_cached_tokens == 0
        generation = rig.submit(PROMPT, max_tokens=2, cache_salt="a")
        finish(generation)
        assert generation.num_cached_tokens == 5 * BLOCK_SIZE


def test_a_salt_has_a_bound():
    with EngineRig() as rig, pytest.raises(RequestError, match="cache_salt"):
        rig.submit(cache_salt="x" * (MAX_CACHE_SALT_CHARS + 1))


def test_it_can_be_turned_off():
    with EngineRig(prefix_cache=False) as rig:
        for _ in range(2):
            generation = rig.submit(PROMPT, max_tokens=2)
            finish(generation)
            assert generation.num_cached_tokens == 0
        assert rig.engine.statistics().cached_blocks == 0


@pytest.mark.parametrize("seed", range(12))
def test_under_pressure_every_token_is_right(seed):
    """Small pools, shared beginnings, chunks, preemption, eviction and cancellation."""
    chance = random.Random(seed)
    stems = [tuple(chance.randrange(60) for _ in range(chance.randrange(1, 30))) for _ in range(4)]
    num_blocks = chance.choice([16, 20, 40])
    with EngineRig(num_blocks=num_blocks, max_running=4, max_step_tokens=chance.choice([8, 64])) as rig:
        wanted = []
        for _ in range(40):
            stem = chance.choice(stems)
            prompt = (
                *stem[: chance.randrange(1, len(stem) + 1)],
                *(chance.randrange(60) for _ in range(chance.randrange(4))),
            )
            num_tokens = chance.randrange(1, 12)
            generation = rig.submit(prompt, max_tokens=num_tokens)
            if chance.random() < 0.15:
                generation.cancel()
            else:
                wanted.append((generation, prompt, num_tokens))
        for generation, prompt, num_tokens in wanted:
            assert finish(generation).tokens == rig.expected(prompt, num_tokens)
        rig.engine.check_integrity()
        assert any(generation.num_cached_tokens % BLOCK_SIZE for generation, _, _ in wanted)
        statistics = rig.engine.statistics()
        assert statistics.free_blocks == statistics.num_blocks


@pytest.mark.parametrize("family", ["llama", "mistral", "lfm2", "deepseek_v3", "gemma3n_text", "gemma4_text"])
def test_a_real_model_says_the_same_behind_a_found_prefix(family):
    oracle = tiny_model(family)
    decoder = build_model(config_json(oracle), DictWeights(tensors_of(oracle)))
    options = EngineOptions(kv_bytes=100 * decoder.kv_block_bytes(4), block_size=4, max_context=96)
    engine = Engine(decoder, ToyTokenizer(), options=options, make_backend=host_backend)
    engine.start()
    stem = tuple((index * 11) % 250 for index in range(21))
    for number in range(3):
        prompt = (*stem, number, number + 1)
        generation = engine.submit(GenerationRequest("r", prompt, 20, GREEDY))
        with torch.no_grad():
            assert generation.result(TIMEOUT_S).tokens == tuple(oracle_greedy(oracle, prompt, 20))
        assert generation.num_cached_tokens == (21 if number else 0)
    engine.stop()
