"""A load whose weights are another device's: the same gates as other loads have, opened as parts
are placed there.

    fetch, verify, decode        ring of images        place
    (a process of its own,  ───────────────────────►  (threads here, which ───►  weights on the device
     or threads here)        ◄──── given back ──────   own the device)

A gate opens when the device has *queued* the last part behind it. So a thread that passes it calls
`order_after`, or holds `reading`, before launching what reads (`placement.py` says why that is
enough). The device is opened, and its memory taken, while the first bytes are on their way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, Self

from ..device.paths import DeviceSpeed
from ..device.placement import Placement
from ..device.ring import ImageRing, ring_bytes, stored_ring
from ..device.sink import ImageSink, SentImage
from ..errors import LoadCancelledError, TeneralError
from ..format.manifest import Manifest, Tier
from ..memory.arena import map_bytes
from ..memory.limits import available_bytes
from ..sources.base import Source
from ..timeline import Timeline
from .accounting import LoadProgress, LoadState, LoadStatistics, mark_ready
from .gates import Readiness
from .launch import AS_STORED
from .options import LoadOptions, Order
from .process_load import ProcessLoad

if TYPE_CHECKING:
    from ..device.base import Device, DeviceStatistics
    from .launch import Launched
    from .load import WeightLoad

OpenDevice = Callable[[], "Device"]


class DeviceLoad:
    """A load onto a device (`base.PlacedLoad`). Made by `follow` or `in_threads`."""

    place: Literal["device"] = "device"  # of the weights
    reserved_bytes = 0
    paged_groups: frozenset[int] = frozenset()
    experts = None

    def __init__(self, open_device: OpenDevice, *, timeline: Timeline, as_stored: bool) -> None:
        """Begin to open the device. For `follow` and `in_threads`."""
        self._timeline, self._as_stored = timeline, as_stored
        self._feed: ProcessLoad | WeightLoad | None = None
        self._give_back: Callable[[int, bool], None] = lambda offset_bytes, wrong: None
        self._device_is: Callable[[DeviceSpeed], None] = lambda speed: None
        self._manifest: Manifest | None = None
        self._readiness: Readiness | None = None
        self._error: TeneralError | None = None
        self._opened = threading.Event()  # or failed
        self._attached = threading.Event()  # to its feed, which may have sent images before
        self._lock = threading.Lock()
        self._placement = Placement(
            open_device,
            timeline=timeline,
            settle=self._settle,
            release=self._release,
            tell=self._tell,
            fail=self._fail,
        )

    @classmethod
    def follow(cls, launched: Launched, open_device: OpenDevice, *, timeline: Timeline | None = None) -> Self:
        """Take over a load that was launched for another device."""
        timeline = timeline or Timeline(started_at=launched.task.started_at)
        load = cls(open_device, timeline=timeline, as_stored=launched.task.as_stored)
        feed = ProcessLoad(launched, timeline=timeline, images=load)
        load._attach(feed, feed.give_back, feed.device_is)
        return load

    @classmethod
    def in_threads(
        cls,
        source: Source,
        manifest: Manifest,
        open_device: OpenDevice,
        *,
        options: LoadOptions | None = None,
        timeline: Timeline | None = None,
        as_stored: bool = AS_STORED,
    ) -> Self:
        """A load in threads of this process, begun at once. Raises `InsufficientMemoryError`."""
        # A load in another process needs nothing of them here.
        from .load import WeightLoad
        from .targets.device import DeviceTarget
        from .targets.images import ImageTarget

        timeline, room_bytes = timeline or Timeline(), available_bytes()
        sizes = stored_ring(manifest, room_bytes=room_bytes) if as_stored else None
        size_bytes = ring_bytes(manifest, room_bytes=room_bytes) if sizes is None else sizes.size_bytes
        memory = map_bytes(size_bytes, what="the ring of images")
        load = cls(open_device, timeline=timeline, as_stored=as_stored)
        target: DeviceTarget | ImageTarget
        try:
            if sizes is None:
                target = ImageTarget(
                    manifest, ImageSink(manifest, ImageRing(memory), load.put, timeline=timeline)
                )
            else:
                target = DeviceTarget(manifest, memory, sizes, load.put, timeline=timeline)
            feed = WeightLoad(source, manifest, target=target, options=options, timeline=timeline)
            load.opened(manifest, memory)
            load._attach(feed, target.give_back, target.device_is)
            feed.start()
        except BaseException:
            load.close()
            raise
        threading.Thread(target=load._watch, args=(feed,), name="teneral-watch", daemon=True).start()
        return load

    # what is fed to it

    def opened(self, manifest: Manifest, ring: memoryview) -> None:
        """See `ImageReceiver`."""
        readiness = Readiness(len(manifest.groups), [(part.group, part.tier) for part in manifest.parts])
        with self._lock:
            self._manifest, self._readiness = manifest, readiness
            failed = self._error
        if failed is not None:
            readiness.fail(failed)
        self._placement.begin(manifest, ring, as_stored=self._as_stored)
        self._opened.set()

    def put(self, image: SentImage) -> None:
        """See `ImageReceiver`."""
        self._placement.put(image)

    def fail(self, error: TeneralError) -> None:
        """See `ImageReceiver`. Nothing once all weights are on the device."""
        self._fail(error)
        self._placement.abandon(error)

    def _fail(self, error: TeneralError) -> None:
        """The feed or the device has failed."""
        with self._lock:
            if self._error is not None:
                return
            if self._readiness is not None and not self._readiness.fail(error) and self._placement.is_done:
                return
            self._error = error
        self._opened.set()
        if self._feed is not None:
            self._feed.cancel()

    # what can be asked of every load

    @property
    def failure(self) -> TeneralError | None:
        return None if isinstance(self._error, LoadCancelledError) else self._error

    @property
    def manifest(self) -> Manifest:
        return self._known()[0]

    def wait(self, group: int, tier: Tier = Tier.REFINE, timeout_s: float | None = None) -> None:
        self._known()[1].wait(group, tier, timeout_s)

    def wait_parts(
        self, numbers: Collection[int], timeout_s: float | None = None, *, asks: bool = True
    ) -> None:
        readiness = self._known()[1]
        if not readiness.are_there(numbers):
            self.want_parts(numbers)
            readiness.wait_parts(numbers, timeout_s)

    def wait_checks(self, timeout_s: float | None = None) -> None:
        """Values go to the device one by one, so that there is no whole file to be compared."""

    def want_parts(self, numbers: Collection[int]) -> None:
        self._fed().want_parts(numbers)

    def is_ready(self, group: int, tier: Tier = Tier.REFINE) -> bool:
        return self._readiness is not None and self._readiness.is_open(group, tier)

    def progress(self) -> LoadProgress:
        """The load's progress: fetched by its feed, and placed here."""
        fetched, readiness = self._fed().progress(), self._readiness
        if readiness is None:
            return fetched
        num_exact = readiness.num_open(Tier.REFINE)
        state = fetched.state
        if self._error is not None:
            cancelled = isinstance(self._error, LoadCancelledError)
            state = LoadState.CANCELLED if cancelled else LoadState.FAILED
        elif state is LoadState.EXACT and num_exact < fetched.num_groups:
            state = LoadState.LOADING
        return fetched._replace(
            state=state, groups_ready_draft=readiness.num_open(Tier.DRAFT), groups_exact=num_exact
        )

    @property
    def order(self) -> Order:
        return self._fed().order

    def reorder(self, order: Order) -> None:
        self._fed().reorder(order)

    def left_s(self) -> float:
        return self._fed().left_s()

    def statistics(self) -> LoadStatistics | None:
        """The cost of fetching and decoding; None until that is known."""
        return self._fed().statistics()

    @property
    def refine_wait_s(self) -> float:
        return self._placement.refine_wait_s

    def cancel(self) -> None:
        self.fail(LoadCancelledError("the load was cancelled"))

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is fetched any more; False when it is after `timeout_s`."""
        return self._fed().join(timeout_s)

    def close(self) -> None:
        self.cancel()
        self._attached.set()
        if self._feed is not None:
            self._feed.close()
        self._placement.close()

    def release(self) -> None:
        """Forget the weights, after `close`: their memory goes with the last tensor over it."""
        self._placement.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # what is the device's

    @property
    def device_name(self) -> str:
        return self._placement.device_name

    def device_slab(self, group: int) -> Any:
        _ = self.manifest
        return self._placement.slab(group)

    def order_after(self, groups: Iterable[int], stream: int) -> None:
        self._placement.order_after(groups, stream)

    def wait_done(self, timeout_s: float | None = None) -> bool:
        return self._placement.wait_done(timeout_s)

    def reading(self, group: int, stream: int = 0) -> AbstractContextManager[None]:
        """Launches on the stream while this is held see the group's values as they are now,
        whatever is placed meanwhile. For computing with values that are not exact yet, in one
        thread.
        """
        return self._placement.reading(group, stream)

    def read_back(self, group: int, begin_bytes: int, end_bytes: int) -> memoryview:
        return self._placement.read_back(group, begin_bytes, end_bytes)

    def device_statistics(self) -> DeviceStatistics | None:
        return self._placement.statistics()

    def _attach(
        self,
        feed: ProcessLoad | WeightLoad,
        give_back: Callable[[int, bool], None],
        device_is: Callable[[DeviceSpeed], None],
    ) -> None:
        with self._lock:
            self._feed, self._give_back, self._device_is = feed, give_back, device_is
            failed = self._error
        self._attached.set()
        if failed is not None:
            feed.cancel()

    def _fed(self) -> ProcessLoad | WeightLoad:
        assert self._feed is not None, "a load is used before it was made"
        return self._feed

    def _release(self, offset_bytes: int, wrong: bool) -> None:
        self._attached.wait()
        self._give_back(offset_bytes, wrong)

    def _tell(self, speed: DeviceSpeed) -> None:
        self._attached.wait()
        self._device_is(speed)

    def _known(self) -> tuple[Manifest, Readiness]:
        self._opened.wait()
        if self._manifest is None or self._readiness is None:
            raise self._error or LoadCancelledError("the load ended before its manifest was read")
        return self._manifest, self._readiness

    def _settle(self, part: int) -> None:
        manifest, readiness = self._known()
        gates, _ = readiness.settle(part)
        mark_ready(self._timeline, manifest, gates)
        readiness.open(gates, (part,))

    def _watch(self, feed: WeightLoad) -> None:
        """Tell of a load in threads that has failed. The body of a thread."""
        feed.join()
        if feed.failure is not None:
            self.fail(feed.failure)
