"""Images of parts in a ring, for another device: nothing stays in this process's memory."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ...device.sink import ImageSink
from .base import Target

if TYPE_CHECKING:
    from ...device.paths import DeviceSpeed
    from ...format.fill import Scratch
    from ...format.manifest import Manifest
    from ..parts import Parts
    from ..plan import Step


class ImageTarget(Target):
    """Delivers parts to the sink; a gate opens when all of its parts were. There are no slabs."""

    what = "images of them"
    is_direct = False
    is_used_here = False
    is_helper = True
    marks_gates = False

    def __init__(self, manifest: Manifest, images: ImageSink) -> None:
        self._images = images
        self.weight_bytes = self.ring_bytes = images.ring_bytes
        self.slabs = [memoryview(b"") for _ in manifest.groups]

    def fill(
        self, parts: Parts, step: Step, stored: memoryview, scratch: Scratch, rate_bytes_per_s: float
    ) -> None:
        parts.deliver(step.part, stored, partial(self._images.deliver, link_bytes_per_s=rate_bytes_per_s))

    def give_back(self, offset_bytes: int, wrong: bool = False) -> None:
        """The device is done with the image at that place of the ring; never with a wrong one, as all were verified."""
        self._images.give_back(offset_bytes)

    def device_is(self, speed: DeviceSpeed) -> None:
        """Take note of what the device can do."""
        self._images.device_is(speed)

    def stop(self) -> None:
        self._images.close()
