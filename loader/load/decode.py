"""The work of a decode thread: a part that has arrived is verified, and only then becomes values in
its slab.

Invariant: no byte of a part that has a digest reaches a decoder or a slab before the digest of the
whole part was found right. It does not know where parts come from, or which callers wait for them. numpy and
zstandard are imported by the first decode thread: the first ranges are on their way by then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from blake3 import blake3

from ..format.manifest import Manifest, Part, Segment
from ..memory.refine_locks import RefineLocks
from ..process.cpu import quick_turns
from ..timeline import Timeline
from .accounting import Meter, Phase, add_part_span, in_part, wrong_digest
from .plan import Step
from .queue import WorkQueue

if TYPE_CHECKING:
    from ..cache.part_cache import PartCache
    from ..device.sink import ImageSink
    from ..format import codec
    from .resident import ResidentBase


class Decoder:
    """`run` is the body of every decode thread of one load."""

    def __init__(
        self,
        manifest: Manifest,
        slabs: Sequence[memoryview],
        work: WorkQueue,
        *,
        source_url: str,
        meter: Meter,
        timeline: Timeline,
        settle: Callable[[Step], None],
        refine_locks: RefineLocks,
        cache: PartCache | None = None,
        images: ImageSink | None = None,
        base: ResidentBase | None = None,
    ) -> None:
        """`settle` takes each step whose values are in its slab; `cache` every part that was found
        right. `base` has the values that differences are added to, if they are in memory already.

        With `images`, the slabs are another device's, and parts are made images of, which are
        delivered there.
        """
        self._manifest = manifest
        self._slabs = slabs
        self._work = work
        self._source_url = source_url
        self._meter = meter
        self._timeline = timeline
        self._settle = settle
        self._refine_locks = refine_locks
        self._cache = cache
        self._images = images
        self._base = base
        self._suspect: set[int] = set()  # steps whose digest was wrong once

    def run(self) -> None:
        """Decode until nothing is left or the queue is stopped. Raises `IntegrityError` naming the
        part.
        """
        from ..format import codec

        scratch = codec.Scratch()
        # A part takes the GIL for an instant a hundred times; imports would keep it 5 ms each time.
        with quick_turns():
            while (task := self._work.next_step()) is not None:
                step, stored = task
                if self._verify(step, stored):
                    self._decode_and_settle(step, stored, scratch)
        self._work.discard_staging()

    def _decode_and_settle(self, step: Step, stored: memoryview, scratch: codec.Scratch) -> None:
        # A step without needs is the first to write there: no values are in use yet.
        is_first = not step.needs or self._images is not None
        with nullcontext() if is_first else self._refine_locks.writing(step.part.group):
            self._decode(step.part, stored, scratch)
        if self._cache is not None and step.part.digest is not None:
            self._cache.offer(step.part.digest, stored)
        self._settle(step)

    def _verify(self, step: Step, stored: memoryview) -> bool:
        """True if the part may be decoded; if not, it is fetched again. Raises when that was tried
        before.
        """
        part = step.part
        if part.digest is None:
            return True  # never packed: there is nothing to compare with
        begun_at_s = time.monotonic()
        with self._meter.measure(Phase.VERIFY, part.size_bytes):
            got = blake3(stored).digest()
        right = got == part.digest
        self._add_span(Phase.VERIFY, part, begun_at_s, right=right)
        if right:
            return True
        from_disk = self._cache is not None and self._cache.reject(part.digest)
        if not from_disk:  # what the disk has spoilt does not count against the store
            if step.number in self._suspect:
                raise wrong_digest(self._manifest, part, self._source_url, got)
            self._suspect.add(step.number)
        self._meter.refetched(part.size_bytes)
        self._work.fetch_again(step)
        return False

    def _decode(self, part: Part, stored: memoryview, scratch: codec.Scratch) -> None:
        begun_at_s = time.monotonic()
        try:
            with self._meter.measure(Phase.DECODE, part.size_bytes):
                if self._images is None:
                    self._fill_slab(part, stored, scratch)
                else:
                    self._images.deliver(part, stored, self._work.rate_bytes_per_s)
        except Exception as error:
            raise in_part(error, self._manifest, part, self._source_url) from error
        self._add_span(Phase.DECODE, part, begun_at_s)

    def _fill_slab(self, part: Part, stored: memoryview, scratch: codec.Scratch) -> None:
        from ..format.codec import decode_planes

        for segment in part.segments:
            tensor, out = self._manifest.tensors[segment.tensor], self._place(segment)
            if self._base is None:
                decode_planes(tensor, segment, part.tier, stored, out, scratch)
            elif segment.planes:
                base = self._base.values(tensor, segment) if segment.is_delta else None
                decode_planes(tensor, segment, part.tier, stored, out, scratch, base)
            else:
                self._base.copy(tensor, segment, out)

    def _add_span(self, phase: Phase, part: Part, begun_at_s: float, **attributes: object) -> None:
        add_part_span(
            self._timeline,
            phase,
            self._manifest,
            part,
            begun_at_s=begun_at_s,
            ended_at_s=time.monotonic(),
            **attributes,
        )

    def _place(self, segment: Segment) -> memoryview:
        """The segment's own bytes in its slab."""
        tensor = self._manifest.tensors[segment.tensor]
        begin = tensor.offset_bytes + segment.start * tensor.element_bytes
        return self._slabs[tensor.group][begin : begin + segment.count * tensor.element_bytes]
