"""A folder of the local file system as a store.

Reads go straight from the page cache into the caller's buffer (`preadv`, without the GIL). Symbolic
links are followed for reading, as the caches of model hubs are made of them, but a name can never
climb out with '..', and for packing no link may lead out of the folder (`leads_out`). Writing is in
`writer.py`: an object appears whole, under its final name, or not at all.
"""

from __future__ import annotations

import mmap
import os
import stat as stat_modes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice

from ...errors import CheckpointError, FormatError, NotFoundError
from .. import base
from ..base import ObjectInfo, check_name
from .writer import FileWriter, Folder, file_info, has_writer, is_temporary, remove

_SNAPSHOTS, _BLOBS = "snapshots", "blobs"


def leads_out(root: str, path: str) -> str | None:
    """The file behind `path` if it lies outside of the folder `root`; None if it is inside, or among the
    blobs of the hub's cache whose snapshot `root` is. Raises `OSError` for a link that leads nowhere.
    """
    target, folder = os.path.realpath(path, strict=True), os.path.realpath(root)
    allowed = [folder, *_blobs_of(folder)]
    return None if any(target.startswith(os.path.join(each, "")) for each in allowed) else target


def _blobs_of(folder: str) -> list[str]:
    """The blobs next to `snapshots/REVISION`, at or above the folder. Not resolved: no link can move them."""
    above, _, inside = folder.rpartition(f"/{_SNAPSHOTS}/")
    return [os.path.join(above, _BLOBS)] if above and inside else []


MAX_SLICE_BYTES = 16 * 1024 * 1024  # between two slices a read notices that its source was closed
MAX_LISTED = 100_000  # files in one folder
MAX_DEPTH = 32


class FileStore:
    """A `Store` on one folder. The folder need not exist before the first write, and is made then."""

    def __init__(self, path: str | os.PathLike[str], *, outside_links: bool = True) -> None:
        """Without `outside_links`, reads of links that lead out of the folder raise `CheckpointError`."""
        self._folder = Folder(path)
        self._outside_links = outside_links
        self._closed = False

    @property
    def url(self) -> str:
        return self._folder.root

    def stat(self, name: str) -> ObjectInfo:
        with self._opened(name) as (_, status):
            return file_info(name, status)

    def read(self, name: str, *, max_bytes: int) -> tuple[bytes, ObjectInfo]:
        with self._opened(name) as (fd, status):
            if status.st_size > max_bytes:
                raise base.too_large(self.url, name, status.st_size, max_bytes)
            data = bytearray(status.st_size)
            self._fill(fd, name, 0, memoryview(data))
            return bytes(data), file_info(name, status)

    def read_into(
        self, name: str, start: int, buffer: memoryview, *, version: str | None = None
    ) -> str | None:
        view = base.byte_view(buffer)
        with self._opened(name) as (fd, status):
            self._check_version(name, status, version)
            self._fill(fd, name, start, view)
            # Once more: a file overwritten in place, not renamed over, changes under an open
            # descriptor.
            self._check_version(name, os.fstat(fd), version)
        # None of its own: on network file systems inode numbers may change where bytes do not.
        return version

    def map(self, name: str, *, version: str | None = None) -> memoryview:
        """A mapping of the file (`Mappable.map`). It holds the file: what is renamed over it or removed stays
        readable.
        """
        with self._opened(name) as (fd, status):
            self._check_version(name, status, version)
            if status.st_size == 0:
                return memoryview(bytearray())
            return memoryview(mmap.mmap(fd, status.st_size, access=mmap.ACCESS_COPY))

    def check_version(self, name: str, version: str | None) -> None:
        self._check_open(name)
        with self._folder.translated(name):
            self._check_version(name, os.stat(self._folder.path_of(name)), version)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """The objects (`Source.list`); raises `NotFoundError` where the store's folder itself does not exist."""
        self._check_open("")
        with self._folder.translated(""):
            if not os.path.isdir(self.url):
                raise self._folder.missing_error()
            root = os.stat(self.url)
            found = sorted(self._walk("", prefix, ((root.st_dev, root.st_ino),)), key=lambda info: info.name)
        return iter(found)

    def close(self) -> None:
        self._closed = True

    def create(self, name: str, *, if_absent: bool = False) -> FileWriter:
        self._check_open(check_name(name))
        return FileWriter(self._folder, name, if_absent=if_absent)

    def put(
        self, name: str, data: bytes, *, if_absent: bool = False, if_version: str | None = None
    ) -> ObjectInfo:
        self._check_open(check_name(name))
        with FileWriter(self._folder, name, if_absent=if_absent, if_version=if_version) as writer:
            writer.write(data)
            return writer.commit()

    def delete(self, name: str) -> None:
        """Remove the object, and the folders that it leaves empty."""
        self._check_open(check_name(name))
        path = self._folder.path_of(name)
        with self._folder.translated(name), suppress(FileNotFoundError, NotADirectoryError):
            remove(path)
        self._folder.prune(os.path.dirname(path))

    def unfinished(self, folder: str) -> tuple[ObjectInfo, ...]:
        """The files below `folder` that writers have not finished, or left when they died."""
        self._check_open(check_name(folder))
        found = []
        for path, _, names in os.walk(self._folder.path_of(folder)):
            for name in filter(is_temporary, names):
                place = os.path.join(path, name)
                with suppress(FileNotFoundError):
                    found.append(file_info(os.path.relpath(place, self.url), os.stat(place)))
        return tuple(found)

    def is_written(self, folder: str) -> bool:
        """True if a writer of an object below `folder` lives."""
        return any(has_writer(self._folder.path_of(info.name)) for info in self.unfinished(folder))

    @contextmanager
    def _opened(self, name: str) -> Iterator[tuple[int, os.stat_result]]:
        """A descriptor of the object, a regular file, and its status."""
        self._check_open(check_name(name))
        with self._folder.translated(name):
            self._check_link(name)
            # O_NONBLOCK: a FIFO under a model's name must not hang the process.
            fd = os.open(self._folder.path_of(name), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
            try:
                status = os.fstat(fd)
                if not stat_modes.S_ISREG(status.st_mode):
                    message = f"{name} in {self.url} is not a regular file"
                    raise NotFoundError(message, source=self.url, name=name)
                yield fd, status
            finally:
                os.close(fd)

    def _fill(self, fd: int, name: str, start: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            self._check_open(name)
            count = os.preadv(fd, [view[done : done + MAX_SLICE_BYTES]], start + done)
            if count == 0:
                size_bytes = os.fstat(fd).st_size
                raise base.ended_early(self.url, name, start, start + len(view), size_bytes)
            done += count

    def _walk(self, folder: str, prefix: str, above: tuple[tuple[int, int], ...]) -> Iterator[ObjectInfo]:
        """All objects below `folder` (relative; '' or with a final '/') whose names start with
        `prefix`.

        `above` identifies the folders on the way down, so that a link that leads back up is not
        followed.
        """
        for name, status in self._entries(folder):
            if not stat_modes.S_ISDIR(status.st_mode):
                if name.startswith(prefix) and stat_modes.S_ISREG(status.st_mode):
                    yield file_info(name, status)
                continue
            identity = (status.st_dev, status.st_ino)
            is_on_the_way = (name + "/").startswith(prefix[: len(name) + 1])
            if is_on_the_way and identity not in above and len(above) < MAX_DEPTH:
                yield from self._walk(name + "/", prefix, (*above, identity))

    def _entries(self, folder: str) -> Iterator[tuple[str, os.stat_result]]:
        """Names relative to the root, links followed. What vanishes or leads nowhere is left out."""
        path = os.path.join(self.url, folder)
        try:
            with os.scandir(path) as entries:
                found = list(islice(entries, MAX_LISTED + 1))
        except FileNotFoundError:
            return
        if len(found) > MAX_LISTED:
            message = f"{path} holds more than {MAX_LISTED:,} files"
            raise FormatError(message, where=folder, hint="Give the folder of one model.")
        for entry in found:
            if not base.is_name(entry.name) or is_temporary(entry.name):
                continue
            try:
                status = entry.stat()
            except OSError:
                continue
            yield folder + entry.name, status

    def _check_version(self, name: str, status: os.stat_result, version: str | None) -> None:
        present = file_info(name, status).version
        if version is not None and version != present:
            raise base.changed(self.url, name, f"version {version} was expected, {present} is there")

    def _check_link(self, name: str) -> None:
        if self._outside_links:
            return
        target = leads_out(self.url, self._folder.path_of(name))
        if target is not None:
            raise CheckpointError(
                f"{name} in {self.url} is a link to {target!r}, which is outside of the model's folder",
                where=name,
                hint="Put the file itself into the folder, or remove the link.",
            )

    def _check_open(self, name: str) -> None:
        if self._closed:
            raise base.closed(self.url, name)
