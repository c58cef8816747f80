"""The `Device` protocol for weights in another memory, the values it speaks in, and the check that
a model fits.

    ring (host memory) ── upload ──► the same ring on the device ── merge ──► weights (device memory)
                        own stream                                own stream

A device works asynchronously, in streams: `place` only queues work. A `Ticket` is a point in that
work. Between streams tickets make order: nothing here makes the host wait but `Ticket.wait`,
`read_back` and `close`.

Why no kernel sees half a layer, and why nothing can wait in a circle: a computing stream waits for
the tickets of the parts that it needs (`order_after`), and records where its last use of a group
ends (`record`); an upload that replaces bits of values in use waits for that (`place(after=…)`). A
stream can only wait for a ticket that exists already, so each waits for earlier work, and never for
later work.

`cuda.py` and the tests' simulated device pass one contract suite. A device belongs to one load. Its
methods may be called from any thread, `place` from one at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..errors import InsufficientMemoryError
from ..memory.limits import MIB
from .image import PartImage
from .stored import StoredImage

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# Left for what is allocated behind the counter's back: other libraries' handles, and the code of
# their kernels. A guess. Keys and values are their pool's to account for, which takes what is left.
MARGIN_BYTES = 256 * MIB


def check_device_fits(name: str, free_bytes: int, *, weights_bytes: int, ring_bytes: int) -> None:
    """Raise `InsufficientMemoryError` when the device has less than this takes, and a margin."""
    needed_bytes = weights_bytes + ring_bytes + MARGIN_BYTES
    if needed_bytes > free_bytes:
        made_of = (
            f"weights {weights_bytes / MIB:,.0f}, images on their way {ring_bytes / MIB:,.0f}, "
            f"a margin of {MARGIN_BYTES / MIB:,.0f}"
        )
        raise device_refused(name, needed_bytes, free_bytes, made_of)


def check_share(name: str, share_bytes: int, *, weights_bytes: int, step_bytes: int, kv_bytes: int) -> None:
    """Raise `InsufficientMemoryError` when a server's share of a device has less than these take together."""
    needed_bytes = weights_bytes + step_bytes + kv_bytes
    if needed_bytes > share_bytes:
        made_of = f"weights {weights_bytes / MIB:,.0f}, steps {step_bytes / MIB:,.0f}, KV pool {kv_bytes / MIB:,.0f}"
        raise device_refused(name, needed_bytes, share_bytes, made_of)


def device_refused(
    name: str, needed_bytes: int, free_bytes: int | None, made_of: str
) -> InsufficientMemoryError:
    """For memory that a device does not have, or, with None, did not give."""
    have = "it gave less" if free_bytes is None else f"{free_bytes / MIB:,.0f} MiB are free"
    return InsufficientMemoryError(
        f"the model needs {needed_bytes / MIB:,.0f} MiB of the memory of {name} ({made_of}), but {have}",
        needed_bytes=needed_bytes,
        available_bytes=free_bytes,
        hint="End what else uses the device, raise --device-percent where it is set, name another device "
        "(--device cuda:1), serve a smaller or quantised model, or use the CPU (--device cpu).",
    )


class Ticket(Protocol):
    """Done once all work is done that was queued before it on its device's stream."""

    def is_done(self) -> bool:
        """Never, when the device could not do it."""

    def wait(self) -> None:
        """Block until it is done. Raises `LoadError` when the device could not do it."""


class DeviceStatistics(NamedTuple):
    """Counters of a device's work, and of the memory that it holds. Sizes in bytes, times in
    seconds.
    """

    name: str
    num_images: int
    sent_bytes: int  # over the link to the device: planes
    written_bytes: int  # of weights, by merging and copying; words that are replaced count again
    num_launches: int
    weights_bytes: int
    ring_bytes: int  # on the host; as much on the device, or its slots
    open_s: float  # until the device could be asked for memory: its context and its kernels
    pin_s: float
    is_pinned: bool  # the host's ring is read by the device itself, and not copied once more


class Placed(NamedTuple):
    """An image that lies in the ring, and where; of a stored one the part, and its tables apart from it."""

    image: PartImage | StoredImage
    offset_bytes: int
    tables_offset_bytes: int = 0


class Device(Protocol):
    """Memory that weights are placed in, and what puts them there."""

    @property
    def name(self) -> str:
        """Like "cuda:0"."""

    @property
    def decompresses(self) -> bool:
        """True if images may be `coded`."""

    def free_bytes(self) -> int:
        """The device memory that is free now, in bytes."""

    def reserve(self, weights_bytes: int, ring: memoryview, *, slot_bytes: int = 0) -> None:
        """Take the memory for the weights, and what images need. To be called once, before all that
        follows.

        With `slot_bytes`, which no image takes more of, images may be stored ones.

        `ring` is the host memory that images will lie in, whole pages; it stays the caller's, and
        must be there until `release_ring` or `close`. Raises `InsufficientMemoryError` with the
        numbers, having taken nothing.
        """

    def weights(self) -> Any:
        """The weights' memory, (weights_bytes,) uint8, on the device: an array that speaks DLPack,
        and that keeps the memory alive for as long as anything looks at it. Undefined content until
        it is placed.
        """

    def place(self, images: Sequence[Placed], after: Iterable[Ticket] = ()) -> Ticket:
        """Have these images merged into the weights, in order, behind all that was placed before.
        One ticket for all.

        What others have read of these weights so far, up to `after`, is read before. The images'
        memory belongs to the device until the ticket is done: then the tables of each stored image
        have the word `wrong`, and where that is not 0, the image has changed no weight. Returns at
        once. Raises `LoadError`.
        """

    def order_after(self, ticket: Ticket, stream: int) -> None:
        """Have all that is launched on a stream from now on wait for a ticket of this device.
        Stream 0 is the default stream of the computing thread.
        """

    def record(self, stream: int) -> Ticket:
        """A ticket for all that was launched on the stream up to now."""

    def read_back(self, begin_bytes: int, end_bytes: int) -> npt.NDArray[np.uint8]:
        """A copy of these bytes of the weights on the host, once all is done that was placed.
        Blocks.
        """

    def statistics(self) -> DeviceStatistics: ...

    def release_ring(self) -> None:
        """Let go of what only images need: all were placed, and their tickets are done. Nothing is
        placed after this.
        """

    def close(self) -> None:
        """Wait for what was placed, and let go of all but the weights. Idempotent."""
