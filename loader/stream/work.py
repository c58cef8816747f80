"""What is to be fetched and what is to be decoded next: the one thing that a load's threads share.

Fetch threads take ranges in plan order; the first range of a part takes memory for the whole part. Decode
threads take, of the parts that have arrived and whose needs are met, the earliest in the plan. It does no
I/O, and knows no sources, digests or codecs.

Why it cannot deadlock, however small the staging and whatever the order in which ranges arrive: parts take
memory in plan order, so when somebody waits for memory, all of it is on loan to earlier steps. Take the
earliest step that is not done. Its needs are earlier still, so they are done. It either has its memory, and
then its ranges are handed out before any other's, its fetch needs nothing else, and its decode waits for
nobody; or it is the very next to take memory, and then nothing is on loan, and one part always fits an empty
staging. Either way it gets done. Fetching a part again asks for no new memory.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Sequence

from .plan import Plan, Read, Step
from .staging import Buffer, Staging


class WorkQueue:
    """Hands out a plan's reads and steps. Thread-safe; the blocking methods wait without the GIL."""

    def __init__(self, plan: Plan, staging: Staging, slabs: Sequence[memoryview]) -> None:
        self._plan = plan
        self._staging = staging
        self._slabs = slabs
        self._lock = threading.Lock()
        self._readable = threading.Condition(self._lock)
        self._decodable = threading.Condition(self._lock)
        self._reads = deque(read for reads in plan.reads for read in reads)
        self._again: deque[Read] = deque()  # of parts that hold their memory already: always before `_reads`
        self._missing = [len(reads) for reads in plan.reads]  # ranges that have not arrived, by step
        self._unmet = [len(step.needs) for step in plan.steps]
        self._needed_by: list[list[int]] = [[] for _ in plan.steps]
        for step in plan.steps:
            for needed in step.needs:
                self._needed_by[needed].append(step.number)
        self._begun_at_s: dict[int, float] = {}  # when the first range of a part on its way was handed out
        self._memory: dict[int, memoryview] = {}  # of steps under way: staging, or the slab itself
        self._loans: dict[int, Buffer] = {}
        self._arrived: set[int] = set()  # with all ranges in, but needs unmet
        self._ready: list[int] = []  # heap of steps to decode
        self._num_left = len(plan.steps)
        self._stopped = False
        self.memory_wait_s = 0.0  # spent waiting for staging, summed over threads

    def next_read(self) -> tuple[Read, memoryview] | None:
        """The next range and the memory that it belongs in. Blocks while there is none; None at the end.

        The memory stays the step's until `finish_step`.
        """
        with self._lock:
            while not self._stopped and self._num_left:
                if self._again:
                    return self._with_memory(self._again.popleft())
                if self._reads and self._place(self._reads[0].step):
                    return self._with_memory(self._reads.popleft())
                self._wait_for_read()
            return None

    def finish_read(self, read: Read) -> float | None:
        """Count a range as read. Once its part is whole: when (monotonic, s) the first range was handed out.

        A part that was read straight into its slab is then the caller's to finish; any other comes up in
        `next_step`.
        """
        with self._lock:
            self._missing[read.step] -= 1
            if self._missing[read.step]:
                return None
            if self._plan.steps[read.step].slab_offset_bytes is None:
                self._arrived.add(read.step)
                self._offer(read.step)
            return self._begun_at_s.pop(read.step)

    def next_step(self) -> tuple[Step, memoryview] | None:
        """The earliest step to decode, and its part's bytes. Blocks while there is none; None at the end."""
        with self._lock:
            while not self._stopped and self._num_left:
                if self._ready:
                    number = heapq.heappop(self._ready)
                    return self._plan.steps[number], self._memory[number]
                self._decodable.wait()
            return None

    def fetch_again(self, step: Step) -> None:
        """Have a part's ranges read once more, into the same memory, before all others."""
        with self._lock:
            self._missing[step.number] = len(self._plan.reads[step.number])
            self._again.extend(self._plan.reads[step.number])
            self._readable.notify_all()

    def finish_step(self, step: Step) -> None:
        """The step's values are in the slab. Takes its memory back and lets go those who waited for it."""
        with self._lock:
            del self._memory[step.number]
            loan = self._loans.pop(step.number, None)
            if loan is not None:
                self._staging.release(loan)
            self._num_left -= 1
            for number in self._needed_by[step.number]:
                self._unmet[number] -= 1
                self._offer(number)
            self._readable.notify_all()
            if self._num_left == 0:
                self._decodable.notify_all()
                self._staging.unmap()

    def stop(self) -> None:
        """Hand out nothing more, and wake all who wait."""
        with self._lock:
            self._stopped = True
            self._readable.notify_all()
            self._decodable.notify_all()

    def check_integrity(self) -> None:
        """Raise `RuntimeError` when loans overlap, or are out to steps that are done."""
        with self._lock:
            self._staging.check_integrity()
            on_loan = sum(len(loan.data) for loan in self._loans.values())
            if on_loan > self._staging.used_bytes or (self._num_left == 0 and self._staging.used_bytes):
                raise RuntimeError("staging is on loan to steps that are done")

    def _wait_for_read(self) -> None:
        started_s = time.monotonic()
        for_memory = bool(self._reads)
        self._readable.wait()
        if for_memory:
            self.memory_wait_s += time.monotonic() - started_s

    def _place(self, number: int) -> bool:
        """Give the step its memory, unless it has it; False when staging has no room now."""
        if number in self._memory:
            return True
        step = self._plan.steps[number]
        if step.slab_offset_bytes is not None:
            begin = step.slab_offset_bytes
            self._memory[number] = self._slabs[step.part.group][begin : begin + step.part.size_bytes]
            return True
        loan = self._staging.acquire(step.part.size_bytes)
        if loan is None:
            return False
        self._loans[number] = loan
        self._memory[number] = loan.data
        return True

    def _with_memory(self, read: Read) -> tuple[Read, memoryview]:
        self._begun_at_s.setdefault(read.step, time.monotonic())
        return read, self._memory[read.step][read.start_bytes : read.end_bytes]

    def _offer(self, number: int) -> None:
        """Let decoders have the step if it has arrived and needs nothing any more."""
        if number in self._arrived and self._unmet[number] == 0:
            self._arrived.remove(number)
            heapq.heappush(self._ready, number)
            self._decodable.notify()
