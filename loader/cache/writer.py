"""Writes to the part cache during a load, which never waits for them; their pace and their
counters.

A part is copied into memory of the writer's own and written by one thread. The copy costs little
(20 GB/s), and buys that a disk that blocks can never hold up a load: no memory of the load's is
lent to it. When that memory is full, parts are dropped. While the load runs, the thread keeps to a
share of the CPU that is left idle; afterwards it hurries.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import NamedTuple

from ..errors import InsufficientMemoryError
from ..format.manifest import MAX_PART_BYTES
from ..memory.staging import Buffer, Staging
from ..process.cpu import available_cores
from .folder import CacheFolder


class CacheStatistics(NamedTuple):
    """Sizes in bytes. `troubles` are sentences for people: why the cache is not, or no longer, used
    as it was meant.
    """

    num_hits: int = 0  # ranges that were read from the disk
    num_misses: int = 0  # ranges that had to come from the store
    read_bytes: int = 0
    num_written: int = 0  # parts
    written_bytes: int = 0
    # Parts that were not written, because the disk was full, or slower than the load.
    num_dropped: int = 0
    num_rejected: int = 0  # parts whose bytes on the disk were wrong
    num_evicted: int = 0  # parts that this process removed to make room
    troubles: tuple[str, ...] = ()


class CacheTally:
    """Adds up. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._statistics = CacheStatistics()

    def add(self, **amounts: int) -> None:
        """Add to counters, by their names in `CacheStatistics`."""
        with self._lock:
            sums = {name: getattr(self._statistics, name) + amount for name, amount in amounts.items()}
            self._statistics = self._statistics._replace(**sums)

    def add_trouble(self, sentence: str) -> None:
        """Once each."""
        with self._lock:
            if sentence not in self._statistics.troubles:
                self._statistics = self._statistics._replace(troubles=(*self._statistics.troubles, sentence))

    def statistics(self) -> CacheStatistics:
        return self._statistics


PLACES = 4  # reads from the disk at the same time: enough for the queue of an SSD
WAIT_S = 0.1  # for a place, on a fast disk
FAST_BYTES_S = 100e6  # one reader's rate; a disk that gives less is no better than a network
FAST_GRACE_S = 0.05  # beyond that, for a thread that has to wait for its CPU
CRAWL_BYTES_S = 20e6  # one reader's rate; below it, a read is given up
CRAWL_GRACE_S = 0.25
WRITER_SHARE = 0.25  # of the cores that the load leaves idle: the share that writing may take
MIN_IDLE_CORES = 0.1  # assumed at least, so that something is written even so
MAX_REST_S = 1.0


class ReadGate:
    """Few threads read from the disk at a time.

    On a fast disk the others wait for their turn, which comes in a moment. On a slow one they are
    sent to the store, so that disk and store bring parts side by side, and the load has at least
    the store's rate.
    """

    def __init__(self) -> None:
        self._places = threading.BoundedSemaphore(PLACES)
        self._slow = False

    def enter(self) -> bool:
        """True if the caller may read from the disk now; it must `leave` then."""
        if self._places.acquire(blocking=False):
            return True
        return not self._slow and self._places.acquire(timeout=WAIT_S)

    def leave(self) -> None:
        """Give the place back."""
        self._places.release()

    def note(self, size_bytes: int, elapsed_s: float) -> None:
        """So much was read in that time. The latest such note says what the disk is like."""
        self._slow = elapsed_s > FAST_GRACE_S + size_bytes / FAST_BYTES_S


def is_crawling(size_bytes: int, elapsed_s: float) -> bool:
    """True if a read of `size_bytes` that is not done after so long is not worth waiting for."""
    return elapsed_s > CRAWL_GRACE_S + size_bytes / CRAWL_BYTES_S


def rest_s(cpu_s: float, delay_s: float, elapsed_s: float, idle_cores: float) -> float:
    """How long a writer rests that used `cpu_s` of CPU time in `elapsed_s`, to keep to its share of
    the idle cores.

    `idle_cores` is what its own process leaves. Others' use of them shows in `delay_s`, for which
    the writer was ready to run and had to wait; then it takes less, by the square.
    """
    if cpu_s <= 0:
        return 0.0
    left = max(MIN_IDLE_CORES, idle_cores) * (cpu_s / (cpu_s + delay_s)) ** 2
    return min(MAX_REST_S, max(0.0, cpu_s / (WRITER_SHARE * left) - elapsed_s))


PENDING_BYTES = 32 * 1024 * 1024  # what waits to be written, unless it is a single larger part


class CacheWriter:
    """Writes to a folder. All methods may be called from any thread."""

    def __init__(self, folder: CacheFolder, tally: CacheTally) -> None:
        self._folder = folder
        self._tally = tally
        self._wake = threading.Condition()
        self._staging: Staging | None = None  # mapped when there is something to write
        self._queue: deque[tuple[bytes, Buffer]] = deque()
        # Digests that are in the queue, or on their way in or out.
        self._pending: set[bytes] = set()
        self._thread: threading.Thread | None = None
        self._finished = False  # nothing more will be offered
        self._broken = False  # nothing more can be written

    def offer(self, digest: bytes, data: memoryview) -> bool:
        """Take a copy of the part to be written some time; False when there is no room for it now.

        Takes as long as the copy does, without the GIL, and never waits for the disk.
        """
        with self._wake:
            if self._finished or self._broken or digest in self._pending:
                return False
            loan = self._lend(len(data))
            if loan is None:
                self._tally.add(num_dropped=1)
                return False
            self._pending.add(digest)
        _copy(data, loan.data)
        with self._wake:
            self._queue.append((digest, loan))
            self._wake.notify_all()
        return True

    def finish(self) -> None:
        """Take no more parts, and write what was taken as fast as the disk allows. Returns at once."""
        with self._wake:
            self._finished = True
            self._wake.notify_all()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait, after `finish`, until all is written; False when it is not after `timeout_s`."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _lend(self, size_bytes: int) -> Buffer | None:
        if not 0 < size_bytes <= MAX_PART_BYTES or self._folder.has_refused(size_bytes):
            return None
        if not self._is_running():
            return None
        assert self._staging is not None
        if self._staging.used_bytes > max(0, PENDING_BYTES - size_bytes):
            return None
        return self._staging.acquire(size_bytes)

    def _is_running(self) -> bool:
        """Start at the first part. False when the system refuses the memory or the thread."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="teneral-cache", daemon=True)
            try:
                self._staging = Staging(MAX_PART_BYTES)
                thread.start()
            except (InsufficientMemoryError, RuntimeError) as error:
                self._give_up(str(error))
                return False
            self._thread = thread
        return True

    def _run(self) -> None:
        num_cores, started_s, started_cpu_s = available_cores(), time.monotonic(), time.process_time()
        while (task := self._next()) is not None:
            digest, loan = task
            begun_s, begun_cpu_s, begun_delay_s = time.monotonic(), time.thread_time(), _delay_s()
            self._write(digest, loan.data)
            cpu_s, delay_s = time.thread_time() - begun_cpu_s, _delay_s() - begun_delay_s
            ended_s = time.monotonic()
            idle_cores = num_cores - (time.process_time() - started_cpu_s) / (ended_s - started_s)
            with self._wake:
                self._pending.discard(digest)
                assert self._staging is not None
                self._staging.release(loan)
                rest = rest_s(cpu_s, delay_s, ended_s - begun_s, idle_cores)
                self._wake.wait_for(lambda: self._finished, rest)

    def _next(self) -> tuple[bytes, Buffer] | None:
        """The next part to write; blocks while there is none; None at the end."""
        with self._wake:
            # A part that is still being copied is pending, but not in the queue.
            self._wake.wait_for(lambda: self._queue or (self._finished and not self._pending))
            if self._queue:
                return self._queue.popleft()
            if self._staging is not None:
                self._staging.unmap()
            return None

    def _write(self, digest: bytes, data: memoryview) -> None:
        if self._broken:
            return
        evicted_before = self._folder.num_evicted
        try:
            if not self._folder.holds(digest):  # else another process was sooner
                if self._folder.write(digest, data):
                    self._tally.add(num_written=1, written_bytes=len(data))
                else:
                    self._tally.add(num_dropped=1)
        except OSError as error:
            self._give_up(error.strerror or str(error))
        self._tally.add(num_evicted=self._folder.num_evicted - evicted_before)

    def _give_up(self, reason: str) -> None:
        self._broken = True
        self._tally.add_trouble(f"nothing more is written to the part cache in {self._folder.path}: {reason}")


def _delay_s() -> float:
    """The time that this thread was ready to run and had to wait for a core, since it began; 0 where
    nothing says.
    """
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _copy(data: memoryview, target: memoryview) -> None:
    # Imported here, because the first bytes of a load need no numpy; by the time that a part has
    # been verified, its decoder has brought it in. It copies without the GIL, as a memoryview does
    # not.
    import numpy as np

    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(data, np.uint8))
