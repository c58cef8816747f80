"""Slabs in memory of this process, or in a memory file that another one maps, too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from ...format.manifest import Manifest, Segment
from ...memory.arena import Arena, Reserve
from ...memory.refine_locks import RefineLocks
from .base import Target

if TYPE_CHECKING:
    from ...format.fill import Scratch
    from ..pages import Paging
    from ..parts import Parts
    from ..plan import Step
    from ..resident import ResidentBase

MIN_HUGE_BYTES = 64 << 20  # of weights: fewer stay in caches, or take no time


class HostTarget(Target):
    """Decodes parts into an arena. Writers of a group's values and readers of those before wait for each other."""

    has_places = True

    def __init__(
        self,
        manifest: Manifest,
        *,
        shared_fd: int | None = None,
        reserve: Reserve | None = None,
        base: ResidentBase | None = None,
        paging: Paging | None = None,
        groups: frozenset[int] | None = None,
    ) -> None:
        """With `shared_fd`, the slabs lie in that memory file, which stays the caller's; with
        `reserve`, in the memory that it has taken. Differences are added to the values of the
        `base`. The pages of `paging` come and go. Other `groups` than these, if they are given, get
        no memory.
        """
        self._manifest = manifest
        self._shared_fd, self._reserve, self._base, self._paging = shared_fd, reserve, base, paging
        self._sizes_bytes = [
            group.slab_bytes if groups is None or group.index in groups else 0 for group in manifest.groups
        ]
        self.weight_bytes = (
            sum(self._sizes_bytes) if paging is None else paging.weights_bytes + paging.buffer_bytes
        )
        self.held_bytes = 0 if reserve is None else reserve.taken_bytes
        self.reserved_bytes = min(self.held_bytes, manifest.weight_bytes)
        self.is_helper = shared_fd is not None

    def take_memory(self) -> None:
        sizes = self._sizes_bytes
        self._arena = Arena(
            sizes, shared_fd=self._shared_fd, reserve=self._reserve, is_sparse=self._paging is not None
        )
        self._refine_locks = RefineLocks(len(sizes), shared_fd=self._shared_fd)
        self.slabs = self._arena.slabs

    def fill(
        self, parts: Parts, step: Step, stored: memoryview, scratch: Scratch, rate_bytes_per_s: float
    ) -> None:
        # A step without needs is the first to write there: no values are in use yet.
        with self._refine_locks.writing(step.part.group) if step.needs else nullcontext():
            parts.fill(step.part, stored, self.place, scratch, resident=self._base)

    def place(self, segment: Segment) -> memoryview:
        """The segment's own bytes in its slab."""
        tensor = self._manifest.tensors[segment.tensor]
        begin = tensor.offset_bytes + segment.start * tensor.element_bytes
        return self.slabs[tensor.group][begin : begin + segment.count * tensor.element_bytes]

    def reading(self, group: int) -> AbstractContextManager[None]:
        return self._refine_locks.reading(group)

    @property
    def refine_wait_s(self) -> float:  # type: ignore[override]  # a plain attribute of others
        return self._refine_locks.waited_s

    def prefault(self, stopped: Callable[[], bool]) -> None:
        if self._paging is None:  # else most pages are given back: they are taken as they are written
            self.has_all_pages = self._arena.prefault(stopped)

    @property
    def can_collapse(self) -> bool:
        return self._arena.takes_huge_pages and self._arena.size_bytes >= MIN_HUGE_BYTES

    def collapse(self, stopped: Callable[[], bool]) -> None:
        self._arena.collapse(stopped)

    def discard(self) -> None:
        self._arena.discard()

    def discard_range(self, group: int, begin: int, end: int) -> None:
        """Return the memory of a group's bytes [begin, end) to the system."""
        self._arena.discard_range(group, begin, end)

    def close(self) -> None:
        self._refine_locks.close()
