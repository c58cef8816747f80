"""One thread's wait for an answer, over one connection or over two: asking again where the first is behind.

The second request goes out on a new connection, for the bytes that are still missing. Whichever brings
the next bytes goes on; the other connection is closed. There is no second buffer: both answers are of one
version of one object, so where they overlap they write the same bytes to the same place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..errors import UnavailableError
from .http1 import Connection
from .http_pool import ConnectionPool
from .http_range import RangeRead
from .http_statistics import Tally
from .pace import Pace, Watch
from .steps import Race, Steps
from .wire import MAX_SLICE_BYTES, WireError

RECOVERED_BYTES = 64 * 1024  # what an answer that was behind must bring to win against a new one's first byte

T = TypeVar("T")


class Answer:
    """A right answer's body that has begun. `done` is how far the range is filled by it."""

    __slots__ = ("connection", "done")

    def __init__(self, connection: Connection, done: int) -> None:
        self.connection = connection
        self.done = done


def first_to_answer(
    first: Steps[T], again: Callable[[], Steps[T]], watch: Watch, tally: Tally, *, is_behind: bool = False
) -> T:
    """The result of `first`, or of another request made by `again` each time the reader is behind.

    Two are on their way at a time: a third takes the place of the oldest. Blocks, without the GIL. Raises
    the last one's `WireError` or `UnavailableError`; any other error at once.
    """
    race = Race[T](passing=(WireError, UnavailableError))
    try:
        race.enter(first)
        if is_behind and len(race):  # else it has won already
            _hedge(race, again, tally)
        while (winner := race.wait()) is None:
            if watch.wants_hedge():
                if len(race) > 1:
                    race.drop_oldest()
                _hedge(race, again, tally)
    finally:
        race.close()
    number, result = winner
    if number:
        tally.add(hedges_won=1)
    return result


def _hedge(race: Race[T], again: Callable[[], Steps[T]], tally: Tally) -> None:
    tally.add(hedges=1)
    race.enter(again())


class HedgedRead:
    """Fills a range's memory in one attempt, which may take several requests. For one thread."""

    def __init__(
        self,
        wanted: RangeRead,
        view: memoryview,
        *,
        ask: Callable[[bool], Steps[Answer]],
        pool: ConnectionPool,
        pace: Pace,
        tally: Tally,
    ) -> None:
        """`ask(fresh)` asks for what `wanted` is missing, over a new connection if `fresh`."""
        self._wanted = wanted
        self._view = view
        self._ask = ask
        self._pool = pool
        self._pace = pace
        self._tally = tally

    def run(self, *, fresh: bool) -> None:
        """Return when the range is full. Raises what stopped it; `wanted.done` says how far it got."""
        with self._pace.watching() as watch:
            answer = first_to_answer(self._ask(fresh), self._ask_again, watch, self._tally)
            while True:
                try:
                    if not self._read_on(answer, watch):
                        return
                except BaseException:
                    self._pool.give_back(answer.connection)
                    raise
                answer = first_to_answer(
                    self._catch_up(answer, watch), self._ask_again, watch, self._tally, is_behind=True
                )

    def _read_on(self, answer: Answer, watch: Watch) -> bool:
        """Read until the range is full (then the connection is given back), or until it is behind: True."""
        while answer.done < len(self._view):
            rest = self._view[answer.done :]
            count = answer.connection.read_some(rest)
            self._got(answer, count)
            watch.received(count, wanted=min(len(rest), MAX_SLICE_BYTES))
            if answer.done < len(self._view) and watch.wants_hedge():
                return True
        self._pool.give_back(answer.connection)
        return False

    def _ask_again(self) -> Steps[Answer]:
        return self._ask(True)

    def _catch_up(self, answer: Answer, watch: Watch) -> Steps[Answer]:
        """The answer itself, once it has brought enough to be trusted again."""
        enough = min(len(self._view), answer.done + RECOVERED_BYTES)
        try:
            while answer.done < enough:
                rest = self._view[answer.done : enough]
                count = yield from answer.connection.read_soon(rest)
                self._got(answer, count)
                watch.received(count, wanted=MAX_SLICE_BYTES)
        except BaseException:  # it failed, or it lost
            self._pool.give_back(answer.connection)
            raise
        return answer

    def _got(self, answer: Answer, count: int) -> None:
        begin, answer.done = answer.done, answer.done + count
        new = max(0, answer.done - max(begin, self._wanted.done))
        self._wanted.done = max(self._wanted.done, answer.done)
        if count:
            self._tally.add(received_bytes=count, wasted_bytes=count - new)
