"""Blocks that change hands are never read: each is full of NaN when it is given up, and again when it is given out.

A NaN that attention reads ends up in the logits, and fails its sequence; so an answer that is there, and is the same
as alone in an engine of its own, was computed from nothing but what its own sequence wrote.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.engine_rig import GREEDY, TIMEOUT_S
from tests.support.inspection import kv_of, replace_allocator, state_of
from tests.support.models import DictWeights, build_model
from tests.support.tiny_models import config_json, tensors_of, tiny_model
from tests.support.toy_decoder import ToyTokenizer

from teneral.loader.native.library import library
from teneral.runtime.engine.engine import Engine, EngineOptions
from teneral.runtime.engine.generation import Generation
from teneral.runtime.kv.blocks import BlockAllocator
from teneral.runtime.kv.storage import KVStorage
from teneral.runtime.models.decoder import Decoder
from teneral.runtime.step.backend import host_backend
from teneral.runtime.step.batch import Epoch
from teneral.runtime.step.requests import FinishReason, GenerationRequest, Priority

BLOCK_SIZE = 4


class PoisoningAllocator(BlockAllocator):
    """Fills blocks with NaN when their last reference goes, and when their first comes."""

    def __init__(self, num_blocks: int, storage: KVStorage) -> None:
        super().__init__(num_blocks)
        self._storage = storage
        self.num_poisoned = 0
        self.poison(range(num_blocks))

    def allocate(self, count: int, *, after: int | None = None, epoch: Epoch = Epoch.EXACT) -> list[int]:
        blocks = super().allocate(count, after=after, epoch=epoch)
        self.poison(blocks)
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        super().release(blocks)
        self.poison(block for block in blocks if not self.reference_count(block))

    def poison(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            slots = slice(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE)
            for data, _ in self._storage.groups:
                data[:, :, :, slots] = np.nan
            self.num_poisoned += 1


class Poisoned:
    """An engine whose blocks are poisoned, and what an engine of its own says to each prompt."""

    def __init__(self, decoder: Decoder, **options: Any) -> None:
        self._decoder = decoder
        self.engine = engine_of(decoder, **options)
        num_blocks = state_of(self.engine).blocks.allocator.num_blocks
        self.allocator = PoisoningAllocator(num_blocks, kv_of(self.engine))
        replace_allocator(self.engine, self.allocator)
        self.engine.start()

    def __enter__(self) -> Poisoned:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.engine.stop(TIMEOUT_S)
        self.engine.check_integrity()
        statistics = self.engine.statistics()
        assert statistics.free_blocks == statistics.num_blocks


def engine_of(decoder: Decoder, *, num_blocks: int, **options: Any) -> Engine:
    kv_bytes = num_blocks * decoder.kv_block_bytes(BLOCK_SIZE)
    return Engine(
        decoder,
        ToyTokenizer(),
        options=EngineOptions(kv_bytes=kv_bytes, block_size=BLOCK_SIZE, max_context=60, **options),
        make_backend=host_backend,
    )


@pytest.fixture(scope="module", params=["llama", "gemma4_text"])
def decoder(request: pytest.FixtureRequest) -> Iterator[Decoder]:
    if request.param == "gemma4_text" and library() is None:
        pytest.skip("such layers are the native core's")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    # In fp32, where the size of a batch does not decide between logits that nearly tie.
    oracle = tiny_model(request.param, dtype=torch.float32)
    model = build_model(config_json(oracle), DictWeights(tensors_of(oracle)))
    assert isinstance(model, Decoder)
    yield model
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def alone(decoder: Decoder) -> Iterator[dict[tuple[int, ...], tuple[int, ...]]]:
    """Twelve prompts and what they are answered by an engine that shares nothing and is never short of blocks."""
    chance = random.Random(0)
    stems = [tuple(chance.randrange(250) for _ in range(length)) for length in (5, 17, 26)]
    prompts = [(*stem, *range(number)) for stem in stems for number in range(4)]
    engine = engine_of(decoder, num_blocks=100, prefix_cache=False, max_running=1)
    engine.start()
    yield {
        prompt: engine.submit(GenerationRequest("r", prompt, 20, GREEDY)).result(TIMEOUT_S).tokens
        for prompt in prompts
    }
    engine.stop(TIMEOUT_S)


def test_the_poison_works(decoder: Decoder) -> None:
    """A read of another sequence's block fails the reader."""
    with Poisoned(decoder, num_blocks=30) as rig:
        prompt = tuple(range(12))
        rig.engine.submit(GenerationRequest("r", prompt, 2, GREEDY)).result(TIMEOUT_S)
        with state_of(rig.engine).changed:
            rig.allocator.poison(list(state_of(rig.engine).blocks.prefixes.blocks()))
        generation = rig.engine.submit(GenerationRequest("r", prompt, 2, GREEDY))
        with pytest.raises(Exception, match="finite"):
            generation.result(TIMEOUT_S)
        assert rig.allocator.num_poisoned > 30


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_to_its_blocks_an_answer_is_that_of_an_engine_of_its_own(
    decoder: Decoder, alone: dict[tuple[int, ...], tuple[int, ...]], seed: int
) -> None:
    """Shared beginnings, sessions, priorities, tenants, small pools, preemption, and some who leave in the middle."""
    chance = random.Random(seed)
    options = {
        "num_blocks": chance.choice([16, 20, 30]),
        "max_running": chance.choice([2, 4, 6]),
        "max_step_tokens": chance.choice([8, 32]),
        "max_prefill_tokens": chance.choice([3, 16]),
        "max_sessions": 3,
    }
    asked: list[tuple[Generation, tuple[int, ...], int]] = []
    with Poisoned(decoder, **options) as rig:
        for _ in range(50):
            prompt, num_tokens = chance.choice(list(alone)), chance.randrange(1, 21)
            request = GenerationRequest(
                "r",
                prompt,
                num_tokens,
                GREEDY,
                cache_salt=chance.choice(["", "", "a", "b"]),
                session=chance.choice(["", "s", "t"]),
                tenant=chance.choice(["", "x", "y"]),
                priority=chance.choice(list(Priority)),
            )
            asked.append((rig.engine.submit(request), prompt, num_tokens))
            if chance.random() < 0.3:
                chance.choice(asked)[0].cancel()
            if chance.random() < 0.2:
                chance.choice(asked)[0].result(TIMEOUT_S)
        for generation, prompt, num_tokens in asked:
            result = generation.result(TIMEOUT_S)
            assert result.tokens == alone[prompt][: len(result.tokens)]
            if result.finish_reason is not FinishReason.CANCELLED:
                assert len(result.tokens) == num_tokens
        rig.engine.check_integrity()
        num_cached = [generation.num_cached_tokens for generation, _, _ in asked]
        assert any(number % BLOCK_SIZE for number in num_cached), "no request began in the middle of a block"
        statistics = rig.engine.statistics()
        assert statistics.prefix_hit_tokens_total > 0
        assert statistics.prefix_evictions_total > 0
        assert statistics.sessions_unpinned_total
        assert rig.allocator.num_poisoned > 100
