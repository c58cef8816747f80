"""A prompt that leaves a cached one in the middle of a block begins there: that much of the block is copied."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from tests.support.engine_rig import BLOCK_SIZE, GREEDY, TIMEOUT_S, EngineRig, finish
from tests.support.inspection import followers_of, kv_of, record_copies, state_of
from tests.support.models import DictWeights, build_model
from tests.support.tiny_models import config_json, tensors_of, tiny_model
from tests.support.toy_decoder import ToyTokenizer

from teneral.runtime.engine.engine import Engine, EngineOptions
from teneral.runtime.engine.generation import GenerationResult
from teneral.runtime.kv.storage import KVKind, KVStorage
from teneral.runtime.models.decoder import Decoder
from teneral.runtime.step.backend import host_backend
from teneral.runtime.step.requests import GenerationRequest, Priority

STEM = tuple((index * 11) % 60 for index in range(5 * BLOCK_SIZE))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def leaving(at: int, *others: int) -> tuple[int, ...]:
    """A prompt that is the stem's up to that token, and then another."""
    return (*STEM[:at], *(others or ((STEM[at] + 1) % 60 if at < len(STEM) else 7, 1, 2)))


@pytest.mark.parametrize("at", range(1, len(STEM) + 1))
def test_a_prompt_begins_where_it_leaves_another(at: int) -> None:
    with EngineRig() as rig:
        finish(rig.submit((*STEM, 3), max_tokens=2))
        generation = rig.submit(leaving(at), max_tokens=6)
        assert finish(generation).tokens == rig.expected(leaving(at), 6)
        assert generation.num_cached_tokens == at
        assert rig.model.batch_tokens[2] == 3
        statistics = rig.engine.statistics()
        assert statistics.prefix_hit_tokens_total == at
        again = rig.submit((*STEM, 3, 4), max_tokens=6)  # what was copied from is what it was
        assert finish(again).tokens == rig.expected((*STEM, 3, 4), 6)
        assert again.num_cached_tokens == len(STEM) + (1 if at == len(STEM) and STEM[0] == 3 else 0)


def test_one_token_is_left_to_compute_also_of_a_block_that_is_there() -> None:
    with EngineRig() as rig:
        finish(rig.submit((*STEM, 3), max_tokens=1))
        for length in range(2, len(STEM) + 1):
            generation = rig.submit(STEM[:length], max_tokens=1)
            assert finish(generation).tokens == rig.expected(STEM[:length], 1)
            assert generation.num_cached_tokens == length - 1


def test_of_several_that_go_on_otherwise_the_one_with_most_in_common_is_taken() -> None:
    with EngineRig() as rig:
        for end in ((1, 2, 3, 4, 5), (1, 2, 9, 9, 9), (1, 8, 8, 8, 8)):
            finish(rig.submit((*STEM, *end), max_tokens=1))
        for end, num_common in (
            ((1, 2, 3, 0), 3),
            ((1, 2, 9, 0), 3),
            ((1, 8, 0), 2),
            ((1, 0), 1),
            ((0, 1), 0),
        ):
            generation = rig.submit((*STEM, *end), max_tokens=3)
            assert finish(generation).tokens == rig.expected((*STEM, *end), 3)
            assert generation.num_cached_tokens == len(STEM) + num_common


def test_who_gives_another_salt_copies_nothing() -> None:
    with EngineRig() as rig:
        finish(rig.submit((*STEM, 3), max_tokens=2, cache_salt="a"))
        for salt, expected in (("", 0), ("b", 0), ("a", 6)):
            generation = rig.submit(leaving(6), max_tokens=1, cache_salt=salt)
            finish(generation)
            assert generation.num_cached_tokens == expected


def test_several_at_once_copy_from_one_block_that_somebody_uses() -> None:
    with EngineRig(max_running=8) as rig:
        finish(rig.submit((*STEM, 3), max_tokens=1))
        rig.model.gate.clear()
        generations = [rig.submit((*STEM[:6], 59, number), max_tokens=5) for number in range(6)]
        rig.model.gate.set()
        for number, generation in enumerate(generations):
            assert finish(generation).tokens == rig.expected((*STEM[:6], 59, number), 5)
            assert generation.num_cached_tokens >= 6
        assert rig.engine.statistics().preemptions_total == 0


def test_in_a_full_pool_the_block_to_copy_from_blocks_no_sequence() -> None:
    """The sequence needs all blocks, the one that it could copy from among them: it computes."""
    with EngineRig(num_blocks=6) as rig:
        finish(rig.submit((*STEM, 3), max_tokens=3))
        assert rig.engine.statistics().cached_blocks == 5
        long = leaving(1, *range(20, 40))
        generation = rig.submit(long, max_tokens=3)
        assert finish(generation).tokens == rig.expected(long, 3)
        assert generation.num_cached_tokens == 0
        # One block fewer, and there is room for both until it is copied.
        finish(rig.submit((*STEM, 3), max_tokens=3))
        short = leaving(1, *range(20, 36))
        generation = rig.submit(short, max_tokens=2)
        assert finish(generation).tokens == rig.expected(short, 2)
        assert generation.num_cached_tokens == 1


def test_who_gets_no_place_copies_nothing_and_holds_nothing() -> None:
    """One is lent what it could begin with at each step in which it waits for the prompt before it."""
    with EngineRig(max_running=4, max_step_tokens=4) as rig:
        finish(rig.submit((*STEM, 3), max_tokens=1))
        copied: list[int] = []
        record_copies(rig.engine, copied)
        rig.model.before_forward = lambda _: rig.engine.check_integrity()
        rig.model.gate.clear()
        first = rig.submit(tuple(range(59, 9, -1)), max_tokens=2)
        assert rig.model.entered.wait(TIMEOUT_S)
        later = rig.submit(leaving(2, 58, 57), max_tokens=4)
        cancelled = rig.submit(leaving(3, 58, 57), max_tokens=4)
        cancelled.cancel()
        rig.model.gate.set()
        assert finish(first).tokens == rig.expected(tuple(range(59, 9, -1)), 2)
        assert finish(later).tokens == rig.expected(leaving(2, 58, 57), 4)
        assert later.num_cached_tokens == 2
        assert len(copied) == 1


def test_what_came_from_elsewhere_can_be_begun_when_somebody_has_used_it() -> None:
    """Blocks of a snapshot come without their tokens; the request that finds them knows these."""
    with EngineRig() as rig:
        finish(rig.submit((*STEM, 3), max_tokens=1))
        prefixes = state_of(rig.engine).blocks.prefixes
        followers_of(prefixes).clear()  # as if they had come from there
        for prompt, expected in ((leaving(6), BLOCK_SIZE), ((*STEM, 9), len(STEM)), (leaving(7, 30), 7)):
            generation = rig.submit(prompt, max_tokens=2)
            assert finish(generation).tokens == rig.expected(prompt, 2)
            assert generation.num_cached_tokens == expected


@pytest.mark.parametrize("seed", range(8))
def test_under_pressure_every_token_is_right(seed: int) -> None:
    """Few tokens, so prompts leave each other everywhere; sessions, priorities, salts, preemption, cancellation."""
    chance = random.Random(seed)
    num_blocks = chance.choice([8, 12, 24])
    options = {"max_running": chance.choice([1, 4]), "max_step_tokens": chance.choice([4, 8, 64])}
    with EngineRig(num_blocks=num_blocks, max_context=28, max_sessions=2, **options) as rig:
        rig.model.before_forward = lambda _: rig.engine.check_integrity()
        wanted = []
        for _ in range(80):
            prompt = tuple(chance.randrange(2) for _ in range(chance.randrange(1, 20)))
            num_tokens = chance.randrange(1, 9)
            generation = rig.submit(
                prompt,
                max_tokens=num_tokens,
                session=chance.choice(["", "", "s", "t", "u"]),
                cache_salt=chance.choice(["", "", "a"]),
                priority=chance.choice(list(Priority)),
            )
            if chance.random() < 0.15:
                generation.cancel()
            else:
                wanted.append((generation, prompt, num_tokens))
            if chance.random() < 0.1:
                finish(wanted[-1][0]) if wanted else None
        for generation, prompt, num_tokens in wanted:
            assert finish(generation).tokens == rig.expected(prompt, num_tokens)
            assert generation.num_cached_tokens < len(prompt)
        assert any(generation.num_cached_tokens % BLOCK_SIZE for generation, _, _ in wanted)
        assert rig.engine.statistics().prefix_evictions_total > 0


# -- a real model --------------------------------------------------------------------------------------------

REAL_STEM = tuple((index * 11) % 250 for index in range(45))
NUM_TOKENS = 12
REAL_BLOCK_SIZE = 16


def engine_of(decoder: Decoder, kind: KVKind, **options: object) -> Engine:
    kv_bytes = 64 * decoder.kv_block_bytes(REAL_BLOCK_SIZE, kind=kind)
    options = {"kv_bytes": kv_bytes, "block_size": REAL_BLOCK_SIZE, "max_context": 96, **options}
    engine = Engine(
        decoder, ToyTokenizer(), options=EngineOptions(kv_dtype=kind, **options), make_backend=host_backend
    )
    engine.start()
    return engine


def ask(engine: Engine, prompt: tuple[int, ...]) -> tuple[GenerationResult, int]:
    request = GenerationRequest("r", prompt, NUM_TOKENS, GREEDY, num_top_logprobs=5, ignore_eos=True)
    generation = engine.submit(request)
    return generation.result(TIMEOUT_S), generation.num_cached_tokens


@pytest.mark.parametrize("at", [1, 15, 17, 31, 40, 45])
@pytest.mark.parametrize("kind", list(KVKind))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_real_model_says_the_same_as_without(
    family: str, dtype: torch.dtype, kind: KVKind, at: int
) -> None:
    """To the last bit: a token a step, since a row rounds otherwise in a pass of another size."""
    oracle = tiny_model(family, dtype=dtype)
    decoder = build_model(config_json(oracle), DictWeights(tensors_of(oracle)))
    prompt = (*REAL_STEM[:at], 251, 252, 253)
    one_by_one = {"max_running": 1, "max_step_tokens": 1}
    expected, result = without_and_with(decoder, kind, prompt, at, **one_by_one)
    assert result.tokens == expected.tokens
    assert result.logprobs == expected.logprobs


@pytest.mark.parametrize("at", [15, 17, 40])
@pytest.mark.parametrize("kind", list(KVKind))
def test_so_it_does_in_steps_of_many_tokens(kind: KVKind, at: int) -> None:
    oracle = tiny_model("llama", dtype=torch.float32)
    decoder = build_model(config_json(oracle), DictWeights(tensors_of(oracle)))
    expected, result = without_and_with(decoder, kind, (*REAL_STEM[:at], 251, 252, 253), at)
    assert result.tokens == expected.tokens
    for one, other in zip(result.logprobs, expected.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4 if kind is KVKind.MODEL else 0.02)


def without_and_with(
    decoder: object, kind: KVKind, prompt: tuple[int, ...], at: int, **options: object
) -> tuple[GenerationResult, GenerationResult]:
    """The answer to a prompt that is `REAL_STEM`'s up to a token, computed whole and from there on."""
    assert isinstance(decoder, Decoder)
    warm = engine_of(decoder, kind, **options)
    cold = engine_of(decoder, kind, prefix_cache=False, **options)
    ask(warm, (*REAL_STEM, *range(16)))
    (expected, num_cold), (result, num_cached) = ask(cold, prompt), ask(warm, prompt)
    assert (num_cold, num_cached) == (0, at)
    assert_copied(warm, prompt, at)
    for engine in (warm, cold):
        assert engine.stop(TIMEOUT_S)
        engine.check_integrity()
    return expected, result


def assert_copied(engine: Engine, prompt: tuple[int, ...], at: int) -> None:
    """That the block in which the prompt leaves the other begins as that one's, bit for bit, in all layers."""
    number, num_tokens = divmod(at, REAL_BLOCK_SIZE)
    if not num_tokens or len(prompt) + NUM_TOKENS - 1 < (number + 1) * REAL_BLOCK_SIZE:
        return  # its block was never full, and is gone
    prefixes, kv = state_of(engine).blocks.prefixes, kv_of(engine)
    followers = followers_of(prefixes).entries()
    previous = engine.prefix_pool.chain(prompt, salt="")[number - 1] if number else None
    alike = [
        block
        for block, (each, tokens) in followers.items()
        if tuple(tokens[:num_tokens]) == prompt[number * REAL_BLOCK_SIZE : at] and previous in (None, each)
    ]
    assert len(alike) == 2
    for data in (kv.data,) if isinstance(kv, KVStorage) else (kv.codes, kv.scales):
        one, other = (data[..., block * REAL_BLOCK_SIZE :, :][..., :num_tokens, :] for block in alike)
        assert one.tobytes() == other.tobytes()
