"""The contract of `loader.load.base.Load`, which every load keeps, wherever its weights go."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.loader.test_mapped_load import write
from tests.support.checkpoints import llama_contents
from tests.support.device_parts import seen
from tests.support.paced import WAIT_S, PacedSource, reads_of
from tests.support.simulated_device import SimulatedDevice
from tests.support.weight_loads import mapped_load, shared_load, start_process_load

from teneral.loader.artifact import open_artifact
from teneral.loader.errors import IntegrityError, LoadCancelledError
from teneral.loader.format.manifest import Manifest, Tier
from teneral.loader.load.accounting import LoadState
from teneral.loader.load.base import HostLoad, Load, PlacedLoad
from teneral.loader.load.device_load import DeviceLoad
from teneral.loader.load.load import WeightLoad
from teneral.loader.load.options import LoadOptions, Order
from teneral.loader.load.shared_child import SharedLoading, SharedTask
from teneral.loader.sources.base import SourceOptions
from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.pack import pack

CONTENTS = llama_contents(num_layers=2)
READING = ["host", "device"]  # they read here, so that a test can hold back or spoil what comes
LOADS = [*READING, "process", "mapped", "shared"]
each_load = pytest.mark.parametrize("kind", LOADS)
each_reader = pytest.mark.parametrize("kind", READING)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The model as it was, and packed."""
    folder = tmp_path_factory.mktemp("contract")
    plain = write(folder / "plain", CONTENTS)
    pack(plain, FileStore(folder / "packed"))
    return folder / "plain", folder / "packed"


@contextmanager
def begun(kind: str, folders: tuple[Path, Path], source: PacedSource | None = None) -> Iterator[Any]:
    """A load that was started; closed at the end."""
    plain, packed = map(FileStore, folders)
    device = SimulatedDevice()
    with contextlib.ExitStack() as stack:
        stack.callback(device.close)
        load: Any
        if kind == "process":
            load = start_process_load(str(folders[1]))
        elif kind == "shared":
            base = SharedLoading(SharedTask(str(folders[1]), SourceOptions(), LoadOptions())).finish()
            assert base is not None
            stack.callback(base.close)
            load = shared_load(base, base.manifest)
        elif kind == "mapped":
            load = mapped_load(plain, open_artifact(plain, in_place=True))
        elif kind == "host":
            load = WeightLoad(source or packed, open_artifact(packed))
        else:
            load = DeviceLoad.in_threads(source or packed, open_artifact(packed), lambda: device)
        stack.callback(load.close)
        if isinstance(load, WeightLoad):
            load.start()
        yield load


def manifest_of(folders: tuple[Path, Path]) -> Manifest:
    return open_artifact(FileStore(folders[1]))


def values(load: Any, name: str) -> bytes:
    if load.place == "device":
        return seen(load, name)
    tensor = load.manifest.by_name[name]
    return bytes(load.slab(tensor.group)[tensor.offset_bytes :][: tensor.size_bytes])


def wait_all(load: Load) -> None:
    for group in load.manifest.groups:
        load.wait(group.index, timeout_s=WAIT_S)


@each_load
def test_every_group_gets_its_exact_values(kind: str, folders: tuple[Path, Path]) -> None:
    with begun(kind, folders) as load:
        wait_all(load)
        assert {name: values(load, name) for name in CONTENTS} == {
            name: bytes(content) for name, (_, _, content) in CONTENTS.items()
        }
        assert load.join(WAIT_S)
        assert load.failure is None
        assert all(load.is_ready(group.index, tier) for group in load.manifest.groups for tier in Tier)
        load.wait_parts(range(len(load.manifest.parts)), timeout_s=WAIT_S)
        with load.reading(0):
            pass


@each_load
def test_what_can_be_asked_of_every_load_can_be_asked_at_any_time(
    kind: str, folders: tuple[Path, Path]
) -> None:
    with begun(kind, folders) as load:
        protocol = PlacedLoad if kind == "device" else HostLoad
        names = {name for each in protocol.__mro__ for name in vars(each) if not name.startswith("_")}
        assert {name for name in names if not hasattr(load, name)} == set()
        for _ in range(2):
            progress = load.progress()
            assert progress.fetched_bytes <= progress.stored_bytes_total
            assert load.left_s() >= 0
            assert load.refine_wait_s >= 0
            assert load.order in Order
            load.want_parts([0])
            load.statistics()
            wait_all(load)
            assert load.join(WAIT_S)
        progress = load.progress()
        assert progress.state is LoadState.EXACT
        assert progress.groups_exact == progress.num_groups == len(load.manifest.groups)
        assert load.left_s() == 0
        assert load.experts is None
        assert load.paged_groups == frozenset()
        statistics = load.statistics()
        assert statistics is not None
        assert statistics.weight_bytes == load.manifest.weight_bytes


@each_load
def test_the_values_stay_when_the_load_is_closed_twice(kind: str, folders: tuple[Path, Path]) -> None:
    with begun(kind, folders) as load:
        wait_all(load)
        load.close()
        load.close()
        assert load.failure is None
        name = "model.norm.weight"
        assert values(load, name) == bytes(CONTENTS[name][2])


@each_reader
def test_a_cancelled_load_frees_its_waiters_at_once(kind: str, folders: tuple[Path, Path]) -> None:
    source = PacedSource(FileStore(folders[1]))
    source.hold()
    with begun(kind, folders, source) as load:
        with pytest.raises(TimeoutError):
            load.wait(0, timeout_s=0.01)
        load.cancel()
        for wait in (lambda: load.wait(0), lambda: load.wait_parts([0])):
            with pytest.raises(LoadCancelledError):
                wait()
        load.close()
        assert load.progress().state is LoadState.CANCELLED
        assert load.failure is None or isinstance(load.failure, LoadCancelledError)
        assert source.closed  # nothing else makes a read return


@each_reader
def test_a_bit_that_flips_on_the_way_is_fetched_once_more(kind: str, folders: tuple[Path, Path]) -> None:
    manifest = manifest_of(folders)
    source = PacedSource(FileStore(folders[1]))
    source.spoil(reads_of(manifest, manifest.parts[-1]), times=1)
    with begun(kind, folders, source) as load:
        wait_all(load)
        assert load.join(WAIT_S)
        assert load.statistics().num_refetched_parts == 1


@each_reader
def test_no_gate_opens_over_a_part_that_is_wrong_twice(kind: str, folders: tuple[Path, Path]) -> None:
    manifest = manifest_of(folders)
    source = PacedSource(FileStore(folders[1]))
    spoilt = manifest.parts[-1]
    source.spoil(reads_of(manifest, spoilt), times=100)
    with begun(kind, folders, source) as load:
        with pytest.raises(IntegrityError, match=rf"part {spoilt.index} "):
            load.wait(spoilt.group, timeout_s=WAIT_S)
        assert not load.is_ready(spoilt.group)
        assert isinstance(load.failure, IntegrityError)
        assert load.progress().state is LoadState.FAILED
