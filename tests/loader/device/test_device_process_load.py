"""Loads onto a simulated device by a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.checkpoints import llama_contents, model_store
from tests.support.device_parts import assert_exact
from tests.support.faulty_loads import first_ranges
from tests.support.inspection import child_of_feed, timeline_of
from tests.support.paced import WAIT_S
from tests.support.simulated_device import SimulatedDevice
from tests.support.store_faults import Fault
from tests.support.store_server import StoreServer

from teneral.loader.artifact import open_artifact
from teneral.loader.device.base import Device
from teneral.loader.errors import (
    InsufficientMemoryError,
    TeneralError,
)
from teneral.loader.format.manifest import Manifest
from teneral.loader.load.accounting import LoadState
from teneral.loader.load.device_load import DeviceLoad
from teneral.loader.load.launch import Task, is_possible, launch
from teneral.loader.load.load import WeightLoad
from teneral.loader.load.options import LoadOptions
from teneral.loader.sources.base import SourceOptions
from teneral.loader.sources.file.store import FileStore
from teneral.loader.timeline import Timeline
from teneral.loader.tools.pack.pack import pack


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    made = SimulatedDevice()
    yield made
    made.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("device")
    pack(model_store(llama_contents(num_layers=3)), FileStore(path / "bucket" / "model"))
    return path


@contextmanager
def load_in_a_process(
    url: str, open_device: Callable[[], Device], *, as_stored: bool = False, **options: object
) -> Iterator[DeviceLoad]:
    timeline = Timeline()
    source_options = SourceOptions(**options.pop("source_options", {}))
    task = Task(
        url,
        None,
        source_options,
        LoadOptions(**options),
        timeline.started_at,
        device="simulated",
        as_stored=as_stored,
    )
    with DeviceLoad.follow(launch(task), open_device, timeline=timeline) as load:
        yield load


needs_memory_files = pytest.mark.skipif(not is_possible(), reason="this system has no memory files")


IN_BOTH_WAYS = pytest.mark.parametrize("as_stored", [False, True], ids=["planes", "as stored"])


@needs_memory_files
@IN_BOTH_WAYS
def test_a_process_brings_the_same_weights(folder: Path, device: SimulatedDevice, as_stored: bool) -> None:
    artifact = folder / "bucket" / "model"
    source = FileStore(artifact)
    manifest = open_artifact(source)
    with (
        WeightLoad(source, manifest) as here,
        load_in_a_process(str(artifact), lambda: device, as_stored=as_stored) as there,
    ):
        here.start()
        assert there.manifest == manifest
        for group in manifest.groups:
            here.wait(group.index, timeout_s=WAIT_S)
        assert_exact(there, {tensor.name: here.array(tensor.name) for tensor in manifest.tensors})
        assert there.join(WAIT_S)
        assert there.progress().state is LoadState.EXACT
        assert there.statistics().stored_bytes == here.statistics().stored_bytes
        lanes = {span.lane for span in timeline_of(there).spans()}
        assert {"fetch", "place", "ready"} <= lanes
        assert as_stored != ({"verify", "decode"} <= lanes), "the device does both, or the host"
        marks = [span.name for span in timeline_of(there).spans() if span.lane == "ready"]
        assert len(marks) == len(set(marks)), "the child tells of gates that are not its own"


@needs_memory_files
def test_a_process_may_be_done_before_the_device_is_open(folder: Path, device: SimulatedDevice) -> None:
    go_on = threading.Event()

    def open_late() -> Device:
        go_on.wait()
        return device

    with load_in_a_process(str(folder / "bucket" / "model"), open_late) as load:
        assert load.join(WAIT_S)  # all images are in the ring
        assert load.progress().state is LoadState.LOADING
        assert not load.is_ready(0)
        go_on.set()
        for group in load.manifest.groups:
            load.wait(group.index, timeout_s=WAIT_S)
        assert load.progress().state is LoadState.EXACT


@needs_memory_files
@IN_BOTH_WAYS
def test_a_process_through_a_faulty_store_brings_exact_weights(
    tmp_path: Path, device: SimulatedDevice, as_stored: bool
) -> None:
    pack(model_store(llama_contents(num_layers=2)), FileStore(tmp_path / "models"))
    contents = open_artifact(FileStore(tmp_path / "models"))
    with (
        StoreServer(tmp_path, fault=first_ranges(3, Fault(status=503))) as server,
        load_in_a_process(f"{server.url}/models", lambda: device, as_stored=as_stored) as load,
        WeightLoad(FileStore(tmp_path / "models"), contents) as here,
    ):
        here.start()
        for group in contents.groups:
            here.wait(group.index, timeout_s=WAIT_S)
        assert_exact(load, {tensor.name: here.array(tensor.name) for tensor in contents.tensors})


@needs_memory_files
@pytest.mark.parametrize("spoils", [frozenset({0}), frozenset(range(3, 6))], ids=["the first", "some"])
def test_a_part_that_the_device_finds_wrong_comes_again_from_the_process(
    folder: Path, spoils: frozenset[int]
) -> None:
    device = SimulatedDevice(spoils=spoils)
    source = FileStore(folder / "bucket" / "model")
    manifest = open_artifact(source)
    with (
        WeightLoad(source, manifest) as here,
        load_in_a_process(str(folder / "bucket" / "model"), lambda: device, as_stored=True) as there,
    ):
        here.start()
        for group in manifest.groups:
            here.wait(group.index, timeout_s=WAIT_S)
        assert_exact(there, {tensor.name: here.array(tensor.name) for tensor in manifest.tensors})
        assert there.wait_done(WAIT_S)
        found = [span for span in timeline_of(there).spans() if "not what its digest says" in span.name]
        assert 1 <= len(found) <= len(spoils)  # images of planes are verified before they are sent
    device.close()


@needs_memory_files
def test_a_device_without_room_ends_the_process(folder: Path) -> None:
    small = SimulatedDevice(memory_bytes=1000)
    with load_in_a_process(str(folder / "bucket" / "model"), lambda: small) as load:
        with pytest.raises(InsufficientMemoryError):
            load.wait(0, timeout_s=WAIT_S)
        assert load.join(WAIT_S)


@needs_memory_files
def test_a_child_that_dies_ends_the_load(folder: Path, device: SimulatedDevice) -> None:
    hold = threading.Event()

    def open_never() -> Device:
        hold.wait()
        return device

    stall = Fault(stall_after_bytes=1000, stall_s=WAIT_S)
    with StoreServer(folder, fault=lambda request: stall if "blobs" in str(request) else None) as server:
        with load_in_a_process(f"{server.url}/bucket/model", open_never) as load:
            assert isinstance(load.manifest, Manifest)
            child_of_feed(load).kill()
            with pytest.raises(TeneralError, match="killed by signal"):
                load.wait(0, timeout_s=WAIT_S)
            hold.set()
        server.drop_connections()
