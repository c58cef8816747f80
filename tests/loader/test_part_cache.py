"""The part cache: what it keeps, what it refuses, and that nothing which befalls it becomes the load's trouble."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
from blake3 import blake3
from tests.support.load import patience_s
from tests.support.tiny_disk import tiny_disk

from teneral.loader.cache.folder import LOCK_NAME, PAGE_BYTES, TEMPORARY_LIFE_S, TEMPORARY_PREFIX, CacheFolder
from teneral.loader.cache.part_cache import SLICE_BYTES, PartCache
from teneral.loader.cache.writer import PENDING_BYTES
from teneral.loader.format.manifest import MAX_PART_BYTES

WAIT_LONG_S = patience_s(30)
MIB = 1024 * 1024
BUDGET_BYTES = 64 * MIB


def part(seed: int, size_bytes: int = 3 * PAGE_BYTES) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


def digest_of(data: bytes) -> bytes:
    return blake3(data).digest()


def keep(directory: Path, *parts: bytes, budget_bytes: int = BUDGET_BYTES) -> PartCache:
    """Another load's cache, after it has written these parts."""
    cache = PartCache(directory, budget_bytes=budget_bytes)
    for data in parts:
        cache.offer(digest_of(data), memoryview(data))
    cache.finish()
    assert cache.join(WAIT_LONG_S)
    return cache


def read(cache: PartCache, digest: bytes, size_bytes: int, start: int = 0) -> bytes | None:
    buffer = bytearray(size_bytes)
    return bytes(buffer) if cache.read_into(digest, start, memoryview(buffer)) else None


def held(cache: PartCache, data: bytes) -> bool:
    got = read(cache, digest_of(data), len(data))
    assert got in (None, data)
    return got is not None


def entry(directory: Path, data: bytes) -> Path:
    return next(directory.glob("teneral-parts-*")) / digest_of(data).hex()


def set_used(path: Path, seconds_ago: float) -> None:
    at_ns = time.time_ns() - int(seconds_ago * 1e9)
    os.utime(path, ns=(at_ns, at_ns))


# keeping


def test_a_part_that_one_load_offered_is_there_for_the_next(tmp_path: Path) -> None:
    data = part(1)
    first = keep(tmp_path, data)
    second = PartCache(tmp_path, budget_bytes=BUDGET_BYTES)
    assert read(second, digest_of(data), len(data)) == data
    assert read(second, digest_of(data), 100, start=5000) == data[5000:5100]
    assert first.statistics().num_written == 1
    assert first.statistics().written_bytes == len(data)
    assert second.statistics().num_hits == 2
    assert second.statistics().read_bytes == len(data) + 100
    assert second.statistics().troubles == ()


def test_a_part_that_was_never_offered_is_a_miss_and_no_trouble(tmp_path: Path) -> None:
    cache = PartCache(tmp_path, budget_bytes=BUDGET_BYTES)
    assert not held(cache, part(1))
    assert cache.statistics().num_misses == 1
    assert cache.statistics().troubles == ()


def test_an_offered_part_may_be_overwritten_at_once(tmp_path: Path) -> None:
    data = part(1, 4 * MIB)
    cache = PartCache(tmp_path, budget_bytes=BUDGET_BYTES)
    lent = bytearray(data)
    assert cache.offer(digest_of(data), memoryview(lent))
    lent[:] = bytes(len(lent))
    cache.finish()
    assert cache.join(WAIT_LONG_S)
    assert held(cache, data)


def test_what_came_from_the_cache_is_not_written_again(tmp_path: Path) -> None:
    data = part(1)
    keep(tmp_path, data)
    cache = PartCache(tmp_path, budget_bytes=BUDGET_BYTES)
    assert held(cache, data)
    assert not cache.offer(digest_of(data), memoryview(data))
    assert cache.statistics().num_dropped == 0


def test_a_part_that_another_process_wrote_meanwhile_is_left_as_it_is(tmp_path: Path) -> None:
    data = part(1)
    keep(tmp_path, data)
    inode = entry(tmp_path, data).stat().st_ino
    assert keep(tmp_path, data).statistics().num_written == 0
    assert entry(tmp_path, data).stat().st_ino == inode


def test_files_are_private_and_the_given_folder_stays_as_it_was(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o777)
    shared.chmod(0o777)  # as container platforms make their volumes
    data = part(1)
    keep(shared, data)
    assert shared.stat().st_mode & 0o777 == 0o777
    assert entry(shared, data).parent.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in entry(shared, data).parent.iterdir()} == {0o600}


def test_missing_folders_are_made_at_the_first_use_and_not_before(tmp_path: Path) -> None:
    cache = PartCache(tmp_path / "a" / "b", budget_bytes=BUDGET_BYTES)
    assert not (tmp_path / "a").exists()
    assert not held(cache, part(1))
    assert (tmp_path / "a" / "b").is_dir()


# the budget


def test_the_least_recently_used_parts_make_room(tmp_path: Path) -> None:
    old, used, new = part(1), part(2), part(3)
    keep(tmp_path, old, used)
    set_used(entry(tmp_path, old), 200)
    set_used(entry(tmp_path, used), 300)
    assert held(PartCache(tmp_path, budget_bytes=BUDGET_BYTES), used)
    cache = keep(tmp_path, new, budget_bytes=7 * PAGE_BYTES)
    assert [held(cache, data) for data in (old, used, new)] == [False, True, True]
    assert cache.statistics().num_evicted == 1


def test_a_model_larger_than_the_budget_does_not_push_out_its_own_beginning(tmp_path: Path) -> None:
    parts = [part(seed) for seed in range(6)]
    cache = keep(tmp_path, *parts, budget_bytes=9 * PAGE_BYTES)
    assert [held(cache, data) for data in parts] == [True] * 3 + [False] * 3
    assert cache.statistics().num_dropped == 3
    assert cache.statistics().num_evicted == 0


def test_a_part_larger_than_the_budget_evicts_nothing(tmp_path: Path) -> None:
    small, large = part(1), part(2, 20 * PAGE_BYTES)
    keep(tmp_path, small)
    set_used(entry(tmp_path, small), 100)
    cache = keep(tmp_path, large, budget_bytes=10 * PAGE_BYTES)
    assert held(cache, small)
    assert not held(cache, large)


def test_a_part_larger_than_any_that_a_manifest_may_declare_is_dropped(tmp_path: Path) -> None:
    cache = PartCache(tmp_path, budget_bytes=1 << 30)
    assert not cache.offer(bytes(32), memoryview(bytes(MAX_PART_BYTES + 1)))
    assert cache.statistics().num_dropped == 1


def test_what_a_dead_writer_left_counts_until_it_is_old_and_then_goes(tmp_path: Path) -> None:
    first, second = part(1), part(2)
    keep(tmp_path, first)
    leftover = entry(tmp_path, first).with_name(f"{TEMPORARY_PREFIX}0123")
    leftover.write_bytes(bytes(3 * PAGE_BYTES))
    assert not held(keep(tmp_path, second, budget_bytes=5 * PAGE_BYTES), second)
    set_used(leftover, TEMPORARY_LIFE_S + 60)
    assert held(keep(tmp_path, second, budget_bytes=5 * PAGE_BYTES), second)
    assert not leftover.exists()


def test_a_spoiled_count_is_counted_anew(tmp_path: Path) -> None:
    first, second = part(1), part(2)
    keep(tmp_path, first)
    for spoiled in (b"", b"-5", b"a lot", b"\xff" * 100, b"999999999999999999999999999"):
        entry(tmp_path, first).with_name(LOCK_NAME).write_bytes(spoiled)
        assert held(keep(tmp_path, second), second)
        assert int(entry(tmp_path, first).with_name(LOCK_NAME).read_bytes()[:32]) == 6 * PAGE_BYTES
        entry(tmp_path, second).unlink()


def test_files_that_are_not_the_caches_own_are_left_alone(tmp_path: Path) -> None:
    data = part(1)
    keep(tmp_path, data)
    foreign = entry(tmp_path, data).with_name("notes.txt")
    foreign.write_text("mine")
    set_used(foreign, 1e6)
    keep(tmp_path, part(2), budget_bytes=4 * PAGE_BYTES)
    assert foreign.read_text() == "mine"


# what is wrong on the disk


def test_a_wrong_part_is_removed_and_never_read_again(tmp_path: Path) -> None:
    data = part(1)
    keep(tmp_path, data)
    entry(tmp_path, data).write_bytes(bytes(len(data)))
    cache = PartCache(tmp_path, budget_bytes=BUDGET_BYTES)
    assert read(cache, digest_of(data), len(data)) == bytes(len(data))
    assert cache.reject(digest_of(data))
    assert not entry(tmp_path, data).exists()
    keep(tmp_path, data)
    assert not held(cache, data)  # whatever others put there: this load has been deceived once
    assert cache.statistics().num_rejected == 1


def test_a_rejected_part_can_be_offered_again_once_it_came_from_the_store(tmp_path: Path) -> None:
    data = part(1)
    keep(tmp_path, data)
    entry(tmp_path, data).write_bytes(bytes(len(data)))
    cache = PartCache(tmp_path, budget_bytes=BUDGET_BYTES)
    read(cache, digest_of(data), len(data))
    cache.reject(digest_of(data))
    assert cache.offer(digest_of(data), memoryview(data))
    cache.finish()
    assert cache.join(WAIT_LONG_S)
    assert held(PartCache(tmp_path, budget_bytes=BUDGET_BYTES), data)


def test_a_part_that_the_store_delivered_wrong_is_not_the_caches_fault(tmp_path: Path) -> None:
    data = part(1)
    keep(tmp_path, data)
    cache = PartCache(tmp_path, budget_bytes=BUDGET_BYTES)
    assert not cache.reject(digest_of(data))
    assert held(cache, data)
    assert cache.reject(digest_of(data))
    assert not cache.reject(digest_of(data))


def test_a_truncated_part_is_a_miss_and_removed(tmp_path: Path) -> None:
    data = part(1)
    keep(tmp_path, data)
    os.truncate(entry(tmp_path, data), 100)
    cache = PartCache(tmp_path, budget_bytes=BUDGET_BYTES)
    assert not held(cache, data)
    assert not entry(tmp_path, data).exists()
    assert cache.statistics().num_rejected == 1


def test_a_part_evicted_between_two_of_its_ranges_is_a_miss_from_then_on(tmp_path: Path) -> None:
    data = part(1)
    keep(tmp_path, data)
    cache = PartCache(tmp_path, budget_bytes=BUDGET_BYTES)
    assert read(cache, digest_of(data), 100) == data[:100]
    entry(tmp_path, data).unlink()
    assert read(cache, digest_of(data), 100, start=100) is None
    assert cache.statistics().troubles == ()


WRONG_ENTRIES = ("link", "link to a folder", "dead link", "fifo", "socket", "folder", "full folder")


def put_wrong_entry(path: Path, kind: str, elsewhere: Path) -> None:
    match kind:
        case "link":
            path.symlink_to(elsewhere)
        case "link to a folder":
            path.symlink_to(elsewhere.parent)
        case "dead link":
            path.symlink_to(elsewhere.parent / "absent")
        case "fifo":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as sock:
                os.chdir(path.parent)  # the whole path may be too long for a socket
                sock.bind(path.name)
        case _:
            path.mkdir()
            if kind == "full folder":
                (path / "file").write_bytes(b"x")
                (path / "link").symlink_to(elsewhere)


@pytest.mark.parametrize("kind", WRONG_ENTRIES)
def test_a_wrong_entry_is_neither_followed_nor_waited_for_and_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    data, other = part(1), part(2)
    keep(tmp_path, other)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(data)
    put_wrong_entry(entry(tmp_path, data), kind, elsewhere)
    cache = PartCache(tmp_path, budget_bytes=BUDGET_BYTES)
    assert not held(cache, data)
    assert held(cache, other), "one wrong entry costs one miss"
    assert cache.offer(digest_of(data), memoryview(data))
    cache.finish()
    assert cache.join(WAIT_LONG_S)
    assert cache.statistics().troubles == ()
    assert elsewhere.read_bytes() == data
    assert held(PartCache(tmp_path, budget_bytes=BUDGET_BYTES), data)


@pytest.mark.parametrize("kind", WRONG_ENTRIES)
@pytest.mark.parametrize("name", ["a part", "lock", "new-0123"])
def test_a_wrong_entry_does_not_keep_parts_from_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    data = part(1)
    keep(tmp_path, part(2))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(data)
    path = entry(tmp_path, data)
    place = path if name == "a part" else path.parent / name
    place.unlink(missing_ok=True)
    put_wrong_entry(place, kind, elsewhere)
    writer = keep(tmp_path, data)
    assert writer.statistics().troubles == ()
    assert elsewhere.read_bytes() == data
    assert held(PartCache(tmp_path, budget_bytes=BUDGET_BYTES), data)


# what befalls the disk


def test_a_full_disk_costs_a_warning_and_nothing_else(tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "disk", 64 * PAGE_BYTES) as disk:
        first, second = part(1), part(2, 20 * PAGE_BYTES)
        assert held(keep(disk, first), first)
        hog = disk / "hog"
        hog.write_bytes(bytes(50 * PAGE_BYTES))
        cache = keep(disk, second)
        assert cache.statistics().num_dropped == 1
        assert held(cache, first)


def test_a_disk_that_runs_full_while_it_is_written_to_ends_writing_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny_disk(tmp_path / "disk", 64 * PAGE_BYTES) as disk:
        first = part(1)
        keep(disk, first)
        (disk / "hog").write_bytes(bytes(58 * PAGE_BYTES))
        monkeypatch.setattr(CacheFolder, "_limit", lambda *_: BUDGET_BYTES)
        cache = keep(disk, part(2, 20 * PAGE_BYTES), part(3))
        (trouble,) = cache.statistics().troubles
        assert "nothing more is written" in trouble
        assert "No space left" in trouble
        assert {path.name for path in entry(disk, first).parent.iterdir()} == {
            LOCK_NAME,
            digest_of(first).hex(),
        }
        assert held(cache, first)


@pytest.mark.usefixtures("tenth_stays_free")
def test_a_tenth_of_the_disk_stays_free_whatever_the_budget(tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "disk", 100 * PAGE_BYTES) as disk:
        keep(disk, *(part(seed) for seed in range(40)))
        free = os.statvfs(disk)
        assert free.f_bavail >= free.f_blocks // 10
        assert len(list(entry(disk, part(0)).parent.glob("?" * 64))) > 20


def test_a_read_only_disk_is_read_and_not_written(tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "disk", 64 * PAGE_BYTES) as disk:
        data = part(1)
        keep(disk, data)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, capture_output=True)
        cache = PartCache(disk, budget_bytes=BUDGET_BYTES)
        assert held(cache, data)
        assert cache.offer(digest_of(part(2)), memoryview(part(2)))
        cache.finish()
        assert cache.join(WAIT_LONG_S)
        assert "Read-only file system" in cache.statistics().troubles[0]
        assert held(cache, data)


def test_a_folder_that_vanishes_in_use_costs_a_warning(tmp_path: Path) -> None:
    data = part(1)
    keep(tmp_path, data)
    cache = PartCache(tmp_path, budget_bytes=BUDGET_BYTES)
    assert held(cache, data)
    home = entry(tmp_path, data).parent
    for path in home.iterdir():
        path.unlink()
    home.rmdir()
    assert not held(cache, data)
    cache.offer(digest_of(part(2)), memoryview(part(2)))
    cache.finish()
    assert cache.join(WAIT_LONG_S)
    assert "nothing more is written" in cache.statistics().troubles[0]


def test_a_file_where_the_folder_should_be_costs_a_warning(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("in the way")
    cache = keep(place, part(1))
    assert not held(cache, part(1))
    assert len(cache.statistics().troubles) == 2
    assert place.read_text() == "in the way"


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_folder_that_others_may_write_to_is_not_used(tmp_path: Path, mode: int) -> None:
    data = part(1)
    keep(tmp_path, data)
    entry(tmp_path, data).parent.chmod(mode)
    cache = PartCache(tmp_path, budget_bytes=BUDGET_BYTES)
    assert not held(cache, data)
    assert "can be written to by other users" in cache.statistics().troubles[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_not_used(tmp_path: Path) -> None:
    data = part(1)
    keep(tmp_path, data)
    os.chown(entry(tmp_path, data).parent, 12345, 12345)
    cache = PartCache(tmp_path, budget_bytes=BUDGET_BYTES)
    assert not held(cache, data)
    assert "belongs to another user" in cache.statistics().troubles[0]


def test_a_writer_that_hangs_takes_what_fits_and_drops_the_rest_without_waiting(tmp_path: Path) -> None:
    keep(tmp_path, part(1))
    with entry(tmp_path, part(1)).with_name(LOCK_NAME).open("rb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as a process does that was stopped while it counted
        cache = PartCache(tmp_path, budget_bytes=1 << 30)
        parts = [part(seed, 13 * MIB) for seed in range(2, 9)]
        assert [cache.offer(digest_of(data), memoryview(data)) for data in parts] == [True] * 2 + [False] * 5
        assert held(cache, part(1))
        cache.finish()
        assert not cache.join(0.05)
    assert cache.join(WAIT_LONG_S)
    assert cache.statistics().num_dropped == 5
    assert [held(cache, data) for data in parts] == [True] * 2 + [False] * 5


def test_a_part_larger_than_what_may_usually_wait_is_taken_alone(tmp_path: Path) -> None:
    large, small = part(1, PENDING_BYTES + PAGE_BYTES), part(2)
    keep(tmp_path, part(3))
    with entry(tmp_path, part(3)).with_name(LOCK_NAME).open("rb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cache = PartCache(tmp_path, budget_bytes=1 << 30)
        assert cache.offer(digest_of(large), memoryview(large))
        assert not cache.offer(digest_of(small), memoryview(small))
    cache.finish()
    assert cache.join(WAIT_LONG_S)
    assert held(cache, large)


def test_nothing_is_taken_after_the_end(tmp_path: Path) -> None:
    cache = keep(tmp_path)
    assert not cache.offer(digest_of(part(1)), memoryview(part(1)))
    assert not list(tmp_path.iterdir())


def test_no_thread_outlives_what_was_to_be_written(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    keep(tmp_path, part(1))
    assert set(threading.enumerate()) <= before


def test_no_descriptor_outlives_the_cache(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for seed in range(5):
        cache = keep(tmp_path, part(seed))
        assert held(cache, part(seed))
        del cache
    assert len(os.listdir("/proc/self/fd")) == before


# standing aside


class SlowClock:
    """Says that a second passes between any two looks."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def test_a_disk_that_crawls_is_given_up_in_the_middle_of_a_read(tmp_path: Path) -> None:
    data = part(1, 3 * SLICE_BYTES)
    keep(tmp_path, data)
    cache = PartCache(tmp_path, budget_bytes=BUDGET_BYTES, clock=SlowClock())
    assert read(cache, digest_of(data), len(data)) is None
    assert "too slow" in cache.statistics().troubles[0]
    assert not held(cache, data)
    assert cache.statistics().num_rejected == 0
