"""The files of the part cache: one folder a user, one file a part, named by its digest.

Several processes use the folder at the same time, and any of them may be killed at any moment. So a
file appears under its final name only when all of it is written (it is renamed there), and what a
process has open stays readable when another evicts it. Nothing is flushed to the disk: a reader
compares the content with the digest, so that a power failure costs a miss and nothing else.

Invariant: the files, temporary ones included, never take more than the budget. What they take is
kept as a number in the lock file. It may be too high (after a crash, or when parts were removed)
but never too low, and a process that finds no room by it counts anew. The least recently used go
first; a file's modification time says when that was, since its content never changes. What was
written or read since this folder was opened is not evicted for more of the same load: a model that
is larger than the budget would otherwise push out its own beginning.

An entry that is no regular file of ours (a link, a FIFO, a folder, a file that may not be read) is
removed where it is met, as a damaged part is: it costs a miss and nothing else.

It does not know what a part is. All methods raise `OSError`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat as stat_modes
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

FOLDER_PREFIX = "teneral-parts-"  # then the user's number: the folder is private to a user
LOCK_NAME = "lock"
TEMPORARY_PREFIX = "new-"
TEMPORARY_LIFE_S = 600.0  # a temporary file that is older was left by a process that died
PAGE_BYTES = 4096  # files are counted in whole ones
# A tenth of the disk stays free, whatever the budget: a full disk would hurt the whole node.
FREE_SHARE = 10
# Eviction frees a twentieth of the budget beyond the need, so that it is not due at every part.
SPARE_SHARE = 20

# What opening says of an entry that is not ours to read: a link, a socket, a device, another's file
# or folder.
_WRONG_ENTRY = frozenset((errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EACCES, errno.EPERM, errno.EISDIR))
MAX_LOCK_TRIES = 10  # others may replace a wrong lock file at the same time

# A link or a FIFO in our place must do no harm.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


class WrongEntryError(OSError):
    """The place of a part holds something else, or a file that this user may not read."""


class _CachedFile(NamedTuple):
    used_at_ns: int
    name: str
    size_bytes: int  # on the disk


class CacheFolder:
    """Parts below `directory`. Does nothing before the first use, which makes what is missing.
    Thread-safe.
    """

    def __init__(self, directory: str | os.PathLike[str], *, budget_bytes: int) -> None:
        root = os.path.abspath(os.path.expanduser(directory))
        self.path = os.path.join(root, f"{FOLDER_PREFIX}{os.geteuid()}")
        self.num_evicted = 0
        self._budget_bytes = budget_bytes
        self._opened_at_ns = time.time_ns()
        # All files are reached through it, wherever the folder is moved.
        self._fd: int | None = None
        self._lock = threading.Lock()  # guards opening the folder
        self._counted = False
        self._refused_bytes: int | None = None  # the smallest size that there was no room for

    @contextmanager
    def opened(self, digest: bytes) -> Iterator[tuple[int, int] | None]:
        """The part's file, and its size in bytes; None when there is none. Counts as a use of the
        part.

        Raises `WrongEntryError` for what cannot be one.
        """
        folder = self._folder()
        try:
            fd = os.open(digest.hex(), _READ, dir_fd=folder)
        except FileNotFoundError:
            yield None
            return
        except OSError as error:
            if error.errno in _WRONG_ENTRY:
                raise WrongEntryError(error.errno, error.strerror) from error
            raise
        try:
            status = os.fstat(fd)
            if not stat_modes.S_ISREG(status.st_mode):
                raise WrongEntryError(errno.EINVAL, "is not a regular file")
            if status.st_mtime_ns < self._opened_at_ns:
                now_ns = time.time_ns()
                with suppress(
                    OSError
                ):  # a read-only disk serves as well, only without a memory of what was used
                    os.utime(fd, ns=(now_ns, now_ns))
            yield fd, status.st_size
        finally:
            os.close(fd)

    def holds(self, digest: bytes) -> bool:
        try:
            status = os.stat(digest.hex(), dir_fd=self._folder(), follow_symlinks=False)
        except FileNotFoundError:
            return False
        return stat_modes.S_ISREG(status.st_mode)

    def has_refused(self, size_bytes: int) -> bool:
        """True if there was no room for a part of that size or a smaller one, and so there will be
        none.
        """
        return self._refused_bytes is not None and size_bytes >= self._refused_bytes

    def write(self, digest: bytes, data: memoryview) -> bool:
        """Keep a part, in place of what is there; False when there is no room. Blocks as long as
        the disk does.
        """
        folder = self._folder()
        temporary = TEMPORARY_PREFIX + os.urandom(8).hex()
        fd = self._reserve(temporary, len(data))
        if fd is None:
            return False
        try:
            try:
                while data:
                    data = data[os.write(fd, data) :]
            finally:
                os.close(fd)
            # Who counts must not miss the file because it changes its name just then.
            with self._locked():
                try:
                    os.rename(temporary, digest.hex(), src_dir_fd=folder, dst_dir_fd=folder)
                except IsADirectoryError:  # all else is replaced by that
                    self.remove(digest)
                    os.rename(temporary, digest.hex(), src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
        return True

    def remove(self, digest: bytes) -> None:
        """Whatever the entry is. Fine when it is not there."""
        self._remove_entry(digest.hex())

    def _remove_entry(self, name: str) -> None:
        folder = self._folder()
        try:
            os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            return
        except IsADirectoryError:
            # Follows no links, and the folder is private to this user.
            shutil.rmtree(name, dir_fd=folder)

    def _reserve(self, temporary: str, size_bytes: int) -> int | None:
        """A new file to write to, whose size counts from now on; None when there is no room for it."""
        folder = self._folder()
        needed_bytes = _on_disk(size_bytes)
        with self._locked() as lock_fd:
            used_bytes = _read_number(lock_fd)
            if used_bytes is None or not self._counted or used_bytes + needed_bytes > self._limit(used_bytes):
                used_bytes = self._make_room(needed_bytes)
                self._counted = True
            has_room = used_bytes + needed_bytes <= self._limit(used_bytes)
            # Before the file is there: if this process dies in between, the number is too high,
            # never too low.
            _write_number(lock_fd, used_bytes + (needed_bytes if has_room else 0))
            if not has_room:
                self._refused_bytes = size_bytes
                return None
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
            try:
                os.ftruncate(fd, size_bytes)  # other processes count what is reserved
            except OSError:
                os.close(fd)
                raise
            os.lseek(fd, 0, os.SEEK_SET)
            return fd

    def _make_room(self, needed_bytes: int) -> int:
        """Evict until `needed_bytes` and some more are free, as far as that goes; what is left, in
        bytes.
        """
        folder = self._folder()
        files = list(self._files())
        used_bytes = sum(file.size_bytes for file in files)
        limit_bytes = self._limit(used_bytes)
        if used_bytes + needed_bytes <= limit_bytes or needed_bytes > limit_bytes:
            return used_bytes
        wanted_bytes = limit_bytes - limit_bytes // SPARE_SHARE - needed_bytes
        for file in sorted(files, key=lambda file: file.used_at_ns):
            if used_bytes <= wanted_bytes or file.used_at_ns >= self._opened_at_ns:
                break
            with suppress(FileNotFoundError):
                os.unlink(file.name, dir_fd=folder)
                self.num_evicted += 1
            used_bytes -= file.size_bytes
        return used_bytes

    def _files(self) -> Iterator[_CachedFile]:
        """Parts, and what is being written. Removes on the way what writers left that died."""
        folder = self._folder()
        dead_before_ns = time.time_ns() - int(TEMPORARY_LIFE_S * 1e9)
        with os.scandir(folder) as entries:
            for entry in entries:
                is_temporary = entry.name.startswith(TEMPORARY_PREFIX)
                if not is_temporary and not _is_part(entry.name):
                    continue
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    is_dead = is_temporary and status.st_mtime_ns < dead_before_ns
                    if is_dead or not stat_modes.S_ISREG(status.st_mode):
                        self._remove_entry(entry.name)
                        continue
                    # Temporary files are not evicted for room: a writer still uses them, or they are
                    # soon too old.
                    used_at_ns = self._opened_at_ns if is_temporary else status.st_mtime_ns
                    yield _CachedFile(used_at_ns, entry.name, _on_disk(status.st_size))

    def _limit(self, used_bytes: int) -> int:
        """The budget, or less where the disk has no room for it."""
        disk = os.fstatvfs(self._folder())
        spare_bytes = (disk.f_bavail - disk.f_blocks // FREE_SHARE) * disk.f_frsize
        return min(self._budget_bytes, used_bytes + spare_bytes)

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Keep all other writers from counting; the lock file. A lock ends with the process that
        holds it.
        """
        fd = self._lock_file()
        try:
            yield fd
        finally:
            os.close(fd)

    def _lock_file(self) -> int:
        """The locked file. One that is no regular file is replaced; a lock on a file that was
        replaced is none.
        """
        folder = self._folder()
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
        for _ in range(MAX_LOCK_TRIES):
            try:
                fd = os.open(LOCK_NAME, flags, 0o600, dir_fd=folder)
            except OSError as error:
                if error.errno not in _WRONG_ENTRY:
                    raise
                self._remove_entry(LOCK_NAME)
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                status = os.fstat(fd)
                if not stat_modes.S_ISREG(status.st_mode):
                    self._remove_entry(LOCK_NAME)
                else:
                    with suppress(FileNotFoundError):
                        present = os.stat(LOCK_NAME, dir_fd=folder, follow_symlinks=False)
                        if os.path.samestat(status, present):
                            return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
        raise OSError(errno.EBUSY, "is replaced again and again", os.path.join(self.path, LOCK_NAME))

    def _folder(self) -> int:
        with self._lock:
            if self._fd is None:
                self._fd = _open_private(self.path)
                # Not a method to call: the last thread that still uses the descriptor must be done
                # with it.
                weakref.finalize(self, os.close, self._fd)
            return self._fd


def _open_private(path: str) -> int:
    """The folder, made if need be. Raises `PermissionError` when others own it or may write to it.

    What they could plant would be found out by its digest; but they could also fill the disk in our
    name, or see which models run here.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags)
    except FileNotFoundError:
        os.makedirs(path, mode=0o700, exist_ok=True)
        fd = os.open(path, flags)
    except ValueError as error:
        raise OSError(errno.EINVAL, "is not a usable path", path) from error
    status = os.fstat(fd)
    problem = "belongs to another user" if status.st_uid != os.geteuid() else ""
    if status.st_mode & (stat_modes.S_IWGRP | stat_modes.S_IWOTH):
        problem = problem or "can be written to by other users"
    if problem:
        os.close(fd)
        raise PermissionError(errno.EPERM, problem, path)
    return fd


def _is_part(name: str) -> bool:
    return len(name) == 64 and set(name) <= set("0123456789abcdef")


def _on_disk(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def _read_number(fd: int) -> int | None:
    text = os.pread(fd, 32, 0).strip()
    return int(text) if text.isdigit() else None


def _write_number(fd: int, number: int) -> None:
    os.pwrite(fd, b"%31d\n" % number, 0)  # of one length always, so that no old digits stay behind
