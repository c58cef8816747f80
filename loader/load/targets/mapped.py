"""Plain safetensors of a local folder, used where they lie in the system's page cache: a load without copies.

Each file is mapped, and the slab of a group is its stretch of the mapping. Reading has the kernel enter the pages: a
model of 1 GB that the node has in its cache is there after 20 ms, in no memory of this process's own. Plain
safetensors carry no digests, so nothing is verified; a file that changes during the load fails it.
After the load a file that is overwritten in place changes the weights, and one that is cut off
kills the process, as with every program that maps its files: models are replaced by renaming, or
served with `mmap = false` (docs/decisions/0029).
"""

from __future__ import annotations

import mmap
from collections.abc import Collection
from typing import Any, NamedTuple

from ...errors import UnavailableError
from ...format.manifest import Manifest
from ...memory.arena import MADV_POPULATE_READ, adviser
from ...sources.base import Mappable
from ..options import Order
from ..plan import Step, plan_load
from .base import Target


class NotInPlaceError(ValueError):
    """Slabs of a manifest that are not stretches of its files: they cannot be mapped."""


class _MappedStart(NamedTuple):
    """The start of a group's slab in a file."""

    blob: int
    begin_bytes: int


class MappedTarget(Target):
    """Views of private mappings, which live as long as any view does: writing changes this process's copy alone."""

    def __init__(self, manifest: Manifest, files: MappedFiles) -> None:
        """Raises `NotInPlaceError` for a manifest of other slabs than `checkpoint.manifest_in_place` makes."""
        stretches = _stretches(plan_load(manifest, Order.EXACT).steps)
        if stretches is None:
            raise NotInPlaceError("these slabs are not stretches of the files")
        self._manifest, self._files, self._stretches = manifest, files, stretches
        self.weight_bytes = manifest.weight_bytes

    def take_memory(self) -> None:
        """Map the files. Raises `UnavailableError` for one that cannot be mapped, and
        `ChangedError` for one that is not of the manifest's version.
        """
        self._files.open(self._manifest)
        self.slabs = []
        for group in self._manifest.groups:
            blob, begin = self._stretches.get(group.index, _MappedStart(0, 0))
            self.slabs.append(self._files.blobs[blob][begin : begin + group.slab_bytes])

    def figures(self) -> dict[str, Any]:
        return {"mapped": True}


class MappedFiles:
    """A source over mapped files: reading a range enters its pages into this process's tables, where they are."""

    def __init__(self, source: Mappable) -> None:
        self._source = source
        self.url = source.url
        self.blobs: list[memoryview] = []

    def open(self, manifest: Manifest) -> None:
        """Map the manifest's blobs."""
        self._numbers = {blob.name: number for number, blob in enumerate(manifest.blobs)}
        self.blobs = [self._source.map(blob.name, version=blob.version) for blob in manifest.blobs]
        self._advisers = [adviser(memory) for memory in self.blobs]
        self._can_populate = all(
            advise(0, mmap.PAGESIZE, MADV_POPULATE_READ) for advise in self._advisers
        )  # Linux 5.14

    def read_into(
        self, name: str, start: int, buffer: memoryview, *, version: str | None = None
    ) -> str | None:
        """Have the pages of these bytes, which `buffer` shows, in memory. Without the GIL. Raises `ChangedError` for a
        file that is not of this version.
        """
        if self._can_populate:
            begin = start - start % mmap.PAGESIZE
            size_bytes = start + len(buffer) - begin
            advise = self._advisers[self._numbers[name]]
            # All at once, where it is not in the cache.
            advise(begin, size_bytes, mmap.MADV_WILLNEED)
            if not advise(begin, size_bytes, MADV_POPULATE_READ):
                self._source.check_version(name, version)  # it was cut off, most likely
                raise UnavailableError(f"{name} in {self.url} cannot be read")
        self._source.check_version(name, version)
        return version

    def close(self) -> None:
        """Nothing is under way that would need it: the source stays its owner's."""


def _stretches(steps: Collection[Step]) -> dict[int, _MappedStart] | None:
    """By group; None where some slab is not as its file has it."""
    found: dict[int, _MappedStart] = {}
    for step in steps:
        if step.slab_offset_bytes is None:
            return None
        stretch = _MappedStart(step.part.blob, step.part.offset_bytes - step.slab_offset_bytes)
        if found.setdefault(step.part.group, stretch) != stretch:
            return None
    return found
