"""A worker: takes missing parts, has their lines answered, and writes each complete part, while
there is time for another by the times of earlier ones.

A few parts are open at a time, so that the last lines of one share the engine with the first of the
next; at most that many parts of work are lost if the process is killed. Other workers' parts are
left to them (`claims.py`), and a part that two computed nevertheless is written once
(`parts.put_part`). This module does not know how lines are answered, nor how a job begins and ends.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..function.channel import calling_on_loop
from ..function.lifetime import Lifetime
from .answers import Answers, Record
from .claims import Claims
from .index import JobIndex
from .input import Embed, Line
from .parts import (
    PartInfo,
    Places,
    describe_part,
    is_there,
    put_part,
    read_lines,
    read_partial,
    remove_partial,
    write_partial,
)
from .progress import ProgressMeter

MIN_OPEN_PARTS = 2
# Of one call: of similar length, so that few tokens are padding.
MAX_EMBED_TEXTS = 32
# Before the deadline, lines in progress are cancelled, and the finished ones of their parts kept.
CUT_S = 1.5
MAX_LEAVING_S = 5.0  # for that, without a deadline
PULSE_S = 1.0  # between two looks at claims


def _now_s() -> float:
    return asyncio.get_running_loop().time()


@dataclass(slots=True)
class _OpenPart:
    """A part in progress: its lines, and their records so far."""

    number: int
    lines: list[Line]
    records: list[Record | None]
    num_answered: int = 0  # by this worker
    begun_s: float = field(default_factory=_now_s)


class Worker:
    """One worker's run. Lives on one event loop; used once."""

    def __init__(
        self,
        places: Places,
        index: JobIndex,
        answers: Answers,
        *,
        input_version: str,
        meter: ProgressMeter,
        lifetime: Lifetime,
        drain_s: float,
        window: int,
        partials: frozenset[int] = frozenset(),
    ) -> None:
        """`window` is the number of concurrent lines; some records of the parts in `partials` are
        known.
        """
        self.written: dict[int, PartInfo] = {}  # written by this worker
        self._places = places
        self._index = index
        self._answers = answers
        self._input_version = input_version
        self._meter = meter
        self._lifetime = lifetime
        self._drain_s = drain_s
        self._window = asyncio.Semaphore(window)
        self._turn = asyncio.Lock()
        self._window_lines = window
        self._max_open = self._count_open()
        self._partials = set(partials)
        self._claims = Claims(places.work)
        self._pace = PartPace()
        self._open: dict[int, _OpenPart] = {}
        self._answered_s: float | None = None  # time of the first record
        self._stopped_s: float | None = None

    async def run(self, order: Sequence[int]) -> None:
        """Process these parts, as many as time allows; those that other workers compute are waited
        for, and taken over if their workers are gone. Ends early with the lifetime; otherwise
        raises the error that ended it.

        Finished records of incomplete parts are left in the store, for the next worker.
        """
        waiting, tasks = deque(order), dict[asyncio.Task[None], int]()
        stopped = asyncio.Event()
        forget = self._lifetime.on_cancel(calling_on_loop(asyncio.get_running_loop(), stopped.set))
        watch = asyncio.create_task(_until(stopped))
        pulse = asyncio.create_task(self._pulse())
        try:
            while self._begin(waiting, tasks) or (self._claims.is_waiting and self._has_time()):
                watched = {*tasks, pulse} if watch.done() else {*tasks, pulse, watch}
                done, _ = await asyncio.wait(
                    watched, timeout=self._patience_s(), return_when=asyncio.FIRST_COMPLETED
                )
                if watch in done:
                    self._stopped_s = _now_s()
                elif not done:
                    break  # no time left
                for task in [each for each in tasks if each in done]:
                    del tasks[task]
                    _raise_first(task)
                if pulse in done:
                    free = pulse.result()
                    waiting.extend(free)
                    self._partials.update(free)  # their workers may have left some records
                    pulse = asyncio.create_task(self._pulse())
        finally:
            forget()
            watch.cancel()
            await _end([*tasks, pulse])
            await self._leave_partials()

    async def _pulse(self) -> list[int]:
        """Keep this worker's claims alive. Returns parts that others no longer hold."""
        await asyncio.sleep(PULSE_S)
        return await self._claims.pulse(is_idle=not self._open)

    def _begin(self, waiting: deque[int], tasks: dict[asyncio.Task[None], int]) -> bool:
        """Open parts while there is capacity and time. Returns whether any is open."""
        while waiting and len(tasks) < self._max_open and self._has_time():
            number = waiting.popleft()
            tasks[asyncio.create_task(self._do_part(number))] = number
        return bool(tasks)

    def _count_open(self) -> int:
        """The number of parts that fill the window while the last lines of one part are in
        progress.
        """
        sizes = sorted(part.num_records for part in self._index.parts)
        return max(MIN_OPEN_PARTS, 1 + math.ceil(self._window_lines / sizes[len(sizes) // 2]))

    def _has_time(self) -> bool:
        return not self._lifetime.cancelled and self._pace.has_time(self._lifetime.remaining_s())

    def _patience_s(self) -> float | None:
        """The time to wait for open parts; None: unlimited."""
        left_s = self._lifetime.remaining_s() - CUT_S
        if self._stopped_s is not None:
            left_s = min(left_s, self._stopped_s + self._drain_s - _now_s())
        return None if left_s == math.inf else max(0.0, left_s)

    async def _do_part(self, number: int) -> None:
        # Looked for again once it is claimed: its worker may have written it in between.
        if await self._is_done(number) or not await self._claims.take(number):
            return
        if await self._is_done(number):
            await self._claims.release([number])
            return
        lines = await asyncio.to_thread(
            read_lines, self._places.input, self._input_version, self._index, number
        )
        part = self._open[number] = _OpenPart(number, lines, [None] * len(lines))
        if number in self._partials:
            part.records = await asyncio.to_thread(read_partial, self._places.work, number, lines)
        # All lines of one part are started before the first of the next, so that it completes
        # first.
        async with asyncio.TaskGroup() as group, self._turn:
            for indices in units_of(lines, skip=lambda index: part.records[index] is not None):
                await self._window.acquire()
                group.create_task(self._answer(part, indices))
        await self._write(part)

    async def _is_done(self, number: int) -> bool:
        """True if another worker has written the part."""
        is_done = await asyncio.to_thread(is_there, self._places.work, number)
        if is_done:
            self._meter.part_done(self._index.parts[number].num_records)
        return is_done

    async def _answer(self, part: _OpenPart, indices: list[int]) -> None:
        """Answer some lines of one part: one, or several to embed together. Frees its place in the
        window.
        """
        try:
            lines = [part.lines[index] for index in indices]
            records = (
                await self._answers.embed(lines) if len(lines) > 1 else [await self._answers.one(lines[0])]
            )
        finally:
            self._window.release()
        for index, record in zip(indices, records, strict=True):
            part.records[index] = record
            part.num_answered += 1
            self._answered_s = self._answered_s or _now_s()
            self._meter.record_done(is_failed=record.is_failed, num_tokens=record.num_tokens)

    async def _write(self, part: _OpenPart) -> None:
        records = [record for record in part.records if record is not None]
        assert len(records) == len(part.lines)
        data = b"".join(record.data for record in records)
        info = describe_part(data, sum(record.is_failed for record in records))
        mine = await asyncio.to_thread(put_part, self._places.work, part.number, data, info)
        if mine is not None:
            self.written[part.number] = mine
        del self._open[part.number]
        self._meter.records_pending -= part.num_answered
        self._meter.part_done(len(records))
        # Waiting for the weights happens once, and does not count as a part's time.
        self._pace.note(_now_s() - max(part.begun_s, self._answered_s or part.begun_s))
        if part.number in self._partials:
            await asyncio.to_thread(remove_partial, self._places.work, part.number)
        await self._claims.release([part.number])

    async def _leave_partials(self) -> None:
        """Store partial records and give up claims, optimisations: they hide no other error, and
        are cut off at the deadline.
        """
        left = asyncio.create_task(self._write_partials())
        await asyncio.wait([left], timeout=min(MAX_LEAVING_S, self._lifetime.remaining_s()))

    async def _write_partials(self) -> None:
        await asyncio.gather(
            *(
                asyncio.to_thread(write_partial, self._places.work, part.number, part.lines, part.records)
                for part in self._open.values()
                if part.num_answered
            ),
            return_exceptions=True,
        )
        await self._claims.release(self._claims.held)


def units_of(lines: Sequence[Line], *, skip: Callable[[int], bool] = lambda _: False) -> Iterator[list[int]]:
    """The units of a part's work, as indices of its lines, in the order of their start.

    Long lines come first: a part is as late as its last line. Texts to embed are grouped with those
    of similar length.
    """
    order = sorted(
        (index for index in range(len(lines)) if not skip(index)), key=lambda index: -lines[index].size_bytes
    )
    texts = [index for index in order if isinstance(lines[index].request, Embed)]
    for start in range(0, len(texts), MAX_EMBED_TEXTS):
        yield texts[start : start + MAX_EMBED_TEXTS]
    for index in order:
        if not isinstance(lines[index].request, Embed):
            yield [index]


async def _until(event: asyncio.Event) -> None:
    await event.wait()


async def _end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _raise_first(task: asyncio.Task[None]) -> None:
    """Raise the task's error, if any: the first of several."""
    error = task.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if error is not None:
        raise error


NUM_RECENT = 32
# For reporting, and for one slow operation of the store.
MIN_MARGIN_S = 3.0
MARGIN = 0.25  # in addition, as a share of a part's time


class PartPace:
    """The times of the parts of one worker."""

    def __init__(self) -> None:
        self._recent_s: deque[float] = deque(maxlen=NUM_RECENT)

    def note(self, seconds: float) -> None:
        self._recent_s.append(seconds)

    def expected_s(self) -> float:
        """An upper bound for nearly all parts: the longest but one in twenty. 0 before the first."""
        if not self._recent_s:
            return 0.0
        ordered = sorted(self._recent_s)
        return ordered[min(len(ordered) - 1, math.ceil(0.95 * len(ordered)) - 1)]

    def has_time(self, remaining_s: float) -> bool:
        """True if a part started now would probably finish. Before the first part: whether there is
        time to try.
        """
        return remaining_s > (1 + MARGIN) * self.expected_s() + MIN_MARGIN_S
