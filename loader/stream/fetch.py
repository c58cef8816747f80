"""The work of a fetch thread: ranges from the source straight into the memory that the work queue names.

One range is one request; retries within it are the source's. It does not know what the bytes mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..format.manifest import Manifest
from ..sources.base import Source
from ..timeline import Timeline
from .blame import blame_part
from .plan import Plan, Read, Step
from .progress import Meter, Phase
from .trace import add_part_span
from .work import WorkQueue


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
    ) -> None:
        """`settle` takes the steps that were read straight into their slab, and are done with that."""
        self._source = source
        self._manifest = manifest
        self._plan = plan
        self._work = work
        self._meter = meter
        self._timeline = timeline
        self._settle = settle

    def run(self) -> None:
        """Read until nothing is left or the queue is stopped. Raises the source's errors, naming the part."""
        while (task := self._work.next_read()) is not None:
            self._read(*task)

    def _read(self, read: Read, memory: memoryview) -> None:
        step = self._plan.steps[read.step]
        part = step.part
        blob = self._manifest.blobs[part.blob]
        try:
            with self._meter.measure(Phase.FETCH, len(memory)):
                self._source.read_into(
                    blob.name, part.offset_bytes + read.start_bytes, memory, version=blob.version
                )
        except Exception as error:
            raise blame_part(error, self._manifest, part, self._source.url) from error
        ended_at_s = time.monotonic()
        begun_at_s = self._work.finish_read(read)
        if begun_at_s is None:
            return
        add_part_span(
            self._timeline, Phase.FETCH, self._manifest, part, begun_at_s=begun_at_s, ended_at_s=ended_at_s
        )
        if step.slab_offset_bytes is not None:
            self._settle(step)
