"""Parts in a ring as they are stored, for a device that verifies, decodes and merges them itself.

    fetch ──► staging, the ring's front ──► tables are written behind each part ──► the device
                                              │ frames with sequences, damaged headers,
                                              │ what the device found wrong
                                              └──► verified and decoded here ──► images, the ring's end ──► the device

A part's memory is the device's from `hand_over` until `give_back`; only then the part counts as there, so that no gate
opens over bytes whose digest is not known, and nothing waits for memory that a later part holds (`queue.py`). What the
device found wrong is looked at here: its digest once more, and then it is fetched again, or decoded here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ...device.image import slab_starts
from ...device.ring import ImageRing, StoredRing
from ...device.sink import ImageForm, ImageSink, SentImage
from ...device.stored import can_be_stored, max_tables_bytes, plan_plain, write_tables
from ...errors import TeneralError
from ...format.manifest import Manifest, Part
from ...native.frames import address
from ...timeline import Timeline
from .base import Target

if TYPE_CHECKING:
    from ...device.paths import DeviceSpeed
    from ...format.fill import Scratch
    from ..parts import Parts
    from ..plan import Step
    from .base import Course


class DeviceTarget(Target):
    """Hands parts over to the code that takes images from the ring. There are no slabs."""

    what = "images of them"
    is_direct = False
    is_used_here = False
    is_helper = True
    marks_gates = False

    def __init__(
        self,
        manifest: Manifest,
        ring: memoryview,
        sizes: StoredRing,
        send: Callable[[SentImage], None],
        *,
        timeline: Timeline,
    ) -> None:
        """`ring` has these sizes, and stays the caller's. `send` takes each image, from any thread."""
        self._manifest, self._send = manifest, send
        self._starts, _ = slab_starts(manifest.groups)
        self._ring_address = address(np.frombuffer(ring, np.uint8)) if ring else 0
        self.staging = ring[: sizes.staging_bytes]
        self._images_begin = sizes.staging_bytes
        images = ImageRing(ring[sizes.staging_bytes :])
        self._images = ImageSink(manifest, images, self._send_image, timeline=timeline)
        self.weight_bytes, self.ring_bytes = sizes.images_bytes, sizes.size_bytes
        self.slabs = [memoryview(b"") for _ in manifest.groups]
        self._course: Course | None = None
        self._lock = threading.Lock()
        self._handed_over: dict[int, tuple[Step, memoryview]] = {}  # by their places in the ring
        self._refused: set[int] = set()  # parts that the device found wrong: they are decoded here

    def attach(self, course: Course) -> None:
        self._course = course

    def room_bytes(self, part: Part) -> int:
        return max_tables_bytes(part)

    def hand_over(self, step: Step, stored: memoryview, room: memoryview) -> bool:
        image = self._image_of(step.part, stored, room) if stored else None
        if image is None:
            return False
        with self._lock:
            self._handed_over[image.offset_bytes] = step, stored
        self._send(image)
        return True

    def fill(
        self, parts: Parts, step: Step, stored: memoryview, scratch: Scratch, rate_bytes_per_s: float
    ) -> None:
        parts.deliver(step.part, stored, self._images.deliver)

    def give_back(self, offset_bytes: int, wrong: bool = False) -> None:
        """The device is done with the image at that place of the ring, or found a stored one `wrong`. Nothing of a load
        that has ended.
        """
        with self._lock:
            handed_over = self._handed_over.pop(offset_bytes, None)
        if handed_over is None:
            self._images.give_back(offset_bytes - self._images_begin)
            return
        step, stored = handed_over
        assert self._course is not None
        if wrong:
            self._refused.add(step.part.index)
        try:
            self._course.placed(step, stored, wrong=wrong)
        except TeneralError as error:
            self._course.fail(error)

    def device_is(self, speed: DeviceSpeed) -> None:
        """It decodes in any case, and nothing else."""

    def stop(self) -> None:
        self._images.close()

    def _image_of(self, part: Part, stored: memoryview, room: memoryview) -> SentImage | None:
        """The image of a part that needs no decoding here; None for others."""
        offset_bytes = address(np.frombuffer(stored, np.uint8)) - self._ring_address
        if plan_plain(self._manifest, part, self._starts) is not None:
            return SentImage(part.index, offset_bytes, way=ImageForm.PLAIN)
        if part.index in self._refused or not can_be_stored(self._manifest, part):
            return None
        if write_tables(self._manifest, part, self._starts, stored, room) is None:
            return None
        tables_bytes = address(np.frombuffer(room, np.uint8)) - self._ring_address
        return SentImage(part.index, offset_bytes, way=ImageForm.STORED, tables_offset_bytes=tables_bytes)

    def _send_image(self, image: SentImage) -> None:
        self._send(image._replace(offset_bytes=image.offset_bytes + self._images_begin))
