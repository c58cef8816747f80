"""The life of an instance: requests follow the bytes, and what fails, fails once and by name."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.inspection import threads_of
from tests.support.load import patience_s
from tests.support.memory_store import MemoryStore
from tests.support.paced import PacedSource, reads_of
from tests.support.tiny_models import save_tiny, tiny_model

from teneral.loader.artifact import open_artifact
from teneral.loader.errors import (
    CheckpointError,
    IntegrityError,
    NotFoundError,
    UnavailableError,
    UsageError,
)
from teneral.loader.format.manifest import Manifest, Tier
from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.pack import pack
from teneral.runtime.config import ServeConfig
from teneral.runtime.errors import DrainingError, ModelError
from teneral.runtime.instance import model
from teneral.runtime.instance.instance import Instance
from teneral.runtime.kv.storage import DEFAULT_KV_BYTES, default_kv_bytes
from teneral.runtime.resolve import resolve
from teneral.runtime.state import State
from teneral.runtime.step.requests import GenerationRequest, SamplingParams

WAIT_S = patience_s(60)
CONFIG = ServeConfig(model="memory", kv_bytes=8 << 20, connections=2)
IN_ORDER = CONFIG.replace(draft_ahead=False)
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tiny("llama", directory, num_hidden_layers=4)
    return directory


@pytest.fixture(scope="module")
def packed(checkpoint: Path) -> MemoryStore:
    store = MemoryStore()
    pack(FileStore(checkpoint), store)
    return store


@pytest.fixture
def artifact(packed: MemoryStore) -> MemoryStore:
    return packed.reopen()


def group_reads(manifest: Manifest, name: str) -> Any:
    group = next(group.index for group in manifest.groups if group.name == name)
    parts = [part for tier in Tier for part in manifest.parts_of(group, tier)]
    return reads_of(manifest, *parts)


def request(tokens: tuple[int, ...] = (5, 6, 7), max_tokens: int = 8) -> GenerationRequest:
    return GenerationRequest(
        request_id="test", prompt_tokens=tokens, max_tokens=max_tokens, sampling=GREEDY, ignore_eos=True
    )


def generate(instance: Instance, **arguments: Any) -> list[int]:
    engine = instance.engine.result(WAIT_S)
    generation = engine.submit(request(**arguments))
    return [token for event in generation.events(WAIT_S) for token in event.tokens]


def test_weights_used_where_their_file_lies_give_the_same_tokens(checkpoint: Path) -> None:
    config = CONFIG.replace(model=str(checkpoint), loader="thread")
    answers = []
    for mmap in (True, False):
        with Instance(config.replace(mmap=mmap)) as instance:
            answers.append(generate(instance, max_tokens=32))
            assert instance.wait_exact(WAIT_S)
            assert (instance.statistics()["load"].staging_capacity_bytes == 0) is mmap
    assert answers[0] == answers[1]


def test_the_first_layer_has_executed_before_the_last_layers_bytes_arrive(
    artifact: MemoryStore,
) -> None:
    manifest = open_artifact(artifact)
    paced = PacedSource(artifact)
    last = paced.hold(group_reads(manifest, "layers.3"))
    with Instance(IN_ORDER, source=paced) as instance:
        generation = instance.engine.result(WAIT_S).submit(request())
        last.wait_reached()
        span = wait_for_span(instance, "execute", "layers.2")
        assert span is not None
        assert instance.timeline.first("execute", "layers.3") is None
        assert instance.state is State.PARTIAL
        assert instance.timeline.first("ready", "layers.3 exact") is None
        forecast = instance.forecast()
        assert forecast is not None
        assert forecast.rate_bytes_per_s > 0
        assert forecast.first_token_s > 0
        last.release()
        tokens = [token for event in generation.events(WAIT_S) for token in event.tokens]
    with Instance(CONFIG, source=artifact.reopen()) as whole:
        assert tokens == generate(whole)
        assert len(tokens) == 8


def wait_for_span(instance: Instance, lane: str, name: str) -> Any:
    """The span once it is there. The engine writes it from its own thread, so this looks again until the
    deadline.
    """
    deadline = time.monotonic() + WAIT_S
    while (span := instance.timeline.first(lane, name)) is None and time.monotonic() < deadline:
        time.sleep(0.005)
    return span


def test_a_plain_checkpoint_gives_the_same_tokens_as_its_artifact(
    checkpoint: Path, artifact: MemoryStore
) -> None:
    with Instance(CONFIG, source=artifact) as packed:
        expected = generate(packed)
    with Instance(CONFIG, source=FileStore(checkpoint)) as plain:
        assert generate(plain) == expected


def test_an_instance_says_when_it_is_ready(artifact: MemoryStore) -> None:
    source = PacedSource(artifact)
    held = source.hold()
    with Instance(CONFIG, source=source) as instance:
        held.wait_reached()
        assert instance.state in (State.LOADING, State.PARTIAL)
        held.release()
        generate(instance)
        assert instance.state is State.READY
        assert instance.progress()["fraction"] == 1.0
        assert instance.forecast() is None
        assert instance.kind.result(WAIT_S) == "decoder"
        assert instance.statistics()["state"] == "ready"
    assert instance.state is State.DRAINING


def test_no_request_waits_longer_than_the_configuration_allows(artifact: MemoryStore, tmp_path: Path) -> None:
    file = tmp_path / "teneral.toml"
    file.write_text("max_wait_s = 2\n")
    assert resolve({"model": "m"}, {}).max_wait_s is None
    for flags, environment, expected_s in (
        ({}, {}, 2.0),
        ({}, {"TENERAL_MAX_WAIT_S": "0.25"}, 0.25),
        ({"max_wait_s": "0"}, {"TENERAL_MAX_WAIT_S": "0.25"}, 0.0),
    ):
        config = resolve({"model": "m", "kv_bytes": CONFIG.kv_bytes, **flags}, environment, file)
        with Instance(config, source=artifact.reopen()) as instance:
            assert instance.engine.result(WAIT_S).options.max_wait_s == expected_s


def test_blocks_that_the_pool_gives_up_are_spilled_where_the_configuration_says(
    artifact: MemoryStore, tmp_path: Path
) -> None:
    sizes = {"kv_host_bytes": 1 << 20, "kv_disk_bytes": 1 << 20, "kv_disk_dir": str(tmp_path)}
    with Instance(CONFIG.replace(**sizes), source=artifact) as instance:
        spill = instance.engine.result(WAIT_S).statistics().spill
    assert spill is not None
    assert set(spill.blocks) == {"host", "disk"}


def test_an_instance_with_an_invalid_spill_fails_by_name(artifact: MemoryStore) -> None:
    config = CONFIG.replace(kv_disk_bytes=1 << 20)
    with (
        Instance(config, source=artifact) as instance,
        pytest.raises(UsageError, match="without kv_disk_dir"),
    ):
        instance.engine.result(WAIT_S)


def test_an_instance_of_an_encoder_embeds_and_refuses_to_generate(tmp_path: Path) -> None:
    save_tiny("bert", tmp_path)
    with Instance(CONFIG, source=FileStore(tmp_path)) as instance:
        embedder = instance.embedder.result(WAIT_S)
        assert embedder.embed([[5, 6, 7]]).result(WAIT_S).shape[0] == 1
        assert instance.kind.result(WAIT_S) == "encoder"
        with pytest.raises(ModelError, match="does not generate text"):
            instance.engine.result(WAIT_S)


def test_a_failing_store_fails_the_instance_and_everything_that_waits(artifact: MemoryStore) -> None:
    source = PacedSource(artifact)
    manifest = open_artifact(artifact)
    source.fail(lambda: UnavailableError("the store is gone"), group_reads(manifest, "layers.2"))
    with Instance(CONFIG, source=source) as instance:
        failure = instance.ended.result(WAIT_S)
        assert failure is not None
        assert "the store is gone" in str(failure)
        assert instance.state is State.FAILED


def test_an_empty_store_is_named_and_every_future_is_answered() -> None:
    with Instance(CONFIG, source=MemoryStore()) as instance:
        failure = instance.ended.result(WAIT_S)
        assert isinstance(failure, NotFoundError | CheckpointError)
        for future in (instance.tokenizer, instance.engine, instance.embedder, instance.kind):
            assert future.exception(WAIT_S) is failure


def test_a_model_without_config_is_refused_with_what_to_do(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    (tmp_path / "config.json").unlink()
    with Instance(CONFIG, source=FileStore(tmp_path)) as instance:
        failure = instance.ended.result(WAIT_S)
    assert isinstance(failure, CheckpointError)
    assert "config.json" in failure.message
    assert failure.hint


def test_closing_while_weights_are_held_back_ends_at_once(artifact: MemoryStore) -> None:
    source = PacedSource(artifact)
    source.hold()
    instance = Instance(CONFIG, source=source).start()
    generation = instance.engine.result(WAIT_S).submit(request())
    instance.close()
    events = list(generation.events(WAIT_S))
    assert events[-1].finish_reason is not None
    assert instance.ended.result(WAIT_S) is None
    with pytest.raises(DrainingError):
        instance.engine.result(0).submit(request())


@pytest.mark.parametrize(
    ("weight_bytes", "free_bytes", "expected"),
    [
        (1 << 30, 64 << 30, DEFAULT_KV_BYTES),
        (1 << 30, 2 << 30, int(0.4 * (1 << 30))),
        (2 << 30, 1 << 30, 1 << 20),
    ],
)
def test_the_kv_pool_takes_a_share_of_what_the_weights_leave(
    weight_bytes: int, free_bytes: int | None, expected: int
) -> None:
    assert default_kv_bytes(weight_bytes, free_bytes) == expected


VERIFIED = CONFIG.replace(verify_exact=True)


def test_refined_tensors_are_compared_with_their_originals_on_demand(artifact: MemoryStore) -> None:
    with Instance(VERIFIED, source=artifact) as instance:
        assert instance.wait_exact()
        assert any(span.name == "verify exact" for span in instance.timeline.spans())


def test_a_tensor_that_is_not_what_was_packed_fails_the_instance_by_its_name(artifact: MemoryStore) -> None:
    source = PacedSource(artifact)
    manifest = open_artifact(artifact)
    last = source.hold(group_reads(manifest, manifest.groups[-1].name))
    with Instance(VERIFIED, source=source) as instance:
        last.wait_reached()
        tensor = next(each for each in manifest.tensors if "layers.1.mlp.down" in each.name)
        instance.opening.result(WAIT_S)
        load = instance.load
        load.wait(tensor.group, timeout_s=WAIT_S)
        load.slab(tensor.group)[tensor.offset_bytes + 7] ^= 1
        running = instance.engine.result(WAIT_S).submit(request(max_tokens=2_000))
        last.release()
        failure = instance.ended.result(WAIT_S)
        assert isinstance(failure, IntegrityError)
        assert tensor.name in failure.message
        with pytest.raises(IntegrityError):  # no request goes on with such weights
            running.result(WAIT_S)
        with pytest.raises(IntegrityError):
            instance.engine.result(WAIT_S).submit(request())


def test_what_has_no_digests_of_its_tensors_cannot_be_compared(checkpoint: Path) -> None:
    with Instance(VERIFIED, source=FileStore(checkpoint)) as instance:
        failure = instance.ended.result(WAIT_S)
        assert isinstance(failure, UsageError)
        assert failure.key == "verify_exact"


@pytest.mark.parametrize(("asked", "computed"), [("float32", "float32"), ("bfloat16", "bfloat16")])
def test_the_timeline_says_what_is_computed_in_and_why(tmp_path: Path, asked: str, computed: str) -> None:
    config = resolve({"model": "memory", "kv_bytes": "8MiB", "compute_dtype": asked}, {})
    save_tiny("llama", tmp_path, dtype=torch.float16)

    with Instance(config, source=FileStore(tmp_path)) as instance:
        assert len(generate(instance)) == 8
        [built] = [span for span in instance.timeline.spans() if (span.lane, span.name) == ("model", "build")]

    assert built.attributes.pop("backend") in ("native", "torch")
    assert built.attributes == {
        "stored_dtype": "float16",
        "compute_dtype": computed,
        "why": "it was requested",
    }


def test_the_dtype_follows_the_cpu_by_default(checkpoint: Path) -> None:
    with Instance(CONFIG, source=FileStore(checkpoint)) as instance:
        instance.engine.result(WAIT_S)
        [built] = [span for span in instance.timeline.spans() if (span.lane, span.name) == ("model", "build")]

    assert built.attributes.pop("backend") in ("native", "torch")
    assert built.attributes == {"stored_dtype": "float32", "compute_dtype": "float32", "why": "as stored"}


def test_with_the_server_first_the_model_is_built_at_full_speed(artifact: MemoryStore) -> None:
    with Instance(CONFIG, source=artifact, server_first=True) as instance:
        instance.tokenizer.result(WAIT_S)
        assert instance.load is not None
        instance.load.wait(0, timeout_s=WAIT_S)
        assert not instance.engine.done(), "weights arrive, and nothing is built"
        instance.full_speed.set()
        first = generate(instance)
    with Instance(CONFIG, source=artifact.reopen()) as instance:
        assert generate(instance) == first


def test_an_instance_that_was_not_let_build_can_be_closed(artifact: MemoryStore) -> None:
    instance = Instance(CONFIG, source=artifact, server_first=True).start()
    instance.opening.result(WAIT_S)
    instance.close()
    instance.release()
    assert not [thread for thread in threads_of(instance) if thread.is_alive()]


@pytest.mark.parametrize(("family", "step"), [("llama", "make_engine"), ("bert", "start_embedder")])
def test_a_worker_that_was_made_while_its_instance_was_closed_is_ended(
    family: str, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(family, tmp_path)
    make = getattr(model, step)

    def make_late(*arguments: Any, **options: Any) -> Any:
        made = make(*arguments, **options)
        instance.close()
        return made

    monkeypatch.setattr(model, step, make_late)
    before = set(threading.enumerate())
    instance = Instance(CONFIG, source=FileStore(tmp_path)).start()
    assert instance.ended.result(WAIT_S) is None
    instance.release(WAIT_S)
    assert not [thread for thread in set(threading.enumerate()) - before if thread.is_alive()]


def test_the_progress_of_a_gguf_file_counts_the_bytes_of_the_file(tmp_path: Path) -> None:
    """Its load counts what is made of them: the network has carried fewer."""
    pytest.importorskip("gguf")
    from tests.support.gguf_models import write_gguf

    path = tmp_path / "model.gguf"
    write_gguf(path, tiny_model("llama", hidden_size=256, intermediate_size=512), "Q4_1")
    # Torch does not compute with blocks, which become floats.
    with Instance(ServeConfig(model=str(path), kv_bytes=8 << 20, backend="torch")) as instance:
        assert instance.wait_exact(WAIT_S)
        assert instance.load is not None
        made_bytes = instance.load.progress().stored_bytes_total
        stored_bytes = instance.progress()["stored_bytes"]
        assert stored_bytes == instance.progress()["fetched_bytes"] < path.stat().st_size < made_bytes
        (share,) = [
            span.attributes["wire_share"]
            for span in instance.timeline.spans()
            if "wire_share" in span.attributes
        ]
        assert share == pytest.approx(stored_bytes / made_bytes, rel=1e-3)
        assert instance.load.join(WAIT_S), "a load in a process of its own sends its figures when it ends"
        counted = instance.statistics()["load"]
        assert counted.stored_bytes == counted.fetch.size_bytes == stored_bytes
        made = instance.load.statistics()
        assert counted.link.rate_bytes_per_s == pytest.approx(made.link.rate_bytes_per_s * share, rel=1e-3)
        assert counted.weight_bytes == made.weight_bytes
