"""Temporary folders of this process, removed at their end, and those that killed processes left,
which the next process with the same prefix removes.

A process holds a lock on a file in its folder, which the system frees when the process dies. So live
owners in other containers count, too, whose process ids mean nothing here.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

LOCK_NAME = "lock"
MIN_AGE_S = 60.0  # of a folder without a held lock: its owner may be about to take it


class ScratchFolder:
    """A folder that only this user can read, as a context manager or until `remove`."""

    def __init__(self, prefix: str) -> None:
        """Raises `OSError` where it cannot be made."""
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._lock_fd: int | None = _lock(self.path)

    def remove(self) -> None:
        """Idempotent."""
        if self._lock_fd is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock_fd)
            self._lock_fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


@contextmanager
def owning(folder: Path) -> Iterator[None]:
    """Be the one process that uses a folder, which stays. Raises `BlockingIOError` where another one
    does, and `OSError` where it cannot be locked.
    """
    fd = _lock(folder)
    try:
        yield
    finally:
        os.close(fd)


def _lock(folder: Path) -> int:
    """Lock the folder, until the descriptor returned is closed. Raises `OSError`."""
    fd = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def remove_abandoned(prefix: str) -> None:
    """Remove this user's folders with that prefix whose owners are gone. Leaves what it may not, or cannot, remove."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):
            found = folder.lstat()
            is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
            if not is_own or time.time() - found.st_mtime < MIN_AGE_S:
                continue
            if not (folder / LOCK_NAME).is_file():
                folder.rmdir()  # its owner was killed at once; a folder with other files is not ours
            elif not _is_held(folder / LOCK_NAME):
                shutil.rmtree(folder, ignore_errors=True)


def _is_held(lock: Path) -> bool:
    """True while a process holds the lock. Raises `OSError`."""
    fd = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
