"""Fetch threads, and the read-ahead before a plan exists: ranges from the source straight into
memory.

One range is one request; retries within it are the source's. Parts that the node's cache holds are
not requested. All that is read of a blob is of one version. Nothing here knows what the bytes mean.

Between the manifest's last byte and the first range that a plan hands out lie the reading of all
parts, their checks and the plan: 15 ms of a core for 300 parts. As soon as it is known how much
memory the model takes, and where a part lies that comes first, `Prefetch` requests its beginning
and keeps it for the load. It is a guess, in every respect: what was not wanted is dropped, what
fails is left to the load, which reads it as if nothing had been requested. Nothing is verified
there, and nothing is read of a model for which there may not be room.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ..format.manifest import Blob, Manifest, Part
from ..memory.limits import MIB, available_bytes
from ..sources import base
from ..sources.base import Remote, Source
from ..timeline import Timeline
from .accounting import Meter, Phase, add_part_span, in_part
from .options import LoadOptions
from .plan import FIRST_GROUP, Plan, Step
from .queue import Piece, Read, WorkQueue

if TYPE_CHECKING:
    from ..cache.part_cache import PartCache


class BlobVersions:
    """The version of each blob, by the manifest or else by the first answer. For all readers of an
    artifact; thread-safe.
    """

    def __init__(self, manifest: Manifest, source_url: str) -> None:
        self._manifest = manifest
        self._source_url = source_url
        self._versions = {
            number: blob.version for number, blob in enumerate(manifest.blobs) if blob.version is not None
        }

    def of(self, blob: int) -> str | None:
        """The version to request; None before the first answer."""
        return self._versions.get(blob)

    def check(self, blob: int, version: str | None) -> None:
        """Note the version of an answer; None: it was not checked. Raises `ChangedError` when
        others were of another.

        Threads that ask before any was answered cannot ask for a version. They find out here,
        before what they have read counts.
        """
        if version is None:
            return
        first = self._versions.setdefault(blob, version)  # atomic: one of them is the first
        if version != first:
            name = self._manifest.blobs[blob].name
            raise base.changed(self._source_url, name, f"version {first} was expected, {version} is there")


SLICE_BYTES = MIB  # what one connection brings in the meantime
MAX_SLICES = 8  # at 200 MB/s, until the first bytes come that a plan asked for
# Must be left after model and reserve: more than the check of a load asks for.
ROOM_BYTES = 256 * MIB


class Taken(NamedTuple):
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

    def take(self, blob: str, start: int, memory: memoryview) -> Taken | None:
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
        return Taken(count, found.version)

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


class Fetcher:
    """`run` is the body of every fetch thread of one load."""

    def __init__(
        self,
        source: Source,
        manifest: Manifest,
        plan: Plan,
        work: WorkQueue,
        *,
        meter: Meter,
        timeline: Timeline,
        settle: Callable[[Step], None],
        between: Callable[[], None],
        versions: BlobVersions,
        cache: PartCache | None = None,
        prefetch: Prefetch | None = None,
    ) -> None:
        """`settle` takes the steps that were read straight into their slab, and are done with that.
        `between` is called after each range.
        """
        self._source = source
        self._manifest = manifest
        self._plan = plan
        self._work = work
        self._meter = meter
        self._timeline = timeline
        self._settle = settle
        self._between = between
        self._cache = cache
        self._prefetch = prefetch
        self._versions = versions

    def run(self) -> None:
        """Read until nothing is left or the queue is stopped. Raises the source's errors, naming
        the part.
        """
        while (task := self._work.next_read()) is not None:
            self._read(*task)
            self._between()

    def _read(self, read: Read, memory: memoryview) -> None:
        part = self._plan.steps[read.pieces[0].step].part
        try:
            with self._meter.measure(Phase.FETCH, sum(piece.size_bytes for piece in read.pieces)):
                is_from_source = self._fill(read, memory)
        except Exception as error:
            num_parts = len(read.pieces)
            raise in_part(error, self._manifest, part, self._source.url, num_parts=num_parts) from error
        ended_at_s = time.monotonic()
        for step, begun_at_s in self._work.finish_read(read, is_from_source=is_from_source):
            add_part_span(
                self._timeline,
                Phase.FETCH,
                self._manifest,
                step.part,
                begun_at_s=begun_at_s,
                ended_at_s=ended_at_s,
            )
            if step.slab_offset_bytes is not None:
                self._settle(step)

    def _fill(self, read: Read, memory: memoryview) -> bool:
        """True if all of it had to come from the source, now."""
        missing = [piece for piece in read.pieces if not self._is_cached(piece, read, memory)]
        if len(missing) == len(read.pieces):
            return self._read_source(read.blob, read.start_bytes, memory)
        for piece in missing:
            self._read_source(read.blob, *self._place(piece, read, memory))
        return False

    def _read_source(self, number: int, start: int, memory: memoryview) -> bool:
        """Fill the memory from this blob. Whether nothing of that had been prefetched. Raises
        `ChangedError` when it is not of the version that others were of.
        """
        name = self._manifest.blobs[number].name
        rest = memory
        while (
            rest
            and self._prefetch is not None
            and (taken := self._prefetch.take(name, start, rest)) is not None
        ):
            self._versions.check(number, taken.version)
            start, rest = start + taken.num_bytes, rest[taken.num_bytes :]
        if rest:
            version = self._source.read_into(name, start, rest, version=self._versions.of(number))
            self._versions.check(number, version)
        return len(rest) == len(memory)

    def _is_cached(self, piece: Piece, read: Read, memory: memoryview) -> bool:
        """True if the cache has filled the memory; verified or not is for the decoder to say, as
        always.
        """
        digest = self._plan.steps[piece.step].part.digest
        if self._cache is None or digest is None:
            return False
        return self._cache.read_into(digest, piece.start_bytes, self._place(piece, read, memory)[1])

    def _place(self, piece: Piece, read: Read, memory: memoryview) -> tuple[int, memoryview]:
        """The start of a piece in its blob, and its own stretch of the read's memory."""
        start = self._plan.steps[piece.step].part.offset_bytes + piece.start_bytes
        offset = start - read.start_bytes
        return start, memory[offset : offset + piece.size_bytes]
