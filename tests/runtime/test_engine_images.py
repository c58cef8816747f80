"""The engine with prompts that have images: transformers' tokens in company, chunked, preempted and from its caches."""

from __future__ import annotations

import functools
import threading
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.load import patience_s
from tests.support.models import DictWeights, build_model
from tests.support.tiny_models import config_json, tensors_of
from tests.support.toy_decoder import ToyTokenizer
from tests.support.vision_models import (
    DYNAMIC,
    IMAGE_TOKEN,
    PLAIN_LEVELS,
    image_at,
    oracle_inputs,
    prompt_with,
    random_tiles,
    tiny_vision_model,
)

from teneral.loader.memory import limits
from teneral.loader.memory.limits import Available
from teneral.runtime.backends.choose import pool_bytes
from teneral.runtime.engine import image_encoder, step_loop
from teneral.runtime.engine import options as engine_options
from teneral.runtime.engine.engine import Engine, EngineOptions
from teneral.runtime.errors import ModelError, RequestError
from teneral.runtime.images.processor import TileLayout
from teneral.runtime.kv.storage import default_kv_bytes
from teneral.runtime.step.backend import host_backend
from teneral.runtime.step.images import PromptImage
from teneral.runtime.step.requests import FinishReason, GenerationRequest, SamplingParams

NUM_TOKENS = 16
BLOCK_SIZE = 4
TIMEOUT_S = patience_s(60)
GREEDY = SamplingParams(temperature=0)
TEXT = GenerationRequest("text", (5, 6, 7, 8, 9), NUM_TOKENS, GREEDY)
# Two images, the second of two tiles, or twice as wide; a tile is four tokens.
PROMPT = tuple(prompt_with([1, 2, 3], 4, [9, 10], 4, 4, [8, 7, 6]))
PLACES = [index for index, token in enumerate(PROMPT) if token == IMAGE_TOKEN]
# Of a model with layouts: two images of a tile, with a mark each.
LAID_OUT = tuple(prompt_with([1, 2, 3], 5, [9, 10], 5, [8, 7, 6]))


# Tokens of images see those before them, or one another, or turn by their rows and columns, or change a state.
all_kinds = pytest.mark.parametrize(
    "model", ["idefics3", "llava", "llava_onevision", "gemma3", *DYNAMIC], indirect=True
)


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    """(transformers' model, our decoder over the same weights)"""
    family, threads = getattr(request, "param", "idefics3"), torch.get_num_threads()
    vision = {"patch_size": 16} if family.startswith("llava") else None  # four tokens a tile, too
    oracle = tiny_vision_model(family, vision=vision)
    torch.set_num_threads(
        1
    )  # on a busy machine, threads that wait for each other cost more than a tiny model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_options, "STATE_SHARE", 0.98)  # of tiny models they are far larger than blocks
        yield oracle, build_model(config_json(oracle), DictWeights(tensors_of(oracle)))
    torch.set_num_threads(threads)


class Rig:
    """An engine over the decoder; checked when a test leaves it."""

    def __init__(self, decoder: Any, *, num_blocks: int = 200, max_running: int = 8, **options: Any) -> None:
        kv_bytes = num_blocks * decoder.kv_block_bytes(BLOCK_SIZE) + 4 * max_running * decoder.state_bytes
        self.engine = Engine(
            decoder,
            ToyTokenizer(),
            options=EngineOptions(
                kv_bytes=kv_bytes,
                block_size=BLOCK_SIZE,
                max_running=max_running,
                max_context=96,
                **options,
            ),
            make_backend=host_backend,
        )

    def tokens(self, *requests: GenerationRequest) -> list[tuple[int, ...]]:
        generations = [self.engine.submit(request) for request in requests]
        self.engine.start()
        return [generation.result(TIMEOUT_S).tokens for generation in generations]

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.engine.stop(TIMEOUT_S)
        self.engine.check_integrity()
        statistics = self.engine.statistics()
        assert statistics.free_blocks == statistics.num_blocks


def is_laid_out(oracle: Any) -> bool:
    return oracle is not None and oracle.config.model_type == "llava_onevision"


def prompt_of(oracle: Any) -> tuple[tuple[int, ...], list[int], list[int]]:
    """Its tokens, and the places of its images."""
    prompt, num = (LAID_OUT, 5) if is_laid_out(oracle) else (PROMPT, 4)
    places = [index for index, token in enumerate(prompt) if token == IMAGE_TOKEN]
    return prompt, places[:num], places[num:]


def tiles_of(oracle: Any, *seeds: int) -> tuple[np.ndarray, np.ndarray]:
    is_one = oracle is not None and oracle.config.model_type in DYNAMIC
    second = random_tiles(1, 32, 64, seed=seeds[1]) if is_one else random_tiles(2, seed=seeds[1])
    return random_tiles(1, seed=seeds[0]), second[:1] if is_laid_out(oracle) else second


def request_with(*seeds: int, oracle: Any = None, **fields: Any) -> GenerationRequest:
    """Of the two images with these seeds, as the model takes them."""
    prompt, *places = prompt_of(oracle)
    images = tuple(
        image_at(
            own, tiles, digest=bytes([seed, number]), layout=TileLayout() if is_laid_out(oracle) else None
        )
        for number, (own, tiles, seed) in enumerate(
            zip(places, tiles_of(oracle, *seeds), seeds, strict=True), 1
        )
    )
    return GenerationRequest("images", prompt, NUM_TOKENS, GREEDY, images=images, **fields)


@functools.cache
def oracle_tokens(oracle: Any, *seeds: int) -> tuple[int, ...]:
    prompt = prompt_of(oracle)[0]
    with torch.no_grad():
        made = oracle.generate(
            **oracle_inputs(oracle, prompt, *tiles_of(oracle, *seeds)),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=-1,
        )
    return tuple(made[0, len(prompt) :].tolist())


@all_kinds
def test_greedy_tokens_are_those_of_transformers(model: tuple[Any, Any]) -> None:
    oracle, decoder = model
    with Rig(decoder) as rig:
        (tokens,) = rig.tokens(request_with(1, 2, oracle=oracle))
    assert tokens == oracle_tokens(oracle, 1, 2)


@all_kinds
def test_chunks_preemption_and_company_change_no_token(model: tuple[Any, Any]) -> None:
    oracle, decoder = model
    seeds = [(1, 2), None, (3, 4), (2, 1), None]
    requests = [TEXT if each is None else request_with(*each, oracle=oracle) for each in seeds]
    alone = []
    for each in seeds:
        request = TEXT if each is None else request_with(*each, oracle=oracle)
        with Rig(decoder) as rig:
            alone += rig.tokens(request)
    limits = {"max_step_tokens": 24, "max_running": 5, "max_prefill_tokens": 7, "prefix_cache": False}
    num_preemptions = 0  # which depend on when the images are there
    for num_blocks in (10, 12, 14, 16):
        with Rig(decoder, num_blocks=num_blocks, **limits) as rig:
            assert rig.tokens(*requests) == alone
            num_preemptions += rig.engine.statistics().preemptions_total
    assert num_preemptions > 0


@all_kinds
def test_cached_prefixes_are_of_equal_images_alone(model: tuple[Any, Any]) -> None:
    oracle, decoder = model
    with Rig(decoder) as rig:
        engine = rig.engine
        engine.start()
        cold = engine.submit(request_with(1, 2, oracle=oracle))
        assert cold.result(TIMEOUT_S).tokens == oracle_tokens(oracle, 1, 2)
        again = engine.submit(request_with(1, 2, oracle=oracle))
        assert again.result(TIMEOUT_S).tokens == oracle_tokens(oracle, 1, 2)
        prompt, (begin, *_), (start, *_) = prompt_of(oracle)
        assert again.num_cached_tokens >= len(prompt) - BLOCK_SIZE
        # The second image is another one: what is before it may be reused, and nothing of it. States are found at
        # ends of blocks, once a prompt has parted there from another one.
        num_reused = (0, 8, 0) if decoder.state_bytes else (start, start, begin)
        for seeds, num in zip([(1, 3), (1, 4), (2, 1)], num_reused, strict=True):
            other = engine.submit(request_with(*seeds, oracle=oracle))
            assert other.result(TIMEOUT_S).tokens == oracle_tokens(oracle, *seeds)
            assert other.num_cached_tokens == num


def test_choices_of_a_prompt_share_its_images(model: tuple[Any, Any]) -> None:
    oracle, decoder = model
    first = request_with(1, 2)
    second = GenerationRequest("second", PROMPT, NUM_TOKENS, GREEDY, images=first.images)
    with Rig(decoder) as rig:
        assert set(rig.tokens(first, second)) == {oracle_tokens(oracle, 1, 2)}
    assert all(image.tiles is None for image in first.images)


class SlowTower:
    """The model's tower, which waits before each tile."""

    def __init__(self, tower: Any) -> None:
        self.config = tower.config
        self.go_on = threading.Event()
        self.num_tiles = 0
        self.failure: Exception | None = None
        self._tower = tower

        self.join, self.working_bytes = tower.join, tower.working_bytes

    def encode(self, tiles: Any, levels: Any, is_over: Any) -> Any:
        for part in self._tower.encode(tiles, levels, is_over):
            self.go_on.wait(TIMEOUT_S)
            if self.failure is not None:
                raise self.failure
            self.num_tiles += 1
            yield part


@pytest.fixture
def slow(model: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, SlowTower]:
    decoder = model[1]
    tower = SlowTower(decoder.vision)
    monkeypatch.setattr(decoder, "vision", tower)
    return decoder, tower


@pytest.mark.parametrize(
    ("family", "height", "width"),
    [
        *(("idefics3", 32, 32), ("llava", 32, 32), ("gemma3", 32, 32), ("gemma4", 224, 304)),
        *(("gemma4_unified", 32, 32), ("qwen2_5_vl", 608, 512), ("qwen3_vl", 608, 512)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "num_tiles", [1, 2]
)  # of the first, only what the executor keeps is there with the second
def test_a_tile_takes_no_more_memory_than_its_tower_predicts(
    num_tiles: int, family: str, height: int, width: int, dtype: torch.dtype
) -> None:
    tiles = random_tiles(num_tiles, height, width)
    towers = {}
    for kind in ("first", "second"):
        oracle = tiny_vision_model(family, dtype=dtype)
        towers[kind] = build_model(config_json(oracle), DictWeights(tensors_of(oracle))).vision
    tower = towers["second"]
    list(towers["first"].encode(tiles, PLAIN_LEVELS))  # what modules make at their first use
    predicted = tower.working_bytes(height, width)
    tracemalloc.start()
    try:
        made = list(tower.encode(tiles, PLAIN_LEVELS))
        taken = tracemalloc.get_traced_memory()[1] - sum(rows.nbytes for rows in made)
    finally:
        tracemalloc.stop()
    assert taken <= predicted <= tower.working_bytes() if family in DYNAMIC else taken <= predicted
    if width > 400:  # of few patches, what is taken at once for some is the most
        assert predicted < 3 * taken
    if tower.config.num_layers:
        assert tower.working_bytes(height, width) < predicted  # the executor keeps some


def test_an_image_for_which_there_is_no_memory_is_refused(
    model: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = model[1]
    needed_bytes = decoder.vision.working_bytes(32, 32)
    monkeypatch.setattr(image_encoder, "available", lambda: Available(needed_bytes - 1, "a limit"))
    with Rig(decoder) as rig:
        with pytest.raises(
            RequestError, match=r"an image of 32 x 32 pixels .* MiB are available \(a limit\)"
        ):
            rig.engine.submit(request_with(1, 2))
        monkeypatch.setattr(image_encoder, "available", lambda: Available(needed_bytes, "a limit"))
        assert len(rig.tokens(request_with(1, 2))[0]) == NUM_TOKENS


def test_a_pool_leaves_memory_to_the_largest_image(
    model: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = model[1]
    free_bytes = decoder.vision.working_bytes() + (400 << 20)
    monkeypatch.setattr(limits, "available_bytes", lambda: free_bytes)
    with_tower = pool_bytes(decoder, 100 << 20, 8)
    monkeypatch.setattr(decoder, "vision", None)
    assert with_tower == default_kv_bytes(100 << 20, 400 << 20) < pool_bytes(decoder, 100 << 20, 8)


def test_texts_are_computed_while_images_are_encoded(slow: tuple[Any, SlowTower]) -> None:
    decoder, tower = slow
    with Rig(decoder) as rig:
        waiting = rig.engine.submit(request_with(1, 2))
        (tokens,) = rig.tokens(TEXT)
        assert len(tokens) == NUM_TOKENS
        assert waiting.finish_reason is None
        tower.go_on.set()
        assert len(waiting.result(TIMEOUT_S).tokens) == NUM_TOKENS


def test_images_that_come_while_a_step_is_planned_do_not_end_the_engine(
    slow: tuple[Any, SlowTower], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planning asks twice whether a sequence waits for images. Both answers must be the same, or the engine fails."""
    decoder, tower = slow
    request, plan_step = request_with(1, 2), step_loop.plan_step

    def plan_meanwhile(*args: Any, **named: Any) -> Any:
        plan = plan_step(*args, **named)
        if not tower.go_on.is_set():
            tower.go_on.set()
            end_s = time.monotonic() + 0.3  # of an encoder that waits until it is planned
            while any(image.rows is None for image in request.images) and time.monotonic() < end_s:
                time.sleep(0.001)
        return plan

    monkeypatch.setattr(step_loop, "plan_step", plan_meanwhile)
    with Rig(decoder) as rig:
        assert len(rig.tokens(request)[0]) == NUM_TOKENS


def test_a_request_that_is_cancelled_is_not_encoded_on(slow: tuple[Any, SlowTower]) -> None:
    decoder, tower = slow
    with Rig(decoder) as rig:
        rig.engine.start()
        cancelled = rig.engine.submit(request_with(1, 2))
        cancelled.cancel()
        tower.go_on.set()
        assert len(rig.engine.submit(request_with(3, 3)).result(TIMEOUT_S).tokens) == NUM_TOKENS
        # At most the tile under way was of the cancelled one; of the other, no image is an earlier one.
        assert tower.num_tiles <= 4
        assert cancelled.finish_reason is FinishReason.CANCELLED


def test_a_failure_of_the_tower_ends_its_request_alone(slow: tuple[Any, SlowTower]) -> None:
    decoder, tower = slow
    tower.failure = ModelError("the tower fell")
    tower.go_on.set()
    with Rig(decoder) as rig:
        rig.engine.start()
        with pytest.raises(ModelError, match="the tower fell"):
            rig.engine.submit(request_with(1, 2)).result(TIMEOUT_S)
        assert len(rig.engine.submit(TEXT).result(TIMEOUT_S).tokens) == NUM_TOKENS


def test_rows_of_images_are_kept_for_the_next_request(slow: tuple[Any, SlowTower]) -> None:
    decoder, tower = slow
    tower.go_on.set()
    with Rig(decoder, prefix_cache=False) as rig:
        rig.tokens(request_with(1, 2))
        num_tiles = tower.num_tiles
        rig.engine.submit(request_with(1, 2)).result(TIMEOUT_S)
        assert tower.num_tiles == num_tiles


def test_kept_rows_are_bounded(slow: tuple[Any, SlowTower], monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, tower = slow
    tower.go_on.set()
    monkeypatch.setattr(image_encoder, "MAX_KEPT_BYTES", 0)
    with Rig(decoder, prefix_cache=False) as rig:
        rig.tokens(request_with(1, 2))
        num_tiles = tower.num_tiles
        rig.engine.submit(request_with(1, 2)).result(TIMEOUT_S)
        assert tower.num_tiles == 2 * num_tiles


@pytest.mark.parametrize("places", [PLACES[:3], [0, 1, 2, 3], PLACES[:5]])
def test_images_that_do_not_fit_their_places_are_refused(model: tuple[Any, Any], places: list[int]) -> None:
    request = GenerationRequest("r", PROMPT, images=(image_at(places, random_tiles(1)),))
    with Rig(model[1]) as rig, pytest.raises(RequestError, match="does not fit its places"):
        rig.engine.submit(request)


@pytest.mark.parametrize("model", ["llava_onevision"], indirect=True)
@pytest.mark.parametrize(
    ("num_tiles", "places", "layout"),
    [
        (1, range(3, 7), None),
        (2, range(3, 8), TileLayout()),
        (1, range(3, 7), TileLayout()),
        (2, range(3, 13), TileLayout(1, 1, 3, 2, 3, 2)),
        (2, range(3, 13), TileLayout(1, 1, 2, 2, 2, 3)),
    ],
)
def test_layouts_that_do_not_fit_their_places_are_refused(
    model: tuple[Any, Any], num_tiles: int, places: range, layout: TileLayout | None
) -> None:
    prompt = prompt_with([1, 2, 3], len(places))
    image = image_at(list(places), random_tiles(num_tiles), layout=layout)
    with Rig(model[1]) as rig, pytest.raises(RequestError, match="does not fit its places"):
        rig.engine.submit(GenerationRequest("r", prompt, images=(image,)))


def test_models_without_marks_take_no_layouts(model: tuple[Any, Any]) -> None:
    image = image_at(PLACES[:4], random_tiles(1), layout=TileLayout())
    with Rig(model[1]) as rig, pytest.raises(RequestError, match="does not fit its places"):
        rig.engine.submit(GenerationRequest("r", PROMPT, images=(image,)))


@pytest.mark.parametrize("places", [[3, 3], [-1], [len(PROMPT)]])
def test_places_outside_the_prompt_are_refused(places: list[int]) -> None:
    with pytest.raises(RequestError, match="images do not fit the prompt's tokens"):
        GenerationRequest("r", PROMPT, images=(image_at(places, random_tiles(1)),))


def test_keys_of_images_are_no_tokens_and_differ() -> None:
    images = [PromptImage(bytes([each]), None, np.empty(0), np.arange(64)) for each in range(4)]
    keys = [key for image in images for key in image.cache_keys()]
    assert min(keys) >= 1 << 62
    assert max(keys) < 1 << 63
    assert len(set(keys)) == len(keys)
