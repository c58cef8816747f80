"""Where decode threads bring parts when the weights are another device's: verified bytes become images in the ring.

It does not know who takes the images from there, or in which process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from ..format.manifest import Manifest, Part
from ..host import available_cores
from ..timeline import Timeline
from .image import plan_image, slab_starts
from .paths import DeviceSpeed, Path, choose_path
from .pieces import cut_part, plane_sizes, with_stored
from .ring import ImageRing, max_image_bytes


class SentImage(NamedTuple):
    """An image that lies in the ring, whole."""

    part: int  # its number in the manifest
    offset_bytes: int  # in the ring
    coded: bool = False  # as `plan_image` has it
    piece: int = 0  # its number in the part, as `cut_part` has them
    plane_sizes: tuple[int, ...] = ()  # of a coded piece, see `with_plane_sizes`


class ImageSink:
    """Makes images of one manifest's parts. Thread-safe."""

    def __init__(
        self, manifest: Manifest, ring: ImageRing, send: Callable[[SentImage], None], *, timeline: Timeline
    ) -> None:
        """`send` takes each image, from any thread; it may block, and must not fail."""
        self._manifest = manifest
        self._ring = ring
        self._send = send
        self._timeline = timeline
        self._starts, _ = slab_starts(manifest.groups)
        self._device = DeviceSpeed()
        self._lock = threading.Lock()
        self._path = Path.HOST
        self._host_bytes, self._host_cpu_s = 0.0, 0.0  # of parts that were decompressed here

    @property
    def ring_bytes(self) -> int:
        return self._ring.size_bytes

    def device_is(self, speed: DeviceSpeed) -> None:
        """What the device can do, as far as that is known."""
        self._device = speed

    def deliver(self, part: Part, stored: memoryview, link_bytes_per_s: float = 0.0) -> None:
        """Make and send the images of a verified part; what it needs was sent before. Blocks while the ring is full.

        `link_bytes_per_s` is what the store gives; 0: unknown. Raises `IntegrityError`, having sent nothing that could
        make the part whole, and `LoadCancelledError` once the ring is closed.
        """
        coded = self._choose(link_bytes_per_s) is Path.DEVICE
        pieces = with_stored(self._manifest, cut_part(self._manifest, part), part, stored)
        for number, piece in enumerate(pieces):
            self._deliver(number, piece, stored, coded=coded, share=1 / len(pieces))

    def _deliver(self, number: int, piece: Part, stored: memoryview, *, coded: bool, share: float) -> None:
        from .fill import fill_image  # numpy, with the first part

        image = plan_image(self._manifest, piece, self._starts, coded=coded)
        if image.size_bytes > max_image_bytes(self._manifest, piece):  # the ring need not have room for it
            image = plan_image(self._manifest, piece, self._starts)
        buffer = self._ring.take(image.size_bytes)
        begun_cpu_s = time.thread_time()
        try:
            fill_image(image, self._manifest, piece, self._starts, stored, buffer.data)
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

    def _choose(self, link_bytes_per_s: float) -> Path:
        cpu_s = self._host_cpu_s
        host_bytes_per_s = self._host_bytes / cpu_s * available_cores() if cpu_s else None
        choice = choose_path(link_bytes_per_s, host_bytes_per_s, self._device)
        with self._lock:
            changed, self._path = choice.path is not self._path, choice.path
        if changed:
            rates = {"link": link_bytes_per_s, "host": host_bytes_per_s, "device": self._device.bytes_per_s}
            self._timeline.mark(
                "device", f"planes are decompressed on the {choice.path}: {choice.why}", **rates
            )
        return choice.path

    def close(self) -> None:
        """Wake who waits for room: nobody takes images any more."""
        self._ring.close()
