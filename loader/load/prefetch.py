"""The read-ahead before a plan exists: the beginning of a part that comes first.

Between the manifest's last byte and the first range that a plan hands out lie the reading of all
parts, their checks and the plan: 15 ms of a core for 300 parts. As soon as it is known how much
memory the model takes, and where a part lies that comes first, `Prefetch` requests its beginning
and keeps it for the load. It is a guess, in every respect: what was not wanted is dropped, what
fails is left to the load, which reads it as if nothing had been requested. Nothing is verified
there, and nothing is read of a model for which there may not be room.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from ..format.manifest import Blob, Part
from ..memory.limits import MIB, available_bytes
from ..sources.base import Remote, Source
from ..timeline import Timeline
from .options import LoadOptions
from .plan import FIRST_GROUP

SLICE_BYTES = MIB  # what one connection brings in the meantime
MAX_SLICES = 8  # at 200 MB/s, until the first bytes come that a plan asked for
# Must be left after model and reserve: more than the check of a load asks for.
ROOM_BYTES = 256 * MIB


class PrefetchedBytes(NamedTuple):
    """The prefetched beginning of a range, in bytes, and the version of the blob that it is of."""

    num_bytes: int
    version: str | None


class _Slice:
    """Bytes [start_bytes, start_bytes + len(data)) of a blob: there once `done` is set, unless it
    `has_failed`.
    """

    def __init__(self, blob: str, start_bytes: int, size_bytes: int) -> None:
        self.blob = blob
        self.start_bytes = start_bytes
        self.data = bytearray(size_bytes)
        self.left_bytes = size_bytes  # not taken yet
        self.done = threading.Event()
        self.has_failed = False
        self.version: str | None = None

    def holds(self, blob: str, start: int) -> bool:
        return blob == self.blob and 0 <= start - self.start_bytes < len(self.data)


class Prefetch:
    """For one load. `look` is for one thread; `take` may be called by any."""

    def __init__(
        self,
        source: Source,
        options: LoadOptions,
        *,
        timeline: Timeline | None = None,
        weights_are_here: bool = True,
        held_bytes: int = 0,
    ) -> None:
        """`held_bytes` are held for weights already; those of another device need no room here."""
        self._source = source
        self._options = options
        self._timeline = timeline or Timeline()
        self._weights_are_here = weights_are_here
        self._held_bytes = held_bytes
        self._slices: list[_Slice] = []
        self._lock = threading.Lock()

    def look(self, weight_bytes: int, blob: Blob, part: Part) -> bool:
        """Look at a manifest's parts, one by one and unchecked; begin to read one that comes first.
        Returns whether no later part matters.
        """
        options = self._options
        if options.cache_dir is not None or not isinstance(self._source, Remote):
            return True  # it may be here already, or is as good as that
        if options.on_demand and part.group == FIRST_GROUP:
            return False  # a table, most likely: the rest of it comes last
        if self._has_room(weight_bytes):
            self._begin(blob.name, part.offset_bytes, part.size_bytes)
        return True

    def take(self, blob: str, start: int, memory: memoryview) -> PrefetchedBytes | None:
        """Fill the beginning of `memory`, with bytes of the blob from `start` on; None where there
        is nothing.

        Waits for what is on its way, without the GIL. A byte is handed out once: a second
        read of it goes to the source.
        """
        with self._lock:
            found = next((each for each in self._slices if each.holds(blob, start)), None)
        if found is None:
            return None
        found.done.wait()
        if found.has_failed:
            return None
        begin = start - found.start_bytes
        count = min(len(memory), len(found.data) - begin)
        memory[:count] = memoryview(found.data)[begin : begin + count]
        with self._lock:
            found.left_bytes -= count
            if found.left_bytes <= 0:
                self._slices = [each for each in self._slices if each is not found]
        return PrefetchedBytes(count, found.version)

    def _begin(self, blob: str, start: int, size_bytes: int) -> None:
        end = start + min(size_bytes, MAX_SLICES * SLICE_BYTES)
        self._slices = [
            _Slice(blob, begin, min(SLICE_BYTES, end - begin)) for begin in range(start, end, SLICE_BYTES)
        ]
        for each in self._slices:
            threading.Thread(target=self._read, args=(each,), name="teneral-ahead", daemon=True).start()

    def _read(self, each: _Slice) -> None:
        try:
            with self._timeline.span("fetch", "ahead", bytes=len(each.data)):
                each.version = self._source.read_into(each.blob, each.start_bytes, memoryview(each.data))
        except Exception:  # noqa: BLE001 - the load will meet the same error and report it
            each.has_failed = True
        each.done.set()

    def _has_room(self, weight_bytes: int) -> bool:
        left_bytes = self._options.available_bytes
        if left_bytes is None:
            found_bytes = available_bytes()
            if found_bytes is None:
                return True  # nothing says
            left_bytes = found_bytes + self._held_bytes
        options = self._options
        needed_bytes = weight_bytes + options.reserved_bytes if self._weights_are_here else 0
        needed_bytes += options.serving_bytes
        return needed_bytes + ROOM_BYTES <= left_bytes
