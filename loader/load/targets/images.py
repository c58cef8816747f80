"""Images of parts in a ring, for another device: nothing stays in this process's memory."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ...device.sink import ImageSink
from .base import Target

if TYPE_CHECKING:
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
        self.weight_bytes = images.ring_bytes
        self.slabs = [memoryview(b"") for _ in manifest.groups]

    def fill(
        self, parts: Parts, step: Step, stored: memoryview, scratch: Scratch, rate_bytes_per_s: float
    ) -> None:
        parts.deliver(step.part, stored, partial(self._images.deliver, link_bytes_per_s=rate_bytes_per_s))

    def stop(self) -> None:
        self._images.close()
