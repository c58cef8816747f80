"""Packing that fails at any point: nothing is left behind, and nothing of other packs is removed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.artifacts import names_in
from tests.support.checkpoints import (
    llama_contents,
    model_store,
)
from tests.support.load import patience_s
from tests.support.memory_store import MemoryStore, MemoryWriter
from tests.support.tiny_disk import tiny_disk

from teneral.loader.artifact import open_artifact
from teneral.loader.errors import (
    AlreadyExistsError,
    ChangedError,
    ManifestError,
    NoSpaceError,
    UnavailableError,
)
from teneral.loader.format import layout, manifest_json
from teneral.loader.format.manifest import FRAME_ELEMENTS
from teneral.loader.sources.base import ObjectInfo
from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.pack import pack
from teneral.loader.tools.verify import verify


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts parts so small that a tiny model has many."""
    monkeypatch.setattr(layout, "MAX_PART_ELEMENTS", FRAME_ELEMENTS)


def test_a_model_that_the_format_cannot_hold_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(manifest_json, "MAX_PARTS", 3)
    store = Failing(1, control_c)
    with pytest.raises(ManifestError, match="parts"):
        pack(model_store(llama_contents()), store)
    assert store.left == 1


class Failing(MemoryStore):
    """Runs `fail` after that number of writes into blobs."""

    def __init__(self, num_writes: int, fail: Callable[[], None]) -> None:
        super().__init__()
        self.left = num_writes
        self.fail = fail

    def create(self, name: str) -> MemoryWriter:
        outer = self

        class Writer(MemoryWriter):
            def write(self, data) -> None:
                super().write(data)
                outer.left -= 1
                if outer.left <= 0:
                    outer.fail()

        return Writer(self, name)


def full_disk() -> None:
    raise NoSpaceError("no space left")


def control_c() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("num_writes", [1, 2, 20, 60])
@pytest.mark.parametrize(("fail", "error"), [(full_disk, NoSpaceError), (control_c, KeyboardInterrupt)])
def test_a_failure_at_any_point_leaves_nothing_behind(
    small_parts: None, num_writes: int, fail: Callable[[], None], error: type[BaseException]
) -> None:
    store = Failing(num_writes, fail)
    with pytest.raises(error):
        pack(model_store(llama_contents(hidden=256)), store)
    assert store.left <= 0
    assert names_in(store) == []


def test_ctrl_c_during_packing_leaves_nothing_behind(small_parts: None, tmp_path: Path) -> None:
    store = FileStore(tmp_path / "artifact")

    def interrupt(progress: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(model_store(llama_contents(hidden=256)), store, progress=interrupt)
    assert names_in(store) == []
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_source_that_changes_meanwhile_is_noticed_and_leaves_nothing_behind(small_parts: None) -> None:
    source, store = model_store(llama_contents(hidden=256)), MemoryStore()

    def replace(progress: object) -> None:
        source.put("model.safetensors", b"another model")

    with pytest.raises(ChangedError):
        pack(source, store, progress=replace)
    assert names_in(store) == []


def test_leftovers_that_cannot_be_removed_are_reported() -> None:
    class Clinging(Failing):
        def delete(self, name: str) -> None:
            raise UnavailableError("the store went away", name=name)

    store = Clinging(12, full_disk)
    with pytest.raises(NoSpaceError) as caught:
        pack(model_store(llama_contents()), store)
    assert any("draft-000.bin could not be removed" in note for note in caught.value.__notes__)


def test_somebody_elses_artifact_that_appears_meanwhile_wins() -> None:
    store = MemoryStore()

    def overtake(progress: object) -> None:
        store.put("manifest.json", b"theirs")

    with pytest.raises(AlreadyExistsError, match="another writer put an artifact"):
        pack(model_store(llama_contents()), store, progress=overtake)
    assert names_in(store) == ["manifest.json"]
    assert store.read("manifest.json", max_bytes=100)[0] == b"theirs"


def test_force_replaces_only_the_artifact_that_it_saw() -> None:
    store = MemoryStore({"manifest.json": b"seen"})

    def overtake(progress: object) -> None:
        store.put("manifest.json", b"newer")

    with pytest.raises(AlreadyExistsError):
        pack(model_store(llama_contents()), store, force=True, progress=overtake)
    assert store.read("manifest.json", max_bytes=100)[0] == b"newer"
    assert names_in(store) == ["manifest.json"]


class Unsure(MemoryStore):
    """Its answer to the manifest's put gets lost, after or before the store took it."""

    def __init__(self, *, takes: bool, answers: bool) -> None:
        super().__init__()
        self.takes = takes
        self.answers = answers

    def put(self, name: str, data: bytes, **conditions) -> ObjectInfo:
        if name != "manifest.json":
            return super().put(name, data, **conditions)
        if self.takes:
            super().put(name, data, **conditions)
        raise UnavailableError("the connection broke", name=name)

    def read(self, name: str, *, max_bytes: int) -> tuple[bytes, ObjectInfo]:
        if not self.answers:
            raise UnavailableError("the connection is still broken", name=name)
        return super().read(name, max_bytes=max_bytes)


def test_a_manifest_that_was_taken_although_the_answer_was_lost_counts() -> None:
    store = Unsure(takes=True, answers=True)
    result = pack(model_store(llama_contents()), store)
    assert open_artifact(store) == result.manifest
    assert verify(store).ok


def test_a_manifest_that_was_not_taken_leaves_nothing_behind() -> None:
    store = Unsure(takes=False, answers=True)
    with pytest.raises(UnavailableError):
        pack(model_store(llama_contents()), store)
    assert names_in(store) == []


def test_blobs_stay_while_it_is_unknown_whether_a_manifest_names_them() -> None:
    store = Unsure(takes=True, answers=False)
    with pytest.raises(UnavailableError, match="connection broke") as caught:
        pack(model_store(llama_contents()), store)
    assert any("were not removed" in note for note in caught.value.__notes__)
    assert len(names_in(store)) == 7


# -- real file systems


def in_a_process(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=patience_s(60),
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        check=False,
    )


def files_below(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_file_size_limit_while_packing_is_no_space_and_leaves_nothing_behind(tmp_path: Path) -> None:
    script = """
import resource, sys
from teneral.loader.errors import NoSpaceError
from teneral.loader.tools.pack.pack import pack
from teneral.loader.sources.file.store import FileStore
from tests.support.checkpoints import llama_contents, model_store
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    pack(model_store(llama_contents(hidden=256)), FileStore(sys.argv[1]))
except NoSpaceError as error:
    print("no space:", error.hint)
"""
    done = in_a_process(script, tmp_path / "artifact")
    assert "no space: Free some space" in done.stdout, done.stderr
    assert files_below(tmp_path) == []


def test_a_full_disk_while_packing_is_no_space_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "disk", 256 * 1024) as disk:
        with pytest.raises(NoSpaceError, match="No space left"):
            pack(model_store(llama_contents(hidden=256)), FileStore(disk / "artifact"))
        assert list(disk.rglob("*")) == []
