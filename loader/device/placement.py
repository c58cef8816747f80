"""Images become weights: the threads between a ring and a device, and the order between placing and
computing.

One thread opens the device at once, while the first bytes are fetched, and then has it place
images, all that wait at a time; another waits for the tickets and gives the ring's memory back. No
image waits on the host for the device to be done with the one before. While they work, Python's
threads take turns ten times as often as they usually do.

A part is *settled* when the device has queued its placement, not when that is done. So a thread
that a gate let through has its stream wait, by `order_after` or `reading`, before it launches
anything that reads. Computations with values that are not exact yet run within `reading`:
what refines them is placed behind the last of that. On the host the two exclude each other for as
long as launching takes; on the device, tickets do the rest (`base.py`). It does not know sources,
planes or torch.
"""

from __future__ import annotations

import copy
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

from ..errors import LoadCancelledError, LoadError, TeneralError
from ..format.manifest import Manifest, Part
from ..memory.refine_locks import RefineLocks
from ..process.cpu import quick_turns
from ..timeline import Timeline
from .base import Device, DeviceStatistics, Placed, Ticket
from .image import PartImage, as_placed, plan_image, slab_starts
from .paths import DeviceSpeed
from .ring import cut_part, stored_ring, with_plane_sizes
from .sink import ImageForm, SentImage
from .stored import WRONG_BYTES, StoredImage, plan_plain, plan_stored

# Placed at a time: enough frames for a large device's decompressor, in up to 200 MiB of scratch.
MAX_IMAGES = 4


class _OnItsWay(NamedTuple):
    """Images that were placed together, and are not done yet."""

    images: tuple[tuple[SentImage, Placed], ...]
    ticket: Ticket
    begun_at_s: float


class _PartOnItsWay:
    """A part of which only some images are done."""

    def __init__(self, manifest: Manifest, part: Part, way: ImageForm, begun_at_s: float) -> None:
        self.pieces = cut_part(manifest, part) if way is ImageForm.PLANES else (part,)
        self.begun_at_s = begun_at_s
        self.num_unplaced = self.num_undone = len(self.pieces)
        self.sent_bytes = self.written_bytes = 0
        # The device decodes any piece of it: the part counts once that is seen to have been right.
        self.is_coded = way is ImageForm.STORED


class _FollowedLoad(NamedTuple):
    """The manifest of the load, and the ring that its images lie in."""

    manifest: Manifest
    starts: list[int]
    weights_bytes: int
    ring: memoryview
    slot_bytes: int  # 0: no image is a stored one


class Placement:
    """The placement of one model's weights on a device. Thread-safe."""

    def __init__(
        self,
        open_device: Callable[[], Device],
        *,
        timeline: Timeline,
        settle: Callable[[int], None],
        release: Callable[[int, bool], None],
        tell: Callable[[DeviceSpeed], None],
        fail: Callable[[TeneralError], None],
    ) -> None:
        """`open_device` is called on a thread of this. `settle` takes the number of each part that
        is being placed, `release` the ring's places that the device is done with, and whether it
        found a stored image wrong there, which then was not placed. `tell` takes what the device can
        do that it need not, `fail` what ended it. They may be called from any thread.
        """
        self._open_device = open_device
        self._timeline = timeline
        self._settle, self._release, self._tell, self._fail = settle, release, tell, fail
        self._model: _FollowedLoad | None = None
        self._device: Device | None = None
        self._error: TeneralError | None = None
        self._abandoned: TeneralError | None = None
        self._begun, self._reserved, self._done = threading.Event(), threading.Event(), threading.Event()
        self._is_closed = False
        # By group, once the manifest is known. What was placed last, as long as the device has not
        # done it …
        self._last: list[Ticket | None] = []
        # … how many parts are not placed, and how many the device has not done …
        self._unplaced: list[int] = []
        self._undone: list[int] = []
        # … and of each stream, where its last use ends of values that are not exact.
        self._uses: list[dict[int, Ticket]] = []
        self._refine_locks = RefineLocks(0)
        self._parts: dict[int, _PartOnItsWay] = {}
        self._fetch_order = ExitStack()
        self._fetch_order.enter_context(quick_turns())
        self._images: queue.SimpleQueue[SentImage | None] = queue.SimpleQueue()
        self._placed: queue.SimpleQueue[_OnItsWay | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._guard, args=(body,), name=name, daemon=True)
            for name, body in (("teneral-place", self._run), ("teneral-placed", self._collect))
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, manifest: Manifest, ring: memoryview, *, as_stored: bool = False) -> None:
        """Set the manifest, and the memory in which images will lie; `as_stored`, stored ones, too."""
        starts, weights_bytes = slab_starts(manifest.groups)
        self._refine_locks = RefineLocks(len(manifest.groups))
        self._last = [None] * len(manifest.groups)
        self._unplaced = [0] * len(manifest.groups)
        for part in manifest.parts:
            self._unplaced[part.group] += 1
        self._undone = list(self._unplaced)
        self._uses = [{} for _ in manifest.groups]
        slot_bytes = stored_ring(manifest).slot_bytes if as_stored else 0
        self._model = _FollowedLoad(as_placed(manifest), starts, weights_bytes, ring, slot_bytes)
        self._begun.set()

    def put(self, sent: SentImage) -> None:
        """Queue an image to be placed after the earlier ones. Returns at once."""
        self._images.put(sent)

    @property
    def device_name(self) -> str:
        """Waits until the device is open."""
        return self._opened().name

    def slab(self, group: int) -> Any:
        """The group's memory on the device: (slab_bytes,) uint8, an array that speaks DLPack. Waits
        until it exists, and raises the placement's error.
        """
        device, model = self._opened(), self._model
        assert model is not None
        begin = model.starts[group]
        return device.weights()[begin : begin + model.manifest.groups[group].slab_bytes]

    def order_after(self, groups: Iterable[int], stream: int) -> None:
        """Order later launches on the stream after all that was placed in these groups so far.

        Costs next to nothing, and asks the device nothing, once they are exact there: so it may
        stand in what a graph captures, after `wait_done`.
        """
        for group in groups:
            ticket = self._last[group]
            if ticket is not None:
                self._opened().order_after(ticket, stream)

    def wait_done(self, timeout_s: float | None = None) -> bool:
        """Block until the device has done all that there is to place; False when it has not after
        this time. Raises what kept it from that.
        """
        if not self._done.wait(timeout_s):
            return False
        error = self._error or self._abandoned
        if error is not None:
            raise _copy(error)
        return True

    @property
    def is_done(self) -> bool:
        """True if the device has placed everything."""
        return self._done.is_set() and self._error is None and self._abandoned is None

    def abandon(self, error: TeneralError) -> None:
        """The load has failed, so not everything will come: `wait_done` raises this. What is here is
        placed. Nothing once everything is.
        """
        if not self._done.is_set():
            self._abandoned = error
            self._done.set()

    @contextmanager
    def reading(self, group: int, stream: int) -> Iterator[None]:
        """Launches on the stream while this is held see the group as it is now, whatever is placed
        meanwhile.

        One thread a group at a time. Blocks no longer than another thread needs to launch.
        """
        with self._refine_locks.reading(group):
            self.order_after((group,), stream)
            try:
                yield
            finally:
                if self._unplaced[group]:
                    self._uses[group][stream] = self._opened().record(stream)

    @property
    def refine_wait_s(self) -> float:
        """The time that `reading` has waited on the host."""
        return self._refine_locks.waited_s if self._model is not None else 0.0

    def read_back(self, group: int, begin_bytes: int, end_bytes: int) -> memoryview:
        """Copy these bytes of a group's slab from the device to the host. Blocks."""
        device, model = self._opened(), self._model
        assert model is not None
        start = model.starts[group]
        return device.read_back(start + begin_bytes, start + end_bytes).data

    def statistics(self) -> DeviceStatistics | None:
        """None while the device is being opened."""
        return None if self._device is None else self._device.statistics()

    def close(self) -> None:
        """Place nothing more, wait for what is on its way, and let go of the device; the weights
        stay. Idempotent.
        """
        self._is_closed = True
        self._begun.set()
        self._images.put(None)
        for thread in self._threads:
            thread.join()
        if not self._done.is_set():
            self._error = LoadCancelledError("the load was closed before all weights were on the device")
            self._done.set()
        self._fetch_order.close()
        if self._device is not None:
            with suppress(TeneralError):  # of a device that has failed: that was reported
                self._device.close()

    def release(self) -> None:
        """Drop the references to the device and its memory, after `close`. No method works then."""
        self._device, self._model = None, None
        self._last, self._uses = [], []

    def _opened(self) -> Device:
        self._reserved.wait()
        if self._device is None or self._error is not None:
            if self._error is not None:
                raise _copy(self._error)
            raise LoadCancelledError("the load was closed before its device was open")
        return self._device

    def _guard(self, body: Callable[[], None]) -> None:
        try:
            body()
        except TeneralError as error:
            self._end(error)
        except Exception as error:  # noqa: BLE001 - a defect fails the load like any other error
            failure = LoadError(f"placing weights stopped on a defect: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._end(failure)

    def _end(self, error: TeneralError) -> None:
        if self._error is None:
            self._error = error
        self._reserved.set()
        self._done.set()
        self._placed.put(None)
        self._fail(error)

    def _run(self) -> None:
        """The body of the thread that places images."""
        device = self._open_device()
        self._device = device
        if device.decompresses:
            self._tell(DeviceSpeed(decompresses=True))
        self._begun.wait()
        model = self._model
        if model is not None and not self._is_closed:
            with self._timeline.span(
                "device", "memory", weights_bytes=model.weights_bytes, ring_bytes=len(model.ring)
            ):
                device.reserve(model.weights_bytes, model.ring, slot_bytes=model.slot_bytes)
            self._reserved.set()
            if not model.manifest.parts:
                self._finish(device, model)
            waiting: list[SentImage] = []
            while (waiting or self._take(waiting)) and not self._is_closed:
                self._take_more(waiting)
                num = num_together(model.manifest, waiting)
                self._place(device, model, waiting[:num])
                del waiting[:num]
            self._placed.put(None)
        else:
            self._error = LoadCancelledError("the load was closed before there was anything to place")
            self._reserved.set()
            self._done.set()
            self._placed.put(None)

    def _take(self, waiting: list[SentImage]) -> bool:
        """Wait for an image; False when there are no more."""
        sent = self._images.get()
        if sent is not None:
            waiting.append(sent)
        return sent is not None

    def _take_more(self, waiting: list[SentImage]) -> None:
        """All queued images, without waiting."""
        with suppress(queue.Empty):
            while len(waiting) < MAX_IMAGES:
                sent = self._images.get_nowait()
                if sent is None:
                    self._images.put(None)  # for the next look
                    return
                waiting.append(sent)

    def _place(self, device: Device, model: _FollowedLoad, together: Sequence[SentImage]) -> None:
        """See `num_together`."""
        begun_at_s = time.monotonic()
        images = tuple(
            (sent, Placed(self._plan(model, sent, begun_at_s), sent.offset_bytes, sent.tables_offset_bytes))
            for sent in together
        )
        placed = [each for _, each in images]
        part = model.manifest.parts[together[0].part]
        if _refines(model.manifest, part):
            with self._refine_locks.writing(part.group):
                ticket = device.place(placed, tuple(self._uses[part.group].values()))
                self._last[part.group] = ticket
        else:  # the first to write there: no values are in use yet
            ticket = device.place(placed)
            for sent in together:
                self._last[model.manifest.parts[sent.part].group] = ticket
        whole = []
        for sent in together:
            on_its_way = self._parts[sent.part]
            on_its_way.num_unplaced -= 1
            if on_its_way.num_unplaced == 0 and sent.way is not ImageForm.STORED:
                self._unplaced[model.manifest.parts[sent.part].group] -= 1
                if not on_its_way.is_coded:  # else it is seen first whether the device could decompress it
                    whole.append(sent.part)
        self._placed.put(_OnItsWay(images, ticket, begun_at_s))
        for number in whole:
            self._settle(number)

    def _plan(self, model: _FollowedLoad, sent: SentImage, begun_at_s: float) -> PartImage | StoredImage:
        part, on_its_way = model.manifest.parts[sent.part], self._parts.get(sent.part)
        if on_its_way is None:
            on_its_way = self._parts[sent.part] = _PartOnItsWay(model.manifest, part, sent.way, begun_at_s)
        if sent.way is ImageForm.STORED:
            return plan_stored(model.manifest, part)
        if sent.way is ImageForm.PLAIN:
            plain = plan_plain(model.manifest, part, model.starts)
            assert plain is not None
            return plain
        piece = on_its_way.pieces[sent.piece]
        if sent.coded:
            on_its_way.is_coded = True
            piece = with_plane_sizes(piece, sent.plane_sizes)
        return plan_image(model.manifest, piece, model.starts, coded=sent.coded)

    def _collect(self) -> None:
        """The body of the thread that waits for the device."""
        speed, done_at_s = _Speed(), 0.0
        while (placed := self._placed.get()) is not None:
            placed.ticket.wait()
            busy_since_s, done_at_s = max(placed.begun_at_s, done_at_s), time.monotonic()
            coded_bytes = sum(each.image.sent_bytes for sent, each in placed.images if sent.coded)
            for sent, each in placed.images:
                wrong = self._is_wrong(each)
                self._note_image(sent, each, wrong, done_at_s)
                self._release(each.offset_bytes, wrong)
            if coded_bytes:
                self._tell(speed.seen(coded_bytes, done_at_s - busy_since_s))
            if not any(self._undone):
                model = self._model
                assert model is not None
                self._finish(self._opened(), model)

    def _is_wrong(self, placed: Placed) -> bool:
        """True for a stored image that the device has reported as wrong: it has changed no weight."""
        image, model = placed.image, self._model
        if not isinstance(image, StoredImage):
            return False
        assert model is not None
        begin = placed.tables_offset_bytes + image.wrong_begin - image.tables_begin
        return any(model.ring[begin : begin + WRONG_BYTES])

    def _note_image(self, sent: SentImage, placed: Placed, wrong: bool, done_at_s: float) -> None:
        if wrong:  # it comes again
            self._timeline.mark("device", "a part is not what its digest says", part=sent.part)
            del self._parts[sent.part]
            return
        on_its_way = self._parts[sent.part]
        on_its_way.num_undone -= 1
        on_its_way.sent_bytes += placed.image.sent_bytes
        on_its_way.written_bytes += placed.image.written_bytes
        if on_its_way.num_undone > 0:
            return
        if sent.way is ImageForm.STORED:
            model = self._model
            assert model is not None
            self._unplaced[model.manifest.parts[sent.part].group] -= 1
        self._note_done(sent.part, self._parts.pop(sent.part), done_at_s)

    def _note_done(self, number: int, on_its_way: _PartOnItsWay, done_at_s: float) -> None:
        """All images of a part are on the device."""
        model = self._model
        assert model is not None
        part = model.manifest.parts[number]
        if on_its_way.is_coded:
            self._settle(number)
        self._undone[part.group] -= 1
        if self._undone[part.group] == 0:
            self._last[part.group] = None  # for good: nothing is placed there any more
        group, tier = model.manifest.groups[part.group].name, part.tier.name.lower()
        started_at = self._timeline.started_at
        self._timeline.add(
            "place",
            f"{group} {tier}",
            on_its_way.begun_at_s - started_at,
            done_at_s - started_at,
            group=group,
            tier=tier,
            part=part.index,
            bytes=on_its_way.sent_bytes,
            weights=on_its_way.written_bytes,
            path="device" if on_its_way.is_coded else "host",
        )

    def _finish(self, device: Device, model: _FollowedLoad) -> None:
        """Everything is placed: release the ring."""
        self._model = model._replace(ring=memoryview(b""))
        device.release_ring()
        self._fetch_order.close()
        self._done.set()


def num_together(manifest: Manifest, waiting: Sequence[SentImage]) -> int:
    """The number of queued images that may be placed together: those that replace no bits,
    or replace bits of one group. So placing holds one group's lock at most.
    """
    first = manifest.parts[waiting[0].part]
    refines = _refines(manifest, first)
    for num, sent in enumerate(waiting):
        part = manifest.parts[sent.part]
        if _refines(manifest, part) != refines or (refines and part.group != first.group):
            return num
    return len(waiting)


def _copy(error: TeneralError) -> TeneralError:
    """A copy of the error: each thread that raises one adds its traceback to it."""
    copied = copy.copy(error)
    copied.__cause__ = error.__cause__
    return copied


class _Speed:
    """The measured speed at which the device decodes images."""

    def __init__(self) -> None:
        self._size_bytes, self._busy_s = 0, 0.0

    def seen(self, size_bytes: int, busy_s: float) -> DeviceSpeed:
        self._size_bytes += size_bytes
        self._busy_s += busy_s
        return DeviceSpeed(True, self._size_bytes / self._busy_s if self._busy_s else None)


def _refines(manifest: Manifest, part: Part) -> bool:
    """True if the part replaces bits that may be in use."""
    return any(
        manifest.tensors[segment.tensor].encoding.tiers[0] is not part.tier for segment in part.segments
    )
