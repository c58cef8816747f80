"""Waiting for several sockets in one thread: code that says what it waits for, and a race between
such codes.

`PollCoroutine[T]` is a generator that does what it can without blocking, yields a `Wait` where it
would block, and returns a T in the end. It is resumed when its socket may be ready, and at every
tick too, so that it looks at its own time limits: being resumed promises nothing. Closing it gives
up what it was doing. Knows no sockets, only their numbers.
"""

from __future__ import annotations

import select
from collections.abc import Generator
from typing import Generic, NamedTuple, TypeAlias, TypeVar

TICK_S = 0.1  # the longest wait without a look at the clock

T = TypeVar("T")


class Wait(NamedTuple):
    """The condition for a coroutine to go on: these events (`select.POLLIN`, `POLLOUT`) on this
    file descriptor.
    """

    fd: int
    events: int


PollCoroutine: TypeAlias = Generator[Wait, None, T]


def run(steps: PollCoroutine[T]) -> T:
    """The result of one coroutine on its own. Blocks."""
    race = Race[T]()
    race.enter(steps)
    while (won := race.wait()) is None:
        pass
    return won[1]


class Race(Generic[T]):
    """Several ways to one result, two at most as a rule; the first one there wins. For one thread.

    A racer that fails with one of the `passing` errors drops out, unless it is the last one. Any
    other error ends the race.
    """

    def __init__(self, passing: tuple[type[Exception], ...] = ()) -> None:
        self._passing = passing
        self._waits: dict[int, Wait] = {}
        # By number, in the order in which they entered.
        self._racers: dict[int, PollCoroutine[T]] = {}
        self._entered = 0
        self._winner: tuple[int, T] | None = None

    def __len__(self) -> int:
        return len(self._racers)

    def enter(self, racer: PollCoroutine[T]) -> None:
        """Let one more run, as far as it gets without waiting. Raises its error, as `wait` does."""
        number, self._entered = self._entered, self._entered + 1
        self._racers[number] = racer
        self._advance(number)

    def wait(self) -> tuple[int, T] | None:
        """The winner's number (from 0, in order of entry) and result, or None after a tick without
        one.
        """
        if self._winner is None:
            poll = select.poll()
            for wait in self._waits.values():
                poll.register(wait.fd, wait.events)
            poll.poll(TICK_S * 1000)
            for number in list(self._racers):
                if self._winner is None:
                    self._advance(number)
        return self._winner

    def drop_oldest(self) -> None:
        """Give up the racer that entered first."""
        self._forget(next(iter(self._racers))).close()

    def close(self) -> None:
        """Close the racers that are still on the way."""
        while self._racers:
            self.drop_oldest()

    def _advance(self, number: int) -> None:
        try:
            self._waits[number] = next(self._racers[number])
        except StopIteration as end:
            self._forget(number)
            self._winner = (number, end.value)
        except self._passing:
            self._forget(number)
            if not self._racers:
                raise
        except BaseException:
            self._forget(number)
            raise

    def _forget(self, number: int) -> PollCoroutine[T]:
        self._waits.pop(number, None)
        return self._racers.pop(number)
