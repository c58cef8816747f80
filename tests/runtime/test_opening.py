"""A remote model is opened ahead of its instance, which takes over the source, the load and its errors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.inspection import threads_of
from tests.support.load import patience_s
from tests.support.store_faults import Fault
from tests.support.store_server import StoreServer
from tests.support.tiny_models import save_tiny

from teneral.loader.errors import CheckpointError, IntegrityError, UsageError
from teneral.loader.sources.file.store import FileStore
from teneral.loader.timeline import Timeline
from teneral.loader.tools.pack.pack import pack
from teneral.runtime.config import ServeConfig
from teneral.runtime.instance import Instance
from teneral.runtime.opening import Opening, open_ahead
from teneral.runtime.step.requests import GenerationRequest, SamplingParams

WAIT_S = patience_s(60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the objects `models/packed/…`."""
    model, root = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("store")
    save_tiny("llama", model, num_hidden_layers=4)
    pack(FileStore(model), FileStore(root / "models" / "packed"))
    return root


@pytest.fixture
def store(folder: Path) -> Iterator[StoreServer]:
    with StoreServer(folder) as server:
        yield server


def config_of(address: str) -> ServeConfig:
    return ServeConfig(model=address, kv_bytes=8 << 20, connections=2, loader="thread")


def tokens_of(instance: Instance) -> list[int]:
    sampling = SamplingParams(temperature=0.0)
    request = GenerationRequest("test", (5, 6, 7), max_tokens=8, sampling=sampling, ignore_eos=True)
    generation = instance.engine.result(WAIT_S).submit(request)
    return [token for event in generation.events(WAIT_S) for token in event.tokens]


def opening_of(config: ServeConfig) -> Opening:
    opening = open_ahead(config, Timeline())
    assert opening is not None
    return opening


def test_an_instance_takes_the_load_that_was_opened_ahead(store: StoreServer, folder: Path) -> None:
    config = config_of(f"{store.url}/models/packed")
    opening = opening_of(config)
    opening.import_ahead()
    load = opening.result()
    assert [entry.key for entry in store.log()].count("packed/manifest.json") == 1
    with Instance(config, opening=opening) as instance:
        tokens = tokens_of(instance)
        assert instance.load is load
        assert instance.wait_exact(WAIT_S)
    assert [entry.key for entry in store.log()].count("packed/manifest.json") == 1
    with Instance(config_of(str(folder / "models" / "packed"))) as instance:
        assert tokens_of(instance) == tokens


def test_the_build_waits_for_full_speed_of_a_load_that_was_opened_ahead(store: StoreServer) -> None:
    config = config_of(f"{store.url}/models/packed")
    opening = opening_of(config)
    with Instance(config, opening=opening, server_first=True) as instance:
        assert instance.full_speed is opening.full_speed
        assert instance.wait_opened(WAIT_S)
        assert not instance.engine.done()
        instance.full_speed.set()
        assert tokens_of(instance)


def test_an_error_of_the_opening_fails_the_instance(store: StoreServer) -> None:
    config = config_of(f"{store.url}/models/none")
    with Instance(config, opening=opening_of(config)) as instance:
        failure = instance.ended.result(WAIT_S)
        assert isinstance(failure, CheckpointError)
        assert instance.engine.exception(WAIT_S) is failure


def test_a_wrong_pin_fails_the_instance(store: StoreServer) -> None:
    config = config_of(f"{store.url}/models/packed@b3:{'ab' * 32}")
    with Instance(config, opening=opening_of(config)) as instance:
        assert isinstance(instance.ended.result(WAIT_S), IntegrityError)


def test_an_instance_closes_an_opening_that_still_waits_for_its_store(store: StoreServer) -> None:
    store.set_fault(lambda request: Fault(first_byte_s=WAIT_S))
    config = config_of(f"{store.url}/models/packed")
    instance = Instance(config, opening=opening_of(config)).start()
    instance.close()
    instance.release()
    assert instance.ended.result(WAIT_S) is None
    assert not [thread for thread in threads_of(instance) if thread.is_alive()]


def test_local_models_and_unusable_addresses_are_left_to_the_instance(folder: Path) -> None:
    threads = set(threading.enumerate())
    local = str(folder / "models" / "packed")
    for address in (local, f"file://{local}", "ftp://host/model", "s3://"):
        assert open_ahead(config_of(address), Timeline()) is None
    assert set(threading.enumerate()) <= threads
    with Instance(config_of("ftp://host/model")) as instance:
        assert isinstance(instance.ended.result(WAIT_S), UsageError)
