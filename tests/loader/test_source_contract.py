"""The contract of every source, tried on each kind: memory, file, http, s3 on our own server, s3 on
moto, gs, az, hub.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer
from tests.support.aws_environment import use_test_credentials
from tests.support.az_server import ACCOUNT, AzServer, use_az_account
from tests.support.gs_server import GsServer, use_gs_account
from tests.support.hub_server import HubServer, use_hub
from tests.support.memory_store import MemoryStore
from tests.support.store_server import StoreServer
from tests.support.toy_store import ToyStore

from teneral.loader.errors import (
    AlreadyExistsError,
    ChangedError,
    FormatError,
    NotFoundError,
    SourceClosedError,
    SourceError,
    UsageError,
)
from teneral.loader.sources.az.store import AzStore
from teneral.loader.sources.base import Source, SourceOptions, Store
from teneral.loader.sources.file.store import FileStore
from teneral.loader.sources.gs.store import GsStore
from teneral.loader.sources.http.source import HttpSource
from teneral.loader.sources.open import open_source
from teneral.loader.sources.s3.store import S3Store

DATA = bytes(range(256)) * 1200  # 300 KiB: more than arrives along with a head
NAMES = ("blobs/a b+c.bin", "blobs/empty", "blobs/ü-名.bin", "config.json")
BUCKET, PREFIX = "models", "team/a model"


@dataclass
class Place:
    """Somewhere that holds objects: how to open a store that writes there, unless it is filled already, and a
    source that reads there.
    """

    open_store: Callable[[], Store] | None
    open: Callable[[], Source]
    can_list: bool = True


@contextmanager
def memory_place(folder: Path) -> Iterator[Place]:
    store = MemoryStore()
    yield Place(store.reopen, store.reopen)


@contextmanager
def toy_place(folder: Path) -> Iterator[Place]:
    def open_database() -> ToyStore:
        return ToyStore(f"toy://{folder}/objects.db/{PREFIX}")

    yield Place(open_database, open_database)


@contextmanager
def file_place(folder: Path) -> Iterator[Place]:
    def open_folder() -> FileStore:
        return FileStore(folder / "not yet" / "there")

    yield Place(open_folder, open_folder)


@contextmanager
def s3_place(folder: Path) -> Iterator[Place]:
    with StoreServer(folder) as server:
        server.objects.make_bucket(BUCKET)
        open_bucket = bucket_at(server.url)
        yield Place(open_bucket, open_bucket)


@contextmanager
def http_place(folder: Path) -> Iterator[Place]:
    with StoreServer(folder) as server:
        server.objects.make_bucket(BUCKET)
        url = f"{server.url}/{BUCKET}/{PREFIX}/"
        yield Place(bucket_at(server.url), lambda: HttpSource(url), can_list=False)


@contextmanager
def moto_place(folder: Path) -> Iterator[Place]:
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    client = boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1")
    client.create_bucket(Bucket=BUCKET)
    client.close()
    open_bucket = bucket_at(f"http://{host}:{port}")
    yield Place(open_bucket, open_bucket)
    server.stop()


@contextmanager
def gs_place(folder: Path) -> Iterator[Place]:
    with GsServer() as server, pytest.MonkeyPatch.context() as patch:
        use_gs_account(patch, server)
        server.objects[BUCKET] = {}
        options = SourceOptions(endpoint_url=server.url, max_attempts=1)

        def open_bucket() -> GsStore:
            return GsStore(f"gs://{BUCKET}/{PREFIX}", options)

        yield Place(open_bucket, open_bucket)


@contextmanager
def az_place(folder: Path) -> Iterator[Place]:
    with AzServer() as server, pytest.MonkeyPatch.context() as patch:
        use_az_account(patch, server)
        server.objects[BUCKET] = {}
        options = SourceOptions(endpoint_url=server.endpoint, max_attempts=1)

        def open_container() -> AzStore:
            return AzStore(f"az://{ACCOUNT}/{BUCKET}/{PREFIX}", options)

        yield Place(open_container, open_container)


@contextmanager
def hub_place(folder: Path) -> Iterator[Place]:
    with HubServer() as server, pytest.MonkeyPatch.context() as patch:
        use_hub(patch, server, folder)
        contents = {f"a model/{name}": b"" if name.endswith("empty") else DATA for name in NAMES}
        server.repository("org/tiny", contents)
        yield Place(None, lambda: open_source("hf://org/tiny/a model", SourceOptions(max_attempts=1)))


def bucket_at(endpoint_url: str) -> Callable[[], S3Store]:
    options = SourceOptions(endpoint_url=endpoint_url, max_attempts=1)
    return lambda: S3Store(f"s3://{BUCKET}/{PREFIX}", options)


PLACES = {
    "memory": memory_place,
    "toy": toy_place,
    "file": file_place,
    "http": http_place,
    "s3": s3_place,
    "moto": moto_place,
    "gs": gs_place,
    "az": az_place,
    "hub": hub_place,
}


@pytest.fixture(scope="module", params=PLACES)
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, s3_environment: None
) -> Iterator[Place]:
    """With `NAMES` in it; tests that write more remove it again."""
    with PLACES[request.param](tmp_path_factory.mktemp(request.param)) as made:
        if made.open_store is not None:
            store = made.open_store()
            for name in NAMES:
                store.put(name, b"" if name.endswith("empty") else DATA)
            store.close()
        yield made


@pytest.fixture(scope="module")
def s3_environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        use_test_credentials(patch)
        yield


@pytest.fixture
def source(place: Place) -> Iterator[Source]:
    opened = place.open()
    yield opened
    opened.close()


@pytest.fixture
def store(place: Place) -> Iterator[Store]:
    if place.open_store is None:
        pytest.skip("nothing can be written there")
    opened = place.open_store()
    yield opened
    opened.close()


# Reading


@pytest.mark.parametrize("name", NAMES)
def test_stat_and_read_agree_on_size_and_version(source: Source, name: str) -> None:
    data, info = source.read(name, max_bytes=len(DATA))
    assert data == (b"" if name.endswith("empty") else DATA)
    assert info == source.stat(name)
    assert (info.name, info.size_bytes) == (name, len(data))
    assert info.version


@pytest.mark.parametrize(
    ("start", "size"), [(0, 1), (0, len(DATA)), (17, 100_000), (len(DATA) - 1, 1), (5, 0)]
)
def test_a_range_lands_in_the_buffer_and_nowhere_else(source: Source, start: int, size: int) -> None:
    memory = bytearray(b"\xee" * (size + 20))
    source.read_into("config.json", start, memoryview(memory)[10 : 10 + size])
    assert memory == b"\xee" * 10 + DATA[start : start + size] + b"\xee" * 10


def test_many_threads_read_at_once(source: Source) -> None:
    size, results = 30_000, {}

    def read(start: int) -> None:
        buffer = bytearray(size)
        source.read_into("blobs/a b+c.bin", start, memoryview(buffer))
        results[start] = bytes(buffer)

    threads = [threading.Thread(target=read, args=(start,)) for start in range(0, len(DATA) - size, size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {start: DATA[start : start + size] for start in range(0, len(DATA) - size, size)}


def test_a_read_only_buffer_is_a_callers_bug(source: Source) -> None:
    with pytest.raises(ValueError, match="read-only"):
        source.read_into("config.json", 0, memoryview(b"12345"))


def test_a_missing_object_is_named(source: Source) -> None:
    for ask in (
        lambda: source.stat("blobs/none"),
        lambda: source.read("blobs/none", max_bytes=10),
        lambda: source.read_into("blobs/none", 0, memoryview(bytearray(4))),
    ):
        with pytest.raises(NotFoundError, match="blobs/none") as caught:
            ask()
        assert (caught.value.name, caught.value.source) == ("blobs/none", source.url)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "blobs//x", "a\0b", "", ".", "blobs/"])
def test_a_name_that_climbs_out_is_refused_before_anything_is_asked(source: Source, name: str) -> None:
    for ask in (
        lambda: source.stat(name),
        lambda: source.read(name, max_bytes=10),
        lambda: source.read_into(name, 0, memoryview(bytearray(4))),
    ):
        with pytest.raises(UsageError, match="not a usable object name"):
            ask()


def test_an_object_larger_than_allowed_is_not_read(source: Source) -> None:
    with pytest.raises(FormatError, match=r"config\.json") as caught:
        source.read("config.json", max_bytes=len(DATA) - 1)
    assert caught.value.where == "config.json"


@pytest.mark.parametrize("start", [len(DATA) - 4, len(DATA), len(DATA) + 1000])
def test_a_range_beyond_the_end_says_that_the_object_is_shorter(source: Source, start: int) -> None:
    with pytest.raises(ChangedError, match=r"config\.json"):
        source.read_into("config.json", start, memoryview(bytearray(8)))


def test_the_expected_version_is_read(source: Source) -> None:
    buffer = bytearray(8)
    version = source.stat("config.json").version
    assert source.read_into("config.json", 3, memoryview(buffer), version=version) == version
    assert source.read_into("config.json", 3, memoryview(buffer)) in (version, None)
    assert buffer == DATA[3:11]


def test_a_replaced_object_is_noticed(store: Store, source: Source) -> None:
    store.put("replaced.bin", b"old content")
    version = source.stat("replaced.bin").version
    store.put("replaced.bin", b"new content")
    with pytest.raises(ChangedError, match=r"replaced\.bin"):
        source.read_into("replaced.bin", 0, memoryview(bytearray(4)), version=version)
    store.delete("replaced.bin")


def test_a_closed_source_reads_no_more(place: Place) -> None:
    source = place.open()
    source.stat("config.json")
    source.close()
    source.close()
    for ask in (
        lambda: source.stat("config.json"),
        lambda: source.read("config.json", max_bytes=10),
        lambda: source.read_into("config.json", 0, memoryview(bytearray(4))),
    ):
        with pytest.raises(SourceClosedError):
            ask()


# Listing


def test_objects_are_listed_in_name_order(place: Place, source: Source) -> None:
    if not place.can_list:
        with pytest.raises(UsageError, match="cannot be listed"):
            source.list()
        return
    assert [info.name for info in source.list()] == sorted(NAMES)
    # Only a listing says when an object was written.
    listed = [info[:3] for info in source.list("blobs/")]
    assert listed == [source.stat(name)[:3] for name in sorted(NAMES)[:3]]
    assert [info.name for info in source.list("conf")] == ["config.json"]
    assert list(source.list("nothing/like/it")) == []


# Writing


def test_a_streamed_object_appears_when_it_is_committed(store: Store, source: Source) -> None:
    with store.create("new/streamed.bin") as writer:
        piece = bytearray(b"abc")
        writer.write(piece)
        piece[:] = b"xyz"  # the writer has taken what it needs
        with pytest.raises(NotFoundError):
            source.stat("new/streamed.bin")
        writer.write(memoryview(b"def"))
        info = writer.commit()
    assert source.read("new/streamed.bin", max_bytes=10) == (b"abcdef", info)
    store.delete("new/streamed.bin")


def test_an_aborted_object_never_appears(store: Store, source: Source) -> None:
    writer = store.create("new/aborted.bin")
    writer.write(b"abc")
    writer.abort()
    writer.abort()
    with pytest.raises(ValueError, match="aborted"):
        writer.write(b"more")
    with pytest.raises(TypeError), store.create("new/failed.bin") as failing:
        failing.write("abc")
    for name in ("new/aborted.bin", "new/failed.bin"):
        with pytest.raises(NotFoundError):
            source.stat(name)


def test_a_committed_object_survives_a_late_abort(store: Store, source: Source) -> None:
    writer = store.create("new/kept.bin")
    writer.write(b"abc")
    info = writer.commit()
    writer.abort()
    assert writer.commit() == info
    assert source.read("new/kept.bin", max_bytes=3)[0] == b"abc"
    store.delete("new/kept.bin")


def test_creating_again_replaces_the_object(store: Store, source: Source) -> None:
    for content in (b"first", b"second"):
        with store.create("new/twice.bin") as writer:
            writer.write(content)
    assert source.read("new/twice.bin", max_bytes=10)[0] == b"second"
    store.delete("new/twice.bin")


def test_a_put_that_must_not_replace_does_not(store: Store, source: Source) -> None:
    info = store.put("new/once.json", b"first", if_absent=True)
    with pytest.raises(AlreadyExistsError, match=r"once\.json"):
        store.put("new/once.json", b"second", if_absent=True)
    assert source.read("new/once.json", max_bytes=10) == (b"first", info)
    store.delete("new/once.json")


@pytest.mark.parametrize("size_bytes", [10, 9 * 1024 * 1024, 17 * 1024 * 1024])
def test_a_streamed_object_that_must_not_replace_does_not(
    store: Store, source: Source, size_bytes: int
) -> None:
    """9 MiB go up in parts to S3, 17 MiB to Cloud Storage, whose completion is conditional as well."""
    data = bytes(size_bytes)
    with store.create("once.bin", if_absent=True) as writer:
        writer.write(data)
    try:
        late = store.create("once.bin", if_absent=True)
        late.write(b"x" * size_bytes)
        with pytest.raises(AlreadyExistsError, match=r"once\.bin"):
            late.commit()
        assert source.read("once.bin", max_bytes=size_bytes)[0] == data
    finally:
        store.delete("once.bin")


def test_a_streamed_object_that_appears_meanwhile_is_not_replaced(store: Store, source: Source) -> None:
    with store.create("late.bin", if_absent=True) as writer:
        writer.write(b"ours")
        store.put("late.bin", b"theirs")
        with pytest.raises(AlreadyExistsError):
            writer.commit()
    assert source.read("late.bin", max_bytes=10)[0] == b"theirs"
    store.delete("late.bin")


def test_a_put_replaces_only_the_version_that_it_expects(store: Store, source: Source) -> None:
    first = store.put("new/manifest.json", b"first")
    second = store.put("new/manifest.json", b"second", if_version=first.version)
    with pytest.raises(AlreadyExistsError, match=r"manifest\.json"):
        store.put("new/manifest.json", b"third", if_version=first.version)
    assert source.read("new/manifest.json", max_bytes=10) == (b"second", second)
    store.delete("new/manifest.json")
    with pytest.raises(AlreadyExistsError):
        store.put("new/manifest.json", b"fourth", if_version=second.version)
    with pytest.raises(NotFoundError):
        source.stat("new/manifest.json")


def test_deleting_twice_is_fine(store: Store, source: Source) -> None:
    store.put("new/short-lived", b"x")
    store.delete("new/short-lived")
    store.delete("new/short-lived")
    with pytest.raises(NotFoundError):
        source.stat("new/short-lived")


def test_names_are_checked_before_writing(store: Store) -> None:
    for ask in (
        lambda: store.put("../up", b"x"),
        lambda: store.create("/up"),
        lambda: store.delete("a/../../up"),
    ):
        with pytest.raises(UsageError):
            ask()


def test_a_closed_store_writes_no_more(store: Store) -> None:
    closed = store
    closed.close()
    for ask in (
        lambda: closed.put("late", b"x"),
        lambda: closed.create("late"),
        lambda: closed.delete("late"),
    ):
        with pytest.raises(SourceClosedError):
            ask()


def test_every_error_is_a_source_error_with_an_address(source: Source) -> None:
    with pytest.raises(SourceError) as caught:
        source.stat("none")
    assert caught.value.source == source.url
    assert source.url.endswith(("objects", "there", "model", "a%20model"))


def test_options_do_not_show_the_headers_that_they_carry() -> None:
    options = SourceOptions(region="eu-central-1", headers=(("Authorization", "Bearer abc"),))
    assert "abc" not in f"{options} {options!r}"
    assert "region='eu-central-1'" in repr(options)
