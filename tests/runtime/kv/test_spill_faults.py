"""Media that fail, and the thread that saves and fetches: no request waits for either."""

from __future__ import annotations

import errno
import os
import threading

import pytest
from tests.support.inspection import file_of, tiers_of
from tests.support.load import patience_s
from tests.support.spill_rig import KINDS, SEED, A, B, C, SpillRig, chain, fetched, small_rig, total
from tests.support.tiny_disk import tiny_disk

from teneral.runtime.kv.spill.media import DiskMedium
from teneral.runtime.kv.spill.tiers import MAX_READ_FAILURES, PROBE_EVERY


@pytest.fixture(params=KINDS)
def rig(request, tmp_path):
    with small_rig(request.param, tmp_path) as rig:
        yield rig


def test_a_block_that_cannot_be_read_is_computed_and_forgotten(rig, caplog):
    rig.compute(A)
    rig.save()
    rig.give_up_all()
    reads = iter([False, False, True] + [False] * 99)
    for medium in rig.media:
        medium.read_fails = lambda: next(reads)
    assert fetched(rig, A) == 2
    assert "a spilled block is lost" in caplog.text
    assert total(rig.spill.statistics().failures_total) == 1
    rig.compute(A)
    rig.save()  # it is saved again
    rig.give_up_all()
    assert fetched(rig, A) == 6


def test_flipped_bytes_in_the_file_are_never_handed_out(tmp_path):
    rig = SpillRig(12, disk=12, folder=tmp_path)
    rig.compute(A)
    rig.save()
    rig.give_up_all()
    found = tiers_of(rig.spill).find(A[4])
    file = file_of(rig.media[0].inner).fileno()
    os.pwrite(file, b"\x00\x01\x02", found.slot * 4096 + 9)
    assert fetched(rig, A) == 4
    assert rig.spill.statistics().failures_total == {"disk": 1}
    rig.spill.stop()


def test_a_medium_that_fails_too_often_is_turned_off(tmp_path, caplog):
    rig = SpillRig(12, disk=24, folder=tmp_path)
    rig.compute(B)
    rig.save()
    rig.media[0].read_fails = lambda: True
    for _ in range(MAX_READ_FAILURES):
        assert not rig.media[0].is_closed
        rig.give_up_all()
        rig.compute(A)
        rig.save()
        rig.give_up_all()
        assert fetched(rig, A) == 0
    assert rig.media[0].is_closed
    assert rig.spill.statistics().blocks == {"disk": 0}
    assert caplog.text.count("no longer spilled to the disk") == 1
    rig.spill.stop()


def test_a_medium_that_cannot_be_written_is_turned_off_and_logged_once(tmp_path, caplog):
    rig = SpillRig(12, disk=24, folder=tmp_path)
    rig.compute(A)
    rig.save()
    rig.media[0].write_fails = lambda: True
    rig.compute(B)
    rig.save()
    rig.compute(C)
    rig.save()
    assert caplog.text.count("no longer spilled to the disk") == 1
    assert rig.media[0].is_closed
    assert rig.spill.statistics().dropped_blocks_total == {"disk": 6}
    rig.give_up_all()
    assert fetched(rig, A) == 0
    rig.spill.stop()


def test_memory_goes_on_when_the_disk_is_turned_off(tmp_path):
    rig = SpillRig(12, host=6, disk=12, folder=tmp_path)
    rig.compute(A)
    rig.save()
    rig.media[1].write_fails = lambda: True
    rig.give_up_all()
    rig.compute(B[:3])
    rig.save()
    statistics = rig.spill.statistics()
    assert statistics.blocks == {"host": 6, "disk": 0}
    assert statistics.dropped_blocks_total == {"host": 3, "disk": 0}
    rig.give_up_all()
    assert fetched(rig, B[:3]) == 3
    rig.spill.stop()


def test_a_full_disk_turns_itself_off_and_gives_its_space_back(tmp_path, caplog):
    with tiny_disk(tmp_path / "small", 16 * 1024) as folder:
        rig = SpillRig(12, disk=12, folder=folder)
        rig.compute(A)
        rig.save()
        assert os.strerror(errno.ENOSPC) in caplog.text
        assert rig.spill.statistics().blocks == {"disk": 0}
        (folder / "other").write_bytes(b"x" * 12_000)
        rig.spill.stop()


def test_a_bug_turns_it_off_and_no_request_waits(rig, caplog):
    rig.compute(A)
    rig.save()
    rig.give_up_all()
    rig.compute(A[:1])
    fetch = rig.fetch(A, 1)

    def fail():
        raise RuntimeError("a bug")

    rig.kv.meanwhile = fail
    assert not rig.spill.pump()
    assert fetch.is_done
    assert "turned off" in caplog.text
    assert total(rig.spill.statistics().blocks) == 0
    assert list(rig.spill.held_blocks()) == []
    assert rig.allocator.free_count + rig.prefixes.num_idle == 12


def test_how_fast_a_medium_reads_is_measured_when_it_is_first_written_and_now_and_then(rig):
    for number in range(2 * PROBE_EVERY):
        rig.compute(chain([number, 0, 0, 0], SEED))
        rig.save()
    assert set(rig.spill.statistics().read_bytes_s) == {medium.name for medium in rig.media}
    reads = []
    for medium in rig.media:
        medium.meanwhile = lambda: reads.append(1)
    for number in range(PROBE_EVERY):
        rig.compute(chain([number, 1, 1, 1], SEED))
        rig.save()
    assert len(reads) > PROBE_EVERY


# -- the thread ----------------------------------------------------------------------------------------------------


def wait_until(rig: SpillRig, predicate) -> None:
    with rig.lock:
        assert rig.lock.wait_for(predicate, patience_s(30))


def test_the_thread_saves_and_fetches(rig):
    rig.spill.start()
    with rig.lock:
        rig.compute(A)
        rig.spill.poke()
    saved = tiers_of(rig.spill).find
    for _ in range(3_000):
        with rig.lock:
            if all(saved(block_hash) for block_hash in A):
                break
        threading.Event().wait(0.01)
    with rig.lock:
        rig.give_up_all()
        fetch = rig.fetch(A)
    wait_until(rig, lambda: fetch.is_done)
    with rig.lock:
        assert rig.found(A) == 6


def test_stopping_in_the_middle_of_a_fetch_lets_everybody_go(rig):
    rig.compute(A)
    rig.save()
    rig.give_up_all()
    entered, go_on = threading.Event(), threading.Event()

    def wait():
        entered.set()
        assert go_on.wait(patience_s(30))

    rig.kv.meanwhile = wait
    rig.spill.start()
    with rig.lock:
        fetches = [rig.fetch(A), rig.fetch(A[:3])]
    assert entered.wait(patience_s(30))
    stopping = threading.Thread(target=rig.spill.stop)
    stopping.start()
    with rig.lock:
        assert len(rig.spill.held_blocks()) == 6
    go_on.set()
    stopping.join(patience_s(30))
    assert not stopping.is_alive()
    assert all(fetch.is_done for fetch in fetches)
    assert list(rig.spill.held_blocks()) == []
    assert rig.allocator.free_count + rig.prefixes.num_idle == 12
    rig.spill.stop()


def test_a_spill_that_never_started_gives_its_file_back(tmp_path):
    rig = SpillRig(4, disk=4, folder=tmp_path)
    rig.spill.stop()
    inner = rig.media[0].inner
    assert isinstance(inner, DiskMedium)
    assert file_of(inner).closed
