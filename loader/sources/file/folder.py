"""The folder behind a `FileStore`: paths, what its errors mean, and which sub-folders writing has
made.

Knows nothing of contents: reading is in `store.py`, writing in `writer.py`.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ...errors import AccessDeniedError, NoSpaceError, NotFoundError, SourceError, UnavailableError
from ..base import ObjectInfo


class Folder:
    """One folder, which may not exist yet. Thread-safe."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.root = os.path.abspath(path)
        # The root and folders above it, where writing had to make them.
        self._made: set[str] = set()
        self._lock = threading.Lock()

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
                # Not empty, or gone already: then nothing above it is empty because of us.
                except OSError:
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
    return ObjectInfo(name, status.st_size, version)
