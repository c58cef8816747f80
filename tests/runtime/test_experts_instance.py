"""Instances of a mixture of experts in less memory than it takes: the same tokens, and errors that name the expert."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.load import patience_s
from tests.support.paced import PacedSource, reads_of
from tests.support.tiny_models import save_tiny
from tests.test_serve_fine_tune import shift_weights

from teneral.loader.artifact import open_artifact
from teneral.loader.errors import PartsUnavailableError, UnavailableError, UsageError
from teneral.loader.format.manifest import Encoding, Manifest
from teneral.loader.load.plan import expert_groups
from teneral.loader.native.library import library
from teneral.loader.sources.file.store import FileStore
from teneral.loader.timeline import Timeline
from teneral.loader.tools.pack.content import Base
from teneral.loader.tools.pack.pack import pack
from teneral.loader.tools.pack.plan import TierOptions
from teneral.loader.tools.pack.quantize_plan import QuantizeOptions
from teneral.runtime.config import ServeConfig
from teneral.runtime.instance.instance import Instance
from teneral.runtime.kv_export import PrefixText, export_prefixes
from teneral.runtime.state import State
from teneral.runtime.step.requests import FinishReason, GenerationRequest, SamplingParams

pytestmark = pytest.mark.skipif(library() is None, reason="the native libraries are not built here")

WAIT_S = patience_s(60)
LAYERS, EXPERTS, USED = 3, 8, 2
PROMPTS = [tuple(range(number, number + 5 * number + 3)) for number in range(1, 5)]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    shape = {"num_local_experts": EXPERTS, "num_experts_per_tok": USED, "num_hidden_layers": LAYERS}
    save_tiny("mixtral", folder / "model", dtype=torch.bfloat16, **shape)
    pack(FileStore(folder / "model"), FileStore(folder / "packed"))
    return folder / "packed"


@pytest.fixture(scope="module")
def manifest(artifact: Path) -> Manifest:
    return open_artifact(FileStore(artifact))


@pytest.fixture(scope="module")
def least_bytes(manifest: Manifest) -> int:
    """The least bytes of weights that one step needs."""
    experts = expert_groups(manifest)
    sizes = {group.index: group.slab_bytes for group in manifest.groups}
    resident = sum(size for index, size in sizes.items() if index not in experts)
    return resident + EXPERTS * sizes[min(experts)]


def config(artifact: Path, **settings: Any) -> ServeConfig:
    values = {"kv_bytes": 8 << 20, "threads": 1, "prefix_cache": False, "loader": "thread"}
    return ServeConfig(model=str(artifact), **values | settings)


@contextmanager
def serving(artifact: Path, **settings: Any) -> Iterator[tuple[Instance, PacedSource]]:
    source = PacedSource(FileStore(artifact))
    source.delay(seed=1, max_s=0.002)
    with Instance(config(artifact, **settings), source=source) as instance:
        yield instance, source


def request(prompt: tuple[int, ...], max_tokens: int = 8) -> GenerationRequest:
    return GenerationRequest("r", prompt, max_tokens, sampling=SamplingParams(temperature=0), ignore_eos=True)


def answers(instance: Instance) -> list[tuple[int, ...]]:
    """Of all prompts at once."""
    engine = instance.engine.result(WAIT_S)
    running = [engine.submit(request(prompt)) for prompt in PROMPTS]
    return [each.result(WAIT_S).tokens for each in running]


def paging(instance: Instance) -> Any:
    return instance.statistics()["experts"]


@pytest.fixture(scope="module")
def expected(artifact: Path) -> list[tuple[int, ...]]:
    with serving(artifact) as (instance, _):
        assert instance.wait_exact(WAIT_S)
        assert "experts" not in instance.statistics()
        return answers(instance)


def test_requests_that_follow_the_experts_get_the_tokens_of_the_whole_load(artifact, expected) -> None:
    for seed in range(3):
        with serving(artifact) as (instance, source):
            source.delay(seed=seed, max_s=0.02)
            assert answers(instance) == expected


@pytest.mark.parametrize(
    ("folder", "settings"),
    [
        ("packed", {"loader": "process"}),
        ("model", {}),
        ("model", {"mmap": False}),
        ("model", {"mmap": False, "loader": "process"}),
    ],
)
def test_every_way_to_load_a_mixture_gives_the_same_tokens(artifact, expected, folder, settings) -> None:
    with Instance(config(artifact.parent / folder, **settings)) as instance:
        assert answers(instance) == expected


def test_unpacked_experts_come_and_go_too(artifact, expected, manifest) -> None:
    half_bytes = manifest.weight_bytes * 3 // 5
    with Instance(config(artifact.parent / "model", weights_bytes=half_bytes)) as instance:
        assert answers(instance) == expected
        assert paging(instance).evictions_total > 0


def whole_and_paged(folder: Path, **settings: Any) -> None:
    """The same tokens with all experts, and with room for few of them."""
    with Instance(config(folder, **settings)) as instance:
        expected = answers(instance)
        assert instance.wait_exact(WAIT_S)
        weight_bytes = instance.opened()[1].weight_bytes
    with Instance(config(folder, weights_bytes=weight_bytes * 3 // 4, **settings)) as instance:
        assert answers(instance) == expected
        assert paging(instance).evictions_total > 0


@pytest.mark.parametrize("bits", [8, 4])
def test_integers_come_and_go_with_their_scales(tmp_path, bits) -> None:
    shape = {"num_local_experts": EXPERTS, "num_experts_per_tok": USED, "intermediate_size": 128}
    save_tiny("mixtral", tmp_path / "model", dtype=torch.bfloat16, **shape)
    pack(FileStore(tmp_path / "model"), FileStore(tmp_path / "packed"), quantize=QuantizeOptions(bits))
    whole_and_paged(tmp_path / "packed")


def test_differences_are_added_each_time_that_an_expert_comes(artifact, tmp_path) -> None:
    shutil.copytree(artifact.parent / "model", tmp_path / "tuned")
    shift_weights(tmp_path / "tuned" / "model.safetensors")
    pack(FileStore(tmp_path / "tuned"), FileStore(tmp_path / "delta"), base=Base(FileStore(artifact)))
    stored = open_artifact(FileStore(tmp_path / "delta"), without_base=True)
    assert sum(tensor.encoding is Encoding.DELTA for tensor in stored.tensors) > EXPERTS
    whole_and_paged(tmp_path / "delta", base=str(artifact))


def test_a_draft_that_was_asked_for_comes_and_goes_with_the_rest(artifact, tmp_path) -> None:
    pack(
        FileStore(artifact.parent / "model"), FileStore(tmp_path / "packed"), tiers=TierOptions(draft_bits=3)
    )
    whole_and_paged(tmp_path / "packed")


def test_tokens_are_the_same_with_evictions_in_every_step(artifact, expected, least_bytes) -> None:
    with serving(artifact, weights_bytes=least_bytes) as (instance, _):
        assert answers(instance) == expected
        figures = paging(instance)
        assert figures.evictions_total >= 8 * (LAYERS - 1), "there is room for one layer's experts"
        assert figures.resident_bytes <= figures.budget_bytes
        assert instance.wait_exact(WAIT_S)
        assert instance.state is State.READY
        assert answers(instance) == expected
        instance.load.check_integrity()
        instance.engine.result().check_integrity()


def test_half_of_the_memory_serves_the_same_tokens_alone_and_together(artifact, expected, manifest) -> None:
    with serving(artifact, weights_bytes=manifest.weight_bytes * 3 // 5) as (instance, _):
        engine = instance.engine.result(WAIT_S)
        assert [engine.submit(request(each)).result(WAIT_S).tokens for each in PROMPTS] == expected
        assert answers(instance) == expected
        assert 0 < paging(instance).evictions_total < paging(instance).misses_total


def test_a_model_that_fits_is_loaded_whole(artifact, expected, manifest) -> None:
    with serving(artifact, weights_bytes=manifest.weight_bytes) as (instance, _):
        assert answers(instance) == expected
        assert instance.wait_exact(WAIT_S)
        assert "experts" not in instance.statistics()


def test_a_store_that_fails_during_a_fetch_fails_the_request_and_no_other(
    artifact, expected, manifest, least_bytes
) -> None:
    with serving(artifact, weights_bytes=least_bytes) as (instance, source):
        assert instance.wait_exact(WAIT_S)
        is_down = [True]
        of_experts = reads_of(
            manifest, *(part for part in manifest.parts if part.group in expert_groups(manifest))
        )
        source.fail(
            lambda: UnavailableError("the store is gone"), lambda call: is_down[0] and of_experts(call)
        )
        failed = instance.engine.result(WAIT_S).submit(request(PROMPTS[0]))
        with pytest.raises(PartsUnavailableError, match=r"layers\.0\.experts\.\d.*the store is gone"):
            failed.result(WAIT_S)
        assert instance.failure is None
        is_down[0] = False
        assert answers(instance) == expected
        instance.engine.result().check_integrity()


def test_a_damaged_expert_is_never_computed(artifact, expected, manifest, least_bytes) -> None:
    with serving(artifact, weights_bytes=least_bytes) as (instance, source):
        assert instance.wait_exact(WAIT_S)
        source.spoil(
            reads_of(manifest, *(part for part in manifest.parts if part.group in expert_groups(manifest))),
            times=2 * EXPERTS,
        )
        failed = instance.engine.result(WAIT_S).submit(request(PROMPTS[0]))
        with pytest.raises(PartsUnavailableError, match="wrong digest"):
            failed.result(WAIT_S)
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:  # until all that was spoilt has been read
            try:
                assert answers(instance) == expected
                break
            except PartsUnavailableError:
                continue


def test_a_request_that_is_cancelled_while_it_waits_for_an_expert_frees_its_place(
    artifact, expected, manifest, least_bytes
) -> None:
    for settings in ({}, {"weights_bytes": least_bytes}):
        with serving(artifact, **settings) as (instance, source):
            held = source.hold(
                reads_of(
                    manifest, *(part for part in manifest.parts if part.group in expert_groups(manifest))
                )
            )
            engine = instance.engine.result(WAIT_S)
            waiting = engine.submit(request(PROMPTS[0]))
            held.wait_reached()
            waiting.cancel()
            assert waiting.result(WAIT_S).finish_reason is FinishReason.CANCELLED
            held.release()
            assert answers(instance) == expected
            engine.check_integrity()


def test_closing_ends_a_request_that_waits_for_an_expert(artifact, manifest, least_bytes) -> None:
    for settings in ({}, {"weights_bytes": least_bytes}):
        with serving(artifact, **settings) as (instance, source):
            held = source.hold(
                reads_of(
                    manifest, *(part for part in manifest.parts if part.group in expert_groups(manifest))
                )
            )
            waiting = instance.engine.result(WAIT_S).submit(request(PROMPTS[0]))
            held.wait_reached()
            closing = threading.Thread(target=instance.close)
            closing.start()
            with pytest.raises(Exception, match=r"shutting down|closed|cancelled"):
                waiting.result(WAIT_S)
            closing.join(WAIT_S)
            assert not closing.is_alive()


def num_asked(instance: Instance) -> int:
    figures = paging(instance)
    return figures.hits_total + figures.misses_total


def test_of_a_prefix_that_is_known_only_the_rest_asks_for_experts(artifact, least_bytes) -> None:
    prompt = tuple(range(33))
    with serving(artifact, weights_bytes=least_bytes, prefix_cache=True) as (instance, _):
        engine = instance.engine.result(WAIT_S)
        first = engine.submit(request(prompt, 1)).result(WAIT_S)
        whole = num_asked(instance)
        again = engine.submit(request(prompt, 1))
        assert again.result(WAIT_S).tokens == first.tokens
        assert again.num_cached_tokens == 32
        assert num_asked(instance) - whole <= USED * LAYERS < whole


def test_with_a_snapshot_only_the_rest_of_the_first_prompt_asks_for_experts(
    artifact, least_bytes, tmp_path
) -> None:
    system, settings = (
        "You answer in verse, never in prose.",
        {"prefix_cache": True, "weights_bytes": least_bytes},
    )
    with serving(artifact, **settings) as (instance, _):
        prompt = tuple(instance.tokenizer.result(WAIT_S).encode(system)[:33])
        expected = instance.engine.result(WAIT_S).submit(request(prompt, 4)).result(WAIT_S).tokens
    address = str(tmp_path / "kv")
    export_prefixes(config(artifact, prefix_cache=True), address, [PrefixText("p", system, False)])
    with serving(artifact, kv_snapshot=address, kv_snapshot_save=False, **settings) as (instance, _):
        engine = instance.engine.result(WAIT_S)
        for thread in threading.enumerate():
            if thread.name == "teneral-kv-snapshot":
                thread.join(WAIT_S)
        found = engine.submit(request(prompt, 4))
        assert found.result(WAIT_S).tokens == expected
        assert found.num_cached_tokens == 32
        assert num_asked(instance) <= 4 * USED * LAYERS


def test_the_timeline_shows_the_waits(artifact, manifest, least_bytes) -> None:
    source, timeline = PacedSource(FileStore(artifact)), Timeline()
    held = source.hold(
        reads_of(manifest, *(part for part in manifest.parts if part.group in expert_groups(manifest)))
    )
    settings = config(artifact, weights_bytes=least_bytes)
    with Instance(settings, source=source, timeline=timeline) as instance:
        waiting = instance.engine.result(WAIT_S).submit(request(PROMPTS[0], 1))
        held.wait_reached()
        time.sleep(0.02)
        held.release()
        waiting.result(WAIT_S)
    waits = [span for span in timeline.spans() if span.lane == "experts"]
    assert {span.name for span in waits} <= {f"layers.{layer}" for layer in range(LAYERS)}
    assert waits[0].name == "layers.0"
    assert waits[0].end_s - waits[0].start_s > 0.01


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights_bytes": 1000}, "a step needs"),
        ({"weights_bytes": 0.9, "loader": "process"}, "own threads"),
        ({"weights_bytes": 0.9, "backend": "torch"}, "own threads|all experts of a layer at once"),
        ({"weights_bytes": 0.9, "verify_exact": True}, "compares all weights"),
    ],
)
def test_what_cannot_be_is_refused(artifact, manifest, settings, message) -> None:
    if isinstance(settings["weights_bytes"], float):
        settings = settings | {"weights_bytes": int(manifest.weight_bytes * settings["weights_bytes"])}
    with Instance(config(artifact, **settings)) as instance, pytest.raises(UsageError, match=message):
        instance.engine.result(WAIT_S)
