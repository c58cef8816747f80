"""Targets: memory that exists, at its final address, before a byte of it has arrived. `Target` is the
base of all, `HostTarget` the usual one: slabs in memory of this process, or in a memory file that
another one maps, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from ...format.manifest import Manifest, Segment
from ...memory.arena import Arena, Reserve
from ...memory.refine_locks import RefineLocks

if TYPE_CHECKING:
    from ...errors import TeneralError
    from ...format.fill import Scratch
    from ...format.manifest import Part
    from ..pages import Paging
    from ..parts import Parts
    from ..plan import Step
    from ..resident import ResidentBase

MIN_HUGE_BYTES = 64 << 20  # of weights: fewer stay in caches, or take no time


class Course(Protocol):
    """The course of a load, for a target that has some parts decoded elsewhere."""

    def placed(self, step: Step, stored: memoryview, *, wrong: bool) -> None:
        """A step that was handed over has its values, or its bytes were found `wrong`. Raises `IntegrityError`."""

    def fail(self, error: TeneralError) -> None:
        """End the load."""


class Target:
    """The target of one load's values. Thread-safe. Methods that are not overridden do nothing."""

    what = "weights"  # in the message of a load that does not fit
    weight_bytes = 0  # of this process's memory that they take
    reserved_bytes = 0  # of that, taken from the system before the load began
    held_bytes = 0  # taken before, also where the weights need less
    is_full = False  # all values are there, and nothing is read
    is_direct = True  # parts that need no decoding are read straight into slabs
    is_used_here = True  # keys and values of what computes with the weights need memory here, too
    is_helper = False  # the weights are for another process, whose memory counts, too
    has_places = False  # `place` gives a part's bytes as they were stored, once they are there
    marks_gates = True  # the timeline takes note of gates that open; else what places the values does
    has_all_pages = False  # the system has given all of the weights' memory: mapping it elsewhere is cheap
    refine_wait_s = 0.0  # that `reading` has waited
    slabs: Sequence[memoryview] = ()  # by group; there after `take_memory`
    staging: memoryview | None = None  # that parts are to be read into; None: memory of the load's own
    ring_bytes = 0  # of images for another device

    def take_memory(self) -> None:
        """Take the slabs' memory. Raises `InsufficientMemoryError`."""

    def attach(self, course: Course) -> None:
        """Called once, before anything is handed over."""

    def room_bytes(self, part: Part) -> int:
        """Memory that the part takes in the staging besides its own bytes, a multiple of 16."""
        return 0

    def hand_over(self, step: Step, stored: memoryview, room: memoryview) -> bool:
        """True if something else verifies and decodes the step's bytes: `Course.placed` follows. Else they are verified
        here, and then there is `fill`.
        """
        return False

    def fill(
        self, parts: Parts, step: Step, stored: memoryview, scratch: Scratch, rate_bytes_per_s: float
    ) -> None:
        """Decode a step's verified bytes to where its values go. `rate_bytes_per_s` is what the
        store gives; 0: unknown. Raises, naming the part.
        """
        raise NotImplementedError

    def place(self, segment: Segment) -> memoryview:
        """The segment's own bytes. Of a target that `has_places`."""
        raise NotImplementedError

    def reading(self, group: int) -> AbstractContextManager[None]:
        """While this is held the group's values stay as they are."""
        return nullcontext()

    def prefault(self, stopped: Callable[[], bool]) -> None:
        """Have the memory's pages given by the system, until that is done or stopped. The body of a thread."""

    @property
    def can_collapse(self) -> bool:
        """True if `collapse` may gain something, after the load."""
        return False

    def collapse(self, stopped: Callable[[], bool]) -> None:
        """Make the memory's small pages huge ones, until that is done or stopped. The body of a thread."""

    def discard(self) -> None:
        """Return the weights' memory to the system; the slabs stay valid, and read as zeros."""

    def stop(self) -> None:
        """Wake threads that wait in `fill`: the load has failed or was cancelled."""

    def close(self) -> None:
        """Give back all but the slabs, once no thread uses it any more."""

    def figures(self) -> dict[str, Any]:
        """Attributes of the load's span on the timeline."""
        return {}


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
