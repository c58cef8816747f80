"""Slabs: their places, and their life beyond their maker's."""

from __future__ import annotations

import gc
import os
import platform
import re
import resource
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.inspection import memory_of, set_taken_bytes, thread_of
from tests.support.load import patience_s

from teneral.loader.errors import InsufficientMemoryError
from teneral.loader.format.manifest import SLAB_ALIGNMENT_BYTES
from teneral.loader.memory import arena as arena_module
from teneral.loader.memory.arena import (
    HUGE_PAGE_BYTES,
    MAX_SLOW_STEPS,
    PREFAULT_STEP_BYTES,
    Arena,
    Reserve,
    as_array,
    map_bytes,
)

KERNEL = [int(number) for number in re.findall(r"\d+", platform.release())[:2]]


@settings(deadline=None)
@given(st.lists(st.integers(0, 10_000), max_size=8))
def test_slabs_have_their_sizes_are_aligned_and_do_not_overlap(sizes_bytes: list[int]) -> None:
    arena = Arena(sizes_bytes)
    slabs = [as_array(slab) for slab in arena.slabs]
    assert [slab.size for slab in slabs] == sizes_bytes
    assert all(slab.ctypes.data % SLAB_ALIGNMENT_BYTES == 0 for slab in slabs if slab.size)
    for number, slab in enumerate(slabs):
        slab[:] = number + 1
    assert all(np.all(slab == number + 1) for number, slab in enumerate(slabs))


def test_memory_is_zero_until_it_is_written() -> None:
    assert not any(map_bytes(100_000, what="a test"))


def test_a_view_keeps_the_memory_when_the_arena_is_gone() -> None:
    arena = Arena([4096, 4096])
    view = as_array(arena.slabs[1])[100:200]
    view[:] = 7
    del arena
    gc.collect()
    assert np.all(view == 7)


def test_slabs_can_be_written_through_other_libraries_views() -> None:
    slab = Arena([64]).slabs[0]
    as_array(slab)[3] = 5
    assert slab[3] == 5


@pytest.mark.parametrize("size_bytes", [1 << 60, 1 << 70])
def test_memory_that_the_system_refuses_is_named(size_bytes: int) -> None:
    with pytest.raises(InsufficientMemoryError, match="the model's weights needs") as caught:
        Arena([size_bytes])
    assert caught.value.needed_bytes == size_bytes
    assert "MiB" in str(caught.value)


def mapping_of(address: int) -> dict[str, str]:
    """What the system says of the mapping that holds this address (Linux)."""
    found: dict[str, str] = {}
    with open("/proc/self/smaps", encoding="ascii") as file:
        for line in file:
            key, _, value = line.partition(" ")
            if not key.endswith(":"):
                begin, end = (int(bound, 16) for bound in key.split("-"))
                found = {"begin": key} if begin <= address < end else {}
            elif found:
                found[key.rstrip(":")] = value.strip()
                if key == "VmFlags:":
                    return found
    raise LookupError(hex(address))


prefaults = pytest.mark.skipif(
    sys.platform != "linux" or KERNEL < [5, 14], reason="the kernel cannot populate a mapping"
)


@prefaults
def test_prefaulting_takes_all_pages_and_changes_no_content() -> None:
    size_bytes = 6 * PREFAULT_STEP_BYTES + 4160
    slab = as_array((arena := Arena([size_bytes])).slabs[0])
    slab[:100] = 3
    arena.prefault(stopped=lambda: False, slow_step_s=60)
    assert int(mapping_of(slab.ctypes.data)["Rss"].split()[0]) * 1024 >= size_bytes
    assert np.all(slab[:100] == 3)
    assert not slab[100:].any()


@prefaults
def test_pages_that_another_process_has_taken_can_be_mapped_ahead() -> None:
    fd = os.memfd_create("test")
    sizes = [4 * PREFAULT_STEP_BYTES, 5]
    theirs, ours = Arena(sizes, shared_fd=fd), Arena(sizes, shared_fd=fd)
    as_array(theirs.slabs[0])[:] = 7
    ours.map_ahead()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    assert int(as_array(ours.slabs[0])[::4096].sum()) == 7 * 4 * PREFAULT_STEP_BYTES // 4096
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 20  # of 2,048 pages
    os.close(fd)


def reserved(size_bytes: int) -> Reserve:
    """A reserve that has taken all of its memory from the system."""
    reserve = Reserve(size_bytes)
    until_s = time.monotonic() + patience_s(30)
    while reserve.taken_bytes < size_bytes:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    return reserve


@prefaults
def test_slabs_lie_in_memory_that_was_taken_ahead_and_its_rest_is_given_back() -> None:
    reserve = reserved(8 * PREFAULT_STEP_BYTES)
    arena = Arena([2 * PREFAULT_STEP_BYTES, 5], reserve=reserve)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    as_array(arena.slabs[0])[:] = 7
    as_array(arena.slabs[1])[:] = 8
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 20  # of 1,024 pages
    slab = as_array(arena.slabs[0])
    assert int(mapping_of(slab.ctypes.data)["Size"].split()[0]) << 10 < 3 * PREFAULT_STEP_BYTES
    assert all(int(as_array(slab).max()) == value for slab, value in zip(arena.slabs, (7, 8), strict=True))


@prefaults
@pytest.mark.parametrize("taken_steps", [4, 1])
def test_pages_that_were_taken_ahead_are_not_looked_at_again(
    taken_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve = reserved(4 * PREFAULT_STEP_BYTES)
    set_taken_bytes(reserve, taken_steps * PREFAULT_STEP_BYTES)
    advised: list[int] = []
    monkeypatch.setattr(arena_module, "adviser", lambda _: lambda offset, *_: advised.append(offset) is None)
    arena = Arena([2 * PREFAULT_STEP_BYTES], reserve=reserve)
    assert arena.prefault(stopped=lambda: False)
    assert advised == ([] if taken_steps == 4 else [PREFAULT_STEP_BYTES])


@prefaults
def test_weights_that_are_larger_than_what_was_taken_ahead_use_it_all_the_same() -> None:
    arena = Arena([4 * PREFAULT_STEP_BYTES], reserve=reserved(2 * PREFAULT_STEP_BYTES))
    slab = as_array(arena.slabs[0])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    slab[: 2 * PREFAULT_STEP_BYTES] = 9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 20  # of 1,024 pages
    slab[:] = 9
    assert int(slab.min()) == 9


def test_a_reserve_that_is_released_holds_no_memory_and_ends_its_thread() -> None:
    reserve = Reserve(64 * PREFAULT_STEP_BYTES)
    reserve.release()
    until_s = time.monotonic() + patience_s(30)
    # The thread that gives the memory back may begin later than the other ends.
    while len(memory_of(reserve)) or reserve.taken_bytes or thread_of(reserve).is_alive():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def flags_of(slab: np.ndarray, offset: int) -> list[str]:
    return mapping_of(slab.ctypes.data + offset)["VmFlags"].split()


@prefaults
def test_prefaulting_does_without_huge_pages_where_they_are_slow() -> None:
    slab = as_array((arena := Arena([6 * PREFAULT_STEP_BYTES])).slabs[0])
    slab[-100:] = 3
    arena.prefault(stopped=lambda: False, slow_step_s=0)
    assert "nh" in flags_of(slab, 0)
    assert "nh" in flags_of(slab, slab.size - 1)
    assert int(mapping_of(slab.ctypes.data)["Rss"].split()[0]) >= slab.size >> 10
    assert np.all(slab[-100:] == 3)
    assert not slab[:-100].any()


@prefaults
def test_prefaulting_uses_huge_pages_where_they_are_fast() -> None:
    slab = as_array((arena := Arena([6 * PREFAULT_STEP_BYTES])).slabs[0])
    slab[:100] = 3
    assert "nh" in flags_of(slab, 0), "who writes before it is known gets small ones"
    arena.prefault(stopped=lambda: False, slow_step_s=60)
    assert "hg" in flags_of(slab, 0)
    assert "hg" in flags_of(slab, slab.size - 1)
    assert np.all(slab[:100] == 3)
    assert not slab[100:].any()


class CostlySteps:
    """A clock of CPU time by which steps take these many ms, one after another."""

    def __init__(self, *costs_ms: float) -> None:
        times_s, now_s = [], 0.0
        for cost_ms in costs_ms:
            times_s += [now_s, now_s + cost_ms / 1000]
            now_s = times_s[-1]
        self._times_s = iter(times_s)

    def thread_time(self) -> float:
        return next(self._times_s)


@prefaults
@pytest.mark.parametrize(
    ("costs_ms", "flag"),
    [
        ([2, 2, 2, 0.7, 0.7, 0.7], "nh"),
        (
            [2, 0.01, 2, 0.01, 2, 0.7],
            "nh",
        ),  # others had taken those between: that says nothing of what is left
        ([2, 0.2, 2, 0.2, 2, 0.2], "hg"),
        ([0.01] * 6, "hg"),
    ],
)
def test_huge_pages_that_become_slow_are_given_up(
    costs_ms: list[float], flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slab = as_array((arena := Arena([6 * PREFAULT_STEP_BYTES])).slabs[0])
    tried_ms = [0.2] * MAX_SLOW_STEPS
    monkeypatch.setattr("teneral.loader.memory.arena.time", CostlySteps(*tried_ms, *costs_ms))
    assert arena.prefault(stopped=lambda: False)
    assert flag in flags_of(slab, slab.size - 1)


def small_pages(num_huge: int) -> tuple[Arena, np.ndarray]:
    """An arena filled with its offsets, in small pages."""
    arena = Arena([num_huge * HUGE_PAGE_BYTES])
    slab = as_array(arena.slabs[0]).view(np.uint64)
    slab[:] = np.arange(slab.size)
    assert int(mapping_of(slab.ctypes.data)["AnonHugePages"].split()[0]) == 0
    return arena, slab


collapses = pytest.mark.skipif(
    sys.platform != "linux" or KERNEL < [6, 1], reason="the kernel cannot collapse small pages"
)


@collapses
def test_small_pages_become_huge_ones_and_keep_their_content() -> None:
    arena, slab = small_pages(6)
    num = arena.collapse(lambda: False)
    huge_bytes = int(mapping_of(slab.ctypes.data)["AnonHugePages"].split()[0]) * 1024
    assert huge_bytes == num * HUGE_PAGE_BYTES
    if not num:
        pytest.skip("the system has no huge pages to give")
    assert np.array_equal(slab, np.arange(slab.size))


@collapses
def test_no_page_is_collapsed_once_the_memory_is_discarded_or_the_work_stopped() -> None:
    arena, _ = small_pages(4)
    assert arena.collapse(lambda: True) == 0
    arena.discard()
    assert arena.collapse(lambda: False) == 0


def test_memory_files_and_sparse_memory_keep_their_pages() -> None:
    fd = os.memfd_create("test")
    for arena in (Arena([4 * HUGE_PAGE_BYTES], shared_fd=fd), Arena([4 * HUGE_PAGE_BYTES], is_sparse=True)):
        assert not arena.takes_huge_pages
        assert arena.collapse(lambda: False) == 0
    os.close(fd)


def test_prefaulting_can_be_stopped() -> None:
    asked = []

    def stopped() -> bool:
        asked.append(True)
        return len(asked) == 3

    Arena([8 * PREFAULT_STEP_BYTES]).prefault(stopped)
    assert len(asked) <= 3


def test_prefaulting_nothing_is_fine() -> None:
    arena = Arena([0])
    arena.prefault(stopped=lambda: False)
    assert len(arena.slabs[0]) == 0
