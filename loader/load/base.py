"""The protocol of loads: what model code, tools, `into/` and the console may ask of one.

`WeightLoad` (`load.py`) runs in threads of this process, and fills a target (`targets/`);
`ProcessLoad` follows one that runs in another process; `DeviceLoad` places what either of them
reads on another device. `tests/loader/test_load_contract.py` has the contract that all of them
keep.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..format.manifest import Manifest, Tier
from .accounting import LoadProgress, LoadStatistics
from .options import Order

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ..device.base import DeviceStatistics
    from ..errors import TeneralError
    from .experts import Pager


class Load(Protocol):
    """One load of one model. All methods may be called from any thread.

    A gate opens only over values whose every stored byte was verified. Groups are named by their numbers in the
    manifest.
    """

    @property
    def manifest(self) -> Manifest:
        """The model's manifest. Waits until it was read; raises the load's error."""

    @property
    def failure(self) -> TeneralError | None:
        """The error that ended the load early; None where there is none."""

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the weights' memory that had been taken from the system before the load began."""

    @property
    def paged_groups(self) -> frozenset[int]:
        """Groups that are in memory only while they are used: their gates never open, and `experts` reads them."""

    @property
    def experts(self) -> Pager | None:
        """The pager of experts that are in memory while they are used; None where all stay."""

    def wait(self, group: int, tier: Tier = Tier.REFINE, timeout_s: float | None = None) -> None:
        """Return when the group holds that tier's values (`REFINE`: exact ones), at once if it does
        already.

        Raises the load's error, `LoadCancelledError`, or `TimeoutError` after `timeout_s`.
        """

    def is_ready(self, group: int, tier: Tier = Tier.REFINE) -> bool:
        """True if the group holds that tier's values."""

    def wait_parts(
        self, numbers: Collection[int], timeout_s: float | None = None, *, asks: bool = True
    ) -> None:
        """Return when these parts of the manifest are there, having asked for them before all others, unless the plan's
        order is to stay (a load in another process always asks).

        Returns at once when they are there already. Raises as `wait` does.
        """

    def wait_checks(self, timeout_s: float | None = None) -> None:
        """Return when every plain file whose digest the store states was compared with it, at once where
        there is none. Gates open before. Raises as `wait` does, and `IntegrityError`.
        """

    def want_parts(self, numbers: Collection[int]) -> None:
        """Have these parts fetched before all others. Returns at once."""

    @property
    def order(self) -> Order:
        """The tier that comes first; AUTO until that is decided."""

    def reorder(self, order: Order) -> None:
        """Go on in this order, whatever was decided; not AUTO."""

    def reading(self, group: int) -> AbstractContextManager[None]:
        """While this is held the group's values stay as they are. For computing with values that
        are not exact yet, in one thread that does nothing to the load meanwhile; exact ones never
        change.
        """

    @property
    def refine_wait_s(self) -> float:
        """Seconds that `reading` has waited for groups that were just being refined."""

    def progress(self) -> LoadProgress:
        """The load's progress. Costs microseconds."""

    def left_s(self) -> float:
        """How long the load will go on, as the link has been so far, seconds; infinity while that
        is unknown.
        """

    def statistics(self) -> LoadStatistics | None:
        """The cost of the load so far; None while that is unknown."""

    def cancel(self) -> None:
        """Stop: closed gates raise `LoadCancelledError`, reads are given up. Nothing after the end."""

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is fetched or decoded any more; False when that is not so after `timeout_s`."""

    def close(self) -> None:
        """Cancel if it is still under way, and wait for its threads. Idempotent. The weights stay."""


class HostLoad(Load, Protocol):
    """A load whose weights are in this process's memory."""

    place: Literal["host"]

    def slab(self, group: int) -> npt.NDArray[np.uint8]:
        """The group's memory: (slab_bytes,), writable, never moved, and valid as long as any view of it. Undefined
        content until `wait`.
        """

    def discard(self) -> None:
        """Return the weights' memory to the system, where all are exact and nothing reads them any more: the slabs stay
        valid, and read as zeros. Nothing for memory that is not this process's own.
        """


class PlacedLoad(Load, Protocol):
    """A load whose weights are another device's. A gate opens when the device has *queued* the last
    part behind it: what reads them is launched after `order_after`, or while `reading` is held.
    """

    place: Literal["device"]

    @property
    def device_name(self) -> str:
        """Like "cuda:0". Waits until the device is open; raises as `wait`."""

    def device_slab(self, group: int) -> Any:
        """The group's memory on the device: (slab_bytes,) uint8, speaks DLPack. Waits until it is
        there; raises as `wait`.
        """

    def order_after(self, groups: Iterable[int], stream: int) -> None:
        """Order later launches on the stream after the parts that opened these groups' gates so
        far.
        """

    def reading(self, group: int, stream: int = 0) -> AbstractContextManager[None]:
        """Launches on the stream while this is held see the group's values as they are now,
        whatever is placed meanwhile. For computing with values that are not exact yet, in one
        thread.
        """

    def wait_done(self, timeout_s: float | None = None) -> bool:
        """Block until all weights are on the device, exact, so that `order_after` launches nothing
        any more: what captures graphs begins then. False when they are not after this time. Raises
        what kept them from being there.
        """

    def read_back(self, group: int, begin_bytes: int, end_bytes: int) -> memoryview:
        """A copy of these bytes of a group's slab, as they are on the device. Blocks."""

    def device_statistics(self) -> DeviceStatistics | None:
        """The device's counters; None until it is open."""


AnyLoad = HostLoad | PlacedLoad  # `place` tells them apart
