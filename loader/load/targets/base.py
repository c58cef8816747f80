"""The base of targets: memory that exists, at its final address, before a byte of it has arrived."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ...errors import TeneralError
    from ...format.fill import Scratch
    from ...format.manifest import Part, Segment
    from ..parts import Parts
    from ..plan import Step


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
