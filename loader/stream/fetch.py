"""The work of a fetch thread: ranges from the source straight into the memory that the work queue names.

One range is one request; retries within it are the source's. What the node's cache holds is not asked for. All that
is read of a blob is of one version. It does not know what the bytes mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..format.manifest import Manifest
from ..sources.base import Source
from ..timeline import Timeline
from .blame import blame_part
from .plan import Plan, Step
from .progress import Meter, Phase
from .trace import add_part_span
from .versions import BlobVersions
from .work import Piece, Read, WorkQueue

if TYPE_CHECKING:
    from ..cache.part_cache import PartCache
    from .ahead import ReadAhead


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
        ahead: ReadAhead | None = None,
    ) -> None:
        """`settle` takes the steps that were read straight into their slab, and are done with that. `between` is called
        after each range.
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
        self._ahead = ahead
        self._versions = versions

    def run(self) -> None:
        """Read until nothing is left or the queue is stopped. Raises the source's errors, naming the part."""
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
            raise blame_part(error, self._manifest, part, self._source.url, num_parts=num_parts) from error
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
        """Whether all of it had to come from the source, now."""
        missing = [piece for piece in read.pieces if not self._is_cached(piece, read, memory)]
        if len(missing) == len(read.pieces):
            return self._read_source(read.blob, read.start_bytes, memory)
        for piece in missing:
            self._read_source(read.blob, *self._place(piece, read, memory))
        return False

    def _read_source(self, number: int, start: int, memory: memoryview) -> bool:
        """Fill the memory from this blob. Whether nothing of that had been asked for ahead. Raises `ChangedError` when
        it is not of the version that others were of.
        """
        name = self._manifest.blobs[number].name
        rest = memory
        while rest and self._ahead is not None and (taken := self._ahead.take(name, start, rest)) is not None:
            self._versions.check(number, taken.version)
            start, rest = start + taken.num_bytes, rest[taken.num_bytes :]
        if rest:
            version = self._source.read_into(name, start, rest, version=self._versions.of(number))
            self._versions.check(number, version)
        return len(rest) == len(memory)

    def _is_cached(self, piece: Piece, read: Read, memory: memoryview) -> bool:
        """Whether the cache has filled the memory; verified or not is for the decoder to say, as always."""
        digest = self._plan.steps[piece.step].part.digest
        if self._cache is None or digest is None:
            return False
        return self._cache.read_into(digest, piece.start_bytes, self._place(piece, read, memory)[1])

    def _place(self, piece: Piece, read: Read, memory: memoryview) -> tuple[int, memoryview]:
        """Where a piece starts in its blob, and its own stretch of the read's memory."""
        start = self._plan.steps[piece.step].part.offset_bytes + piece.start_bytes
        offset = start - read.start_bytes
        return start, memory[offset : offset + piece.size_bytes]
