"""The load of a `SharedBase`: by a process of its own, since the owner must keep a single thread.

The child reads the artifact, has every part verified and decoded into the memory file, puts the
small files behind the weights, and reports once. It ends with its owner. The file is sealed
afterwards, by the owner: only when the child has ended is no mapping left that could write to it.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from ..artifact import open_artifact, open_model, read_file
from ..errors import LoadError, TeneralError, UsageError
from ..process.helper import OWNER_GONE, HelperProcess
from ..sources.open import split_pin
from .targets.shared import MAX_FILES_BYTES, LoadedBase, SharedBase, new_memory_file

if TYPE_CHECKING:
    from ..format.manifest import Manifest
    from ..sources.base import Source, SourceOptions
    from .options import LoadOptions


class SharedTask(NamedTuple):
    """The child's task, sent once."""

    address: str  # perhaps pinned
    source_options: SourceOptions
    load_options: LoadOptions
    held_digest: bytes | None = None  # of a base that is held already: nothing is loaded if it is this one


class SharedLoading:
    """A load that is under way. `fileno` is readable when `finish` need not wait any more. For a process
    with one thread, which it does not change. End it with `finish` or `cancel`.
    """

    def __init__(self, task: SharedTask) -> None:
        """Fork the child. Raises `OSError` where the system refuses another process."""
        self.task = task
        self._memory_fd = new_memory_file()
        try:
            self._process = HelperProcess(".loader.load.shared_child", fds=(self._memory_fd,), fork=True)
        except OSError:
            os.close(self._memory_fd)
            raise
        with suppress(OSError):  # it has ended already: `finish` says so
            self._process.socket.sendall(pickle.dumps(task))

    def fileno(self) -> int:
        return self._process.socket.fileno()

    def finish(self) -> SharedBase | None:
        """Wait for the child's end: the base, or None where it is the one that is held. Raises the error
        of its load.
        """
        try:
            with self._process.socket.makefile("rb") as stream:
                found: LoadedBase | TeneralError | None = pickle.load(stream)  # noqa: S301 - written by our own child
        except (EOFError, OSError, pickle.UnpicklingError):
            status = self._process.wait()
            found = LoadError(
                f"the process that loads the base {self.task.address} ended early, with status {status}",
                hint="Status -9 usually means that the container is out of memory: give it more.",
            )
        self._process.wait()
        self._process.socket.close()
        if isinstance(found, LoadedBase):
            try:
                return SharedBase(self.task.address, found.manifest, found.places, self._memory_fd)
            except OSError as error:
                found = LoadError(f"the memory of the base cannot be sealed: {error.strerror or error}")
        os.close(self._memory_fd)
        if found is not None:
            raise found
        return None

    def forget(self) -> None:
        """Close what a fork of the owner has inherited of it: the load goes on, and its memory is not
        the fork's to hold.
        """
        self._process.forget()
        os.close(self._memory_fd)

    def cancel(self) -> None:
        """End the child, and give its memory back."""
        self._process.kill()
        self._process.wait()
        self._process.socket.close()
        os.close(self._memory_fd)


def main(socket_fd: int, memory_fd: int) -> None:
    # Ctrl-C reaches the whole group: the owner decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=socket_fd) as sock, sock.makefile("rwb") as stream:
        task: SharedTask = pickle.load(stream)  # noqa: S301 - written by our own parent
        found: LoadedBase | TeneralError | None
        try:
            found = _load(task, memory_fd)
        except TeneralError as error:
            found = error
        pickle.dump(found, stream)


def _load(task: SharedTask, memory_fd: int) -> LoadedBase | None:
    from .load import WeightLoad
    from .targets.base import HostTarget

    address, digest = split_pin(task.address)
    source = open_model(address, task.source_options)
    try:
        manifest = open_artifact(source, digest=digest, without_base=True)
        _check(manifest, source)
        if manifest.digest == task.held_digest:
            return None
        target = HostTarget(manifest, shared_fd=memory_fd)
        with WeightLoad(source, manifest, target=target, options=task.load_options) as load:
            load.start()
            for group in manifest.groups:
                load.wait(group.index)
            load.join()
            return LoadedBase(manifest, _put_files(source, manifest, memory_fd))
    finally:
        source.close()


def _check(manifest: Manifest, source: Source) -> None:
    """Raise `UsageError` for a model that cannot be a shared base."""
    refuse = None
    if manifest.digest is None:
        refuse = "is plain, and only an artifact can be a base", "Pack it, and the fine-tunes against it."
    elif manifest.base is not None:
        refuse = f"holds only the differences to b3:{manifest.base.hex()}", "Give that artifact's address."
    elif sum(file.size_bytes for file in manifest.files) > MAX_FILES_BYTES:
        refuse = (
            f"has more than {MAX_FILES_BYTES >> 20} MiB of files next to its weights",
            "Leave --base out.",
        )
    if refuse is not None:
        what, hint = refuse
        raise UsageError(
            f"{source.url} cannot be the base of a standby pool: it {what}", key="base", hint=hint
        )


def _put_files(source: Source, manifest: Manifest, fd: int) -> dict[bytes, tuple[int, int]]:
    """Write the small files behind the weights. Returns their places."""
    places: dict[bytes, tuple[int, int]] = {}
    offset = manifest.weight_bytes
    for file in manifest.files:
        if file.digest is None or file.digest in places:
            continue
        left = memoryview(read_file(source, manifest, file.name))
        places[file.digest] = offset, len(left)
        while left:
            written = os.pwrite(fd, left, offset)
            offset, left = offset + written, left[written:]
    return places


if __name__ == "__main__":
    with suppress(*OWNER_GONE):
        main(*map(int, sys.argv[1:]))
