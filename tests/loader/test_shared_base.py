"""A base in a sealed memory file: its load in a process of its own, its content, and who may write to it."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.inspection import memory_fd_of
from tests.support.load import patience_s
from tests.support.tiny_models import save_tiny
from tests.support.weight_loads import shared_load

from teneral.loader.artifact import find_file, open_artifact
from teneral.loader.errors import InsufficientMemoryError, LoadError, NotFoundError
from teneral.loader.load.load import WeightLoad
from teneral.loader.load.options import LoadOptions
from teneral.loader.load.shared_child import SharedLoading, SharedTask
from teneral.loader.load.targets.shared import SharedBase
from teneral.loader.sources.base import SourceOptions
from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.pack import pack

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory files are Linux's")

WAIT_S = patience_s(60)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shared")
    save_tiny("llama", path / "plain")
    pack(FileStore(path / "plain"), FileStore(path / "base"))
    return path / "base"


@pytest.fixture(scope="module")
def base(artifact: Path) -> Iterator[SharedBase]:
    found = SharedLoading(SharedTask(str(artifact), SourceOptions(), LoadOptions())).finish()
    assert found is not None
    yield found
    found.close()


def test_weights_and_files_are_those_of_the_artifact(artifact: Path, base: SharedBase) -> None:
    source = FileStore(artifact)
    manifest = open_artifact(source)
    shared = shared_load(base, manifest)
    shared.start()
    assert shared.join(WAIT_S)
    with WeightLoad(source, manifest) as load:
        load.start()
        for group in manifest.groups:
            load.wait(group.index)
            shared.wait(group.index, timeout_s=0)
            assert (load.slab(group.index) == shared.slab(group.index)).all()
    shared.wait_parts(range(len(manifest.parts)), timeout_s=0)
    assert shared.progress().groups_exact == len(manifest.groups)
    assert shared.statistics().stored_bytes == 0
    for file in manifest.files:
        assert base.files.read(file.digest) == (artifact / file.path).read_bytes()
    assert base.files.read(b"\0" * 32) is None
    assert find_file(manifest, "config.json") is not None


def test_a_writer_changes_its_own_copy_alone(base: SharedBase) -> None:
    first, second = shared_load(base, base.manifest), shared_load(base, base.manifest)
    slab = first.slab(0)
    before = int(slab[0])
    slab[0] = before ^ 0xFF
    assert int(second.slab(0)[0]) == before
    with pytest.raises(PermissionError):
        os.pwrite(base.files.fd, b"x", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(base.files.fd, mmap.PAGESIZE)
    with pytest.raises(PermissionError):
        os.ftruncate(base.files.fd, 0)


def test_the_base_that_is_held_is_not_loaded_again(artifact: Path, base: SharedBase) -> None:
    task = SharedTask(str(artifact), SourceOptions(), LoadOptions(), base.digest)
    assert SharedLoading(task).finish() is None


def test_a_base_that_does_not_fit_is_refused_with_the_numbers(artifact: Path) -> None:
    task = SharedTask(str(artifact), SourceOptions(), LoadOptions(available_bytes=1 << 10))
    with pytest.raises(InsufficientMemoryError, match="MiB are available"):
        SharedLoading(task).finish()


def test_an_absent_base_is_its_sources_error_and_a_cancelled_load_leaves_nothing(tmp_path: Path) -> None:
    task = SharedTask(str(tmp_path / "absent"), SourceOptions(), LoadOptions())
    with pytest.raises(NotFoundError, match="absent"):
        SharedLoading(task).finish()
    loading = SharedLoading(task)
    loading.cancel()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(loading.fileno())


def test_memory_that_cannot_be_sealed_is_the_loads_error_and_is_given_back(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = SharedLoading(SharedTask(str(artifact), SourceOptions(), LoadOptions()))
    fd = memory_fd_of(loading)
    memory: list[mmap.mmap] = []
    refused = SharedBase.__init__

    def hold(self: SharedBase, *arguments: Any) -> None:
        memory.append(mmap.mmap(fd, mmap.PAGESIZE))  # as a process that could still write to it
        refused(self, *arguments)

    monkeypatch.setattr(SharedBase, "__init__", hold)
    with pytest.raises(LoadError, match="cannot be sealed"):
        loading.finish()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
