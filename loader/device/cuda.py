"""A CUDA device, through CuPy: a pinned ring, streams, and the kernels that merge planes.

Uploads have a stream of their own, so that the next image crosses the link while the last one is
merged, and while a refining waits for a computation. Streams wait for each other by events; the host
waits for none but in `Ticket.wait`, `read_back` and `close`. Streams of others (torch's) are known
by their numbers and are never owned here.

Stored images go to *slots* of the device. Several streams verify and decode the images of different slots in parallel.
Merges have one stream, in the order in which images came, and each reads the image's word `wrong` first.

The weights are one allocation of their own, not a pool's: they are never given back while the model
lives, and torch sees them by DLPack as they are. CuPy is imported when a device is opened, which
only a machine that has one does. A process that forks must do so before.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import LoadError, TeneralError
from ..format.manifest import align
from ..timeline import Timeline
from .base import DeviceStatistics, Placed, Ticket, check_device_fits, device_refused
from .compile import cubin_for
from .image import CHUNK_STATUS_BYTES, COPY_KERNEL, KERNELS, RESOLVE_KERNEL, PartImage
from .nvcomp import Decompressor, find_library
from .stored import (
    DECODE_KERNEL,
    HASH_KERNEL,
    ROOT_KERNEL,
    WRONG_BYTES,
    StoredImage,
    num_blocks,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

THREADS = 256  # of a block, as the kernels' source has it
BLOCKS_PER_FRAME = 4  # each takes a quarter of a whole frame
MAX_GRID_Y = 65_535
OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context
SCRATCH_ALIGNMENT_BYTES = 256
# That go to the decompressor and come back for each chunk.
CHUNK_ARRAYS_BYTES = 5 * 8 + CHUNK_STATUS_BYTES


# More of them hide how long a frame takes to decode, fewer leave the weights more memory.
MAX_SLOTS, MIN_SLOTS, SLOTS_BYTES = 6, 2, 512 << 20
NUM_CHECKS = 3  # streams that verify and decode
HASH_THREADS, ROOT_THREADS, LANES = 128, 256, 32  # of a block, as blake3.cu and huf_frames.cu have it


class _Slot:
    """Memory for an image, on the device."""

    def __init__(self, memory: Any, checks: Any) -> None:
        self.memory, self.checks = memory, checks
        self.merged: Any = None  # the event behind its last image

    @property
    def address(self) -> int:
        return int(self.memory.ptr)


class CudaTicket:
    """An event on a stream."""

    def __init__(
        self, device: CudaDevice, event: Any, statuses: Sequence[npt.NDArray[np.int32]] = ()
    ) -> None:
        """`statuses`, on the host, are the decompressor's results for each image's frames, once the
        event has passed.
        """
        self._device = device
        self.event = event
        self._statuses = statuses

    def is_done(self) -> bool:
        with self._device.used("asking for its progress"):
            return bool(self.event.done)

    def wait(self) -> None:
        with self._device.used("placing weights"):
            self.event.synchronize()
        statuses, self._statuses = self._statuses, ()  # their memory is the next images' afterwards
        num_failed = sum(int((of_image != 0).sum()) for of_image in statuses)
        if num_failed:
            num_frames = sum(of_image.size for of_image in statuses)
            raise LoadError(
                f"{self._device.name} could not decompress {num_failed} of {num_frames} frames",
                hint="Their digests were right: uninstall nvidia-libnvcomp to have the host decompress them.",
            )


class CudaDevice:
    """See `base.Device`."""

    def __init__(
        self, index: int, *, timeline: Timeline, cubin_folders: Sequence[Path] = (), max_percent: int = 100
    ) -> None:
        """Open the device: its context, and its kernels from the first of the folders that has
        them, compiled otherwise and left in the last one. Takes some tenths of a second, or
        seconds. `max_percent` is the share of its memory that may be taken. Raises `LoadError` when that fails.
        """
        begun_s = time.monotonic()
        self.name = f"cuda:{index}"
        with timeline.span("device", "import CuPy"):
            try:
                import cupy  # only with a device: 0.2 s
            except ImportError as error:
                raise LoadError(
                    f"CuPy cannot be imported: {error}", hint="Reinstall it, or say --device cpu."
                ) from error
        self._cupy, self._runtime = cupy, cupy.cuda.runtime
        self._index, self._max_percent = index, max_percent
        self._ring_memory: Any = None
        self._host_ring: npt.NDArray[np.uint8] | None = None
        self._ring_address = 0
        self._ring_bytes = self._weights_bytes = 0
        self._slots: list[_Slot] = []
        self._num_images = self._sent_bytes = self._written_bytes = self._num_launches = 0
        self._pin_s = 0.0
        self._scratch: Any = None  # of the decompressor
        self._scratch_bytes = 0
        self._decompressor = _find_decompressor(timeline)
        self._is_pinned = self._is_closed = False
        self._timeline = timeline
        with timeline.span("device", "context", device=self.name), self.used("opening it"):
            self._runtime.free(0)  # does nothing but make the context
            self._uploads, self._merges, *self._checks = (
                cupy.cuda.Stream(non_blocking=True) for _ in range(2 + NUM_CHECKS)
            )
        with timeline.span("device", "kernels") as span, self.used("loading its kernels"):
            self._kernels, span["compiled"] = self._load_kernels(cubin_folders)
        self._open_s = time.monotonic() - begun_s

    @property
    def decompresses(self) -> bool:
        return self._decompressor is not None

    def free_bytes(self) -> int:
        with self.used("asking for its memory"):
            free_bytes, total_bytes = self._runtime.memGetInfo()
        return min(int(free_bytes), int(total_bytes) * self._max_percent // 100)

    def reserve(self, weights_bytes: int, ring: memoryview, *, slot_bytes: int = 0) -> None:
        """See `base.Device`. Pinning takes the longest, some tenths of a second a GB."""
        num_slots = max(MIN_SLOTS, min(MAX_SLOTS, SLOTS_BYTES // slot_bytes)) if slot_bytes else 0
        image_bytes = num_slots * slot_bytes or len(ring)
        check_device_fits(self.name, self.free_bytes(), weights_bytes=weights_bytes, ring_bytes=image_bytes)
        import numpy as np  # CuPy requires it

        cupy = self._cupy
        with self.used("taking memory", needed_bytes=weights_bytes + image_bytes):
            weights = cupy.cuda.MemoryPointer(cupy.cuda.Memory(max(1, weights_bytes)), 0)
            if not num_slots:
                self._ring_memory = cupy.cuda.MemoryPointer(cupy.cuda.Memory(max(1, len(ring))), 0)
            for number in range(num_slots):
                memory = cupy.cuda.MemoryPointer(cupy.cuda.Memory(slot_bytes), 0)
                self._slots.append(_Slot(memory, self._checks[number % NUM_CHECKS]))
        self._weights = cupy.ndarray((weights_bytes,), cupy.uint8, memptr=weights)
        self._weights_bytes, self._ring_bytes = weights_bytes, len(ring)
        self._host_ring = np.frombuffer(ring, np.uint8)
        self._ring_address = int(self._host_ring.ctypes.data)
        begun_s = time.monotonic()
        try:
            with self.used("pinning the host's memory"):
                if len(ring):
                    self._runtime.hostRegister(self._ring_address, len(ring), PORTABLE)
            self._is_pinned = len(ring) > 0
        except LoadError as error:
            # Some sandboxes do not let shared memory be pinned. CUDA then copies it once more, to
            # memory of its own.
            self._timeline.mark("device", "the ring is not pinned: uploads are slower", why=error.message)
        self._pin_s = time.monotonic() - begun_s

    def weights(self) -> Any:
        return self._weights

    def place(self, images: Sequence[Placed], after: Iterable[Ticket] = ()) -> Ticket:
        with self.used("placing weights"):
            if self._slots:
                return self._place_in_slots(images, after)
            for image, offset_bytes, _ in images:
                assert isinstance(image, PartImage)
                self._upload(image, offset_bytes, self._ring_memory.ptr + offset_bytes)
            there = self._cupy.cuda.Event(disable_timing=True)
            there.record(self._uploads)
            self._merges.wait_event(there)
            for ticket in after:
                assert isinstance(ticket, CudaTicket)
                self._merges.wait_event(ticket.event)
            statuses = self._decompress(images)
            for image, offset_bytes, _ in images:
                self._merge(image, self._ring_memory.ptr + offset_bytes)
            done = self._cupy.cuda.Event(block=True, disable_timing=True)
            done.record(self._merges)
        self._count(images)
        return CudaTicket(self, done, statuses)

    def order_after(self, ticket: Ticket, stream: int) -> None:
        assert isinstance(ticket, CudaTicket)
        with self.used("ordering streams"):
            self._runtime.streamWaitEvent(stream, ticket.event.ptr, 0)

    def record(self, stream: int) -> Ticket:
        with self.used("ordering streams"):
            event = self._cupy.cuda.Event(block=True, disable_timing=True)
            self._runtime.eventRecord(event.ptr, stream)
        return CudaTicket(self, event)

    def read_back(self, begin_bytes: int, end_bytes: int) -> npt.NDArray[np.uint8]:
        import numpy as np  # as above

        out = np.empty(end_bytes - begin_bytes, np.uint8)
        with self.used("reading weights back"):
            self._merges.synchronize()
            if out.size:
                source = self._weights.data.ptr + begin_bytes
                self._runtime.memcpy(out.ctypes.data, source, out.size, self._runtime.memcpyDeviceToHost)
        return out

    def statistics(self) -> DeviceStatistics:
        return DeviceStatistics(
            self.name,
            self._num_images,
            self._sent_bytes,
            self._written_bytes,
            self._num_launches,
            self._weights_bytes,
            self._ring_bytes,
            self._open_s,
            self._pin_s,
            self._is_pinned,
        )

    def release_ring(self) -> None:
        address, self._ring_address = self._ring_address, 0
        try:
            if address and self._is_pinned:
                with self.used("letting go of the host's memory"):
                    self._runtime.hostUnregister(address)
        finally:
            self._ring_memory = self._host_ring = self._scratch = None
            self._slots = []

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            with self.used("closing it"):
                for stream in (self._uploads, *self._checks, self._merges):
                    stream.synchronize()
        finally:  # also after an error: the system must not keep pages pinned that are not in use
            self.release_ring()

    @contextmanager
    def used(self, doing: str, *, needed_bytes: int = 0) -> Iterator[None]:
        """This thread works with the device: CUDA's errors are translated."""
        cuda = self._cupy.cuda
        try:
            # A new one each time: it keeps what to go back to, which threads must not share.
            with cuda.Device(self._index):
                yield
        except (cuda.runtime.CUDARuntimeError, cuda.driver.CUDADriverError) as error:
            raise self._translated(error, doing, needed_bytes) from error

    def _translated(self, error: Any, doing: str, needed_bytes: int) -> TeneralError:
        if getattr(error, "status", None) == OUT_OF_MEMORY and needed_bytes:
            return device_refused(self.name, needed_bytes, None, "weights and images on their way")
        return LoadError(
            f"{self.name} failed while {doing}: {error}",
            hint="`nvidia-smi` shows the device and its errors; --device cpu serves without it.",
        )

    def _count(self, images: Sequence[Placed]) -> None:
        self._num_images += len(images)
        for image, _, _ in images:
            self._sent_bytes += image.sent_bytes
            self._written_bytes += image.written_bytes
            self._num_launches += len(image.launches)

    def _place_in_slots(self, images: Sequence[Placed], after: Iterable[Ticket]) -> Ticket:
        for ticket in after:  # merges only: what comes before them changes no weight
            assert isinstance(ticket, CudaTicket)
            self._merges.wait_event(ticket.event)
        for placed in images:
            slot = self._slots[self._num_images % len(self._slots)]
            if slot.merged is not None:
                self._uploads.wait_event(slot.merged)
            if isinstance(placed.image, StoredImage):
                self._place_stored(placed.image, placed, slot)
            else:
                self._upload(placed.image, placed.offset_bytes, slot.address)
                self._follow(self._uploads, self._merges)
                self._merge(placed.image, slot.address)
            slot.merged = self._cupy.cuda.Event(disable_timing=True)
            slot.merged.record(self._merges)
            self._count((placed,))
        done = self._cupy.cuda.Event(block=True, disable_timing=True)
        done.record(self._merges)
        return CudaTicket(self, done)

    def _place_stored(self, image: StoredImage, placed: Placed, slot: _Slot) -> None:
        """Upload, verify, decode and merge it; its word `wrong` comes back to its tables in the ring."""
        import numpy as np  # as above

        runtime, at = self._runtime, slot.address
        tables, wrong = self._ring_address + placed.tables_offset_bytes, at + image.wrong_begin
        for to, source, size_bytes in (
            (at, self._ring_address + placed.offset_bytes, image.part_bytes),
            (at + image.tables_begin, tables, image.tables_bytes),
        ):
            runtime.memcpyAsync(to, source, size_bytes, runtime.memcpyHostToDevice, self._uploads.ptr)
        self._follow(self._uploads, slot.checks)
        part_bytes, nodes = np.uint32(image.part_bytes), np.uint64(at + image.nodes_begin)
        digest, word = np.uint64(at + image.tables_begin), np.uint64(wrong)
        frames, num_frames = np.uint32(image.decode.table_bytes), image.decode.num_frames
        with slot.checks:
            grid = (num_blocks(image.part_bytes),)
            self._kernels[HASH_KERNEL](grid, (HASH_THREADS,), (np.uint64(at), part_bytes, nodes))
            self._kernels[ROOT_KERNEL]((1,), (ROOT_THREADS,), (nodes, part_bytes, digest, word))
            if num_frames:
                arguments = (np.uint64(at), frames, np.uint32(num_frames), word)
                self._kernels[DECODE_KERNEL]((num_frames,), (LANES,), arguments)
        self._follow(slot.checks, self._merges)
        self._merge(image, at, wrong)
        came_back = tables + image.wrong_begin - image.tables_begin
        runtime.memcpyAsync(came_back, wrong, WRONG_BYTES, runtime.memcpyDeviceToHost, self._merges.ptr)

    def _follow(self, first: Any, then: Any) -> None:
        """Order what is launched later on a stream after what was launched on another one."""
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(first)
        then.wait_event(event)

    def _upload(self, image: PartImage, offset_bytes: int, to: int) -> None:
        """Upload what the kernels need to an address of the device, and the rest straight to its place."""
        to_device, stream = self._runtime.memcpyHostToDevice, self._uploads.ptr
        host = self._ring_address + offset_bytes
        if image.upload_bytes:
            self._runtime.memcpyAsync(to, host, image.upload_bytes, to_device, stream)
        weights = self._weights.data.ptr
        for copy in image.copies:  # each is its words' only tier: nothing has read the old value
            if copy.size_bytes:
                place = weights + copy.weights_bytes
                self._runtime.memcpyAsync(place, host + copy.image_bytes, copy.size_bytes, to_device, stream)

    def _decompress(self, placed: Sequence[Placed]) -> list[npt.NDArray[np.int32]]:
        """Have the frames of these images decompressed behind each, before they are merged: all in
        one launch, as one image has too few frames for a large device. Their results come to the
        host's images.
        """
        images = [
            (each.image.chunks, each.offset_bytes)
            for each in placed
            if isinstance(each.image, PartImage) and each.image.chunks is not None
        ]
        if not images:
            return []
        import numpy as np  # as above

        decompressor = self._decompressor
        assert decompressor is not None
        assert self._host_ring is not None
        num = sum(each.num for each, _ in images)
        needed_bytes = decompressor.scratch_bytes(num, sum(each.total_bytes for each, _ in images))
        arrays = self._take_scratch(num, needed_bytes)
        done = 0
        for each, offset_bytes in images:
            ring = np.uint64(self._ring_memory.ptr + offset_bytes)
            pointers = [np.uint64(arrays + 8 * (num * place + done)) for place in range(4)]
            arguments = (ring, np.uint32(each.table_bytes), np.uint32(each.num), *pointers)
            with self._merges:
                self._kernels[RESOLVE_KERNEL]((-(-each.num // THREADS),), (THREADS,), arguments)
            done += each.num
        room = arrays + align(num * CHUNK_ARRAYS_BYTES, SCRATCH_ALIGNMENT_BYTES)
        decompressor.launch(arrays, num, room, needed_bytes, self._merges.ptr)
        statuses, source = [], arrays + 5 * 8 * num
        for each, offset_bytes in images:
            begin = offset_bytes + each.status_bytes
            received = self._host_ring[begin : begin + CHUNK_STATUS_BYTES * each.num].view(np.int32)
            to_host = self._runtime.memcpyDeviceToHost
            self._runtime.memcpyAsync(
                received.ctypes.data, source, received.nbytes, to_host, self._merges.ptr
            )
            source += received.nbytes
            statuses.append(received)
        return statuses

    def _take_scratch(self, num_chunks: int, room_bytes: int) -> int:
        """The address of the arrays for these chunks, with this much room for the decompressor
        behind them.

        What is launched one after another uses the same memory: its stream keeps the order.
        """
        needed_bytes = align(num_chunks * CHUNK_ARRAYS_BYTES, SCRATCH_ALIGNMENT_BYTES) + room_bytes
        if needed_bytes > self._scratch_bytes:
            # Frees the smaller one; launches grow to a few pieces at most, so this is rare.
            self._merges.synchronize()
            with self.used("taking memory", needed_bytes=needed_bytes):
                self._scratch = self._cupy.cuda.MemoryPointer(self._cupy.cuda.Memory(needed_bytes), 0)
            self._scratch_bytes = needed_bytes
        return int(self._scratch.ptr)

    def _merge(self, image: PartImage | StoredImage, at: int, wrong: int = 0) -> None:
        """`at` is the image's address on the device, `wrong` that of its word; 0: it has none."""
        import numpy as np  # as above

        memory, weights, word = np.uint64(at), np.uint64(self._weights.data.ptr), np.uint64(wrong)
        for launch in image.launches:
            grid = (BLOCKS_PER_FRAME, min(launch.num_frames, MAX_GRID_Y))
            counts = np.uint32(launch.table_bytes), np.uint32(launch.num_frames)
            arguments = (memory, *counts, weights, word)
            with self._merges:
                self._kernels[launch.kernel](grid, (THREADS,), arguments)

    def _load_kernels(self, folders: Sequence[Path]) -> tuple[dict[str, Any], bool]:
        """The kernels by name, and whether they had to be compiled."""
        import numpy as np  # as above

        architecture = int(self._cupy.cuda.Device(self._index).compute_capability)
        cubin, compiled = cubin_for(architecture, folders)
        # It stays loaded for as long as this does.
        self._module = self._cupy.RawModule(path=str(cubin))
        merging, checking = (*KERNELS, COPY_KERNEL), (HASH_KERNEL, ROOT_KERNEL, DECODE_KERNEL)
        names = (*merging, *checking, RESOLVE_KERNEL)
        kernels = {name: self._module.get_function(name) for name in names}
        # CUDA loads a kernel when it is first launched: now, over no frames, and over no bytes.
        memory = self._cupy.cuda.Memory(1024)
        address, zero = np.uint64(memory.ptr), np.uint32(0)
        with self._merges:
            for name in merging:
                kernels[name]((1,), (THREADS,), (address, zero, zero, address, np.uint64(0)))
            kernels[HASH_KERNEL]((1,), (HASH_THREADS,), (address, zero, address))
            kernels[ROOT_KERNEL]((1,), (ROOT_THREADS,), (address, zero, address, address))
            kernels[DECODE_KERNEL]((1,), (LANES,), (address, zero, zero, address))
        self._merges.synchronize()  # the memory goes when this returns
        return kernels, compiled


def _find_decompressor(timeline: Timeline) -> Decompressor | None:
    """The decompressor, where the optional package is installed and works."""
    path = find_library()
    if path is None:
        return None
    try:
        return Decompressor(path)
    except LoadError as error:
        timeline.mark("device", "the host decompresses, as nvCOMP cannot be used", why=error.message)
        return None
