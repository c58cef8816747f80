"""The work of a load: ranges to fetch and parts to decode, handed to its threads in plan order.

Fetch threads take ranges in the order of `plan.FetchOrder`; the first range of a part takes memory
for the whole part. Small parts that lie one behind the other are read as one
range. Decode threads take, of the parts that have arrived and whose needs are met, the one whose
turn was first. While a pass asks for experts, no others are read, ahead of those that it asks for
next. The queue does no I/O, and knows no sources, digests or codecs.

Why it cannot deadlock, however small the staging, whatever is wanted sooner, and in whatever order
ranges arrive: a step gets its turn, and with it its memory, only after all steps that it needs had
theirs, and turns are given one by one. So when a thread waits for memory, all of it is on loan to
steps that had their turn. Take of these the one that is not done and had it first. What it needs
had its turn before it, so that is done. It has its memory; its ranges are handed out before any
other's, its fetch needs nothing else, and its decode waits for no other step. So it gets done,
until nothing is on loan, and one part always fits an empty staging. Fetching a part again asks for
no new memory.
"""

from __future__ import annotations

import heapq
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ..format.manifest import Part, Tier, align
from ..memory.staging import Buffer, Staging, discard
from .link import LinkStatistics, LinkTuner, PlanPosition, cut
from .options import Order
from .plan import FetchOrder, Plan, Step

# After an expert that was asked for: the pass computes it, and asks for those of its next layer. Longer where that was
# seen to take longer.
HOLD_S, MAX_HOLD_S = 0.15, 1.0
HOLD_MARGIN = 1.5
ROOM_ALIGNMENT_BYTES = 16
NO_ROOM = memoryview(b"")


class PartPiece(NamedTuple):
    """Bytes [start_bytes, end_bytes) of the part of step number `step`."""

    step: int
    start_bytes: int
    end_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.end_bytes - self.start_bytes


class Read(NamedTuple):
    """Bytes [start_bytes, end_bytes) of a blob, one request to the source: some of a part, or
    several whole parts.
    """

    blob: int
    start_bytes: int
    end_bytes: int
    pieces: tuple[PartPiece, ...]
    began_s: float  # when it was handed out, on `time.monotonic()`'s clock


class _Loan:
    """Staging memory of one or several steps."""

    __slots__ = ("buffer", "num_steps")

    def __init__(self, buffer: Buffer, num_steps: int) -> None:
        self.buffer = buffer
        self.num_steps = num_steps  # that are not done


class WorkQueue:
    """Hands out a plan's ranges and steps. Thread-safe; the blocking methods wait without the GIL."""

    def __init__(
        self,
        plan: Plan,
        staging: Staging,
        slabs: Sequence[memoryview],
        tuner: LinkTuner,
        room_bytes: Callable[[Part], int] = lambda part: 0,
    ) -> None:
        """`room_bytes` is what a part takes in the staging besides its own bytes, a multiple of 16."""
        self._plan = plan
        self._room_bytes = room_bytes
        self._staging = staging
        self._slabs = slabs
        self._tuner = tuner
        self._lock = threading.Lock()
        self._readable = threading.Condition(self._lock)
        self._decodable = threading.Condition(self._lock)
        self._fetch_order = FetchOrder(plan)
        # Of parts with bytes that are not requested yet: where these begin.
        self._cursors: dict[int, int] = {}
        self._missing = [step.part.size_bytes for step in plan.steps]  # bytes that have not arrived
        self._unmet = [len(step.needs) for step in plan.steps]
        self._needed_by: list[list[int]] = [[] for _ in plan.steps]
        for step in plan.steps:
            for needed in step.needs:
                self._needed_by[needed].append(step.number)
        self._num_reading = 0
        # When the first range of a part on its way was handed out.
        self._begun_at_s: dict[int, float] = {}
        self._memory: dict[int, memoryview] = {}  # of steps under way: staging, or the slab itself
        self._rooms: dict[int, memoryview] = {}  # what they take besides
        self._loans: dict[int, _Loan] = {}
        self._arrived: set[int] = set()  # with all bytes in, but needs unmet
        self._ready: list[tuple[int, int]] = []  # heap of steps to decode, by their turns
        self._num_left = len(plan.steps)
        self._optional = frozenset(step.number for step in plan.steps if step.part.index in plan.optional)
        self._asked: set[int] = set()  # optional steps that were asked for and are not done
        self._asked_done_s = -math.inf  # when the last of them was done
        self._hold_s = HOLD_S
        self._stopped = False
        with self._lock:
            for step in plan.steps:
                if not step.part.size_bytes:  # a copy of what is in memory
                    self._memory[step.number] = memoryview(b"")
                    self._arrived.add(step.number)
                    self._offer(step.number)
        self._unmapped = memoryview(b"")  # staging, when all is done
        self.memory_wait_s = 0.0  # spent waiting for staging, summed over threads

    @property
    def connections(self) -> int:
        """The number of threads that should read: more of them only wait."""
        return self._tuner.connections

    def next_read(self) -> tuple[Read, memoryview] | None:
        """The next range and the memory that it belongs in. Blocks while there is none; None at the
        end.

        The memory stays the steps' until `finish_step`.
        """
        with self._lock:
            while not self._stopped and self._num_left:
                may_read = self._num_reading < self._tuner.connections
                if may_read and (pieces := self._next_pieces()):
                    self._readable.notify()  # there may be more; a thread that finds none waits again
                    return self._hand_out(pieces)
                started_s = time.monotonic()
                is_held = self._is_held()
                for_memory = may_read and not is_held and self._fetch_order.peek() is not None
                self._readable.wait(self._held_until_s() - started_s if is_held and not self._asked else None)
                if for_memory:
                    waited_s = time.monotonic() - started_s
                    self.memory_wait_s += waited_s
                    self._tuner.waited(waited_s)
            return None

    def finish_read(self, read: Read, *, is_from_source: bool = True) -> list[tuple[Step, float]]:
        """Count a range as read. Returns the parts that are whole now: each step, and when
        (monotonic, s) its first range was handed out.

        A part that was read straight into its slab is then the caller's to finish; any other comes
        up in `next_step`. Only what came from the source says something about the link to it.
        """
        whole: list[tuple[Step, float]] = []
        with self._lock:
            self._num_reading -= 1
            if is_from_source:
                size_bytes = read.end_bytes - read.start_bytes
                self._tuner.arrived(
                    size_bytes, read.began_s, time.monotonic(), self._fetch_order.unread_bytes
                )
            for piece in read.pieces:
                step = self._plan.steps[piece.step]
                self._missing[step.number] -= piece.size_bytes
                if self._missing[step.number]:
                    continue
                whole.append((step, self._begun_at_s.pop(step.number)))
                if step.slab_offset_bytes is None:
                    self._arrived.add(step.number)
                    self._offer(step.number)
        return whole

    def next_step(self) -> tuple[Step, memoryview, memoryview] | None:
        """The earliest step to decode, its part's bytes, and the room that it has besides. Blocks while there is none;
        None at the end.
        """
        with self._lock:
            while not self._stopped and self._num_left:
                if self._ready:
                    _, number = heapq.heappop(self._ready)
                    return self._plan.steps[number], self._memory[number], self._rooms.get(number, NO_ROOM)
                self._decodable.wait()
            return None

    def promote(self, numbers: Iterable[int]) -> None:
        """Give these steps, and those that they need, their turn before all others."""
        wanted = set(numbers)
        with self._lock:
            self._fetch_order.promote(wanted)
            asked = {each for each in wanted & self._optional if not self._is_done(each)}
            if asked and not self._asked:
                self._note_gap(time.monotonic() - self._asked_done_s)
            self._asked |= asked
            self._readable.notify()

    def reorder(self, order: Order) -> None:
        """Go on in another order, from the next part on that is not requested yet."""
        with self._lock:
            self._fetch_order.reorder(order)

    def decode_again(self, step: Step) -> None:
        """Offer a step once more, with the bytes that it has."""
        with self._lock:
            self._arrived.add(step.number)
            self._offer(step.number)

    def fetch_again(self, step: Step) -> None:
        """Have a part read once more, into the same memory, before all others."""
        with self._lock:
            self._missing[step.number] = step.part.size_bytes
            self._fetch_order.handed_out(step.number, -step.part.size_bytes)
            self._cursors = {step.number: 0, **self._cursors}
            self._readable.notify()

    def finish_step(self, step: Step) -> None:
        """The step's values are in the slab. Takes its memory back, and releases the steps that
        need it.
        """
        with self._lock:
            del self._memory[step.number]
            self._rooms.pop(step.number, None)
            loan = self._loans.pop(step.number, None)
            if loan is not None:
                loan.num_steps -= 1
                if not loan.num_steps:
                    self._staging.release(loan.buffer)
            self._num_left -= 1
            if step.number in self._asked:
                self._asked.remove(step.number)
                self._asked_done_s = time.monotonic()
            for number in self._needed_by[step.number]:
                self._unmet[number] -= 1
                self._offer(number)
            # Waking one is enough, here and above: it wakes the next when it has found something to
            # read.
            self._readable.notify()
            if self._num_left == 0:
                self._readable.notify_all()
                self._decodable.notify_all()
                self._unmapped = self._staging.unmap()

    def discard_staging(self) -> None:
        """Return the staging's pages to the system once all is done; without effect before. For a thread that nothing
        waits for.
        """
        with self._lock:
            memory, self._unmapped = self._unmapped, memoryview(b"")
        if memory:
            discard(memory)

    def stop(self) -> None:
        """Hand out nothing more, and wake all waiting threads."""
        with self._lock:
            self._stopped = True
            self._readable.notify_all()
            self._decodable.notify_all()

    def left_bytes(self) -> list[int]:
        """The bytes not requested yet, by tier."""
        left = [0] * len(Tier)
        for part in self.left_parts():
            left[part.tier] += part.size_bytes
        return left

    def left_parts(self) -> list[Part]:
        """The parts of which nothing is requested yet."""
        with self._lock:
            return [
                step.part
                for step in self._plan.steps
                if 0 < self._missing[step.number] == step.part.size_bytes and step.number not in self._memory
            ]

    @property
    def rate_bytes_per_s(self) -> float:
        """Of all that came from the store so far; 0: nothing."""
        with self._lock:
            return self._tuner.rate_bytes_per_s

    def link_statistics(self) -> LinkStatistics:
        with self._lock:
            return self._tuner.statistics()

    def check_integrity(self) -> None:
        """Raise `RuntimeError` when loans overlap, or are out to steps that are done."""
        with self._lock:
            self._staging.check_integrity()
            on_loan = sum(len(loan.buffer.data) for loan in set(self._loans.values()))
            if on_loan > self._staging.used_bytes or (self._num_left == 0 and self._staging.used_bytes):
                raise RuntimeError("staging is on loan to steps that are done")

    def _next_pieces(self) -> tuple[PartPiece, ...]:
        """The pieces that the next range reads; none when all are requested, or while staging has
        no room for the next part.
        """
        if self._cursors:
            return self._cut(next(iter(self._cursors)))
        number = self._fetch_order.peek()
        if number is None or self._is_held():
            return ()
        most_bytes = self._range_bytes(number)
        run = self._fetch_order.next_run(most_bytes)
        if not self._place(run):
            run = run[:1]
            if not self._place(run):
                return ()
        self._fetch_order.take(run)
        if len(run) > 1:
            return tuple(PartPiece(each, 0, self._missing[each]) for each in run)
        self._cursors[number] = 0
        return self._cut(number)

    def _is_done(self, number: int) -> bool:
        return not self._missing[number] and number not in self._memory

    def _is_held(self) -> bool:
        """True if only experts come next that were not asked for, while others are or will be."""
        if self._fetch_order.is_asked or self._fetch_order.peek() not in self._optional:
            return False
        return bool(self._asked) or time.monotonic() < self._held_until_s()

    def _held_until_s(self) -> float:
        return self._asked_done_s + self._hold_s

    def _note_gap(self, gap_s: float) -> None:
        """It took so long from the last expert that was asked for until others were: a pass computed a layer, or has
        ended since.
        """
        if gap_s < MAX_HOLD_S:
            self._hold_s = min(MAX_HOLD_S, max(HOLD_S, HOLD_MARGIN * gap_s))

    def _cut(self, number: int) -> tuple[PartPiece, ...]:
        """The next range of a part with bytes that are not requested yet."""
        start = self._cursors.pop(number)
        left_bytes = self._plan.steps[number].part.size_bytes - start
        end = start + cut(left_bytes, self._range_bytes(number))
        if end < start + left_bytes:
            # In front again, so that a part to be fetched once more does not wait for others.
            self._cursors = {number: end, **self._cursors}
        return (PartPiece(number, start, end),)

    def _range_bytes(self, number: int) -> int:
        is_staged = self._plan.steps[number].slab_offset_bytes is None
        order = self._fetch_order
        return self._tuner.range_bytes(
            PlanPosition(order.awaited_bytes, order.bytes_to_end(number), is_staged)
        )

    def _hand_out(self, pieces: tuple[PartPiece, ...]) -> tuple[Read, memoryview]:
        now_s = time.monotonic()
        for piece in pieces:
            self._begun_at_s.setdefault(piece.step, now_s)
            self._fetch_order.handed_out(piece.step, piece.size_bytes)
        first, last = pieces[0], pieces[-1]
        part = self._plan.steps[first.step].part
        start = part.offset_bytes + first.start_bytes
        end = self._plan.steps[last.step].part.offset_bytes + last.end_bytes
        self._num_reading += 1
        self._tuner.handed_out(end - start)
        return Read(part.blob, start, end, pieces, now_s), self._memory_of(pieces, end - start)

    def _memory_of(self, pieces: tuple[PartPiece, ...], size_bytes: int) -> memoryview:
        first = pieces[0]
        if len(pieces) == 1:
            return self._memory[first.step][first.start_bytes : first.end_bytes]
        step = self._plan.steps[first.step]
        if step.slab_offset_bytes is None:
            return self._loans[first.step].buffer.data[:size_bytes]
        begin = step.slab_offset_bytes
        return self._slabs[step.part.group][begin : begin + size_bytes]

    def _place(self, run: Sequence[int]) -> bool:
        """Give the steps their memory, in one piece; False when staging has no room now."""
        steps = [self._plan.steps[number] for number in run]
        begin = steps[0].part.offset_bytes
        size_bytes = steps[-1].part.offset_bytes + steps[-1].part.size_bytes - begin
        if steps[0].slab_offset_bytes is not None:
            for step in steps:
                slab, offset = self._slabs[step.part.group], step.slab_offset_bytes or 0
                self._memory[step.number] = slab[offset : offset + step.part.size_bytes]
            return True
        rooms = [self._room_bytes(step.part) for step in steps]
        room_at = align(size_bytes, ROOM_ALIGNMENT_BYTES)
        needed_bytes = room_at + sum(rooms) if any(rooms) else size_bytes
        if len(run) > 1 and needed_bytes > self._staging.capacity_bytes:
            return False
        buffer = self._staging.acquire(needed_bytes)
        if buffer is None:
            return False
        loan = _Loan(buffer, len(run))
        for step, room_bytes in zip(steps, rooms, strict=True):
            offset = step.part.offset_bytes - begin
            self._loans[step.number] = loan
            self._memory[step.number] = buffer.data[offset : offset + step.part.size_bytes]
            if room_bytes:
                self._rooms[step.number] = buffer.data[room_at : room_at + room_bytes]
                room_at += room_bytes
        return True

    def _offer(self, number: int) -> None:
        """Let decoders have the step if it has arrived and needs nothing any more."""
        if number in self._arrived and self._unmet[number] == 0:
            self._arrived.remove(number)
            heapq.heappush(self._ready, (self._fetch_order[number], number))
            self._decodable.notify()
