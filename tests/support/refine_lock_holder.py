"""Threads that hold a lock until they are let go, in this process or in another one that has the file open, too.

    python -m tests.support.refine_lock_holder FD NUM_GROUPS 1

takes commands on its standard input, "take reading 0" or "drop reading 0", and answers "has reading 0" when it has the
lock. With the line "write" it fills the file with ever new bytes, in two halves, under the lock of group 0; with "write
unlocked" without a lock.
"""

from __future__ import annotations

import mmap
import queue
import subprocess
import sys
import threading
import time

from tests.support.load import patience_s

from teneral.loader.memory import refine_locks as refine_locks_module
from teneral.loader.memory.refine_locks import RefineLocks

WAIT_S = patience_s(30)
LOOK_S = 0.1  # in which who need not wait would surely be through
FILE_BYTES = 4096


class Holder:
    """Takes one lock in a thread of its own, and holds it until `drop`."""

    def __init__(self, locks: RefineLocks, kind: str, group: int) -> None:
        self._has = threading.Event()
        self._may_drop = threading.Event()
        self._locks, self._kind, self._group = locks, kind, group
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def has_it(self, timeout_s: float = WAIT_S) -> bool:
        return self._has.wait(timeout_s)

    def must_wait(self) -> None:
        assert not self._has.wait(LOOK_S), f"{self._kind} group {self._group} did not wait"

    def drop(self) -> None:
        self._may_drop.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with getattr(self._locks, self._kind)(self._group):
            self._has.set()
            self._may_drop.wait(WAIT_S)


class OtherProcess:
    """A process that holds locks over the same file. A context manager, which kills it."""

    def __init__(self, fd: int, num_groups: int, *, has_file_locks: bool = True) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, str(fd), str(num_groups), str(int(has_file_locks))],
            pass_fds=[fd],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.expect("ready")

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def expect(self, line: str) -> None:
        assert self._lines.get(timeout=WAIT_S) == line

    def take(self, what: str) -> None:
        self.tell(f"take {what}")
        self.expect(f"has {what}")

    def drop(self, what: str) -> None:
        self.tell(f"drop {what}")
        self.expect(f"dropped {what}")

    def must_be_silent(self) -> None:
        try:
            line_read = self._lines.get(timeout=LOOK_S)
        except queue.Empty:
            return
        raise AssertionError(f"it did not wait, but wrote: {line_read}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(WAIT_S)

    def __enter__(self) -> OtherProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._reader.join(WAIT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.strip())


def write_patterns(fd: int, locks: RefineLocks, *, is_locked: bool) -> None:
    """For ever. Every write takes a while between its two halves."""
    memory = mmap.mmap(fd, FILE_BYTES)
    half = FILE_BYTES // 2
    number = 0
    while True:
        number = (number + 1) % 256
        lock = locks.writing(0) if is_locked else threading.Lock()
        with lock:
            memory[:half] = bytes([number]) * half
            time.sleep(1e-3)
            memory[half:] = bytes([number]) * half
        time.sleep(1e-4)


def main(fd: int, num_groups: int, has_file_locks: int) -> None:
    if not has_file_locks:
        refine_locks_module.has_file_locks = lambda fd, unused_byte: False
    locks = RefineLocks(num_groups, shared_fd=fd)
    holders: dict[str, Holder] = {}
    say = threading.Lock()

    def tell(line: str) -> None:
        with say:
            print(line, flush=True)

    def take(what: str) -> None:
        kind, group = what.split()
        holder = holders[what] = Holder(locks, kind, int(group))
        if holder.has_it():
            tell(f"has {what}")

    tell("ready")
    for line in sys.stdin:
        verb, _, what = line.strip().partition(" ")
        if verb == "take":
            threading.Thread(target=take, args=(what,), daemon=True).start()
        elif verb == "drop":
            holders.pop(what).drop()
            tell(f"dropped {what}")
        else:
            is_locked = what != "unlocked"
            threading.Thread(
                target=write_patterns, args=(fd, locks), kwargs={"is_locked": is_locked}, daemon=True
            ).start()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
