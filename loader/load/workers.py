"""The bodies of a load's threads: fetching ranges, and decoding the parts that have arrived.

What comes next is the queue's to say, and what is done with bytes is `parts.py`'s. Parts that the
node's cache holds are not requested.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from ..errors import TeneralError
from ..process.cpu import quick_turns
from ..timeline import Timeline
from .accounting import Meter, Phase, add_part_span, in_part
from .parts import Parts
from .plan import Plan, Step
from .queue import PartPiece, Read, WorkQueue
from .targets.base import Target

HEAD_START_S = 0.15  # of a base that drafts, before its fine-tune is decoded
ENDED_POLL_S = 0.05


class Pacing(NamedTuple):
    """When the threads of one load begin."""

    full_speed: threading.Event | None  # until it is set two cores are left to others; None: never
    drafts_on_base: bool  # the cores are the base's at first, until the rest would wait for the decoding
    has_enough: Callable[[], bool]  # so much has come that it would
    is_over: Callable[[], bool]  # the load has ended

    def paced(self, body: Callable[[], None], *, is_spare: bool) -> Callable[[], None]:
        """The body, which waits for full speed unless its core is a spare one, and for the base."""

        def run() -> None:
            if self.full_speed is not None and not is_spare:
                while not self.full_speed.wait(ENDED_POLL_S):
                    if self.is_over():
                        return
            deadline_s = time.monotonic() + (HEAD_START_S if self.drafts_on_base else 0.0)
            while not self.has_enough() and time.monotonic() < deadline_s:
                if self.is_over():
                    return
                time.sleep(HEAD_START_S / 15)
            body()

        return run


class Fetcher:
    """`run` is the body of every fetch thread of one load."""

    def __init__(
        self,
        parts: Parts,
        plan: Plan,
        work: WorkQueue,
        *,
        meter: Meter,
        timeline: Timeline,
        settle: Callable[[Step], None],
        between: Callable[[], None],
    ) -> None:
        """`settle` takes the steps that were read straight into their slab, and are done with that.
        `between` is called after each range.
        """
        self._parts = parts
        self._plan = plan
        self._work = work
        self._meter = meter
        self._timeline = timeline
        self._settle = settle
        self._between = between

    def run(self) -> None:
        """Read until nothing is left or the queue is stopped. Raises the source's errors, naming
        the part.
        """
        while (task := self._work.next_read()) is not None:
            self._read(*task)
            self._between()

    def _read(self, read: Read, memory: memoryview) -> None:
        parts, first = self._parts, self._plan.steps[read.pieces[0].step].part
        try:
            with self._meter.measure(Phase.FETCH, sum(piece.size_bytes for piece in read.pieces)):
                is_from_source = self._fill(read, memory)
        except Exception as error:
            num_parts = len(read.pieces)
            raise in_part(error, parts.manifest, first, parts.source_url, num_parts=num_parts) from error
        ended_at_s = time.monotonic()
        for step, begun_at_s in self._work.finish_read(read, is_from_source=is_from_source):
            add_part_span(
                self._timeline,
                Phase.FETCH,
                parts.manifest,
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
            return self._parts.read_range(read.blob, read.start_bytes, memory)
        for piece in missing:
            self._parts.read_range(read.blob, *self._place(piece, read, memory))
        return False

    def _is_cached(self, piece: PartPiece, read: Read, memory: memoryview) -> bool:
        part = self._plan.steps[piece.step].part
        return self._parts.read_cached(part, piece.start_bytes, self._place(piece, read, memory)[1])

    def _place(self, piece: PartPiece, read: Read, memory: memoryview) -> tuple[int, memoryview]:
        """The start of a piece in its blob, and its own stretch of the read's memory."""
        start = self._plan.steps[piece.step].part.offset_bytes + piece.start_bytes
        offset = start - read.start_bytes
        return start, memory[offset : offset + piece.size_bytes]


class PartDecoder:
    """`run` is the body of every decode thread of one load."""

    def __init__(
        self,
        parts: Parts,
        work: WorkQueue,
        target: Target,
        *,
        settle: Callable[[Step], None],
        fail: Callable[[TeneralError], object],
    ) -> None:
        """`settle` takes each step whose values are in the target, `fail` an error that is not `run`'s."""
        self._parts = parts
        self._work = work
        self._target = target
        self._settle, self._fail = settle, fail

    def run(self) -> None:
        """Decode until nothing is left or the queue is stopped. Raises `IntegrityError` naming the
        part.
        """
        # numpy is imported by the first decode thread: the first ranges are on their way by then.
        from ..format.fill import Scratch

        scratch = Scratch()
        # Imports would keep the GIL for 5 ms each time that a part needs it for an instant.
        with quick_turns():
            while (task := self._work.next_step()) is not None:
                step, stored, room = task
                if self._target.hand_over(step, stored, room):
                    continue
                if self._parts.is_right(step.part, stored):
                    self._target.fill(self._parts, step, stored, scratch, self._work.rate_bytes_per_s)
                    self._parts.keep(step.part, stored)
                    self._settle(step)
                else:
                    self._work.fetch_again(step)
        self._work.discard_staging()

    def placed(self, step: Step, stored: memoryview, *, wrong: bool) -> None:
        """See `targets.base.Course`."""
        if not wrong:
            self._parts.keep(step.part, stored)
            self._settle(step)
        elif self._parts.is_right(step.part, stored):
            self._work.decode_again(step)
        else:
            self._work.fetch_again(step)

    def fail(self, error: TeneralError) -> None:
        self._fail(error)
