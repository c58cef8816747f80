"""Verification: an intact artifact is called intact, and of a damaged one every bad part is named."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from blake3 import blake3
from tests.support.checkpoints import llama_contents, model_store
from tests.support.memory_store import MemoryStore

from teneral.loader.artifact import open_artifact
from teneral.loader.errors import (
    AccessDeniedError,
    IntegrityError,
    ManifestError,
    NotFoundError,
    UnavailableError,
)
from teneral.loader.format import layout
from teneral.loader.format.manifest import FRAME_ELEMENTS, Codec, Manifest, Tier
from teneral.loader.format.manifest_json import dump_manifest
from teneral.loader.sources.base import ObjectInfo
from teneral.loader.tools.pack.pack import pack
from teneral.loader.tools.progress_bar import TransferProgress
from teneral.loader.tools.unpack import unpack
from teneral.loader.tools.verify import verify


@pytest.fixture
def artifact(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """One with many small parts."""
    monkeypatch.setattr(layout, "MAX_PART_ELEMENTS", FRAME_ELEMENTS)
    store = MemoryStore(label="models/small")
    pack(model_store(llama_contents(hidden=256)), store, threads=2)
    return store


def overwrite(store: MemoryStore, name: str, offset: int, data: bytes) -> None:
    content = bytearray(store.read(name, max_bytes=1 << 30)[0])
    content[offset : offset + len(data)] = data
    store.put(name, bytes(content))


def flip_bit(store: MemoryStore, manifest: Manifest, part_index: int, offset: int) -> None:
    part = manifest.parts[part_index]
    name = manifest.blobs[part.blob].name
    place = part.offset_bytes + offset % part.size_bytes
    (byte,) = store.read(name, max_bytes=1 << 30)[0][place : place + 1]
    overwrite(store, name, place, bytes([byte ^ 4]))


def test_an_intact_artifact_is_intact(artifact: MemoryStore) -> None:
    report = verify(artifact, threads=3)
    manifest = open_artifact(artifact)
    assert report.ok
    assert report.problems == ()
    assert (report.num_parts, report.num_files) == (len(manifest.parts), 4)
    assert report.digest == manifest.digest
    assert report.render().splitlines()[0].startswith(f"intact: {report.num_parts} parts and 4 files")
    assert f"memory://models/small@b3:{report.digest.hex()}" in report.render()


def test_every_damaged_part_is_named_with_its_place(artifact: MemoryStore) -> None:
    manifest = open_artifact(artifact)
    last = len(manifest.parts) - 1
    for index in (0, 3, last):
        flip_bit(artifact, manifest, index, 12345)
    report = verify(artifact)
    assert not report.ok
    assert [problem.part for problem in report.problems] == [manifest.parts[index] for index in (0, 3, last)]
    bad = report.problems[2]
    assert bad.part.tier is Tier.REFINE
    begin, end = bad.part.offset_bytes, bad.part.offset_bytes + bad.part.size_bytes
    blob = manifest.blobs[bad.part.blob].name
    group = manifest.groups[bad.part.group].name
    assert f"part {last} ({group} refine, bytes [{begin}, {end}) of {blob})" in report.render()
    assert report.render().splitlines()[0].endswith("; problems: 3")
    assert report.render().count(f"part {last} (") == 1


def test_a_truncated_blob_is_named_and_so_are_the_parts_that_it_lacks(artifact: MemoryStore) -> None:
    manifest = open_artifact(artifact)
    part = manifest.parts[2]
    name = manifest.blobs[part.blob].name
    cut = part.offset_bytes + part.size_bytes - 1
    artifact.put(name, artifact.read(name, max_bytes=1 << 30)[0][:cut])
    report = verify(artifact)
    lacking = [one for one in manifest.parts[2:] if one.blob == part.blob]
    assert report.problems[0].where == f"blob {name}"
    assert f"it has {cut} bytes" in report.problems[0].message
    assert [problem.part for problem in report.problems[1:]] == lacking


def test_a_missing_blob_shows_with_each_of_its_parts(artifact: MemoryStore) -> None:
    manifest = open_artifact(artifact)
    refine = next(blob.name for blob in manifest.blobs if "refine" in blob.name)
    artifact.delete(refine)
    report = verify(artifact)
    assert [problem.part for problem in report.problems] == [
        part for part in manifest.parts if part.tier is Tier.REFINE
    ]
    assert refine in report.problems[0].message


def test_a_damaged_and_a_missing_file_are_named(artifact: MemoryStore) -> None:
    paths = {file.name: file.path for file in open_artifact(artifact).files}
    overwrite(artifact, paths["tokenizer.json"], 0, b"[")
    artifact.delete(paths["config.json"])
    where = [problem.where for problem in verify(artifact).problems]
    assert where == [f"file {name} ({paths[name]})" for name in ("config.json", "tokenizer.json")]


def test_bytes_that_match_their_digest_but_do_not_decode_are_found(artifact: MemoryStore) -> None:
    """What a writer's bug would leave: everything is as the writer stored it, but no reader can use it."""
    manifest = open_artifact(artifact)
    part = next(
        part for part in manifest.parts if any(plane.codec is Codec.ZSTD for plane in part.segments[0].planes)
    )
    blob = manifest.blobs[part.blob].name
    flip = bytearray(artifact.read(blob, max_bytes=1 << 30)[0])
    flip[part.offset_bytes] ^= 0xFF  # the first frame's magic number
    artifact.put(blob, bytes(flip))
    stored = bytes(flip[part.offset_bytes : part.offset_bytes + part.size_bytes])
    parts = list(manifest.parts)
    parts[part.index] = part._replace(digest=blake3(stored).digest())
    artifact.put("manifest.json", dump_manifest(manifest._replace(parts=tuple(parts))))
    (problem,) = verify(artifact).problems
    assert problem.part.index == part.index
    assert "zstd frame" in problem.message


def test_a_damaged_manifest_is_an_error_of_its_own(artifact: MemoryStore) -> None:
    data = artifact.read("manifest.json", max_bytes=1 << 30)[0]
    artifact.put("manifest.json", data[:-10])
    with pytest.raises(ManifestError):
        verify(artifact)


def test_another_manifest_than_the_pinned_one_is_refused(artifact: MemoryStore) -> None:
    with pytest.raises(IntegrityError, match="pinned"):
        verify(artifact, digest=bytes(32))


@pytest.mark.parametrize("error", [UnavailableError("no network"), AccessDeniedError("no permission")])
def test_a_store_that_does_not_answer_is_not_called_damaged(artifact: MemoryStore, error: Exception) -> None:
    class Gone(MemoryStore):
        def read_into(self, name: str, start: int, buffer: memoryview, *, version: str | None = None) -> None:
            raise error

    store = Gone({info.name: artifact.read(info.name, max_bytes=1 << 30)[0] for info in artifact.list()})
    with pytest.raises(type(error)):
        verify(store)


def test_plain_safetensors_are_only_called_readable() -> None:
    report = verify(model_store(llama_contents()))
    assert report.ok
    assert report.digest is None
    assert "readable" in report.render()
    assert "no digests" in report.render()


def test_nothing_at_all_is_not_found() -> None:
    with pytest.raises(NotFoundError):
        verify(MemoryStore())


def test_progress_rises_to_all_that_is_stored(artifact: MemoryStore) -> None:
    seen: list[int] = []
    report = verify(artifact, progress=lambda progress: seen.append(progress.done_bytes))
    assert seen == sorted(seen)
    assert seen[-1] == report.read_bytes


def test_an_object_that_is_replaced_meanwhile_is_called_changed_and_not_damaged(
    artifact: MemoryStore,
) -> None:
    manifest = open_artifact(artifact)
    blob = manifest.blobs[0].name
    content = iter([artifact.read(blob, max_bytes=1 << 30)[0]])

    def replace(_: TransferProgress) -> None:
        if data := next(content, None):
            artifact.put(blob, data)

    report = verify(artifact, threads=1, progress=replace)
    assert report.problems
    for problem in report.problems:
        assert problem.part.blob == 0
        assert "replaced or truncated" in problem.message


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda lines: lines[:-1], "a line for each of the"),
        (lambda lines: [lines[1], lines[0], *lines[2:]], "its line for tensor"),
        (lambda lines: ["x" + lines[0][1:], *lines[1:]], "its line for tensor"),
    ],
)
def test_digests_of_tensors_that_do_not_fit_the_manifest_are_named(
    artifact: MemoryStore, change: Callable[[list[str]], list[str]], problem: str
) -> None:
    """A writer's bug would leave such digests, under a right digest of the file."""
    manifest = open_artifact(artifact)
    file = next(each for each in manifest.files if each.name == "tensors.b3")
    lines = artifact.read(file.path, max_bytes=1 << 20)[0].decode().splitlines()
    data = "".join(line + "\n" for line in change(lines)).encode()
    artifact.put(file.path, data)
    changed = file._replace(size_bytes=len(data), digest=blake3(data).digest())
    files = tuple(changed if each is file else each for each in manifest.files)
    artifact.put("manifest.json", dump_manifest(manifest._replace(files=files)))
    report = verify(artifact)
    assert ["tensors.b3" in each.where and problem in each.message for each in report.problems] == [True]


class FaultyAnswers:
    """A store that treats its answers with parts as `spoil` says, given the number of the answer."""

    def __init__(self, store: MemoryStore, spoil: Callable[[int, memoryview], None]) -> None:
        self._store = store
        self._spoil = spoil
        self._lock = threading.Lock()
        self.num_reads = 0

    def read_into(
        self, name: str, start: int, buffer: memoryview, *, version: str | None = None
    ) -> str | None:
        found = self._store.read_into(name, start, buffer, version=version)
        with self._lock:
            number = self.num_reads
            self.num_reads += 1
        self._spoil(number, buffer)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def flip_answer(number: int, *more: int) -> Callable[[int, memoryview], None]:
    def spoil(answer: int, buffer: memoryview) -> None:
        if answer in (number, *more):
            buffer[len(buffer) // 2] ^= 4

    return spoil


def test_a_bit_that_flips_on_the_way_is_no_damage(artifact: MemoryStore, tmp_path: Path) -> None:
    store = FaultyAnswers(artifact, flip_answer(2))
    report = verify(store, threads=1)
    assert report.ok
    assert store.num_reads == report.num_parts + 1
    unpack(FaultyAnswers(artifact, flip_answer(2)), tmp_path / "back", threads=1)


def test_a_bit_that_flips_twice_is_damage(artifact: MemoryStore) -> None:
    report = verify(FaultyAnswers(artifact, flip_answer(2, 3)), threads=1)
    assert [problem.part.index for problem in report.problems] == [2]


def test_a_small_file_is_read_again_too(artifact: MemoryStore) -> None:
    class Flipping:
        flipped: ClassVar[list[str]] = []

        def read(self, name: str, *, max_bytes: int) -> tuple[bytes, ObjectInfo]:
            data, info = artifact.read(name, max_bytes=max_bytes)
            if name.endswith("config.json") and name not in self.flipped:
                self.flipped.append(name)
                data = bytes([data[0] ^ 1]) + data[1:]
            return data, info

        def __getattr__(self, name: str) -> Any:
            return getattr(artifact, name)

    assert verify(Flipping()).ok
    assert len(Flipping.flipped) == 2


@pytest.mark.parametrize("tool", ["verify", "unpack"])
def test_a_store_that_dies_is_given_up_after_one_failure(
    artifact: MemoryStore, tmp_path: Path, tool: str
) -> None:
    """A real store has waited for the outage by then."""
    num_threads = 3

    def die(answer: int, buffer: memoryview) -> None:
        if answer >= 5:
            raise UnavailableError("nothing has come for 30 s")

    store = FaultyAnswers(artifact, die)
    run = verify if tool == "verify" else functools.partial(unpack, directory=tmp_path / "back")
    with pytest.raises(UnavailableError, match="30 s"):
        run(store, threads=num_threads)
    assert store.num_reads <= 5 + num_threads
