"""A whole instance whose weights are another device's: loaded in a process, placed on a simulated device, served."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.support.load import patience_s
from tests.support.simulated_device import SimulatedDevice
from tests.support.store_faults import Fault
from tests.support.store_server import StoreServer
from tests.support.tiny_models import save_tiny

from teneral.loader.errors import InsufficientMemoryError, LoadError, TeneralError
from teneral.loader.load.device_load import DeviceLoad
from teneral.loader.load.launch import Prepared, Task, is_possible, launch
from teneral.loader.sources.file.store import FileStore
from teneral.loader.timeline import Timeline
from teneral.loader.tools.pack.pack import pack
from teneral.loader.tools.pack.plan import TierOptions
from teneral.runtime.config import ServeConfig
from teneral.runtime.instance.helpers import Helpers, LaunchedHelpers
from teneral.runtime.instance.instance import Instance
from teneral.runtime.instance.loading import Way
from teneral.runtime.step.requests import GenerationRequest, SamplingParams
from teneral.runtime.text.launch import PreparedTokenizer, TokenizerTask
from teneral.runtime.text.remote import TokenizerProcess

WAIT_S = patience_s(60)
pytestmark = pytest.mark.skipif(not is_possible(), reason="this system has no memory files")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("instance")
    save_tiny("llama", path / "plain", num_hidden_layers=3)
    pack(FileStore(path / "plain"), FileStore(path / "models" / "tiny"))
    pack(FileStore(path / "plain"), FileStore(path / "models" / "sketched"), tiers=TierOptions(sketch_bits=1))
    return path


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    made = SimulatedDevice()
    yield made
    made.close()


def on_device(config: ServeConfig, device: SimulatedDevice) -> Instance:
    """An instance on a device that configurations cannot name, made like `launch_helpers` and `adopt` make it."""
    timeline, prepared = Timeline(), Prepared()
    source, options = config.source_options, config.load_options
    load = launch(
        Task(config.model, None, source, options, timeline.started_at, device="simulated"), prepared
    )
    tokenizer = PreparedTokenizer(files=prepared.files).launch(
        TokenizerTask(config.model, source, options, timeline.started_at)
    )
    helpers = Helpers(
        DeviceLoad.follow(load, lambda: device, timeline=timeline),
        TokenizerProcess(tokenizer, timeline=timeline),
    )

    class Launched(LaunchedHelpers):
        def adopt(self, timeline: Timeline) -> Helpers:
            return helpers

    return Instance(config, timeline=timeline, launched=Launched(load, tokenizer))


def generate(instance: Instance) -> list[int]:
    request = GenerationRequest(
        request_id="test",
        prompt_tokens=(5, 6, 7),
        max_tokens=12,
        sampling=SamplingParams(temperature=0.0),
        ignore_eos=True,
    )
    generation = instance.engine.result(WAIT_S).submit(request)
    return [token for event in generation.events(WAIT_S) for token in event.tokens]


def config_of(model: Path | str, **settings: Any) -> ServeConfig:
    return ServeConfig(
        model=str(model), kv_bytes=8 << 20, connections=2, device="cpu", backend="torch", **settings
    )


@pytest.mark.parametrize("name", ["plain", "models/tiny", "models/sketched"])
def test_an_instance_on_a_device_gives_the_tokens_of_one_on_the_cpu(
    folder: Path, device: SimulatedDevice, name: str
) -> None:
    config = config_of(folder / name, verify_exact=name != "plain")
    with on_device(config, device) as instance, Instance(config) as here:
        assert generate(instance) == generate(here)
        assert instance.wait_exact(WAIT_S)
        assert instance.statistics()["placement"].name == "simulated"


def test_a_load_in_the_servers_own_threads_goes_to_the_device_as_well(
    folder: Path, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("teneral.runtime.instance.loading.choose_way", lambda **facts: Way.DEVICE)
    monkeypatch.setattr(
        "teneral.runtime.instance.loading.opener", lambda name, kernel_dir, timeline, percent: lambda: device
    )
    config = config_of(folder / "models" / "tiny", verify_exact=True)
    source = FileStore(folder / "models" / "tiny")
    with Instance(config, source=source) as instance, Instance(config) as here:
        assert generate(instance) == generate(here)
        assert instance.wait_exact(WAIT_S)
        assert instance.statistics()["placement"].num_images == len(instance.load.manifest.parts)


def test_tokens_of_the_draft_come_before_the_exact_weights_and_are_confirmed_by_them(
    folder: Path, device: SimulatedDevice
) -> None:
    """A slow store: the draft is used, and refined on the device between passes."""
    expected = config_of(folder / "models" / "tiny")
    with Instance(expected) as here, StoreServer(folder, rate_mb_s=0.3) as server:
        config = config_of(f"{server.url}/models/tiny", first_token="draft")
        with on_device(config, device) as instance:
            instance.load.reorder(instance.load.order.DRAFT_FIRST)
            tokens = generate(instance)
            assert len(tokens) == 12
            assert instance.wait_exact(WAIT_S)
            assert generate(instance) == generate(here)


@pytest.mark.parametrize(
    ("made", "error"),
    [
        (lambda: SimulatedDevice(memory_bytes=100_000), InsufficientMemoryError),
        (lambda: SimulatedDevice(fail_at_image=2), LoadError),
    ],
    ids=["no room", "fails on the way"],
)
def test_what_fails_on_the_device_fails_the_instance(
    folder: Path, made: Any, error: type[TeneralError]
) -> None:
    failing = made()
    with on_device(config_of(folder / "models" / "tiny"), failing) as instance:
        with suppress(error):  # no engine, or no token
            assert generate(instance) == []
        assert isinstance(instance.ended.result(WAIT_S), error)
    failing.close()


def test_a_store_that_breaks_off_fails_the_instance_by_name(folder: Path, device: SimulatedDevice) -> None:
    def broken(request: object) -> Fault | None:
        return Fault(status=403) if ".bin" in str(request) else None  # no weights

    with (
        StoreServer(folder, fault=broken) as server,
        on_device(config_of(f"{server.url}/models/tiny"), device) as instance,
    ):
        error = instance.ended.result(WAIT_S)
        assert isinstance(error, TeneralError)
        assert "could not be loaded" in error.message
