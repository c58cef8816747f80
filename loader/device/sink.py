"""The sink of decode threads when weights belong to another device: verified parts become images in
the ring.

All checks of the format are made on what is decompressed here; what the device decompresses has its
frames' headers checked. Works without the GIL for the most part. Nothing here knows which code takes
the images from the ring, or in which process.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..format.fill import Scratch, SegmentMemory, fill_part, fill_planes
from ..format.manifest import FRAME_ELEMENTS, Manifest, Part
from ..native.frames import find_frames
from ..process.cpu import available_cores
from ..timeline import Timeline
from .image import PartImage, PlacedPlane, as_placed, pack_tables, plan_image, slab_starts
from .paths import DeviceSpeed, Path, choose_path
from .ring import ImageRing, cut_part, max_image_bytes, plane_sizes, with_stored


def fill_image(
    image: PartImage,
    manifest: Manifest,
    part: Part,
    starts: Sequence[int],
    stored: memoryview,
    out: memoryview,
    scratch: Scratch | None = None,
) -> None:
    """Write into `out`, the image's memory, at least all that is to be sent of it.

    `image` was planned for this part with these `starts`. Raises `IntegrityError` when a plane is
    not what its codec says, or has bits that mean nothing; `out` is then undefined.
    """
    pack_tables(image, manifest, part, starts, out)
    memory = np.frombuffer(out, np.uint8)
    segments = [(manifest.tensors[segment.tensor], segment) for segment in part.segments]
    outs = [
        [
            memory[plane.offset_bytes : plane.offset_bytes + plane.size_bytes]
            if plane.coded_bytes is None
            else None
            for plane in placed
        ]
        for placed in image.planes
    ]
    fill_planes(segments, part.tier, stored, outs, scratch or Scratch())
    if image.chunks is None:
        return
    chunks: list[tuple[int, int, int, int]] = []
    for (tensor, segment), placed in zip(segments, image.planes, strict=True):
        for plane, place in zip(segment.planes, placed, strict=True):
            if place.coded_bytes is not None:
                coded = stored[plane.offset_bytes : plane.offset_bytes + plane.size_bytes]
                chunks += _keep_coded(coded, place, memory, where=f"tensor {tensor.name!r}")
    begin = image.chunks.table_bytes
    table = np.array(chunks, "<u4").tobytes()
    out[begin : begin + len(table)] = table


def _keep_coded(
    coded: memoryview, place: PlacedPlane, memory: npt.NDArray[np.uint8], *, where: str
) -> list[tuple[int, int, int, int]]:
    """Copy a plane's frames as they are. Of each, as `resolve_chunks` reads it: where it is and how
    long, coded, decoded.
    """
    assert place.coded_bytes is not None
    first = place.coded_bytes
    np.copyto(memory[first : first + len(coded)], np.frombuffer(coded, np.uint8))
    extents = find_frames(coded, place.size_bytes, FRAME_ELEMENTS, where=where).tolist()
    sizes = [FRAME_ELEMENTS] * (len(extents) - 1) + [place.size_bytes - FRAME_ELEMENTS * (len(extents) - 1)]
    return [
        (first + begin, end - begin, place.offset_bytes + number * FRAME_ELEMENTS, size)
        for number, ((begin, end), size) in enumerate(zip(extents, sizes, strict=True))
    ]


class ImageForm(enum.IntEnum):
    """The form of an image, which decides how it is placed."""

    PLANES = 0  # the host has verified and decoded the part
    STORED = 1  # the device will
    PLAIN = 2  # the part's bytes are weights


class SentImage(NamedTuple):
    """An image that lies in the ring, whole."""

    part: int  # its number in the manifest
    offset_bytes: int  # in the ring
    coded: bool = False  # as `plan_image` has it
    piece: int = 0  # its number in the part, as `cut_part` has them
    plane_sizes: tuple[int, ...] = ()  # of a coded piece, see `with_plane_sizes`
    way: ImageForm = ImageForm.PLANES
    tables_offset_bytes: int = 0  # of a stored one's tables, in the ring


class SparseTensors:
    """Sparse tensors while they arrive, whole: later tiers name values by the elements that earlier ones have made. A
    tensor's memory is freed with its last part. Thread-safe.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._lock = threading.Lock()
        self._memory: dict[int, npt.NDArray[np.uint8]] = {}  # by the tensors' numbers
        self._num_left: dict[int, int] = {}  # of their elements, of the last tier

    def place(
        self, part: Part, placed: Part, stored: memoryview, scratch: Scratch
    ) -> tuple[Part, memoryview]:
        """A part's verified bytes as `placed` has them, of `as_placed`: the elements of its sparse segments are behind
        them. Raises `IntegrityError`.
        """
        tensors = self._manifest.tensors
        own = [
            (segment, at.planes[0])
            for segment, at in zip(part.segments, placed.segments, strict=True)
            if tensors[segment.tensor].encoding.is_sparse
        ]
        if not own:
            return part, stored
        wholes = [
            SegmentMemory(
                tensors[segment.tensor],
                segment,
                self._memory_of(segment.tensor, segment.start, segment.count),
            )
            for segment, _ in own
        ]
        fill_part(wholes, part.tier, stored, scratch)
        last = own[-1][1]
        made = np.empty(last.offset_bytes + last.size_bytes, np.uint8)
        made[: len(stored)] = np.frombuffer(stored, np.uint8)
        for (_, plane), whole in zip(own, wholes, strict=True):
            made[plane.offset_bytes : plane.offset_bytes + plane.size_bytes] = whole.out
        for whole in wholes:
            if part.tier is whole.tensor.encoding.tiers[-1]:
                self._finish(whole)
        return placed, made.data

    def _memory_of(self, number: int, start: int, count: int) -> npt.NDArray[np.uint8]:
        tensor = self._manifest.tensors[number]
        with self._lock:
            if number not in self._memory:
                self._memory[number] = np.empty(tensor.size_bytes, np.uint8)
                self._num_left[number] = tensor.num_elements
            memory = self._memory[number]
        return memory[start * tensor.element_bytes : (start + count) * tensor.element_bytes]

    def _finish(self, whole: SegmentMemory) -> None:
        number = whole.segment.tensor
        with self._lock:
            self._num_left[number] -= whole.segment.count
            if not self._num_left[number]:
                del self._memory[number], self._num_left[number]


class ImageSink:
    """Makes images of one manifest's parts. Thread-safe."""

    def __init__(
        self, manifest: Manifest, ring: ImageRing, send: Callable[[SentImage], None], *, timeline: Timeline
    ) -> None:
        """`send` takes each image, from any thread; it may block, and must not fail."""
        self._sparse = SparseTensors(manifest)
        self._manifest = as_placed(manifest)
        self._ring = ring
        self._send = send
        self._timeline = timeline
        self._starts, _ = slab_starts(manifest.groups)
        self._device = DeviceSpeed()
        self._num_cores = available_cores()  # once: it reads files
        self._lock = threading.Lock()
        self._own = threading.local()  # each thread's working memory
        self._path = Path.HOST
        self._host_bytes, self._host_cpu_s = 0.0, 0.0  # of parts that were decompressed here

    @property
    def ring_bytes(self) -> int:
        return self._ring.size_bytes

    def device_is(self, speed: DeviceSpeed) -> None:
        """The device's abilities, as far as they are known."""
        self._device = speed

    def deliver(self, part: Part, stored: memoryview, link_bytes_per_s: float = 0.0) -> None:
        """Make and send the images of a verified part; what it needs was sent before. Blocks while
        the ring is full.

        `link_bytes_per_s` is what the store gives; 0: unknown. Raises `IntegrityError`, having sent
        nothing that could make the part whole, and `LoadCancelledError` once the ring is closed.
        """
        coded = self._choose(link_bytes_per_s) is Path.DEVICE
        placed = self._manifest.parts[part.index]
        part, stored = self._sparse.place(part, placed, stored, self._scratch())
        pieces = with_stored(self._manifest, cut_part(self._manifest, part), part, stored)
        for number, piece in enumerate(pieces):
            self._deliver(number, piece, stored, coded=coded, share=1 / len(pieces))

    def _deliver(self, number: int, piece: Part, stored: memoryview, *, coded: bool, share: float) -> None:
        image = plan_image(self._manifest, piece, self._starts, coded=coded)
        # The ring need not have room for it.
        if image.size_bytes > max_image_bytes(self._manifest, piece):
            image = plan_image(self._manifest, piece, self._starts)
        buffer = self._ring.take(image.size_bytes)
        begun_cpu_s = time.thread_time()
        try:
            fill_image(image, self._manifest, piece, self._starts, stored, buffer.data, self._scratch())
        except BaseException:
            self._ring.give_back(buffer.offset_bytes)
            raise
        is_coded = image.chunks is not None
        if not is_coded:
            with self._lock:
                self._host_bytes += share * len(stored)
                self._host_cpu_s += time.thread_time() - begun_cpu_s
        sizes = plane_sizes(piece) if is_coded else ()
        self._send(SentImage(piece.index, buffer.offset_bytes, is_coded, number, sizes))

    def _scratch(self) -> Scratch:
        if not hasattr(self._own, "scratch"):
            self._own.scratch = Scratch()
        scratch: Scratch = self._own.scratch
        return scratch

    def _choose(self, link_bytes_per_s: float) -> Path:
        cpu_s = self._host_cpu_s
        host_bytes_per_s = self._host_bytes / cpu_s * self._num_cores if cpu_s else None
        choice = choose_path(link_bytes_per_s, host_bytes_per_s, self._device)
        with self._lock:
            changed, self._path = choice.path is not self._path, choice.path
        if changed:
            rates = {"link": link_bytes_per_s, "host": host_bytes_per_s, "device": self._device.bytes_per_s}
            self._timeline.mark(
                "device", f"planes are decompressed on the {choice.path}: {choice.why}", **rates
            )
        return choice.path

    def give_back(self, offset_bytes: int) -> None:
        """The image at that place of the ring is with the device."""
        self._ring.give_back(offset_bytes)

    def close(self) -> None:
        """Wake threads that wait for room: images are not taken any more."""
        self._ring.close()
