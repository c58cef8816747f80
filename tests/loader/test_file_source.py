"""The folder store: links, odd files, crashes, full disks, and writers that race."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from teneral.loader.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    ChangedError,
    NoSpaceError,
    NotFoundError,
    SourceError,
    UsageError,
)
from teneral.loader.sources.file import store as file_store
from teneral.loader.sources.file import writer as file_writer
from teneral.loader.sources.file.store import FileStore
from teneral.loader.sources.open import open_source, open_store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    return made


@pytest.fixture
def store(folder: Path) -> FileStore:
    return FileStore(folder)


def files(folder: Path) -> list[str]:
    """Everything below the folder, hidden files too."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# Addresses


@pytest.mark.parametrize("form", ["{}", "file://{}", "file://localhost{}", "FILE://{}"])
def test_a_folder_can_be_named_in_several_ways(tmp_path: Path, form: str) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    (folder / "x").write_bytes(b"content")
    path = str(folder) if form == "{}" else str(folder).replace(" ", "%20")
    assert open_source(form.format(path)).read("x", max_bytes=10)[0] == b"content"


def test_a_relative_path_stays_the_same_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "x").write_bytes(b"content")
    monkeypatch.chdir(folder.parent)
    source = open_source("model")
    monkeypatch.chdir("/")
    assert source.read("x", max_bytes=10)[0] == b"content"


@pytest.mark.parametrize(
    "url", ["ftp://host/x", "memory://x", "file://host/path", "", "file:///x?y=1", "a\0b"]
)
def test_an_address_that_cannot_be_opened_says_what_can(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_store(url)
    assert "path" in caught.value.hint


def test_a_web_address_cannot_be_written_to() -> None:
    with pytest.raises(UsageError, match="only be read"):
        open_store("https://host/folder")


# Reading


def test_a_missing_folder_differs_from_a_missing_file(tmp_path: Path, store: FileStore) -> None:
    with pytest.raises(NotFoundError, match="nowhere does not exist") as caught:
        FileStore(tmp_path / "nowhere").stat("config.json")
    assert caught.value.name == ""
    with pytest.raises(NotFoundError, match=r"there is no config\.json") as caught:
        store.stat("config.json")
    assert caught.value.name == "config.json"
    with pytest.raises(NotFoundError, match="nowhere does not exist"):
        FileStore(tmp_path / "nowhere").list()


def test_a_file_in_place_of_the_folder_is_reported_as_a_file(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"x")
    with pytest.raises(NotFoundError, match="is a file, not a folder"):
        FileStore(folder / "model.safetensors").stat("config.json")


def test_a_cache_of_links_to_blobs_is_read_through(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "1234").write_bytes(b"content")
    (snapshot / "config.json").symlink_to("../../blobs/1234")
    (snapshot / "gone.json").symlink_to("../../blobs/5678")
    source = FileStore(snapshot)
    assert source.read("config.json", max_bytes=10)[0] == b"content"
    assert [info.name for info in source.list()] == ["config.json"]
    with pytest.raises(NotFoundError):
        source.stat("gone.json")


def test_a_link_in_a_circle_ends(folder: Path, store: FileStore) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "x").write_bytes(b"1")
    (folder / "sub" / "up").symlink_to("..")
    (folder / "self").symlink_to("self")
    assert [info.name for info in store.list()] == ["sub/x"]
    with pytest.raises(NotFoundError):
        store.stat("self")


def test_what_is_not_a_regular_file_is_refused_without_hanging(folder: Path, store: FileStore) -> None:
    os.mkfifo(folder / "fifo")
    (folder / "sub").mkdir()
    for name in ("fifo", "sub"):
        with pytest.raises(NotFoundError, match="not a regular file"):
            store.read(name, max_bytes=10)
    assert list(store.list()) == []


def test_names_that_could_not_be_asked_for_are_not_listed(folder: Path, store: FileStore) -> None:
    for name in ("plain", "line\nbreak", "back\\slash"):
        (folder / name).write_bytes(b"x")
    (folder / os.fsdecode(b"not-utf8-\xff")).write_bytes(b"x")
    assert [info.name for info in store.list()] == ["plain"]


def test_a_file_that_is_overwritten_in_place_has_another_version(folder: Path, store: FileStore) -> None:
    (folder / "x").write_bytes(b"before")
    version = store.stat("x").version
    (folder / "x").write_bytes(b"after!!")
    with pytest.raises(ChangedError, match="was expected"):
        store.read_into("x", 0, memoryview(bytearray(3)), version=version)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_refused(folder: Path, store: FileStore) -> None:
    (folder / "x").write_bytes(b"secret")
    (folder / "x").chmod(0)
    with pytest.raises(AccessDeniedError, match="Permission denied"):
        store.read("x", max_bytes=10)


# Writing


def test_nothing_can_be_seen_of_an_object_before_it_is_whole(folder: Path, store: FileStore) -> None:
    writer = store.create("blobs/a.bin")
    writer.write(b"x" * 100_000)
    assert list(store.list()) == []
    assert not (folder / "blobs" / "a.bin").exists()
    writer.commit()
    assert files(folder) == ["blobs", "blobs/a.bin"]


def test_an_abort_leaves_no_file_and_no_folder(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "new" / "artifact")
    first, second = store.create("blobs/one/a.bin"), store.create("blobs/one/b.bin")
    first.abort()
    assert (tmp_path / "new" / "artifact" / "blobs" / "one").exists()
    second.abort()
    assert files(tmp_path) == []


def test_deleting_the_last_object_removes_its_folders_but_not_a_root_that_was_there(
    folder: Path, store: FileStore
) -> None:
    store.put("blobs/one/a.bin", b"x")
    store.put("blobs/two/b.bin", b"x")
    store.delete("blobs/one/a.bin")
    assert files(folder) == ["blobs", "blobs/two", "blobs/two/b.bin"]
    store.delete("blobs/two/b.bin")
    assert files(folder) == []
    assert folder.exists()


def test_what_a_killed_writer_left_is_removed_by_the_next(folder: Path, store: FileStore) -> None:
    code = (
        "import os, signal, sys\n"
        "from teneral.loader.sources.file.store import FileStore\n"
        "writer = FileStore(sys.argv[1]).create('a.bin')\n"
        "writer.write(b'half of it')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(folder)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(files(folder)) == 1
    living = store.create("b.bin")
    assert len(files(folder)) == 1
    store.put("c.bin", b"x")
    living.write(b"still there")
    living.commit()
    assert files(folder) == ["b.bin", "c.bin"]


@pytest.fixture
def small_files() -> Iterator[int]:
    """No file of this process may be larger than this: the kernel refuses, as a full disk would."""
    limit, old = 100_000, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_no_space_is_an_error_and_nothing_is_left(folder: Path, store: FileStore, small_files: int) -> None:
    with (
        pytest.raises(NoSpaceError, match=r"large\.bin") as caught,
        store.create("blobs/large.bin") as writer,
    ):
        writer.write(bytes(3 * small_files))
    assert "Free some space" in caught.value.hint
    assert files(folder) == []


def test_an_abandoned_writer_leaves_nothing(tmp_path: Path) -> None:
    FileStore(tmp_path / "new" / "artifact").create("blobs/one")
    assert not (tmp_path / "new").exists()


# A folder's listing that is interrupted before `with` has it is closed by the garbage collector, which warns.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_point_before_a_writer_is_kept_leaves_nothing(tmp_path: Path) -> None:
    """A signal is handled between two instructions of Python: the trace raises at each of them in turn."""
    traced = {file_writer.__file__, file_store.__file__, os.makedirs.__code__.co_filename}
    cleaning_up = {"__del__", "abort", "_discard", "prune"}
    num_interrupted = 0

    def interrupted_at(wanted: int) -> bool:
        store, seen = FileStore(tmp_path / "new" / "artifact"), 0

        def trace(frame, event: str, argument: object):
            nonlocal seen
            if frame.f_code.co_filename not in traced or frame.f_code.co_name in cleaning_up:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                seen += 1
                if seen == wanted:
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            writer = store.create("blobs/one")
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        writer.abort()
        return False

    for wanted in range(1, 2000):
        if not interrupted_at(wanted):
            break
        num_interrupted += 1
        assert not (tmp_path / "new").exists(), f"interrupted at instruction {wanted}"
    assert num_interrupted > 100
    assert not (tmp_path / "new").exists()


def test_a_folder_where_nothing_can_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(NotFoundError, match=r"not a folder|does not exist"):
        FileStore(tmp_path / "file" / "model").put("x", b"x")
    with pytest.raises(SourceError):
        FileStore("/proc/nothing/here").put("x", b"x")


def test_an_object_cannot_replace_a_folder(store: FileStore) -> None:
    store.put("blobs/a", b"x")
    for condition in ({}, {"if_version": "1-2-3"}):
        with pytest.raises(NotFoundError, match="is a folder"):
            store.put("blobs", b"x", **condition)


def race(put: list[object], num_threads: int = 8) -> list[str]:
    """Run the callables at the same moment; 'won' or the error's kind of each, sorted."""
    barrier, outcomes = threading.Barrier(num_threads), []

    def run(one: object) -> None:
        barrier.wait()
        try:
            one()
        except AlreadyExistsError as error:
            outcomes.append(type(error).__name__)
        else:
            outcomes.append("won")

    threads = [threading.Thread(target=run, args=(one,)) for one in put]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(outcomes)


def test_of_many_who_create_only_one_wins(folder: Path) -> None:
    for _ in range(20):
        puts = [
            lambda number=number: FileStore(folder).put("m.json", b"%d" % number, if_absent=True)
            for number in range(8)
        ]
        assert race(puts) == ["AlreadyExistsError"] * 7 + ["won"]
        (folder / "m.json").unlink()
    assert files(folder) == []


def test_of_many_who_replace_a_version_only_one_wins(folder: Path) -> None:
    store = FileStore(folder)
    version = store.put("m.json", b"first").version
    for _ in range(20):
        puts = [
            lambda number=number, version=version: FileStore(folder).put(
                "m.json", b"%d" % number, if_version=version
            )
            for number in range(8)
        ]
        assert race(puts) == ["AlreadyExistsError"] * 7 + ["won"]
        version = store.stat("m.json").version
    assert files(folder) == ["m.json"]


def test_a_deletion_waits_for_a_conditional_writer_of_the_object(folder: Path) -> None:
    """An object that a writer has compared is there until the writer has replaced it."""
    store = FileStore(folder)
    store.put("m.json", b"first")
    with (folder / "m.json").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        deleter = threading.Thread(target=store.delete, args=("m.json",))
        deleter.start()
        deleter.join(0.2)
        assert deleter.is_alive()
        assert files(folder) == ["m.json"]
    deleter.join()
    assert files(folder) == []


def test_many_delete_the_same_object(folder: Path) -> None:
    for _ in range(20):
        FileStore(folder).put("m.json", b"first")
        assert race([lambda: FileStore(folder).delete("m.json")] * 8) == ["won"] * 8


def test_an_object_that_may_not_be_written_is_deleted(folder: Path) -> None:
    FileStore(folder).put("m.json", b"first")
    (folder / "m.json").chmod(0o400)
    FileStore(folder).delete("m.json")
    assert files(folder) == []


def test_writers_and_deleters_of_one_folder_do_not_trip_over_each_other(folder: Path) -> None:
    store, failures = FileStore(folder), []

    def come_and_go(number: int) -> None:
        try:
            for _ in range(50):
                store.put(f"blobs/deep/{number}", b"x")
                store.delete(f"blobs/deep/{number}")
        except SourceError as error:
            failures.append(error)

    threads = [threading.Thread(target=come_and_go, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert files(folder) == []
