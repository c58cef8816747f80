"""Threads that hold a guard until they are let go, in this process or in another one that has the file open, too.

    python -m tests.support.guard_holder FD NUM_GROUPS 1

does as it is told by lines on its standard input, "take using 0" or "drop using 0", and says "has using 0" when it has.
With the line "write" it fills the file with ever new bytes, in two halves, guarded by group 0; with "write unguarded"
without a guard.
"""

from __future__ import annotations

import mmap
import queue
import subprocess
import sys
import threading
import time

from tests.support.load import patience_s

from teneral.loader.memory import refine_locks as guards_module
from teneral.loader.memory.refine_locks import Guards

WAIT_S = patience_s(30)
LOOK_S = 0.1  # in which who need not wait would surely be through
FILE_BYTES = 4096


class Holder:
    """Takes one guard in a thread of its own, and holds it until `drop`."""

    def __init__(self, guards: Guards, kind: str, group: int) -> None:
        self._has = threading.Event()
        self._may_drop = threading.Event()
        self._guards, self._kind, self._group = guards, kind, group
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
        with getattr(self._guards, self._kind)(self._group):
            self._has.set()
            self._may_drop.wait(WAIT_S)


class OtherProcess:
    """A process that holds guards over the same file. A context manager, which kills it."""

    def __init__(self, fd: int, num_groups: int, *, has_file_locks: bool = True) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, str(fd), str(num_groups), str(int(has_file_locks))],
            pass_fds=[fd],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._said: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.expect("ready")

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def expect(self, line: str) -> None:
        assert self._said.get(timeout=WAIT_S) == line

    def take(self, what: str) -> None:
        self.tell(f"take {what}")
        self.expect(f"has {what}")

    def drop(self, what: str) -> None:
        self.tell(f"drop {what}")
        self.expect(f"dropped {what}")

    def must_be_silent(self) -> None:
        try:
            said = self._said.get(timeout=LOOK_S)
        except queue.Empty:
            return
        raise AssertionError(f"it did not wait, but said: {said}")

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
            self._said.put(line.strip())


def write_patterns(fd: int, guards: Guards, *, is_guarded: bool) -> None:
    """For ever. Every write takes a while between its two halves."""
    memory = mmap.mmap(fd, FILE_BYTES)
    half = FILE_BYTES // 2
    number = 0
    while True:
        number = (number + 1) % 256
        guard = guards.refining(0) if is_guarded else threading.Lock()
        with guard:
            memory[:half] = bytes([number]) * half
            time.sleep(1e-3)
            memory[half:] = bytes([number]) * half
        time.sleep(1e-4)


def main(fd: int, num_groups: int, has_file_locks: int) -> None:
    if not has_file_locks:
        guards_module._has_file_locks = lambda fd, unused_byte: False
    guards = Guards(num_groups, shared_fd=fd)
    holders: dict[str, Holder] = {}
    say = threading.Lock()

    def tell(line: str) -> None:
        with say:
            print(line, flush=True)

    def take(what: str) -> None:
        kind, group = what.split()
        holder = holders[what] = Holder(guards, kind, int(group))
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
            is_guarded = what != "unguarded"
            threading.Thread(
                target=write_patterns, args=(fd, guards), kwargs={"is_guarded": is_guarded}, daemon=True
            ).start()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
