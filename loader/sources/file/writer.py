"""Writing one object into a folder, so that it appears whole or not at all; and the folder behind a
`FileStore`: paths, the meaning of its errors, and the sub-folders that writing has made.

Bytes go to a temporary file in the object's own folder, are flushed to the disk, and are then
renamed over the object (linked, where it must not exist yet). The temporary file is locked while
its writer lives: the next writer in that folder removes the unlocked ones, which crashed processes
left.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from ...errors import (
    AccessDeniedError,
    AlreadyExistsError,
    NoSpaceError,
    NotFoundError,
    SourceError,
    UnavailableError,
)
from ..base import ObjectInfo, Writer

MAX_ATTEMPTS = 100  # to make a temporary file while others clear the folder away
_PREFIX, _SUFFIX = ".teneral-", ".tmp"


class Folder:
    """One folder, which may not exist yet. Thread-safe."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.root = os.path.abspath(path)
        # The root and folders above it, where writing had to make them.
        self._made: set[str] = set()
        self._lock = threading.RLock()  # a lost writer's end may come while this thread makes a folder

    def path_of(self, name: str) -> str:
        """The file behind a checked name."""
        return os.path.join(self.root, name)

    def make(self, folder: str) -> None:
        """Make `folder`, an absolute path at or below the root, and what is missing above it."""
        with self._lock:
            missing = self.root
            while not os.path.isdir(missing) and missing != os.path.dirname(missing):
                self._made.add(missing)
                missing = os.path.dirname(missing)
            os.makedirs(folder, exist_ok=True)

    def prune(self, folder: str) -> None:
        """Remove `folder` and those above it while they are empty, as object stores know no empty
        folders.

        The root and what is above it stay, unless this very object made them.
        """
        with self._lock:
            while folder in self._made or folder.startswith(os.path.join(self.root, "")):
                try:
                    os.rmdir(folder)
                except FileNotFoundError:
                    pass  # Ctrl-C came before it was made; those above it may be there
                except OSError:  # not empty: then nothing above it is
                    return
                self._made.discard(folder)
                folder = os.path.dirname(folder)

    def missing_error(self) -> NotFoundError:
        what = "is a file, not a folder" if os.path.exists(self.root) else "does not exist"
        hint = "Give the folder that holds manifest.json, or the model's config.json and *.safetensors."
        return NotFoundError(f"{self.root} {what}", source=self.root, hint=hint)

    @contextmanager
    def translated(self, name: str) -> Iterator[None]:
        """Translates the operating system's errors about the object `name` into the loader's."""
        try:
            yield
        except OSError as error:
            raise self._explain(name, error) from error

    def _explain(self, name: str, error: OSError) -> SourceError:
        what = f"{name} in {self.root}" if name else self.root
        reason = os.strerror(error.errno) if error.errno else str(error)
        match error.errno:
            case errno.ENOENT | errno.ENOTDIR | errno.ELOOP | errno.ENAMETOOLONG:
                if not os.path.isdir(self.root):
                    return self.missing_error()
                return NotFoundError(f"there is no {what}", source=self.root, name=name)
            case errno.EISDIR:
                return NotFoundError(f"{what} is a folder, not a file", source=self.root, name=name)
            case errno.EACCES | errno.EPERM | errno.EROFS:
                hint = "Check the permissions of the folder and of those above it."
                return AccessDeniedError(f"{what}: {reason}", source=self.root, name=name, hint=hint)
            case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
                hint = "Free some space or choose another place; what was being written has been removed."
                return NoSpaceError(
                    f"{what} could not be written: {reason}", source=self.root, name=name, hint=hint
                )
        return UnavailableError(f"{what}: {reason}", source=self.root, name=name)


def file_info(name: str, status: os.stat_result) -> ObjectInfo:
    """Size and version of an object. The inode tells apart two files written within one tick of the
    clock.
    """
    version = f"{status.st_size:x}-{status.st_mtime_ns:x}-{status.st_ino:x}"
    return ObjectInfo(name, status.st_size, version, status.st_mtime)


def is_temporary(file_name: str) -> bool:
    return file_name.startswith(_PREFIX) and file_name.endswith(_SUFFIX)


class FileWriter(Writer):
    """An `ObjectWriter`. `commit` raises `AlreadyExistsError` where `if_absent` or `if_version` do
    not hold.

    `if_version` is compared under a lock that other conditional writers and deletions respect.
    """

    def __init__(
        self, folder: Folder, name: str, *, if_absent: bool = False, if_version: str | None = None
    ) -> None:
        self._maker = os.getpid()  # whose temporary file it is: a fork's copy of this object removes nothing
        self._folder = folder
        self._name = name
        self._path = folder.path_of(name)
        self._if_absent = if_absent
        self._if_version = if_version
        self._temporary, self._fd = "", -1
        super().__init__()
        try:
            with folder.translated(name):
                self._make_temporary(os.path.dirname(self._path))
        except BaseException:  # Ctrl-C, or the disk
            with suppress(SourceError):
                self.abort()
            raise

    def __del__(self) -> None:
        # Ctrl-C may come when it was made, and before a caller has it that could abort it.
        if self._is_open and self._maker == os.getpid():
            with suppress(SourceError):
                self.abort()

    def _append(self, data: bytes | bytearray | memoryview) -> None:
        rest = memoryview(data).cast("B")
        with self._folder.translated(self._name):
            while rest:
                rest = rest[os.write(self._fd, rest) :]

    def _finish(self) -> ObjectInfo:
        with self._folder.translated(self._name):
            os.fsync(self._fd)
            if self._if_version is not None:
                with _held(self._path) as present:
                    version = file_info(self._name, present).version if present else None
                    if version != self._if_version:
                        raise self._lost(f"version {self._if_version} was to be replaced, {version} is there")
                    os.replace(self._temporary, self._path)
            elif self._if_absent:
                self._link()
            else:
                os.replace(self._temporary, self._path)
            _sync_folder(os.path.dirname(self._path))
            info = file_info(self._name, os.fstat(self._fd))
            self._close()
        return info

    def _link(self) -> None:
        try:
            os.link(self._temporary, self._path)
        except FileExistsError as error:
            raise self._lost("it exists already") from error
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            raise SourceError(
                f"{self._name} cannot be made atomically: {self._folder.root} knows no hard links",
                source=self._folder.root,
                name=self._name,
                hint="Write to a folder on a local disk and copy it.",
            ) from error
        os.unlink(self._temporary)

    def _discard(self) -> None:
        with self._folder.translated(self._name):
            if self._temporary:
                with suppress(FileNotFoundError):
                    os.unlink(self._temporary)
            self._close()
        self._folder.prune(os.path.dirname(self._path))

    def _make_temporary(self, directory: str) -> None:
        """Open a new, locked temporary file in `directory`, which is made where it is missing."""
        for attempts_left in reversed(range(MAX_ATTEMPTS)):
            path = os.path.join(directory, f"{_PREFIX}{os.urandom(8).hex()}{_SUFFIX}")
            try:
                self._folder.make(directory)
                _remove_leftovers(directory)
                self._temporary = path  # known before it is there: Ctrl-C may come right behind
                self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            except FileNotFoundError:  # pruned meanwhile by another writer that gave up or deleted
                if attempts_left:
                    continue
                raise
            # A file system without locks: then no leftovers are removed either.
            with suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_EX)
            if os.fstat(self._fd).st_nlink > 0:
                return
            self._close()  # taken for a leftover before it was locked
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), directory)

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _lost(self, detail: str) -> AlreadyExistsError:
        return AlreadyExistsError(
            f"{self._name} in {self._folder.root} was not written: {detail}",
            source=self._folder.root,
            name=self._name,
        )


def _remove_leftovers(directory: str) -> None:
    """Remove temporary files whose writers died."""
    with os.scandir(directory) as entries:
        leftovers = [entry.path for entry in entries if is_temporary(entry.name)]
    for path in leftovers:
        try:
            fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        except OSError:
            continue  # gone by now, or another user's
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
        except OSError:
            continue  # its writer lives
        finally:
            os.close(fd)


def has_writer(path: str) -> bool:
    """True if the temporary file's writer lives, or may live."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # another user's
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def remove(path: str) -> None:
    """Remove the object, between two conditional writers' turns."""
    with ExitStack() as stack:
        # The user may not write it, or the file system has no locks: then no writer replaces it on a condition.
        with suppress(OSError):
            stack.enter_context(_held(path))
        os.unlink(path)


@contextmanager
def _held(path: str) -> Iterator[os.stat_result | None]:
    """Keep other conditional writers and deletions off the object while the block runs; its status, None
    if there is none.

    The lock is on the object itself, not on a file next to it: nothing is left lying about, and it
    works over NFS too, which locks no folders.
    """
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        except FileNotFoundError:
            yield None
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            status = os.fstat(fd)
            # The last holder of the lock may have replaced or removed the file: then the lock is on
            # the wrong one.
            if _is_at(path, status):
                yield status
                return
        finally:
            os.close(fd)


def _is_at(path: str, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(status, os.stat(path))
    except FileNotFoundError:
        return False


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some file systems cannot sync a folder.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)
