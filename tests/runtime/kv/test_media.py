"""The contract of every medium for spilled blocks, and the properties of a file alone."""

from __future__ import annotations

import os
import stat

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.inspection import file_of
from tests.support.tiny_disk import tiny_disk

from teneral.loader.errors import IntegrityError, UsageError
from teneral.runtime.kv.spill.media import DiskMedium, HostMedium, open_media, slot_bytes_on_disk

BLOCK_BYTES = 5_000  # no multiple of a page
NUM_SLOTS = 4


def content(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, BLOCK_BYTES, np.uint8)


def read(medium, slot: int) -> np.ndarray:
    into = np.empty(BLOCK_BYTES, np.uint8)
    medium.read(slot, into)
    return into


@pytest.fixture
def disk(tmp_path):
    medium = DiskMedium(NUM_SLOTS, BLOCK_BYTES, str(tmp_path))
    yield medium
    medium.close()


@pytest.fixture(params=["host", "disk"])
def medium(request, tmp_path):
    if request.param == "host":
        medium = HostMedium(NUM_SLOTS, BLOCK_BYTES)
    else:
        medium = DiskMedium(NUM_SLOTS, BLOCK_BYTES, str(tmp_path))
    yield medium
    medium.close()


def test_a_disk_medium_makes_its_folder_for_the_owner_alone(tmp_path):
    folder = tmp_path / "new" / "kv"
    DiskMedium(NUM_SLOTS, BLOCK_BYTES, str(folder)).close()
    assert folder.stat().st_mode & 0o777 == 0o700


class TestEveryMedium:
    def test_says_what_it_is(self, medium):
        assert medium.name in ("host", "disk")
        assert (medium.num_slots, medium.block_bytes) == (NUM_SLOTS, BLOCK_BYTES)

    def test_reads_what_was_written_last(self, medium):
        for seed, slot in enumerate((0, NUM_SLOTS - 1, 1, 0)):
            medium.write(slot, content(seed))
        assert np.array_equal(read(medium, 0), content(3))
        assert np.array_equal(read(medium, 1), content(2))
        assert np.array_equal(read(medium, NUM_SLOTS - 1), content(1))

    def test_keeps_a_copy(self, medium):
        given_away = content(1)
        medium.write(2, given_away)
        given_away.fill(0)
        into = read(medium, 2)
        into.fill(0)
        assert np.array_equal(read(medium, 2), content(1))

    def test_reads_the_same_when_it_was_forgotten_by_caches(self, medium):
        medium.write(1, content(5))
        medium.forget_cached(1)
        assert np.array_equal(read(medium, 1), content(5))

    def test_can_be_closed_twice(self, medium):
        medium.write(0, content(1))
        medium.close()
        medium.close()

    @settings(deadline=None, max_examples=30)
    @given(writes=st.lists(st.tuples(st.integers(0, NUM_SLOTS - 1), st.integers(0, 9)), max_size=12))
    def test_slots_do_not_touch_each_other(self, tmp_path_factory, writes):
        media = [
            HostMedium(NUM_SLOTS, BLOCK_BYTES),
            DiskMedium(NUM_SLOTS, BLOCK_BYTES, str(tmp_path_factory.getbasetemp())),
        ]
        for medium in media:
            expected = {}
            for slot, seed in writes:
                medium.write(slot, content(seed))
                expected[slot] = seed
            for slot, seed in expected.items():
                assert np.array_equal(read(medium, slot), content(seed))
            medium.close()


def test_the_file_has_no_name_and_is_its_owner_s_only(disk, tmp_path):
    disk.write(0, content(1))
    assert list(tmp_path.iterdir()) == []
    found = os.fstat(file_of(disk).fileno())
    assert found.st_nlink == 0
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert not os.get_inheritable(file_of(disk).fileno())


def test_the_file_takes_space_as_it_is_written(disk):
    assert os.fstat(file_of(disk).fileno()).st_blocks == 0
    disk.write(0, content(1))
    disk.forget_cached(0)
    assert 0 < os.fstat(file_of(disk).fileno()).st_blocks * 512 <= 2 * slot_bytes_on_disk(BLOCK_BYTES)


def test_one_flipped_bit_in_the_file_is_noticed(disk):
    disk.write(1, content(1))
    disk.write(2, content(2))
    offset = slot_bytes_on_disk(BLOCK_BYTES) + 4_321
    byte = os.pread(file_of(disk).fileno(), 1, offset)[0]
    os.pwrite(file_of(disk).fileno(), bytes([byte ^ 0x10]), offset)
    with pytest.raises(IntegrityError, match="slot 1") as caught:
        read(disk, 1)
    assert caught.value.expected != caught.value.got
    assert np.array_equal(read(disk, 2), content(2))
    disk.write(1, content(3))
    assert np.array_equal(read(disk, 1), content(3))


def test_a_file_that_has_become_shorter_is_an_error_of_the_read(disk):
    disk.write(3, content(1))
    os.ftruncate(file_of(disk).fileno(), 3 * slot_bytes_on_disk(BLOCK_BYTES) + 100)
    with pytest.raises(OSError, match="truncated"):
        read(disk, 3)


def test_a_full_disk_is_an_error_of_the_write_and_the_rest_can_be_read(tmp_path):
    with tiny_disk(tmp_path / "small", 64 * 1024) as folder:
        medium = DiskMedium(1_000, BLOCK_BYTES, str(folder))
        for slot in range(8):
            medium.write(slot, content(slot))
        with pytest.raises(OSError, match="No space"):
            medium.write(8, content(8))
        assert np.array_equal(read(medium, 7), content(7))
        medium.close()


def test_budgets_become_slots(tmp_path):
    host, disk = open_media(BLOCK_BYTES, host_bytes=12_000, disk_bytes=100_000, disk_dir=str(tmp_path))
    assert (host.name, host.num_slots) == ("host", 2)
    assert (disk.name, disk.num_slots) == ("disk", 100_000 // slot_bytes_on_disk(BLOCK_BYTES))
    disk.close()
    assert open_media(BLOCK_BYTES, host_bytes=0, disk_bytes=0, disk_dir=None) == []


@pytest.mark.parametrize(
    ("budgets", "key"),
    [
        ({"host_bytes": BLOCK_BYTES - 1}, "kv_host_bytes"),
        ({"host_bytes": 1 << 60}, "kv_host_bytes"),
        ({"disk_bytes": BLOCK_BYTES, "disk_dir": "."}, "kv_disk_bytes"),
        ({"disk_bytes": 1 << 20}, "kv_disk_dir"),
        ({"disk_dir": "."}, "kv_disk_bytes"),
        ({"disk_bytes": 1 << 20, "disk_dir": "/dev/null/folder"}, "kv_disk_dir"),
        ({"disk_bytes": 1 << 20, "disk_dir": "/proc"}, "kv_disk_dir"),
    ],
)
def test_an_invalid_budget_is_refused_by_name(budgets, key):
    wanted = {"host_bytes": 0, "disk_bytes": 0, "disk_dir": None} | budgets
    with pytest.raises(UsageError) as caught:
        open_media(BLOCK_BYTES, **wanted)
    assert caught.value.key == key
    assert caught.value.hint
