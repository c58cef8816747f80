"""Unused generations: what is in use, or may be, is never removed; everything else is, by one command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.support.checkpoints import llama_contents, model_objects
from tests.support.gs_server import GsServer, use_gs_account
from tests.support.load import patience_s
from tests.support.store_server import StoreServer

from teneral import cli
from teneral.loader.artifact import open_artifact
from teneral.loader.errors import ManifestError, NotFoundError, UsageError
from teneral.loader.load.load import WeightLoad
from teneral.loader.sources.base import SourceOptions
from teneral.loader.sources.file.store import FileStore
from teneral.loader.sources.gs.store import GsStore
from teneral.loader.sources.s3.store import S3Store
from teneral.loader.tools.garbage import collect_garbage, find_unused
from teneral.loader.tools.pack.pack import PackResult, pack
from teneral.loader.tools.verify import verify

DAY_S = 24 * 3600.0


@pytest.fixture
def model(tmp_path: Path) -> FileStore:
    for name, data in model_objects(llama_contents(hidden=128)).items():
        (tmp_path / "model" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "model" / name).write_bytes(data)
    return FileStore(tmp_path / "model")


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "artifact")


def generations(store: FileStore) -> set[str]:
    return {path.name for path in Path(store.url, "blobs").iterdir()}


def make_older(store: FileStore, folder: str, by_s: float) -> None:
    for path in Path(store.url, folder).rglob("*"):
        os.utime(path, (time.time() - by_s,) * 2)
    if folder == "manifest.json":
        os.utime(Path(store.url, folder), (time.time() - by_s,) * 2)


def pack_twice(model: FileStore, store: FileStore) -> tuple[PackResult, PackResult]:
    return pack(model, store), pack(model, store, force=True)


def test_a_load_under_way_outlives_a_replacement(model: FileStore, store: FileStore) -> None:
    manifest = pack(model, store).manifest
    with WeightLoad(store, manifest) as load:
        pack(model, store, force=True)
        load.start()
        for group in manifest.groups:
            load.wait(group.index, timeout_s=patience_s(60))
        assert load.join(patience_s(60))


def test_a_replaced_generation_is_removed_a_day_later(model: FileStore, store: FileStore) -> None:
    old, new = (each.manifest.generation for each in pack_twice(model, store))
    report = collect_garbage(store)
    assert [each.name for each in report.kept] == [old]
    assert "kept: not yet unused for 24:00 h" in report.render()
    make_older(store, f"blobs/{old}", 7 * DAY_S)
    assert not collect_garbage(store).removed, "it was replaced only now"
    make_older(store, "manifest.json", DAY_S + 60)
    assert [each.name for each in collect_garbage(store, dry_run=True).removed] == [old]
    assert generations(store) == {old, new}
    assert [each.name for each in collect_garbage(store).removed] == [old]
    assert generations(store) == {new}
    assert verify(store).ok
    assert collect_garbage(store).render() == f"nothing is unused at {store.url}"


def test_the_generation_in_use_is_never_removed(model: FileStore, store: FileStore) -> None:
    pack(model, store)
    make_older(store, "", 100 * DAY_S)
    collect_garbage(store, older_than_s=0)
    assert verify(store).ok


def test_nothing_is_removed_by_a_manifest_that_cannot_be_read(model: FileStore, store: FileStore) -> None:
    old = pack(model, store).manifest.generation
    store.put("manifest.json", b"damaged")
    with pytest.raises(ManifestError):
        collect_garbage(store, older_than_s=0)
    assert generations(store) == {old}


def test_nothing_but_generations_is_removed(model: FileStore, store: FileStore) -> None:
    for name in ("blobs/mine.bin", "blobs/0123456789abc/x", "blobs/0123456789AB/x", "other/0123456789ab/x"):
        store.put(name, b"mine")
    pack(model, store)
    assert find_unused(store) == ()
    collect_garbage(store, older_than_s=0)
    assert len(list(store.list("blobs/"))) > 3
    assert store.stat("blobs/mine.bin")


KILLED = """
import os, signal, sys
from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.pack import pack

def stop(progress):
    print("packing", flush=True)
    signal.pause()

pack(FileStore(sys.argv[1]), FileStore(sys.argv[2]), progress=stop)
"""


def test_what_a_killed_pack_left_is_listed_and_removed_and_a_living_ones_is_not(
    model: FileStore, store: FileStore, capsys: pytest.CaptureFixture[str]
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, model.url, store.url], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "packing\n"
        (left,) = generations(store)
        assert [each.name for each in collect_garbage(store, older_than_s=0).kept] == [left], "it is written"
        process.send_signal(signal.SIGKILL)
        process.wait(patience_s(60))
        assert generations(store) == {left}
        assert cli.run(["gc", store.url, "--dry-run"]) == 0
        assert f"blobs/{left}: " in capsys.readouterr().out
        assert cli.run(["gc", store.url, "--older-than", "0"]) == 0
        assert "removed" in capsys.readouterr().out
        assert not Path(store.url, "blobs").exists()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("age", ["-1h", "1", "h", "1w", "x", "1.5h", "9999999d"])
def test_an_age_that_is_none_is_refused(store: FileStore, age: str) -> None:
    with pytest.raises(SystemExit):
        cli.run(["gc", store.url, f"--older-than={age}"])
    with pytest.raises(UsageError):
        collect_garbage(store, older_than_s=-1)


def test_listings_of_buckets_say_how_old_objects_are(
    model: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(model, FileStore(tmp_path / "bucket" / "m"))
    with StoreServer(tmp_path) as server:
        source = S3Store("s3://bucket/m", SourceOptions(endpoint_url=server.url, anonymous=True))
        times = [info.modified_unix_s for info in source.list()]
        source.close()
    assert times
    assert all(each is not None and abs(each - time.time()) < patience_s(300) for each in times)
    with GsServer() as gs:
        use_gs_account(monkeypatch, gs)
        gs.objects["models"] = {"m/x": (b"abc", 17)}
        opened = GsStore("gs://models/m", SourceOptions(endpoint_url=gs.url))
        assert [info.modified_unix_s for info in opened.list()] == [1767323045.5]
        opened.close()


def test_a_bucket_that_does_not_exist_is_named_before_anything_is_read(
    model: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("teneral.loader.tools.pack.pack.open_checkpoint", read)
    with StoreServer(tmp_path) as server:
        store = S3Store("s3://nowhere/m", SourceOptions(endpoint_url=server.url, anonymous=True))
        with pytest.raises(NotFoundError, match="the bucket of s3://nowhere/m does not exist"):
            pack(model, store)
        with pytest.raises(NotFoundError, match="the bucket of s3://nowhere/m does not exist"):
            collect_garbage(store)
        store.close()


def test_an_artifact_packed_again_and_again_is_whole(model: FileStore, store: FileStore) -> None:
    for _ in range(3):
        pack(model, store, force=True)
    assert len(find_unused(store)) == 2
    collect_garbage(store, older_than_s=0)
    assert open_artifact(store).generation in generations(store)
    assert len(generations(store)) == 1
