"""A source around another one, whose reads a test holds back, slows, fails or spoils.

    source = PacedSource(store)
    held = source.hold(reads_of(manifest, part))   # these reads block …
    held.wait_reached()                            # … one of them was asked for …
    held.release()                                 # … and now they go on

It passes the bytes through untouched otherwise, and keeps a log of what was asked for in `calls`.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.support.load import patience_s

from teneral.loader.errors import SourceClosedError
from teneral.loader.format.manifest import Manifest, Part
from teneral.loader.sources.base import ObjectInfo, Source

WAIT_S = patience_s(30)  # a test that waits longer has failed


@dataclass(frozen=True, slots=True)
class Call:
    """One `read_into` of bytes [start, end) of an object."""

    name: str
    start: int
    end: int


Rule = Callable[[Call], bool]


def every_read(call: Call) -> bool:
    return True


def reads_of(manifest: Manifest, *parts: Part) -> Rule:
    """The reads that touch any of these parts."""
    places = [
        (manifest.blobs[part.blob].name, part.offset_bytes, part.offset_bytes + part.size_bytes)
        for part in parts
    ]
    return lambda call: any(
        call.name == name and call.start < end and begin < call.end for name, begin, end in places
    )


class Hold:
    """Reads that wait: made by `PacedSource.hold`."""

    def __init__(self, applies: Rule, condition: threading.Condition) -> None:
        self.applies = applies
        self._condition = condition
        self._num_reached = 0
        self.released = False

    def reach(self) -> None:
        self._num_reached += 1
        self._condition.notify_all()

    def wait_reached(self, count: int = 1) -> None:
        """Return when that number of reads wait here, or have."""
        with self._condition:
            if not self._condition.wait_for(lambda: self._num_reached >= count, WAIT_S):
                raise TimeoutError(f"{self._num_reached} of {count} reads came to the hold")

    @property
    def num_reached(self) -> int:
        return self._num_reached

    def release(self) -> None:
        with self._condition:
            self.released = True
            self._condition.notify_all()


class PacedSource:
    """A `Source`. Rules may be added at any time, and apply to the reads that begin afterwards."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._condition = threading.Condition()
        self._holds: list[Hold] = []
        self._failures: list[tuple[Rule, Callable[[], Exception]]] = []
        self._spoiled: list[list[object]] = []  # [rule, times left]
        self._delays: tuple[random.Random, float] | None = None
        self.closed = False
        self.calls: list[Call] = []

    def hold(self, applies: Rule = every_read) -> Hold:
        """Make these reads wait until released. A closed source wakes them with `SourceClosedError`."""
        hold = Hold(applies, self._condition)
        with self._condition:
            self._holds.append(hold)
        return hold

    def fail(self, error: Callable[[], Exception], applies: Rule = every_read) -> None:
        """Make these reads raise."""
        with self._condition:
            self._failures.append((applies, error))

    def spoil(self, applies: Rule = every_read, *, times: int) -> None:
        """Flip a bit in what the next `times` of these reads deliver."""
        with self._condition:
            self._spoiled.append([applies, times])

    def delay(self, *, seed: int, max_s: float) -> None:
        """Make every read take a random while longer, so that they end in any order."""
        self._delays = random.Random(seed), max_s

    @property
    def url(self) -> str:
        return self._source.url

    def stat(self, name: str) -> ObjectInfo:
        return self._source.stat(name)

    def read(self, name: str, *, max_bytes: int) -> tuple[bytes, ObjectInfo]:
        return self._source.read(name, max_bytes=max_bytes)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self._source.list(prefix)

    def read_into(self, name: str, start: int, buffer: memoryview, *, version: str | None = None) -> None:
        call = Call(name, start, start + len(buffer))
        with self._condition:
            self.calls.append(call)
            self._wait_for_holds(call)
            for applies, error in self._failures:
                if applies(call):
                    raise error()
            spoil = self._takes_spoil(call)
            pause_s = self._delays[0].random() * self._delays[1] if self._delays else 0.0
        time.sleep(pause_s)
        self._source.read_into(name, start, buffer, version=version)
        if spoil and len(buffer):
            buffer[len(buffer) // 2] ^= 0x10

    def close(self) -> None:
        with self._condition:
            self.closed = True
            self._condition.notify_all()
        self._source.close()

    def _wait_for_holds(self, call: Call) -> None:
        for hold in [hold for hold in self._holds if hold.applies(call)]:
            hold.reach()
            self._condition.wait_for(lambda hold=hold: hold.released or self.closed)
        if self.closed:
            raise SourceClosedError(f"reading {call.name} was given up", source=self.url, name=call.name)

    def _takes_spoil(self, call: Call) -> bool:
        for rule in self._spoiled:
            applies, times = rule
            if times and applies(call):
                rule[1] = times - 1
                return True
        return False
