"""Objects that are replaced while they are loaded: one load never mixes two versions, and says that they were changed.

The artifacts are packed for real: their manifests know no versions, which the load learns from the first answers.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.artifacts import build_artifact
from tests.support.aws_environment import use_test_credentials
from tests.support.checkpoints import llama_contents, model_store
from tests.support.faulty_loads import FaultyStore, faulty_store
from tests.support.memory_store import MemoryStore
from tests.support.paced import WAIT_S
from tests.support.store_faults import Fault
from tests.support.store_http import Request
from tests.support.store_server import StoreServer

from teneral.loader.artifact import open_artifact
from teneral.loader.errors import ChangedError, IntegrityError, TeneralError
from teneral.loader.format.manifest import Manifest
from teneral.loader.load.load import WeightLoad
from teneral.loader.load.options import LoadOptions
from teneral.loader.sources.base import Source, SourceOptions
from teneral.loader.sources.file.store import FileStore
from teneral.loader.sources.http.source import HttpSource
from teneral.loader.sources.s3.store import S3Store
from teneral.loader.tools.pack.pack import pack

CONTENTS = llama_contents(num_layers=3)
RANGE_BYTES = 2_000
BEFORE = 8  # range requests that are answered before something happens


@dataclass
class Bucket:
    """A model behind the store server, and whole loads of it."""

    server: StoreServer
    folder: Path

    def opened(self, scheme: str) -> Source:
        options = SourceOptions(hedge_after_s=0, endpoint_url=self.server.url if scheme == "s3" else None)
        if scheme == "s3":
            return S3Store("s3://models/m", options)
        return HttpSource(f"{self.server.url}/models/m", options)

    def load(self, scheme: str = "http", *, connections: int = 4) -> None:
        """Load everything and compare every tensor. Raises the load's error."""
        with closing(self.opened(scheme)) as source:
            manifest = open_artifact(source)
            load_all(source, manifest, LoadOptions(connections=connections, range_bytes=RANGE_BYTES))

    def replace(self, *, mtime_s: float | None = None) -> None:
        """Put other objects of the same size in the place of all that hold weights."""
        for path in [*self.folder.rglob("*.bin"), *self.folder.rglob("*.safetensors")]:
            other = self.folder.parent.parent / "other"
            other.write_bytes(bytes(path.stat().st_size))
            if mtime_s is not None:
                os.utime(other, (mtime_s, mtime_s))
            other.replace(path)

    def names(self) -> set[str]:
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*.bin")}


def load_all(source: Source, manifest: Manifest, options: LoadOptions) -> None:
    with WeightLoad(source, manifest, options=options) as load:
        load.start()
        for group in manifest.groups:
            load.wait(group.index, timeout_s=WAIT_S)
        for name, (_, _, content) in CONTENTS.items():
            assert load.array(name).tobytes() == content, name
        assert load.join(WAIT_S)
        load.check_integrity()


@pytest.fixture(params=["packed", "plain"])
def bucket(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bucket]:
    use_test_credentials(monkeypatch)
    folder = tmp_path / "root" / "models" / "m"
    plain = model_store(CONTENTS)
    if request.param == "packed":
        pack(plain, FileStore(folder))
    else:
        target = FileStore(folder)
        for info in plain.list():
            target.put(info.name, plain.read(info.name, max_bytes=1 << 30)[0])
    with StoreServer(tmp_path / "root") as server:
        yield Bucket(server, folder)


only_packed = pytest.mark.parametrize("bucket", ["packed"], indirect=True)


class Ranges:
    """The requests for weights that a hook has seen, in the order in which they came."""

    def __init__(self, react: Callable[[int, Request], Fault | None] = lambda number, request: None) -> None:
        self.seen: list[tuple[str, str | None]] = []  # key, If-Match
        self._lock = threading.Lock()
        self._react = react

    def __call__(self, request: Request) -> Fault | None:
        if request.range is None or (
            "blobs/" not in request.key and not request.key.endswith(".safetensors")
        ):
            return None
        with self._lock:
            number = len(self.seen)
            self.seen.append((request.key, request.headers.get("if-match")))
        return self._react(number, request)


# Replaced while it is loaded


@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_an_object_that_is_replaced_during_a_load_is_refused_as_changed(bucket: Bucket, scheme: str) -> None:
    bucket.load(scheme)

    def react(number: int, request: Request) -> None:
        if number == BEFORE:
            bucket.replace()

    bucket.server.set_fault(Ranges(react))
    with pytest.raises(ChangedError, match=r"part \d+ \(.*(replaced or truncated|another version)") as caught:
        bucket.load(scheme, connections=1)
    assert "Start again" in caught.value.hint


@only_packed
def test_the_version_of_each_objects_first_answer_is_asked_for_from_then_on(bucket: Bucket) -> None:
    ranges = Ranges()
    bucket.server.set_fault(ranges)
    bucket.load(connections=1)
    asked: dict[str, list[str | None]] = {}
    for key, version in ranges.seen:
        asked.setdefault(key, []).append(version)
    assert {key.removeprefix("m/") for key in asked} == bucket.names()
    assert len(asked) > 1  # each has its own
    for key, versions in asked.items():
        etag = bucket.server.objects.find("models", key).etag
        assert versions == [None, *[etag] * (len(versions) - 1)]
        assert len(versions) > 1


@only_packed
def test_a_server_that_ignores_if_match_is_found_out_by_its_own_etag(bucket: Bucket) -> None:
    def react(number: int, request: Request) -> None:
        request.headers.pop("if-match", None)
        if number == BEFORE:
            bucket.replace()

    bucket.server.set_fault(Ranges(react))
    with pytest.raises(ChangedError, match=r"version \S+ was expected, \S+ is there"):
        bucket.load(connections=1)


@only_packed
def test_two_first_answers_of_different_versions_are_not_both_believed(bucket: Bucket) -> None:
    """Both are in flight before the version of either is known, and both bring the right bytes."""
    together = threading.Barrier(2, timeout=WAIT_S)

    def react(number: int, request: Request) -> Fault | None:
        if number < 2:
            together.wait()
        return Fault(headers={"ETag": f'"{number}"'}) if number < 2 else None

    ranges = Ranges(react)
    bucket.server.set_fault(ranges)
    with pytest.raises(ChangedError, match=r"version \S+ was expected, \S+ is there|another version"):
        bucket.load(connections=2)
    (first, _), (second, _) = ranges.seen[:2]
    assert first == second


@only_packed
def test_weak_etags_are_compared_here_and_never_sent(bucket: Bucket) -> None:
    ranges = Ranges(lambda number, request: Fault(headers={"ETag": 'W/"1"'}))
    bucket.server.set_fault(ranges)
    bucket.load()
    changing = Ranges(lambda number, request: Fault(headers={"ETag": f'W/"{number // BEFORE}"'}))
    bucket.server.set_fault(changing)
    with pytest.raises(ChangedError, match='W/"1" is there'):
        bucket.load(connections=1)
    assert {version for _, version in ranges.seen + changing.seen} == {None}


@only_packed
@pytest.mark.parametrize(("mtime_s", "kind"), [(1e9, ChangedError), (0.0, IntegrityError)])
def test_without_etags_the_time_of_change_tells_and_without_that_the_digest(
    bucket: Bucket, mtime_s: float, kind: type[TeneralError]
) -> None:
    versions = {"ETag": ""} if mtime_s else {"ETag": "", "Last-Modified": ""}

    def react(number: int, request: Request) -> Fault:
        if number == BEFORE:
            bucket.replace(mtime_s=mtime_s)
        return Fault(headers=versions)

    ranges = Ranges(react)
    bucket.server.set_fault(ranges)
    with pytest.raises(kind, match=r"part \d+ "):
        bucket.load(connections=1)
    assert {version for _, version in ranges.seen} == {None}


@only_packed
def test_what_was_fetched_before_by_another_load_does_not_bind_the_next_one(bucket: Bucket) -> None:
    """A version is the load's, not the source's: the same source may read what was packed anew."""
    with closing(bucket.opened("http")) as source:
        options = LoadOptions(connections=2, range_bytes=RANGE_BYTES)
        load_all(source, open_artifact(source), options)
        for path in bucket.folder.rglob("*.bin"):
            copied = bucket.folder.parent.parent / "copied"
            copied.write_bytes(path.read_bytes())
            copied.replace(path)
        load_all(source, open_artifact(source), options)


def test_a_hedge_never_patches_a_range_from_two_versions(tmp_path: Path) -> None:
    """The object is replaced after the first answer stalled: the second one is of another version."""
    with faulty_store(tmp_path) as store:

        def hook(request: Request) -> Fault | None:
            if request.serial == 0:
                return Fault(stall_after_bytes=5_000)
            for blob in store.built.manifest.blobs:
                other = store.folder / "other"
                other.write_bytes(bytes(blob.size_bytes))
                other.replace(store.folder / blob.name)
            return None

        store.set_fault(hook)
        with pytest.raises(ChangedError, match="replaced or truncated"):
            store.load(connections=1)


def test_hedges_and_resumed_ranges_ask_for_the_version_of_the_others(tmp_path: Path) -> None:
    with faulty_store(tmp_path) as store:
        faults = {BEFORE: Fault(stall_after_bytes=5_000), 2 * BEFORE: Fault(cut_after_bytes=5_000)}
        ranges = Ranges(lambda number, request: faults.get(number))
        store.set_fault(ranges)
        done = store.load(connections=1)
        assert (done.web.hedges, done.web.retries, done.web.resumed) == (1, 1, 2)
        assert sum(version is None for _, version in ranges.seen) == num_blobs(store)


def num_blobs(store: FaultyStore) -> int:
    return len(store.built.manifest.blobs)


class Forgetful(MemoryStore):
    """Gives its set answer, whatever version is asked for."""

    def __init__(self, versions: Iterator[str | None], objects: dict[str, bytes]) -> None:
        super().__init__(objects)
        self.versions = versions
        self.asked: list[str | None] = []

    def read_into(
        self, name: str, start: int, buffer: memoryview, *, version: str | None = None
    ) -> str | None:
        self.asked.append(version)
        super().read_into(name, start, buffer)
        return next(self.versions)


@pytest.mark.parametrize(
    ("versions", "is_refused"), [("aaaaaaaa", False), ("aaab", True), ([None] * 8, False)]
)
def test_a_source_that_says_nothing_of_versions_is_believed_and_one_that_wavers_is_not(
    versions: list[str | None], is_refused: bool
) -> None:
    built = build_artifact([("g", {"w": ("F32", (1_000,))})])
    stored = {blob.name: built.store.read(blob.name, max_bytes=1 << 20)[0] for blob in built.manifest.blobs}
    source = Forgetful(itertools.cycle(versions), stored)
    with WeightLoad(source, built.manifest, options=LoadOptions(connections=1, range_bytes=600)) as load:
        load.start()
        if is_refused:
            with pytest.raises(ChangedError, match="version a was expected, b is there"):
                load.wait(0, timeout_s=WAIT_S)
        else:
            load.wait(0, timeout_s=WAIT_S)
            assert len(source.asked) > 4
            assert load.array("w").tobytes() == built.originals["w"].tobytes()
        assert source.asked[1:] == [versions[0]] * (len(source.asked) - 1)
