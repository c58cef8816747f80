"""One worker: takes parts that are missing, has their lines answered, and makes each part visible when it is whole.

A few parts are open at a time, so that the last lines of one share the engine with the first of the next; that many
parts of work are lost when the process is killed, at most. Nothing is locked: what two workers do twice is visible once
(`parts.put_part`). It does not know where lines are answered, nor how a job begins and ends.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ..function.lifetime import Lifetime, calling_on_loop
from .answers import Answers
from .index import JobIndex
from .lines import Embed, Line
from .meter import Meter
from .pace import PartPace
from .partial import read_partial, remove_partial, write_partial
from .parts import PartInfo, describe_part, is_there, put_part, read_lines
from .places import Places
from .records import Record

MIN_OPEN_PARTS = 2
MAX_EMBED_TEXTS = 32  # of one call: of similar length, so that few tokens are padding
CUT_S = 1.5  # before the deadline, what is still being worked on is given up, and what is finished of it kept
MAX_LEAVING_S = 5.0  # for that, where there is no deadline


@dataclass(slots=True)
class _OpenPart:
    """A part that is being worked on: its lines, and their records as they come."""

    number: int
    lines: list[Line]
    records: list[Record | None]
    num_answered: int = 0  # by this worker
    begun_s: float = field(default_factory=time.monotonic)


class Worker:
    """Lives on one event loop; used once."""

    def __init__(
        self,
        places: Places,
        index: JobIndex,
        answers: Answers,
        *,
        input_version: str,
        meter: Meter,
        lifetime: Lifetime,
        drain_s: float,
        window: int,
        partials: frozenset[int] = frozenset(),
    ) -> None:
        """`window` is how many lines are worked on at a time; of the parts in `partials`, some records are known."""
        self.written: dict[int, PartInfo] = {}  # parts that this worker made visible
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
        self._partials = partials
        self._pace = PartPace()
        self._open: dict[int, _OpenPart] = {}
        self._answered_s: float | None = None  # when the first record came
        self._stopped_s: float | None = None

    async def run(self, order: Sequence[int]) -> None:
        """Do these parts, as many as there is time for. Ends early when the lifetime does; raises what ended it else.

        What was finished of parts that did not become whole is left in the store, for who goes on.
        """
        waiting, tasks = deque(order), dict[asyncio.Task[None], int]()
        stopped = asyncio.Event()
        forget = self._lifetime.on_cancel(calling_on_loop(asyncio.get_running_loop(), stopped.set))
        watch = asyncio.create_task(_until(stopped))
        try:
            while self._begin(waiting, tasks):
                watched = {*tasks} if watch.done() else {*tasks, watch}
                done, _ = await asyncio.wait(
                    watched, timeout=self._patience_s(), return_when=asyncio.FIRST_COMPLETED
                )
                if watch in done:
                    self._stopped_s = time.monotonic()
                elif not done:
                    break  # time is up
                for task in done - {watch}:
                    del tasks[task]
                    _raise_first(task)
        finally:
            forget()
            watch.cancel()
            await _end(tasks)
            await self._leave_partials()

    def _begin(self, waiting: deque[int], tasks: dict[asyncio.Task[None], int]) -> bool:
        """Open parts while there is room and time. Returns whether any is open."""
        while waiting and len(tasks) < self._max_open and self._has_time():
            number = waiting.popleft()
            tasks[asyncio.create_task(self._do_part(number))] = number
        return bool(tasks)

    def _count_open(self) -> int:
        """So many that the window is full while the last lines of one part are worked on."""
        sizes = sorted(part.num_records for part in self._index.parts)
        return max(MIN_OPEN_PARTS, 1 + math.ceil(self._window_lines / sizes[len(sizes) // 2]))

    def _has_time(self) -> bool:
        return not self._lifetime.cancelled and self._pace.has_time(self._lifetime.remaining_s())

    def _patience_s(self) -> float | None:
        """How long what is open is waited for; None: for ever."""
        left_s = self._lifetime.remaining_s() - CUT_S
        if self._stopped_s is not None:
            left_s = min(left_s, self._stopped_s + self._drain_s - time.monotonic())
        return None if left_s == math.inf else max(0.0, left_s)

    async def _do_part(self, number: int) -> None:
        num_records = self._index.parts[number].num_records
        if await asyncio.to_thread(is_there, self._places.work, number):
            self._meter.part_done(num_records)  # another worker's
            return
        lines = await asyncio.to_thread(
            read_lines, self._places.input, self._input_version, self._index, number
        )
        part = self._open[number] = _OpenPart(number, lines, [None] * len(lines))
        if number in self._partials:
            part.records = await asyncio.to_thread(read_partial, self._places.work, number, lines)
        # All of one part are begun before the first of the next, so that it is whole first.
        async with asyncio.TaskGroup() as group, self._turn:
            for indices in units_of(lines, skip=lambda index: part.records[index] is not None):
                await self._window.acquire()
                group.create_task(self._answer(part, indices))
        await self._write(part)

    async def _answer(self, part: _OpenPart, indices: list[int]) -> None:
        """Some lines of one part: one, or several that are embedded together. Gives its place in the window back."""
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
            self._answered_s = self._answered_s or time.monotonic()
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
        # The wait for the weights is not a part's time: it comes once.
        self._pace.note(time.monotonic() - max(part.begun_s, self._answered_s or part.begun_s))
        if part.number in self._partials:
            await asyncio.to_thread(remove_partial, self._places.work, part.number)

    async def _leave_partials(self) -> None:
        """Nothing depends on it: it hides no other error, and is not waited for beyond the deadline."""
        writes = asyncio.gather(
            *(
                asyncio.to_thread(write_partial, self._places.work, part.number, part.lines, part.records)
                for part in self._open.values()
                if part.num_answered
            ),
            return_exceptions=True,
        )
        await asyncio.wait([writes], timeout=min(MAX_LEAVING_S, self._lifetime.remaining_s()))


def units_of(lines: Sequence[Line], *, skip: Callable[[int], bool] = lambda _: False) -> Iterator[list[int]]:
    """What of a part is worked on at once, as indices of its lines, in the order in which it is begun.

    Long lines come first: a part is as late as its last line. Texts to be embedded go together with those of a similar
    length.
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


async def _end(tasks: Iterable[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _raise_first(task: asyncio.Task[None]) -> None:
    """What ended the task, if anything did: of several errors at once, the first."""
    error = task.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if error is not None:
        raise error
