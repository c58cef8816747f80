"""Locks that keep refining a group's weights and computing with them apart.

A refine part replaces the low bits of weights that were usable before. A forward pass over such
weights holds `reading` for as long as it uses them, and decode threads hold `writing`; neither
happens during the other. Exact groups need no lock, and neither does a pass that waits for exact
values.

Between two processes these are locks on a file that both have open, one byte for each group: the
kernel frees them when their holder dies. They belong to the open file and not to the process
(Linux' "open file description locks"), so that threads may wait for different groups at once
without looking like a deadlock. Where the system lacks these (some sandboxes do), the process's own
locks are taken, and asked for again when a deadlock is suspected. It does not know tiers or values.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_FLOCK = struct.Struct(
    "hhqqi4x"
)  # struct flock: l_type, l_whence, l_start, l_len, l_pid; padded as C pads it
DEADLOCK_PAUSE_S = 1e-3


class RefineLocks:
    """The locks of `num_groups` groups. Thread-safe.

    With `shared_fd`, a file that two processes have open, one of them reads and the other writes;
    without it, both happen in this process.
    """

    def __init__(self, num_groups: int, *, shared_fd: int | None = None) -> None:
        """Raises `OSError` when the file cannot be opened once more (/proc is not there)."""
        self._fd = -1
        if shared_fd is not None:
            # An inherited descriptor is the same open file in both processes, and so would be the
            # locks'.
            self._fd = os.open(f"/proc/self/fd/{shared_fd}", os.O_RDWR | os.O_CLOEXEC)
            self._by_file = has_file_locks(self._fd, num_groups)
        self._locks = [threading.Lock() for _ in range(num_groups)]
        self._refiners = [_Refiners() for _ in range(num_groups)]
        self._waited_s = 0.0

    @property
    def waited_s(self) -> float:
        """Seconds that readers have waited for writers."""
        return self._waited_s

    @contextmanager
    def reading(self, group: int) -> Iterator[None]:
        """Keep writers out of the group while this is held. One thread a group at a time."""
        begun_s = time.monotonic()
        self._take(group)
        self._waited_s += time.monotonic() - begun_s
        try:
            yield
        finally:
            self._give_back(group)

    @contextmanager
    def writing(self, group: int) -> Iterator[None]:
        """Keep readers out of the group while this is held. Any number of threads."""
        refiners = self._refiners[group]
        # Held while the first one waits, for which all others have to wait, too.
        with refiners.lock:
            if refiners.num == 0:
                self._take(group)
            refiners.num += 1
        try:
            yield
        finally:
            with refiners.lock:
                refiners.num -= 1
                if refiners.num == 0:
                    self._give_back(group)

    def close(self) -> None:
        """Let go of the file. From then on nothing is kept apart: nothing is refined any more."""
        for lock in self._locks:
            lock.acquire()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        for lock in self._locks:
            lock.release()

    def _take(self, group: int) -> None:
        self._locks[group].acquire()
        try:
            if self._fd >= 0:
                self._lock_byte(group, exclusive=True)
        except BaseException:  # also Ctrl-C while it waits: it would never be given back
            self._locks[group].release()
            raise

    def _give_back(self, group: int) -> None:
        if self._fd >= 0:
            self._lock_byte(group, exclusive=False)
        self._locks[group].release()

    def _lock_byte(self, group: int, *, exclusive: bool) -> None:
        import fcntl  # a load in exact order never needs it

        kind = fcntl.F_WRLCK if exclusive else fcntl.F_UNLCK
        command = fcntl.F_OFD_SETLKW if self._by_file else fcntl.F_SETLKW
        while True:
            try:
                fcntl.fcntl(self._fd, command, _FLOCK.pack(kind, os.SEEK_SET, group, 1, 0))
                return
            except OSError as error:
                # Between processes: each of two threads here waits for one there. No thread here
                # holds what another waits for, so it is no deadlock.
                if error.errno != errno.EDEADLK:
                    raise
                time.sleep(DEADLOCK_PAUSE_S)


def has_file_locks(fd: int, unused_byte: int) -> bool:
    """True if the system has locks that belong to open files."""
    import fcntl

    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, unused_byte, 1, 0))
    except OSError:
        return False
    return True


class _Refiners:
    """The threads that refine one group."""

    __slots__ = ("lock", "num")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num = 0
