"""Blocks that the pool has given up come back from memory or a file, and no request notices but by
its speed.
"""

from __future__ import annotations

import random
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from tests.support.decoding import oracle_greedy
from tests.support.engine_rig import BLOCK_SIZE, GREEDY, TIMEOUT_S, EngineRig, finish
from tests.support.inspection import file_of, has_blocks_to_save, state_of, tiers_of
from tests.support.models import DictWeights, build_model
from tests.support.tiny_models import config_json, tensors_of, tiny_model
from tests.support.toy_decoder import UNWRITTEN, ToyDecoder, ToyPool, ToyTokenizer

from teneral.loader.errors import UsageError
from teneral.runtime.engine.engine import Engine, EngineOptions
from teneral.runtime.errors import DrainingError
from teneral.runtime.kv.spill import spill as spill_module
from teneral.runtime.kv.spill.policy import FetchPlan
from teneral.runtime.metrics import Metrics
from teneral.runtime.step.backend import host_backend
from teneral.runtime.step.requests import GenerationRequest

BLOCK_BYTES = ToyDecoder().kv_block_bytes(BLOCK_SIZE)
MUCH = 1 << 20


class CopiedPool(ToyPool):
    """The same, whose blocks can be copied out and in."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()  # a copy has begun, and may be waiting at the gate

    def copy_out(self, blocks, into):
        into.view(np.int64)[...] = self.data[:, list(blocks)].swapaxes(0, 1).reshape(len(blocks), -1)

    def copy_in(self, blocks, content):
        self.entered.set()
        assert self.gate.wait(TIMEOUT_S)
        rows = content.view(np.int64).reshape(len(blocks), 2, -1)
        self.data[:, list(blocks)] = rows.swapaxes(0, 1)


class SpillingToy(ToyDecoder):
    """The toy decoder over a pool that can be copied from and to."""

    pool: CopiedPool

    def new_kv(self, num_blocks, block_size):
        self.pool = CopiedPool(num_blocks, block_size)
        return self.pool


@pytest.fixture
def always(monkeypatch):
    """Whatever can be had is brought back, and there is time for it: a toy computes faster than any disk reads."""

    def plan(rates, **_):
        num_blocks = next((number for number, rate in enumerate(rates) if rate is None), len(rates))
        return FetchPlan(num_blocks, 0.0, TIMEOUT_S)

    monkeypatch.setattr(spill_module, "plan_fetch", plan)
    monkeypatch.setattr(spill_module, "is_worth_writing", lambda *_, **__: True)


def prompt(number: int, num_blocks: int = 5) -> tuple[int, ...]:
    return tuple((number * 17 + index * 3) % 60 for index in range(num_blocks * BLOCK_SIZE + 2))


def until(engine: Engine, predicate) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not predicate(engine.statistics().spill):
        assert time.monotonic() < deadline_s, engine.statistics().spill
        time.sleep(0.002)


def spill_threads() -> set[threading.Thread]:
    """Those of all engines of this process."""
    return {thread for thread in threading.enumerate() if thread.name == "teneral-kv-spill"}


def serve_three(rig) -> None:
    """Prompts 0, 1 and 2, each saved before the next one takes its blocks."""
    for number in range(3):
        finish(rig.submit(prompt(number), max_tokens=2))
        saved(rig.engine)


def saved(engine: Engine) -> None:
    """Wait until what is idle in the pool is on a medium, too."""
    spill = state_of(engine).blocks.spill
    until(engine, lambda _: not has_blocks_to_save(spill))


@contextmanager
def spilling(folder=None, **options):
    if folder is not None:
        options |= {"kv_disk_bytes": options.get("kv_disk_bytes", MUCH), "kv_disk_dir": str(folder)}
    with EngineRig(num_blocks=12, model=SpillingToy(), **options) as rig:
        yield rig


MEDIA = {
    "host": {"kv_host_bytes": MUCH},
    "disk": {"kv_disk_bytes": MUCH},
    "both": {"kv_host_bytes": 13 * BLOCK_BYTES, "kv_disk_bytes": MUCH},
}


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("media", MEDIA)
def test_a_prompt_whose_blocks_were_given_up_is_not_computed_again(media, tmp_path):
    folder = tmp_path if "disk" in media or media == "both" else None
    with spilling(folder, **MEDIA[media]) as rig:
        for number in range(4):  # each takes six of the twelve blocks
            finish(rig.submit(prompt(number), max_tokens=2))
            saved(rig.engine)
        assert rig.engine.statistics().prefix_evictions_total > 0
        rig.model.batch_tokens.clear()
        again = rig.submit(prompt(0), max_tokens=2)
        assert finish(again).tokens == rig.expected(prompt(0), 2)
        assert again.num_cached_tokens == 5 * BLOCK_SIZE
        assert rig.model.batch_tokens[0] == 2  # of 22
        statistics = rig.engine.statistics()
        assert sum(statistics.spill.restored_tokens_total.values()) == 5 * BLOCK_SIZE
        assert statistics.prefix_hit_tokens_total == 5 * BLOCK_SIZE


@pytest.mark.usefixtures("always")
def test_who_gives_another_salt_gets_nothing_back(tmp_path):
    with spilling(tmp_path) as rig:
        for number in range(3):
            finish(rig.submit(prompt(number), max_tokens=2, cache_salt="a"))
            saved(rig.engine)
        other = rig.submit(prompt(0), max_tokens=2, cache_salt="b")
        finish(other)
        assert other.num_cached_tokens == 0
        same = rig.submit(prompt(0), max_tokens=2, cache_salt="a")
        finish(same)
        assert same.num_cached_tokens == 5 * BLOCK_SIZE


@pytest.mark.usefixtures("always")
def test_others_go_on_while_blocks_come_back(tmp_path):
    with spilling(tmp_path) as rig:
        serve_three(rig)
        rig.model.pool.gate.clear()
        waits = rig.submit(prompt(0), max_tokens=2)
        until(rig.engine, lambda spill: spill.fetching == 1)
        behind = rig.submit((5, 6, 7), max_tokens=8)
        assert finish(behind).tokens == rig.expected((5, 6, 7), 8)
        assert rig.engine.statistics().queued == 1
        rig.engine.check_integrity()
        rig.model.pool.gate.set()
        assert finish(waits).tokens == rig.expected(prompt(0), 2)
        assert waits.num_cached_tokens == 5 * BLOCK_SIZE


@pytest.mark.usefixtures("always")
def test_who_overtakes_those_that_wait_for_blocks_finds_its_own_beginning(tmp_path):
    with spilling(tmp_path, max_running=1) as rig:
        serve_three(rig)
        rig.model.pool.gate.clear()
        waits = rig.submit(prompt(0), max_tokens=2)
        until(rig.engine, lambda spill: spill.fetching == 1)
        behind = rig.submit(prompt(2), max_tokens=2)
        assert finish(behind).tokens == rig.expected(prompt(2), 2)
        assert behind.num_cached_tokens == 5 * BLOCK_SIZE
        rig.model.pool.gate.set()
        assert finish(waits).tokens == rig.expected(prompt(0), 2)
        assert waits.num_cached_tokens == 5 * BLOCK_SIZE


def test_what_does_not_come_back_in_time_is_computed(always, monkeypatch, tmp_path):
    with spilling(tmp_path) as rig:
        serve_three(rig)
        monkeypatch.setattr(spill_module, "plan_fetch", lambda rates, **_: FetchPlan(len(rates), 0.0, 0.05))
        rig.model.pool.gate.clear()
        late = rig.submit(prompt(0), max_tokens=2)
        until(rig.engine, lambda spill: spill.late_fetches_total == 1)
        rig.model.pool.gate.set()
        assert finish(late).tokens == rig.expected(prompt(0), 2)


@pytest.mark.usefixtures("always")
def test_a_cancelled_request_does_not_wait_for_its_blocks(tmp_path):
    with spilling(tmp_path) as rig:
        serve_three(rig)
        rig.model.pool.gate.clear()
        waits = rig.submit(prompt(0), max_tokens=2)
        until(rig.engine, lambda spill: spill.fetching == 1)
        waits.cancel()
        assert rig.engine.statistics().queued == 0
        rig.model.pool.gate.set()


@pytest.mark.usefixtures("always")
def test_the_engine_stops_in_the_middle_of_a_fetch(tmp_path):
    before = spill_threads()
    with spilling(tmp_path) as rig:
        serve_three(rig)
        rig.model.pool.gate.clear()
        rig.model.pool.entered.clear()
        waits = rig.submit(prompt(0), max_tokens=2)
        until(rig.engine, lambda spill: spill.fetching == 1)
        assert rig.model.pool.entered.wait(TIMEOUT_S)
        assert spill_threads() - before
        assert not rig.engine.stop(0.05)  # the block that is being copied
        with pytest.raises(DrainingError):
            finish(waits)
        rig.model.pool.gate.set()
        assert rig.engine.stop(TIMEOUT_S)
        assert not spill_threads() - before


def test_by_what_is_measured_the_tokens_are_the_same(tmp_path):
    """With nothing decided for it: whether blocks are written and brought back depends on this machine."""
    with spilling(tmp_path, kv_host_bytes=MUCH) as rig:
        rig.model.before_forward = lambda _: time.sleep(0.005)
        for number in (0, 1, 2, 0, 1, 2, 0, 1, 2):
            assert finish(rig.submit(prompt(number), max_tokens=3)).tokens == rig.expected(prompt(number), 3)
        rig.engine.check_integrity()


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("seed", range(6))
def test_under_pressure_every_token_is_right(seed, tmp_path):
    chance = random.Random(seed)
    stems = [tuple(chance.randrange(60) for _ in range(chance.randrange(8, 30))) for _ in range(5)]
    media = chance.choice(list(MEDIA))
    folder = tmp_path if media != "host" else None
    with spilling(folder, max_running=4, max_context=44, **MEDIA[media]) as rig:
        for _ in range(6):
            wanted = []
            for _ in range(8):
                stem = chance.choice(stems)
                stem = stem[: chance.randrange(1, 2 * len(stem))]
                tokens = (*stem, *(chance.randrange(60) for _ in range(chance.randrange(4))))
                num_tokens = chance.randrange(1, 10)
                generation = rig.submit(tokens, max_tokens=num_tokens)
                if chance.random() < 0.15:
                    generation.cancel()
                else:
                    wanted.append((generation, tokens, num_tokens))
            for generation, tokens, num_tokens in wanted:
                assert finish(generation).tokens == rig.expected(tokens, num_tokens)
            rig.engine.check_integrity()
        assert sum(rig.engine.statistics().spill.failures_total.values()) == 0


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    ("family", "media"),
    [
        ("llama", "host"),
        ("llama", "disk"),
        ("lfm2", "host"),
        ("deepseek_v2", "disk"),
        ("gemma4_text", "disk"),
    ],
)
def test_a_real_model_says_the_same_behind_blocks_that_came_back(family, media, tmp_path):
    oracle = tiny_model(family)
    decoder = build_model(config_json(oracle), DictWeights(tensors_of(oracle)))
    options = EngineOptions(
        kv_bytes=16 * decoder.kv_block_bytes(4),
        block_size=4,
        max_context=64,
        kv_host_bytes=MUCH if media == "host" else 0,
        kv_disk_bytes=MUCH if media == "disk" else 0,
        kv_disk_dir=str(tmp_path) if media == "disk" else None,
    )
    engine = Engine(decoder, ToyTokenizer(), options=options, make_backend=host_backend)
    engine.start()
    try:
        stems = [tuple((index * 11 + number * 7) % 250 for index in range(41)) for number in range(3)]
        for number in (0, 1, 2, 0):
            generation = engine.submit(GenerationRequest("r", stems[number], 10, GREEDY))
            with torch.no_grad():
                assert generation.result(TIMEOUT_S).tokens == tuple(oracle_greedy(oracle, stems[number], 10))
            saved(engine)
        assert generation.num_cached_tokens == 40
        assert engine.statistics().spill.restored_tokens_total[media] > 0
    finally:
        assert engine.stop(TIMEOUT_S)


@pytest.mark.usefixtures("always")
def test_what_it_does_can_be_seen(tmp_path):
    with spilling(tmp_path, kv_host_bytes=2 * BLOCK_BYTES) as rig:
        for number in (0, 1, 2, 0):
            finish(rig.submit(prompt(number), max_tokens=2))
            saved(rig.engine)
        text = Metrics().render({"engine": rig.engine.statistics()}).decode()
        assert "teneral_engine_spill_blocks_host 2.0" in text
        assert f"teneral_engine_spill_bytes_host {2.0 * BLOCK_BYTES}" in text
        assert 'teneral_engine_spill_restored_tokens_total{kind="disk"}' in text
        assert 'teneral_engine_spill_dropped_blocks_total{kind="disk"} 0.0' in text
        assert 'teneral_engine_spill_failures_total{kind="disk"} 0.0' in text
        assert "teneral_engine_spill_fetches_total 1.0" in text


def test_without_a_budget_there_is_none():
    with EngineRig() as rig:
        assert rig.engine.statistics().spill is None


def test_an_engine_that_never_started_gives_its_file_back(tmp_path):
    before = spill_threads()
    with spilling(tmp_path, start=False) as rig:
        medium = tiers_of(state_of(rig.engine).blocks.spill).all[0].medium
        assert not spill_threads() - before
        rig.engine.stop()
        assert file_of(medium).closed


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"kv_disk_bytes": MUCH}, "kv_disk_dir"),
        ({"kv_host_bytes": BLOCK_BYTES - 1}, "kv_host_bytes"),
        ({"kv_host_bytes": -1}, "kv_host_bytes"),
        ({"kv_host_bytes": MUCH, "prefix_cache": False}, "prefix_cache"),
        ({"kv_disk_bytes": MUCH, "kv_disk_dir": "/dev/null/folder"}, "kv_disk_dir"),
    ],
)
def test_invalid_options_are_refused(options, key):
    with pytest.raises(UsageError) as caught:
        EngineRig(start=False, **options)
    assert caught.value.key == key


def test_the_toy_pool_copies_whole_blocks():
    model = SpillingToy()
    pool = model.new_kv(4, BLOCK_SIZE)
    pool.data[:, 2] = np.arange(2 * BLOCK_SIZE).reshape(2, BLOCK_SIZE)
    content = np.empty((1, BLOCK_BYTES), np.uint8)
    pool.copy_out([2], content)
    pool.copy_in([0], content)
    np.testing.assert_array_equal(pool.data[:, 0], pool.data[:, 2])
    assert (pool.data[:, 1] == UNWRITTEN).all()
