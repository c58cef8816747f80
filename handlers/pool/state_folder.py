"""The folder of a pool's sockets and KV snapshots: a named one, or one of the run's own.

A run's own folder is removed at its end. That of a run that was killed is removed by the next one: a run holds a lock
on a file in its folder, which the system frees when the process dies.
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

from ...loader.errors import UsageError

FOLDER_PREFIX = "teneral-pool-"
LOCK_NAME = "lock"
MIN_AGE_S = 60.0  # of a folder without a held lock: its run may be about to take it


@contextmanager
def state_folder(given: str | None) -> Iterator[Path]:
    """The folder `given`, made where it does not exist; without one, a temporary folder, which is removed at the end.

    Raises `UsageError` where it cannot be made or used.
    """
    try:
        if given is not None:
            folder = Path(given).absolute()
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            yield folder
            return
        _remove_abandoned(Path(tempfile.gettempdir()))
        folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        lock_fd = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"cannot use a folder for the pool's state: {error}", key="state-dir") from error
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock_fd)


def _remove_abandoned(parent: Path) -> None:
    """Remove this user's folders whose runs are gone. Leaves what it may not, or cannot, remove."""
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError):
            found = folder.lstat()
            is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
            if not is_own or time.time() - found.st_mtime < MIN_AGE_S:
                continue
            if not (folder / LOCK_NAME).is_file():
                folder.rmdir()  # of a run that was killed at once; anything else is not a run's
            elif not _is_held(folder / LOCK_NAME):
                shutil.rmtree(folder, ignore_errors=True)


def _is_held(lock: Path) -> bool:
    """True while a run holds the lock. Raises `OSError`."""
    fd = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
