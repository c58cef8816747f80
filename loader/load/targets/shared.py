"""A base in a sealed memory file: the exact weights and small files of one artifact, for every process that has
the file open.

One process fills the file (`shared_child.py`), and seals are put on it once that process has ended:
from then on none can write to it, also none that has it open. Its pages exist once, however many
processes map them, and are counted once by a cgroup. A process that writes to its mapping gets a
page of its own. `docs/decisions/0052` has the reasons. It does not know the processes that share the file.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ...errors import LoadError
from ...format.manifest import Manifest, align
from ...memory.arena import MADV_POPULATE_READ, PREFAULT_STEP_BYTES, adviser, map_private
from .base import Target

MAX_FILES_BYTES = 256 * 1024 * 1024  # of all small files together
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class HeldFiles(NamedTuple):
    """Small files in a memory file, by their digests. `places` has the offset and the bytes of each."""

    fd: int
    places: Mapping[bytes, tuple[int, int]]

    def read(self, digest: bytes | None) -> bytes | None:
        """The content; None where it is not held. Thread-safe."""
        place = None if digest is None else self.places.get(digest)
        if place is None:
            return None
        offset, left_bytes = place
        pieces: list[bytes] = []
        while left_bytes:
            piece = os.pread(self.fd, left_bytes, offset)
            if not piece:
                raise LoadError("the memory file of the base is shorter than it was")
            pieces.append(piece)
            offset, left_bytes = offset + len(piece), left_bytes - len(piece)
        return b"".join(pieces)


def new_memory_file() -> int:
    """An empty memory file that can be sealed; the caller closes it. Raises `OSError`."""
    return os.memfd_create("teneral-base", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


class LoadedBase(NamedTuple):
    """The report of a process that has filled a memory file."""

    manifest: Manifest
    places: dict[bytes, tuple[int, int]]  # of the small files in the memory file, by digest


class SharedBase:
    """Thread-safe, and inherited by forks. Close it with `close`; mappings stay valid."""

    def __init__(
        self, address: str, manifest: Manifest, places: Mapping[bytes, tuple[int, int]], fd: int
    ) -> None:
        """Take over the file, which holds the slabs of `manifest` and the files at `places`, and seal
        it. Raises `OSError` where a process still may write to it.
        """
        assert manifest.digest is not None
        self.address = address
        self.manifest = manifest
        self.digest = manifest.digest
        self.files = HeldFiles(fd, places)
        self.size_bytes = os.fstat(fd).st_size
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)

    def map(self) -> memoryview:
        """All slabs in this process's memory: (weight_bytes,), a view that owns the mapping. Raises
        `InsufficientMemoryError` where the system refuses the address space.
        """
        return map_private(self.files.fd, self.manifest.weight_bytes, what="the shared base")

    def close(self) -> None:
        os.close(self.files.fd)


class SharedTarget(Target):
    """Views of the shared base: all values are there. A thread enters the pages into this process's tables, front to
    back, so that forward passes need not. The slabs live as long as their views.
    """

    is_full = True

    def __init__(self, base: SharedBase, manifest: Manifest) -> None:
        """`manifest` is the base's, perhaps of another generation."""
        assert manifest.digest == base.digest
        self._base, self._manifest = base, manifest
        self.reserved_bytes = manifest.weight_bytes

    def take_memory(self) -> None:
        self._memory = self._base.map()
        self.slabs = []
        start = 0
        for group in self._manifest.groups:
            self.slabs.append(self._memory[start : start + group.slab_bytes])
            start += align(group.slab_bytes)

    def prefault(self, stopped: Callable[[], bool]) -> None:
        advise = adviser(self._memory)
        for offset in range(0, len(self._memory), PREFAULT_STEP_BYTES):
            if stopped() or not advise(offset, PREFAULT_STEP_BYTES, MADV_POPULATE_READ):
                return

    def figures(self) -> dict[str, Any]:
        return {"shared": True}


class NothingToRead:
    """The source of a full target's load."""

    def __init__(self, url: str) -> None:
        self.url = url

    def read_into(
        self, name: str, start: int, buffer: memoryview, *, version: str | None = None
    ) -> str | None:
        raise LoadError(f"{name} is not read: all values of {self.url} are in memory")

    def close(self) -> None:
        """Holds nothing."""
