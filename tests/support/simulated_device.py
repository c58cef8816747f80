"""A device that is none: threads for streams, numpy for kernels. Behaves as asynchronously as a
real one, for tests.

Its streams are numbers, as a real device's are: 0 is the calling thread itself, on which work is
done when it is launched (that is how torch computes on a CPU). `hold` stops the streams that place
weights, so that tests can look at what must not be there yet.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import numpy.typing as npt

from teneral.loader.device.base import DeviceStatistics, Placed, Ticket, check_device_fits
from teneral.loader.device.image import PartImage
from teneral.loader.device.stored import DIGEST_BYTES, WRONG_BYTES, StoredImage
from teneral.loader.errors import LoadError, TeneralError

HOST_STREAM = 0
GARBAGE = 0xEE  # what fresh device memory is full of


class SimulatedTicket:
    """Done when a stream gets there; or given up, with an error."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: TeneralError | None = None

    def is_done(self) -> bool:
        return self._done.is_set() and self._error is None

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise LoadError(self._error.message)

    def finish(self, error: TeneralError | None) -> None:
        self._error = error
        self._done.set()


class _Stream:
    """Does one thing after another, in a thread. Once one has failed, what follows fails with the
    same error.
    """

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | SimulatedTicket | None] = queue.SimpleQueue()
        self._error: TeneralError | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def launch(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def record(self) -> SimulatedTicket:
        ticket = SimulatedTicket()
        self._work.put(ticket)
        return ticket

    def end(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            if isinstance(work, SimulatedTicket):
                work.finish(self._error)
            elif self._error is None:
                try:
                    work()
                except TeneralError as error:
                    self._error = error
                except Exception as error:
                    self._error = LoadError(f"the simulated device failed: {type(error).__name__}: {error}")


class SimulatedDevice:
    """See `base.Device`."""

    def __init__(
        self,
        *,
        memory_bytes: int = 1 << 40,
        fail_at_image: int | None = None,
        decompresses: bool = False,
        spoils: frozenset[int] = frozenset(),
    ) -> None:
        """With `fail_at_image`, the image with that number fails on the device; stored images with the numbers of
        `spoils` have a bit flipped on their way to it.
        """
        self._spoils = spoils
        self._decompresses = decompresses
        self._memory_bytes = memory_bytes
        self._fail_at_image = fail_at_image
        self._uploads, self._merges = _Stream("simulated-uploads"), _Stream("simulated-merges")
        self._streams: dict[int, _Stream] = {}
        self._num_images = self._sent_bytes = self._written_bytes = self._num_launches = 0
        self._weights_bytes = self._ring_bytes = 0
        self._slots: dict[int, npt.NDArray[np.uint8]] = {}  # of stored images, by their place in the ring
        self._is_closed = False

    @property
    def name(self) -> str:
        return "simulated"

    @property
    def decompresses(self) -> bool:
        return self._decompresses

    def free_bytes(self) -> int:
        return self._memory_bytes

    def reserve(self, weights_bytes: int, ring: memoryview, *, slot_bytes: int = 0) -> None:
        check_device_fits(self.name, self._memory_bytes, weights_bytes=weights_bytes, ring_bytes=len(ring))
        self._weights_bytes, self._ring_bytes = weights_bytes, len(ring)
        self._weights = np.full(weights_bytes, GARBAGE, np.uint8)
        self._ring = np.full(len(ring), GARBAGE, np.uint8)
        self._host_ring = np.frombuffer(ring, np.uint8)

    def weights(self) -> npt.NDArray[np.uint8]:
        return self._weights

    def place(self, images: Sequence[Placed], after: Iterable[Ticket] = ()) -> Ticket:
        first = self._num_images
        for image, _, _ in images:
            self._num_images += 1
            self._sent_bytes += image.sent_bytes
            self._written_bytes += image.written_bytes
            self._num_launches += len(image.launches)
        for placed in images:
            self._uploads.launch(partial(self._upload, *placed))
        self._merges.launch(self._uploads.record().wait)
        for ticket in after:
            self._merges.launch(ticket.wait)
        for number, placed in enumerate(images, first):
            self._merges.launch(partial(self._merge, *placed, number=number))
        return self._merges.record()

    def order_after(self, ticket: Ticket, stream: int) -> None:
        if stream == HOST_STREAM:
            ticket.wait()
        else:
            self._streams[stream].launch(ticket.wait)

    def record(self, stream: int) -> Ticket:
        if stream != HOST_STREAM:
            return self._streams[stream].record()
        ticket = SimulatedTicket()
        ticket.finish(None)
        return ticket

    def read_back(self, begin_bytes: int, end_bytes: int) -> npt.NDArray[np.uint8]:
        self._merges.record().wait()
        return self._weights[begin_bytes:end_bytes].copy()

    def statistics(self) -> DeviceStatistics:
        return DeviceStatistics(
            self.name,
            self._num_images,
            self._sent_bytes,
            self._written_bytes,
            self._num_launches,
            self._weights_bytes,
            self._ring_bytes,
            open_s=0.0,
            pin_s=0.0,
            is_pinned=True,
        )

    def release_ring(self) -> None:
        self._host_ring = self._ring = None  # type: ignore[assignment]

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            for stream in (self._uploads, self._merges, *self._streams.values()):
                stream.end()
            self.release_ring()

    # for tests

    def new_stream(self) -> int:
        """A stream for computations."""
        number = len(self._streams) + 1
        self._streams[number] = _Stream(f"simulated-{number}")
        return number

    def launch(self, stream: int, work: Callable[[], None]) -> None:
        """Have a stream do something."""
        self._streams[stream].launch(work)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """While inside, nothing that is placed gets done."""
        free = threading.Event()
        self._uploads.launch(lambda: (free.wait(), None)[1])
        try:
            yield
        finally:
            free.set()

    def _upload(self, image: PartImage | StoredImage, offset_bytes: int, tables_offset_bytes: int) -> None:
        if isinstance(image, StoredImage):  # the ring is read here, as late as it may be
            slot = self._slots[offset_bytes] = np.full(image.size_bytes, GARBAGE, np.uint8)
            slot[: image.part_bytes] = self._host_ring[offset_bytes : offset_bytes + image.part_bytes]
            tables = self._host_ring[tables_offset_bytes : tables_offset_bytes + image.tables_bytes]
            slot[image.tables_begin : image.tables_begin + image.tables_bytes] = tables
            return
        end = offset_bytes + image.upload_bytes
        self._ring[offset_bytes:end] = self._host_ring[offset_bytes:end]
        for copy in image.copies:
            begin = offset_bytes + copy.image_bytes
            data = self._host_ring[begin : begin + copy.size_bytes]
            self._weights[copy.weights_bytes : copy.weights_bytes + copy.size_bytes] = data

    def _merge(
        self, image: PartImage | StoredImage, offset_bytes: int, tables_offset_bytes: int, *, number: int
    ) -> None:
        from tests.support.image_programs import decompress_chunks, run_launch, run_stored

        if number == self._fail_at_image:
            raise LoadError("the simulated device is set to fail here")
        if isinstance(image, StoredImage):
            slot = self._slots.pop(offset_bytes)
            if number in self._spoils:
                slot[image.part_bytes // 2] ^= 4
            begin = tables_offset_bytes + DIGEST_BYTES
            word = np.array([run_stored(image, slot, self._weights)], "<u4")
            self._host_ring[begin : begin + WRONG_BYTES] = word.view(np.uint8)
            return
        data = self._ring[offset_bytes : offset_bytes + image.size_bytes]
        if image.chunks is not None:
            decompress_chunks(image.chunks, data)
        for launch in image.launches:
            run_launch(launch, data, self._weights)
