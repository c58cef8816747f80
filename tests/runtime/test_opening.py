"""A remote model is opened before anything else is imported; its errors are the instance's."""

from __future__ import annotations

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
from teneral.loader.tools.pack.pack import pack
from teneral.runtime.config import ServeConfig
from teneral.runtime.instance.instance import Instance
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


def test_the_manifest_is_requested_once(store: StoreServer, folder: Path) -> None:
    config = config_of(f"{store.url}/models/packed")
    with Instance(config) as instance:
        tokens = tokens_of(instance)
        assert instance.wait_exact(WAIT_S)
    assert [entry.key for entry in store.log()].count("packed/manifest.json") == 1
    with Instance(config_of(str(folder / "models" / "packed"))) as instance:
        assert tokens_of(instance) == tokens


def test_the_build_waits_for_full_speed(store: StoreServer) -> None:
    config = config_of(f"{store.url}/models/packed")
    with Instance(config, server_first=True) as instance:
        assert instance.wait_opened(WAIT_S)
        assert not instance.engine.done()
        instance.full_speed.set()
        assert tokens_of(instance)


def test_a_model_that_is_not_there_fails_the_instance(store: StoreServer) -> None:
    config = config_of(f"{store.url}/models/none")
    with Instance(config) as instance:
        failure = instance.ended.result(WAIT_S)
        assert isinstance(failure, CheckpointError)
        assert instance.engine.exception(WAIT_S) is failure


def test_a_wrong_pin_fails_the_instance(store: StoreServer) -> None:
    config = config_of(f"{store.url}/models/packed@b3:{'ab' * 32}")
    with Instance(config) as instance:
        assert isinstance(instance.ended.result(WAIT_S), IntegrityError)


def test_an_instance_is_closed_while_its_store_gives_nothing(store: StoreServer) -> None:
    store.set_fault(lambda request: Fault(first_byte_s=WAIT_S))
    config = config_of(f"{store.url}/models/packed")
    instance = Instance(config).start()
    instance.close()
    instance.release()
    assert instance.ended.result(WAIT_S) is None
    assert not [thread for thread in threads_of(instance) if thread.is_alive()]


def test_an_unusable_address_fails_the_instance() -> None:
    for address in ("ftp://host/model", "s3://"):
        with Instance(config_of(address)) as instance:
            assert isinstance(instance.ended.result(WAIT_S), UsageError)
            assert isinstance(instance.tokenizer.exception(WAIT_S), UsageError)
