"""The ring of images: host memory lent out image by image, and the pieces of a part that become
images.

A draft part makes up to 24 MiB of planes. As one image a few of them would fill the ring, and as
few threads could decode at once; a ring that grows with the cores, and pieces of 8 to 16 MiB, let
one thread a core fill its own. Smaller pieces cost more than they bring: each takes the GIL for its
tables, on both sides. A piece is a part with fewer frames: whole frames of some segments, so that
the code that plans and fills images of parts does so for pieces. The process that fills images and
the one that sends them cut alike, by the manifest alone. Where the stored frames of a piece lie is
known only with the part's bytes.

A thread that fills images takes memory, which may have to wait; it is given back once the device
needs it no more. That never waits for a filling thread, so the ring cannot lock up: what is on loan
is being filled, or on its way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from ..errors import InsufficientMemoryError, IntegrityError, LoadCancelledError
from ..format.manifest import (
    FRAME_ELEMENTS,
    Codec,
    Manifest,
    Part,
    Plane,
    Segment,
    align,
    decoded_plane_bytes,
    plane_shares,
)
from ..memory.limits import MIB
from ..memory.staging import ALIGNMENT_BYTES, Buffer, Staging
from ..native.frames import find_frames
from ..process.cpu import available_cores
from .image import (
    CHUNK_ENTRY_BYTES,
    CHUNK_STATUS_BYTES,
    FRAME_ENTRY_BYTES,
    MAX_PLANES,
    PLANE_BYTES,
    RECIPE_BYTES,
    as_placed,
    check_placeable,
)
from .stored import max_stored_bytes, max_tables_bytes

MAX_PIECE_BYTES = 16 << 20


def cut_part(manifest: Manifest, part: Part) -> tuple[Part, ...]:
    """The part's pieces in order, about equally large; the part itself where it is small enough.

    The planes of several pieces have their decoded sizes, and no place in the part: `with_stored`
    gives them one.
    """
    total_bytes = sum(_decoded_bytes(manifest, part, segment, segment.count) for segment in part.segments)
    if total_bytes <= MAX_PIECE_BYTES:
        return (part,)
    most_bytes = -(-total_bytes // -(-total_bytes // MAX_PIECE_BYTES))
    pieces: list[list[Segment]] = [[]]
    room_bytes = most_bytes
    for segment in part.segments:
        first = 0
        while first < segment.count:
            if room_bytes <= 0:
                pieces.append([])
                room_bytes = most_bytes
            frame_bytes = max(1, _decoded_bytes(manifest, part, segment, FRAME_ELEMENTS))
            count = min(segment.count - first, -(-room_bytes // frame_bytes) * FRAME_ELEMENTS)
            pieces[-1].append(_stretch(manifest, part, segment, first, count))
            room_bytes -= _decoded_bytes(manifest, part, segment, count)
            first += count
    if len(pieces) == 1:  # few large frames, which are never cut
        return (part,)
    return tuple(part._replace(segments=tuple(segments)) for segments in pieces)


def with_stored(
    manifest: Manifest, pieces: Sequence[Part], part: Part, stored: memoryview
) -> tuple[Part, ...]:
    """The pieces with the place of each plane in the part's verified bytes.

    The headers of all frames are read. Raises `IntegrityError` where a plane has not the frames
    that it should have.
    """
    if len(pieces) == 1:
        return tuple(pieces)
    places = iter([_frame_places(manifest, part, segment, stored) for segment in part.segments])
    begins = iter(part.segments)
    segment, frames = next(begins), next(places)
    found = []
    for piece in pieces:
        located = []
        for stretch in piece.segments:
            while stretch.tensor != segment.tensor or not (
                segment.start <= stretch.start < segment.start + max(1, segment.count)
            ):
                segment, frames = next(begins), next(places)
            first = (stretch.start - segment.start) // FRAME_ELEMENTS
            last = first + -(-stretch.count // FRAME_ELEMENTS)
            planes = tuple(
                Plane(plane.codec, of_plane[first], of_plane[last] - of_plane[first])
                for plane, of_plane in zip(segment.planes, frames, strict=True)
            )
            located.append(stretch._replace(planes=planes))
        found.append(piece._replace(segments=tuple(located)))
    return tuple(found)


def plane_sizes(piece: Part) -> tuple[int, ...]:
    """The stored bytes of each plane: all that planning the image of a coded piece takes, other
    than the manifest.
    """
    return tuple(plane.size_bytes for segment in piece.segments for plane in segment.planes)


def with_plane_sizes(piece: Part, sizes: Sequence[int]) -> Part:
    """The reverse of `plane_sizes`, for the process that has no bytes."""
    left = iter(sizes)
    segments = tuple(
        segment._replace(planes=tuple(plane._replace(size_bytes=next(left)) for plane in segment.planes))
        for segment in piece.segments
    )
    return piece._replace(segments=segments)


def _stretch(manifest: Manifest, part: Part, segment: Segment, first: int, count: int) -> Segment:
    """Elements [first, first + count) of the segment."""
    sizes = _plane_bytes(manifest, part, segment, count)
    planes = tuple(
        Plane(plane.codec, 0, size_bytes) for plane, size_bytes in zip(segment.planes, sizes, strict=True)
    )
    return segment._replace(start=segment.start + first, count=count, planes=planes)


def _frame_places(manifest: Manifest, part: Part, segment: Segment, stored: memoryview) -> list[list[int]]:
    """Of each plane where each of its frames begins in the part, and at last where the plane ends."""
    tensor = manifest.tensors[segment.tensor]
    sizes = _plane_bytes(manifest, part, segment, segment.count)
    shares = (
        plane_shares(tensor.encoding, part.tier, tensor.element_bytes) if not tensor.encoding.is_whole else ()
    )
    where = f"tensor {tensor.name!r}, elements from {segment.start}"
    found = []
    for number, (plane, size_bytes) in enumerate(zip(segment.planes, sizes, strict=True)):
        frame_bytes = FRAME_ELEMENTS // shares[number] if shares else FRAME_ELEMENTS * tensor.element_bytes
        end = plane.offset_bytes + plane.size_bytes
        if plane.codec is Codec.ZSTD:
            frames = find_frames(stored[plane.offset_bytes : end], size_bytes, frame_bytes, where=where)
            begins = [plane.offset_bytes + begin for begin, _ in frames.tolist()]
        elif plane.size_bytes == size_bytes:
            begins = list(range(plane.offset_bytes, end, frame_bytes))
        else:
            raise IntegrityError(
                f"{where}: a raw plane of {size_bytes} bytes was expected, and the part holds {plane.size_bytes}",
                where=where,
            )
        found.append([*begins, end])
    return found


def _plane_bytes(manifest: Manifest, part: Part, segment: Segment, count: int) -> tuple[int, ...]:
    tensor = manifest.tensors[segment.tensor]
    return decoded_plane_bytes(tensor.encoding, part.tier, tensor.element_bytes, count)


def _decoded_bytes(manifest: Manifest, part: Part, segment: Segment, count: int) -> int:
    return sum(_plane_bytes(manifest, part, segment, count))


# All of it is pinned, which takes 0.2 s a GiB.
DEFAULT_BYTES = 128 * 1024 * 1024
CORE_BYTES = 24 * 1024 * 1024  # an image that is being filled, and another on its way
MAX_BYTES = 512 * 1024 * 1024
HOST_IMAGES_BYTES = 64 * 1024 * 1024  # where most parts go to the device as they are stored


ROOM_SHARE = 8  # a ring takes at most this fraction (1/8) of the host's memory


def ring_bytes(manifest: Manifest, wanted_bytes: int | None = None, *, room_bytes: int | None = None) -> int:
    """How large a ring for this model should be, in whole pages: what is wanted (None: 128 to 512
    MiB, by the cores), or less where the host is short of memory (`room_bytes`; None: unknown), but
    enough for the largest image, and no more than all images take together. Raises `UsageError` for
    weights that no device can merge, and `InsufficientMemoryError` where the host has not the memory
    of sparse ones.
    """
    check_placeable(manifest)
    sparse_bytes = sum(tensor.size_bytes for tensor in manifest.tensors if tensor.encoding.is_sparse)
    if room_bytes is not None and sparse_bytes > room_bytes:
        raise InsufficientMemoryError(
            f"pruned weights take {sparse_bytes / MIB:,.0f} MiB of the host's memory on their way to a GPU, and "
            f"{room_bytes / MIB:,.0f} MiB are free",
            needed_bytes=sparse_bytes,
            available_bytes=room_bytes,
            hint="Pack the model again with --dense.",
        )
    manifest = as_placed(manifest)
    wanted_bytes = _wanted_bytes(wanted_bytes, room_bytes)
    bounds = [
        align(max_image_bytes(manifest, piece), ALIGNMENT_BYTES)
        for part in manifest.parts
        for piece in cut_part(manifest, part)
    ]
    return min(max(align(wanted_bytes, ALIGNMENT_BYTES), max(bounds, default=0)), sum(bounds))


class StoredRing(NamedTuple):
    """The ring of images as they are stored: `staging_bytes` that parts are read into and sent from, and behind them
    `images_bytes` for the images of those that the host decodes. `slot_bytes` hold any of them on the device.
    """

    staging_bytes: int
    images_bytes: int
    slot_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.staging_bytes + self.images_bytes


def stored_ring(manifest: Manifest, *, room_bytes: int | None = None) -> StoredRing:
    """Its sizes for this model, as those of `ring_bytes`. Raises `UsageError` as that does."""
    sizes = [
        align(part.size_bytes + PLANE_BYTES + max_tables_bytes(part), ALIGNMENT_BYTES)
        for part in manifest.parts
    ]
    wanted_bytes = align(_wanted_bytes(None, room_bytes), ALIGNMENT_BYTES)
    staging_bytes = min(max(wanted_bytes, max(sizes, default=0)), sum(sizes))
    images_bytes = ring_bytes(manifest, HOST_IMAGES_BYTES, room_bytes=room_bytes)
    placed = as_placed(manifest)
    images = (max_image_bytes(placed, piece) for part in placed.parts for piece in cut_part(placed, part))
    slots = (max_stored_bytes(part) for part in manifest.parts)
    return StoredRing(staging_bytes, images_bytes, align(max((*images, *slots), default=0), ALIGNMENT_BYTES))


def _wanted_bytes(wanted_bytes: int | None, room_bytes: int | None) -> int:
    if wanted_bytes is None:
        wanted_bytes = min(max(DEFAULT_BYTES, available_cores() * CORE_BYTES), MAX_BYTES)
    return wanted_bytes if room_bytes is None else min(wanted_bytes, room_bytes // ROOM_SHARE)


def max_image_bytes(manifest: Manifest, part: Part) -> int:
    """No image of a part, or of a piece of one, takes more, however it is planned: cheaper to know
    than its plan.

    A piece whose frames are longer coded than decoded is no exception: it is not sent coded.
    """
    total = PLANE_BYTES
    for segment in part.segments:
        # Planes hold a byte an element more than words where exponents are shorter; coded ones come
        # with room for both forms.
        num_frames = -(-segment.count // FRAME_ELEMENTS)
        size_bytes = segment.count * (manifest.tensors[segment.tensor].element_bytes + 1)
        coded_bytes = sum(plane.size_bytes for plane in segment.planes)
        tables = RECIPE_BYTES + num_frames * (
            FRAME_ENTRY_BYTES + MAX_PLANES * (CHUNK_ENTRY_BYTES + CHUNK_STATUS_BYTES)
        )
        total += size_bytes + coded_bytes + tables + (2 * MAX_PLANES + 2) * PLANE_BYTES
    return total


class ImageRing:
    """Lends memory for images. Thread-safe."""

    def __init__(self, memory: memoryview) -> None:
        """`memory` has whole pages, and stays the caller's."""
        self._staging = Staging(len(memory), memory=memory)
        self.size_bytes = len(memory)
        self._changed = threading.Condition()
        self._lent: dict[int, Buffer] = {}
        self._is_closed = False
        # Spent waiting for memory, summed over threads: above zero, the device limits the load.
        self.wait_s = 0.0

    def take(self, size_bytes: int) -> Buffer:
        """Blocks while there is no room. Raises `LoadCancelledError` once the ring is closed."""
        with self._changed:
            begun_s = time.monotonic()
            while not self._is_closed:
                buffer = self._staging.acquire(size_bytes)
                if buffer is not None:
                    self.wait_s += time.monotonic() - begun_s
                    self._lent[buffer.offset_bytes] = buffer
                    return buffer
                self._changed.wait()
        raise LoadCancelledError("the ring of images was closed")

    def give_back(self, offset_bytes: int) -> None:
        """The image at that place is with the device. Nothing after `close`."""
        with self._changed:
            buffer = self._lent.pop(offset_bytes, None)
            if buffer is not None and not self._is_closed:
                self._staging.release(buffer)
                self._changed.notify_all()

    def close(self) -> None:
        """Lend nothing more, and wake waiting threads. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def check_integrity(self) -> None:
        """Raise `RuntimeError` when the ring's books do not agree."""
        with self._changed:
            self._staging.check_integrity()
            if (
                sum(align(len(each.data), ALIGNMENT_BYTES) for each in self._lent.values())
                != self._staging.used_bytes
            ):
                raise RuntimeError("images on loan do not add up")
