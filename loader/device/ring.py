"""Where images wait for the device: one piece of host memory, lent out image by image.

Who fills images takes memory, which may have to wait; it is given back once the device needs it no more. That never
waits for who fills, so the ring cannot lock up: what is on loan is being filled, or on its way.
"""

from __future__ import annotations

import threading
import time

from ..errors import LoadCancelledError
from ..format.manifest import FRAME_ELEMENTS, Manifest, Part, align
from ..stream.staging import ALIGNMENT_BYTES, Buffer, Staging
from .image import CHUNK_ENTRY_BYTES, CHUNK_STATUS_BYTES, FRAME_ENTRY_BYTES, PLANE_BYTES
from .pieces import cut_part
from .recipe import MAX_PLANES, RECIPE_BYTES

# 16 images of 4 to 6 MiB that are being filled, and some on their way; all of it is pinned, which takes its time.
DEFAULT_BYTES = 128 * 1024 * 1024


ROOM_SHARE = 8  # of the host's memory a ring takes no more than one part in so many


def ring_bytes(
    manifest: Manifest, wanted_bytes: int = DEFAULT_BYTES, *, room_bytes: int | None = None
) -> int:
    """How large a ring for this model should be, in whole pages: what is wanted, or less where the host is short of
    memory (`room_bytes`; None: unknown), but enough for the largest image, and no more than all images take together.
    """
    if room_bytes is not None:
        wanted_bytes = min(wanted_bytes, room_bytes // ROOM_SHARE)
    bounds = [
        align(max_image_bytes(manifest, piece), ALIGNMENT_BYTES)
        for part in manifest.parts
        for piece in cut_part(manifest, part)
    ]
    return min(max(align(wanted_bytes, ALIGNMENT_BYTES), max(bounds, default=0)), sum(bounds))


def max_image_bytes(manifest: Manifest, part: Part) -> int:
    """No image of a part, or of a piece of one, takes more, however it is planned: cheaper to know than its plan.

    A piece whose frames are longer coded than decoded is no exception: it is not sent coded.
    """
    total = PLANE_BYTES
    for segment in part.segments:
        # Planes hold a byte an element more than words where exponents are shorter; coded ones come with room beside.
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
        self.wait_s = (
            0.0  # spent waiting for memory, summed over threads: above zero, the device limits the load
        )

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
        """Lend nothing more, and wake who waits. Idempotent."""
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
