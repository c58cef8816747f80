"""Refine locks: no reader computes with weights that are being refined, in one process or in two."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator

import pytest
from tests.support.inspection import close_fd_of, set_fd
from tests.support.refine_lock_holder import FILE_BYTES, LOOK_S, WAIT_S, Holder, OtherProcess

from teneral.loader.memory import refine_locks as refine_locks_module
from teneral.loader.memory.refine_locks import RefineLocks

NUM_GROUPS = 3


@pytest.fixture
def fd() -> Iterator[int]:
    number = os.memfd_create("locks")
    os.truncate(number, FILE_BYTES)
    yield number
    os.close(number)


@pytest.fixture(params=["in one process", "in two processes"])
def locks(request: pytest.FixtureRequest, fd: int) -> RefineLocks:
    return RefineLocks(NUM_GROUPS, shared_fd=None if request.param == "in one process" else fd)


@pytest.fixture
def other(fd: int) -> Iterator[OtherProcess]:
    with OtherProcess(fd, NUM_GROUPS) as process:
        yield process


@pytest.mark.parametrize(("first", "second"), [("reading", "writing"), ("writing", "reading")])
def test_in_one_process_neither_happens_during_the_other(locks: RefineLocks, first: str, second: str) -> None:
    one = Holder(locks, first, 0)
    assert one.has_it()
    two = Holder(locks, second, 0)
    two.must_wait()
    one.drop()
    assert two.has_it()
    two.drop()


def test_several_may_refine_one_group_and_who_uses_it_waits_for_the_last(locks: RefineLocks) -> None:
    refiners = [Holder(locks, "writing", 0) for _ in range(3)]
    assert all(refiner.has_it() for refiner in refiners)
    user = Holder(locks, "reading", 0)
    for refiner in refiners:
        user.must_wait()
        refiner.drop()
    assert user.has_it()
    user.drop()


def test_several_may_wait_to_refine_and_all_of_them_go_on_together(locks: RefineLocks) -> None:
    user = Holder(locks, "reading", 0)
    assert user.has_it()
    refiners = [Holder(locks, "writing", 0) for _ in range(3)]
    for refiner in refiners:
        refiner.must_wait()
    user.drop()
    assert all(refiner.has_it() for refiner in refiners)
    for refiner in refiners:
        refiner.drop()


def test_groups_have_nothing_to_do_with_each_other(locks: RefineLocks) -> None:
    holders = [Holder(locks, "reading", 0), Holder(locks, "writing", 1), Holder(locks, "reading", 2)]
    assert all(holder.has_it() for holder in holders)
    for holder in holders:
        holder.drop()


def test_a_guard_is_let_go_when_what_it_guarded_raises(locks: RefineLocks) -> None:
    for kind in ("reading", "writing"):
        with pytest.raises(ZeroDivisionError), getattr(locks, kind)(0):
            raise ZeroDivisionError
    for kind in ("reading", "writing"):
        with getattr(locks, kind)(0):
            pass


def test_time_spent_waiting_to_use_is_counted_and_only_that(locks: RefineLocks) -> None:
    refiner = Holder(locks, "writing", 0)
    assert refiner.has_it()
    user = Holder(locks, "reading", 0)
    user.must_wait()
    user.must_wait()
    refiner.drop()
    assert user.has_it()
    waited_s = locks.waited_s
    assert waited_s >= LOOK_S
    refiner = Holder(locks, "writing", 0)
    refiner.must_wait()
    user.drop()
    assert refiner.has_it()
    refiner.drop()
    assert locks.waited_s == waited_s


@pytest.mark.parametrize(("here", "there"), [("reading", "writing"), ("writing", "reading")])
def test_between_two_processes_neither_happens_during_the_other(
    fd: int, other: OtherProcess, here: str, there: str
) -> None:
    locks = RefineLocks(NUM_GROUPS, shared_fd=fd)
    other.take(f"{there} 0")
    ours = Holder(locks, here, 0)
    ours.must_wait()
    other.drop(f"{there} 0")
    assert ours.has_it()
    other.tell(f"take {there} 0")
    other.must_be_silent()
    ours.drop()
    other.expect(f"has {there} 0")
    locks.close()


def test_one_thread_of_several_that_refine_elsewhere_does_not_let_the_user_in_alone(
    fd: int, other: OtherProcess
) -> None:
    locks = RefineLocks(NUM_GROUPS, shared_fd=fd)
    ours = [Holder(locks, "writing", 1) for _ in range(2)]
    assert all(holder.has_it() for holder in ours)
    other.tell("take reading 1")
    ours[0].drop()
    other.must_be_silent()
    ours[1].drop()
    other.expect("has reading 1")
    locks.close()


def test_another_processs_groups_do_not_concern_ours(fd: int, other: OtherProcess) -> None:
    locks = RefineLocks(NUM_GROUPS, shared_fd=fd)
    other.take("writing 0")
    other.take("writing 2")
    with locks.reading(1):
        other.must_be_silent()
    locks.close()


def wait_crosswise(fd: int, other: OtherProcess) -> None:
    """Each process holds what the other waits for; the system must not think that one of them has to give up."""
    locks = RefineLocks(NUM_GROUPS, shared_fd=fd)
    user = Holder(locks, "reading", 0)
    assert user.has_it()
    other.take("writing 1")
    waiting = Holder(locks, "reading", 1)
    other.tell("take writing 0")
    waiting.must_wait()
    other.must_be_silent()
    user.drop()
    other.expect("has writing 0")
    other.drop("writing 1")
    assert waiting.has_it()
    waiting.drop()
    locks.close()


def test_threads_of_both_processes_that_wait_crosswise_are_no_deadlock(fd: int, other: OtherProcess) -> None:
    wait_crosswise(fd, other)


@pytest.mark.parametrize("kind", ["reading", "writing"])
def test_a_holder_that_is_killed_lets_go(fd: int, other: OtherProcess, kind: str) -> None:
    locks = RefineLocks(NUM_GROUPS, shared_fd=fd)
    other.take(f"{kind} 0")
    ours = Holder(locks, "writing" if kind == "reading" else "reading", 0)
    ours.must_wait()
    other.kill()
    assert ours.has_it()
    ours.drop()
    locks.close()


def test_closing_waits_for_no_other_process_and_keeps_nothing_apart_any_more(
    fd: int, other: OtherProcess
) -> None:
    locks = RefineLocks(NUM_GROUPS, shared_fd=fd)
    other.take("writing 0")
    locks.close()
    locks.close()
    with locks.reading(0), locks.reading(1):
        pass
    other.drop("writing 0")


def test_closing_waits_until_our_own_threads_have_let_go(fd: int, other: OtherProcess) -> None:
    locks = RefineLocks(NUM_GROUPS, shared_fd=fd)
    other.take("writing 0")
    waiting = Holder(locks, "reading", 0)
    waiting.must_wait()
    closing = Holder(locks, "reading", 1)
    assert closing.has_it()
    closer = CloserThread(locks)
    closer.must_wait()
    other.drop("writing 0")
    assert waiting.has_it()
    waiting.drop()
    closer.must_wait()
    closing.drop()
    assert closer.has_it()


class CloserThread(Holder):
    """Closes the locks instead of taking one."""

    def __init__(self, locks: RefineLocks) -> None:
        super().__init__(locks, "close", 0)

    def _run(self) -> None:
        self._locks.close()
        self._has.set()


def test_our_end_of_the_file_is_closed_and_only_ours(fd: int) -> None:
    before = set(os.listdir("/proc/self/fd"))
    locks = RefineLocks(NUM_GROUPS, shared_fd=fd)
    with locks.reading(0):
        guards_fds = set(os.listdir("/proc/self/fd")) - before
    locks.close()
    assert len(guards_fds) == 1
    assert not guards_fds & set(os.listdir("/proc/self/fd"))
    os.fstat(fd)


def test_a_lock_that_the_system_refuses_leaves_nothing_locked(fd: int) -> None:
    locks = RefineLocks(NUM_GROUPS, shared_fd=fd)
    close_fd_of(locks)
    for kind in ("reading", "writing"):
        with pytest.raises(OSError, match="Bad file descriptor"), getattr(locks, kind)(0):
            pytest.fail("it was entered")
    set_fd(locks, os.dup(fd))
    for kind in ("reading", "writing"):
        holder = Holder(locks, kind, 0)
        assert holder.has_it(WAIT_S)
        holder.drop()
    locks.close()


def is_torn(content: bytes) -> bool:
    return len(set(content)) > 1


def test_who_reads_under_a_guard_never_sees_half_of_what_another_process_writes(
    fd: int, other: OtherProcess
) -> None:
    locks = RefineLocks(NUM_GROUPS, shared_fd=fd)
    memory = mmap.mmap(fd, FILE_BYTES)
    other.tell("write")
    seen: set[int] = set()
    until_s = time.monotonic() + WAIT_S
    while len(seen) < 100 and time.monotonic() < until_s:
        with locks.reading(0):
            content = memory[:]
        assert not is_torn(content)
        seen.add(content[0])
    assert len(seen) >= 100
    assert locks.waited_s > 0
    other.kill()
    locks.close()


def test_without_a_guard_halves_are_seen(fd: int, other: OtherProcess) -> None:
    """So that the test above is known to be able to fail."""
    memory = mmap.mmap(fd, FILE_BYTES)
    other.tell("write unlocked")
    until_s = time.monotonic() + WAIT_S
    while not is_torn(memory[:]):
        assert time.monotonic() < until_s, "no half was ever seen"


def test_where_locks_belong_to_processes_waiting_crosswise_is_no_deadlock_either(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refine_locks_module, "has_file_locks", lambda fd, byte: False)
    with OtherProcess(fd, NUM_GROUPS, has_file_locks=False) as other:
        wait_crosswise(fd, other)
