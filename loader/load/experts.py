"""Experts that are in memory only while they are used: fetched when they are asked for, and given back when others need
their memory.

    want(pages) → queue → threads: evict → fetch → verify → decode → wait(pages) returns

A page is a group with one expert, or, of a group with all experts of a layer, the parts that are one expert's alone.
Invariants: a page is filled only with values whose every stored byte was verified. The pages that were wanted last
are neither evicted nor refilled. Slabs stay at their addresses; an evicted page keeps no memory. A failure concerns the
pages that were asked for: the next `want` tries again. It does not know what a page is for.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from ..errors import PartsUnavailableError, TeneralError
from .accounting import in_part
from .pages import Paging
from .parts import Parts

if TYPE_CHECKING:
    from ..cache.part_cache import PartCache
    from .targets.base import HostTarget

MAX_SPANS = 4_000  # an instance may fetch them for days


class Residency:
    """The pages that have memory, those used longest ago first. Decides, and does nothing. Not thread-safe."""

    def __init__(self, sizes_bytes: Mapping[int, int], budget_bytes: int) -> None:
        self._sizes_bytes = sizes_bytes
        self._budget_bytes = budget_bytes
        self._pages: dict[int, None] = {}  # in this order
        self.used_bytes = 0

    def __contains__(self, page: int) -> bool:
        return page in self._pages

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def pages(self) -> tuple[int, ...]:
        return tuple(self._pages)

    def use(self, pages: Iterable[int]) -> None:
        """These are used now, as far as they have memory."""
        for page in pages:
            if page in self._pages:
                del self._pages[page]
                self._pages[page] = None

    def victims(self, page: int, kept: Collection[int]) -> list[int] | None:
        """The pages that make way for this one, those used longest ago; none of `kept`. None if that is not enough."""
        missing_bytes = self.used_bytes + self._sizes_bytes[page] - self._budget_bytes
        found: list[int] = []
        for each in self._pages:
            if missing_bytes <= 0:
                break
            if each not in kept:
                found.append(each)
                missing_bytes -= self._sizes_bytes[each]
        return found if missing_bytes <= 0 else None

    def admit(self, page: int) -> None:
        assert page not in self._pages
        self._pages[page] = None
        self.used_bytes += self._sizes_bytes[page]

    def evict(self, page: int) -> None:
        del self._pages[page]
        self.used_bytes -= self._sizes_bytes[page]


class PagerStatistics(NamedTuple):
    """Counts of pages, and bytes as they are stored, unless stated otherwise; since the start."""

    budget_bytes: int  # in memory
    resident_bytes: int  # in memory
    resident: int
    hits_total: int  # pages that were asked for and there
    misses_total: int
    evictions_total: int
    failures_total: int
    fetched_bytes_total: int
    refetched_bytes_total: int  # of pages that had been there before
    wait_seconds_total: float  # of callers of `wait`


class Pager:
    """Fetches pages into their slabs on demand. All methods may be called from any thread."""

    def __init__(
        self,
        parts: Parts,
        paging: Paging,
        target: HostTarget,
        *,
        want_parts: Callable[[Collection[int]], None],
        wait_parts: Callable[[Collection[int], float | None], None],
        cache: PartCache | None = None,
    ) -> None:
        """`want_parts` and `wait_parts` are the load's, for parts that stay. `cache` is what `parts` reads, and closed
        here.
        """
        self._parts = parts
        self._target = target
        self._want_parts, self._wait_parts = want_parts, wait_parts
        self.cache = cache
        self._paging = paging
        self._pages = paging.pages
        sizes = {number: page.size_bytes for number, page in paging.pages.items()}
        self._residency = Residency(sizes, paging.budget_bytes)
        self._changed = threading.Condition()
        self._wanted: frozenset[int] = frozenset()
        self._queue: deque[int] = deque()  # wanted, without memory
        self._filling: set[int] = set()
        self._filled: set[int] = set()
        self._known: set[int] = set()  # that were filled before
        self._errors: dict[int, TeneralError] = {}
        self._stopped: TeneralError | None = None
        self._hits = self._misses = self._evictions = self._failures = 0
        self._fetched_bytes = self._refetched_bytes = 0
        self._wait_s = 0.0
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads, which sleep until something is wanted."""
        self._threads = [
            threading.Thread(target=self._run, name=f"teneral-experts-{number}", daemon=True)
            for number in range(self._paging.num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def pages_of(self, group: int) -> tuple[int, ...]:
        """The numbers of a group's pages: its own, or each expert's where it holds all of a layer."""
        return tuple(number for number, page in self._pages.items() if page.group == group)

    def want(self, pages: Collection[int]) -> None:
        """Have these pages in memory until the next call, and what they share with others; fetch what is not there.
        Returns at once.
        """
        wanted = frozenset(pages)
        with self._changed:
            if wanted != self._wanted or self._errors:
                self._wanted = wanted
                self._errors.clear()
                ordered = sorted(wanted)
                self._residency.use(ordered)
                self._queue = deque(page for page in ordered if page not in self._residency)
                num_missing = len(wanted - self._filled)
                self._misses += num_missing
                self._hits += len(wanted) - num_missing
                self._changed.notify_all()
        if shared := self._shared_by(pages):
            self._want_parts(shared)

    def wait(self, pages: Collection[int], timeout_s: float | None = None) -> bool:
        """Block until these pages, the wanted ones, hold their exact values; False after `timeout_s`. Raises
        `PartsUnavailableError` if one of them could not be read or was wrong, and the load's error.
        """
        begun_s = time.monotonic()
        if shared := self._shared_by(pages):
            try:
                self._wait_parts(shared, timeout_s)
            except TimeoutError:
                return False
        with self._changed:
            self._changed.wait_for(lambda: self._is_decided(pages), timeout_s)
            self._wait_s += time.monotonic() - begun_s
            if self._filled.issuperset(pages):
                return True
            error = self._stopped or next(
                (self._errors[each] for each in pages if each in self._errors), None
            )
            if error is not None:
                raise copy.copy(error) from error.__cause__
            return False

    def _shared_by(self, pages: Collection[int]) -> set[int]:
        """The numbers of the parts that these pages share with others."""
        return set().union(*(self._pages[page].shared for page in pages))

    def statistics(self) -> PagerStatistics:
        with self._changed:
            return PagerStatistics(
                self._paging.budget_bytes,
                self._residency.used_bytes,
                len(self._residency),
                self._hits,
                self._misses,
                self._evictions,
                self._failures,
                self._fetched_bytes,
                self._refetched_bytes,
                self._wait_s,
            )

    def check_integrity(self) -> None:
        """Raise `RuntimeError` if the books do not agree."""
        with self._changed:
            if set(self._residency.pages) != self._filled | self._filling or self._filled & self._filling:
                raise RuntimeError("pages have memory that are neither filled nor being filled, or both")
            if self._residency.used_bytes > self._paging.budget_bytes:
                raise RuntimeError("pages have more memory than there is")

    def stop(self, error: TeneralError) -> None:
        """Fetch nothing more; waiting threads get this error."""
        with self._changed:
            self._stopped = self._stopped or error
            self._changed.notify_all()

    @property
    def is_busy(self) -> bool:
        """True if something is being fetched."""
        with self._changed:
            return bool(self._filling)

    def close(self) -> None:
        """Wait, after `stop`, until the threads have ended, and give the cache what is left."""
        for thread in self._threads:
            thread.join()
        if self.cache is not None:
            self.cache.finish()

    def _is_decided(self, pages: Collection[int]) -> bool:
        is_failed = self._stopped is not None or not self._errors.keys().isdisjoint(pages)
        return is_failed or self._filled.issuperset(pages)

    # ---- the threads ----

    def _run(self) -> None:
        from ..format.fill import Scratch

        buffer, scratch = memoryview(bytearray(self._paging.part_bytes)), Scratch()
        while (page := self._next()) is not None:
            failure: TeneralError | None = None
            try:
                for part in self._pages[page].parts:
                    stored = buffer[: part.size_bytes]
                    self._parts.read(part, stored)
                    self._parts.fill(part, stored, self._target.place, scratch)
                    self._parts.keep(part, stored)
            except TeneralError as error:
                failure = error
            except Exception as error:  # noqa: BLE001 - a defect fails the pass like any other error
                failure = in_part(
                    error, self._parts.manifest, self._pages[page].parts[0], self._parts.source_url
                )
                failure.__cause__ = error
            self._settle(page, failure)

    def _next(self) -> int | None:
        """The next page to fill, which has its memory now. Blocks; None at the end."""
        with self._changed:
            while self._stopped is None:
                if self._queue:
                    page = self._queue[0]
                    victims = self._residency.victims(page, self._wanted | self._filling)
                    if victims is not None:
                        self._queue.popleft()
                        for each in victims:
                            self._give_back(each)
                        self._evictions += len(victims)
                        self._residency.admit(page)
                        self._filling.add(page)
                        return page
                self._changed.wait()
            return None

    def _give_back(self, page: int) -> None:
        self._filled.discard(page)
        self._residency.evict(page)
        for begin, end in self._pages[page].ranges:
            self._target.discard_range(self._pages[page].group, begin, end)

    def _settle(self, page: int, failure: TeneralError | None) -> None:
        size_bytes = sum(part.size_bytes for part in self._pages[page].parts)
        with self._changed:
            self._filling.remove(page)
            if failure is None:
                self._filled.add(page)
                self._fetched_bytes += size_bytes
                self._refetched_bytes += size_bytes if page in self._known else 0
                self._known.add(page)
            else:
                self._failures += 1
                self._give_back(page)
                if page in self._wanted:
                    self._errors[page] = PartsUnavailableError(failure.message, hint=failure.hint)
                    self._errors[page].__cause__ = failure
            self._changed.notify_all()
