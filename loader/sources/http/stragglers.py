"""Slow reads: readers of a source compared, and a second request for one that has fallen behind the
others.

A reader is *behind* when, for a while, it got less than an eighth of what the others got on the
average, and those got enough for that to mean something. So on a slow link, on which all get
little, no reader is behind. Where the others got nothing either, or where there are none, time must
do: then one reader at a time, for all, may try whether asking again helps.

The second request goes out on a new connection, for the bytes that are still missing. Whichever
brings the next bytes goes on; the other connection is closed. There is no second buffer: both
answers are of one version of one object, so where they overlap they write the same bytes to the
same place.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ...errors import UnavailableError
from .connections import Connection, ConnectionPool
from .head import RangeRead
from .outage import HttpTally
from .poll_coroutines import PollCoroutine, Race
from .retry import Throttle, TokenBucket
from .wire import MAX_SLICE_BYTES, WireError

SLOW_SHARE = 8  # a reader that gets less than this fraction (1/8) of what others get is behind
# What each of the others must have got before a comparison means anything.
TELLING_BYTES = 256 * 1024
NUM_FIRST_BYTES = 128  # times to the first byte that are remembered
PATIENCE_FACTOR = 3.0  # how far beyond the usual time to the first byte a silence may go
FREE_HEDGES = 12.0  # a load of few requests may ask again so often …
HEDGE_SHARE = 0.05  # … and any other in one of twenty requests
MAX_HEDGES = 32.0  # that may be saved up


class Stragglers:
    """The comparison of one source's reads. Thread-safe; never blocks."""

    def __init__(
        self, hedge_after_s: float, throttle: Throttle, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`hedge_after_s`: no reader is behind sooner than this; 0: none ever is."""
        self.hedge_after_s = hedge_after_s
        self.clock = clock
        self._throttle = throttle
        self._bucket = TokenBucket(at_first=FREE_HEDGES, share=HEDGE_SHARE, most=MAX_HEDGES)
        self._first_bytes_s: deque[float] = deque(maxlen=NUM_FIRST_BYTES)
        self._lock = threading.Lock()
        self.received_bytes = 0  # by all readers
        self.num_readers = 0
        self.usual_bytes_s = 0.0  # what one reader gets, by the ranges that are done
        self.prober: Watch | None = None  # the reader that tries for all while none gets anything

    @contextmanager
    def watching(self) -> Iterator[Watch]:
        """Count as a reader for so long."""
        self._bucket.earn()
        with self._lock:
            self.num_readers += 1
        watch = Watch(self)
        try:
            yield watch
        finally:
            with self._lock:
                self.num_readers -= 1
                if self.prober is watch:
                    self.prober = None
                rate = watch.rate_bytes_s()
                if rate:
                    self.usual_bytes_s = (
                        rate if not self.usual_bytes_s else (3 * self.usual_bytes_s + rate) / 4
                    )

    def answered(self, first_byte_s: float) -> None:
        """An answer's first byte came so long after it was asked for."""
        self._first_bytes_s.append(first_byte_s)

    def received(self, count: int) -> None:
        with self._lock:
            self.received_bytes += count
            self.prober = None

    def patience_s(self) -> float:
        """The time that a reader may get nothing before it is suspected. Infinite where hedging is off."""
        if not self.hedge_after_s:
            return float("inf")
        times_s = sorted(self._first_bytes_s.copy())
        usual_s = times_s[len(times_s) * 95 // 100] if times_s else 0.0
        return max(self.hedge_after_s, PATIENCE_FACTOR * usual_s)

    def may_hedge(self, watch: Watch, *, is_alone: bool) -> bool:
        """True if the reader may ask a second time; if so, that is paid for."""
        with self._lock:
            if is_alone and self.prober not in (None, watch):
                return False
            if self._throttle.is_pausing or not self._bucket.spend():
                return False
            if is_alone:
                self.prober = watch
            return True


class Watch:
    """One reader's own books. For its thread alone."""

    def __init__(self, stragglers: Stragglers) -> None:
        self._stragglers = stragglers
        self._hedges = 0
        self._began_s = self._since_s = self._others_s = stragglers.clock()
        self._since_bytes = stragglers.received_bytes  # what all had got when the comparison began
        self._total_bytes = self._own_bytes = self._others_bytes = 0

    def received(self, count: int, *, wanted: int) -> None:
        """Bytes have come, of `wanted` at most."""
        if not count:
            return
        self._stragglers.received(count)
        self._total_bytes += count
        self._own_bytes += count
        if count == wanted:
            self._restart(self._stragglers.clock())  # all that could come: nothing to compare

    def wants_hedge(self) -> bool:
        """True if the reader is behind the others, and may do something about it. Cheap when it is
        not.
        """
        now_s = self._stragglers.clock()
        elapsed_s = now_s - self._since_s
        others_bytes = self._stragglers.received_bytes - self._since_bytes - self._own_bytes
        if others_bytes > self._others_bytes:
            self._others_bytes, self._others_s = others_bytes, now_s
        if elapsed_s < self._stragglers.hedge_after_s:
            return False
        patience_s = self._stragglers.patience_s() * (1 << self._hedges)
        if elapsed_s < patience_s:
            return False
        is_alone = now_s - self._others_s >= patience_s
        if is_alone:
            expected_bytes = self._stragglers.usual_bytes_s * elapsed_s
        else:
            expected_bytes = others_bytes / max(1, self._stragglers.num_readers - 1)
            if expected_bytes < TELLING_BYTES:
                return False
        is_behind = not self._own_bytes or self._own_bytes < expected_bytes / SLOW_SHARE
        if not is_behind:
            self._restart(now_s)
        elif self._stragglers.may_hedge(self, is_alone=is_alone):
            self._hedges += 1
            self._restart(now_s)
            return True
        return False

    def rate_bytes_s(self) -> float:
        return self._total_bytes / max(1e-6, self._stragglers.clock() - self._began_s)

    def _restart(self, now_s: float) -> None:
        """Compare from now on."""
        self._since_s = self._others_s = now_s
        self._since_bytes = self._stragglers.received_bytes
        self._own_bytes = 0
        self._others_bytes = 0


# What an answer that was behind must bring to win against a new one's first byte.
RECOVERED_BYTES = 64 * 1024

T = TypeVar("T")


class RangeAnswer:
    """A right answer's body that has begun. `done` is how far the range is filled by it."""

    __slots__ = ("connection", "done")

    def __init__(self, connection: Connection, done: int) -> None:
        self.connection = connection
        self.done = done


def first_to_answer(
    first: PollCoroutine[T],
    again: Callable[[], PollCoroutine[T]],
    watch: Watch,
    tally: HttpTally,
    *,
    is_behind: bool = False,
) -> T:
    """The result of `first`, or of another request made by `again` each time the reader is behind.

    Two are on their way at a time: a third takes the place of the oldest. Blocks, without the GIL.
    Raises the last one's `WireError` or `UnavailableError`; any other error at once.
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


def _hedge(race: Race[T], again: Callable[[], PollCoroutine[T]], tally: HttpTally) -> None:
    tally.add(hedges=1)
    race.enter(again())


class HedgedRead:
    """Fills a range's memory in one attempt, which may take several requests. For one thread."""

    def __init__(
        self,
        wanted: RangeRead,
        view: memoryview,
        *,
        ask: Callable[[bool], PollCoroutine[RangeAnswer]],
        pool: ConnectionPool,
        stragglers: Stragglers,
        tally: HttpTally,
    ) -> None:
        """`ask(fresh)` asks for what `wanted` is missing, over a new connection if `fresh`."""
        self._wanted = wanted
        self._view = view
        self._ask = ask
        self._pool = pool
        self._stragglers = stragglers
        self._tally = tally

    def run(self, *, fresh: bool) -> None:
        """Return when the range is full. Raises what stopped it; `wanted.done` says how far it got."""
        with self._stragglers.watching() as watch:
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

    def _read_on(self, answer: RangeAnswer, watch: Watch) -> bool:
        """Read until the range is full (then the connection is given back), or until it is behind:
        True.
        """
        while answer.done < len(self._view):
            rest = self._view[answer.done :]
            count = answer.connection.read_some(rest)
            self._got(answer, count)
            watch.received(count, wanted=min(len(rest), MAX_SLICE_BYTES))
            if answer.done < len(self._view) and watch.wants_hedge():
                return True
        self._pool.give_back(answer.connection)
        return False

    def _ask_again(self) -> PollCoroutine[RangeAnswer]:
        return self._ask(True)

    def _catch_up(self, answer: RangeAnswer, watch: Watch) -> PollCoroutine[RangeAnswer]:
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

    def _got(self, answer: RangeAnswer, count: int) -> None:
        begin, answer.done = answer.done, answer.done + count
        new = max(0, answer.done - max(begin, self._wanted.done))
        self._wanted.done = max(self._wanted.done, answer.done)
        if count:
            self._tally.add(received_bytes=count, wasted_bytes=count - new)
