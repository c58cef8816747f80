"""Parts that this node has fetched before, by their digests.

A part is found by its BLAKE3-256 digest from the manifest, so models, versions and stores share
what they have in common and cannot be confused. The manifest always comes from the store: pins,
replacement and access control hold as they do without a cache.

Invariant: it is never an obstacle. What is read from it is as unverified as what comes over a
network, and goes through the same check; no error leaves it, and no disk, full, slow, read-only or
gone, fails a load or holds it up for long. Troubles are listed in `statistics().troubles`.

It does not know tensors, manifests or stores.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from .folder import CacheFolder, WrongEntryError
from .writer import CacheStatistics, CacheTally, CacheWriter, ReadGate, is_crawling

SLICE_BYTES = 1024 * 1024  # between two slices a read notices that the disk crawls


class PartCache:
    """One load's view of the cache below `directory`, where at most `budget_bytes` are kept.

    Does nothing before it is asked. All methods but `join` may be called from any thread, and raise
    nothing.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        budget_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = CacheFolder(directory, budget_bytes=budget_bytes)
        self._tally = CacheTally()
        self._writer = CacheWriter(self._folder, self._tally)
        self._gate = ReadGate()
        self._clock = clock
        self._is_readable = True
        self._lock = threading.Lock()  # guards the two sets
        self._served: set[bytes] = set()  # parts that bytes were read of
        self._rejected: set[bytes] = set()

    def read_into(self, digest: bytes, start: int, buffer: memoryview) -> bool:
        """Fill `buffer` with bytes [start, start + len(buffer)) of the part, unverified; blocks
        without the GIL.

        False when they have to come from the store: then the buffer's content is undefined.
        """
        if not self._is_readable or digest in self._rejected or not self._gate.enter():
            self._tally.add(num_misses=1)
            return False
        begun_s = self._clock()
        try:
            found = self._read(digest, start, buffer, begun_s)
        except WrongEntryError:
            self._discard(digest)
            found = False
        except OSError as error:
            self._stop_reading(error.strerror or str(error))
            found = False
        finally:
            self._gate.leave()
        if not found:
            self._tally.add(num_misses=1)
            return False
        self._gate.note(len(buffer), self._clock() - begun_s)
        with self._lock:
            self._served.add(digest)
        self._tally.add(num_hits=1, read_bytes=len(buffer))
        return True

    def holds(self, digest: bytes) -> bool:
        """True if `read_into` would look for the part here and find it, as far as is known without
        reading it.
        """
        if not self._is_readable or digest in self._rejected:
            return False
        try:
            return self._folder.holds(digest)
        except OSError:
            return False  # reading will find out the same, and say so

    def offer(self, digest: bytes, data: memoryview) -> bool:
        """Have a whole part kept, whose digest was found right. Copies it; never waits for the
        disk.

        False when it is not taken: it came from here, or the writer is behind, or nothing can be
        written.
        """
        return digest not in self._served and self._writer.offer(digest, data)

    def reject(self, digest: bytes) -> bool:
        """Called for a part that had another digest: whether bytes of it came from here.

        If so, they are removed, and no read of the part succeeds any more: it is to be fetched from
        the store.
        """
        with self._lock:
            if digest not in self._served:
                return False
            self._served.remove(digest)
        self._discard(digest)
        return True

    def finish(self) -> None:
        """Nothing more will be offered: what is still to be written is written at full speed.
        Returns at once.
        """
        self._writer.finish()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait, after `finish`, until all is written; False when it is not after `timeout_s`."""
        return self._writer.join(timeout_s)

    def turn_off(self, reason: str) -> None:
        """Neither read nor write from now on; `reason` is a sentence for people."""
        self._is_readable = False
        self._writer.finish()
        self._tally.add_trouble(reason)

    def statistics(self) -> CacheStatistics:
        return self._tally.statistics()

    def _read(self, digest: bytes, start: int, buffer: memoryview, begun_s: float) -> bool:
        with self._folder.opened(digest) as entry:
            if entry is None:
                return False
            fd, size_bytes = entry
            if start + len(buffer) > size_bytes:
                self._discard(digest)
                return False
            done = 0
            while True:
                count = os.preadv(fd, [buffer[done : done + SLICE_BYTES]], start + done)
                done += count
                if done == len(buffer):
                    return True
                if count == 0:  # cut off since it was opened
                    return False
                if is_crawling(len(buffer), self._clock() - begun_s):
                    self._stop_reading("the disk is too slow")
                    return False

    def _discard(self, digest: bytes) -> None:
        """The part's entry is wrong: it is removed, and not asked for again by this load."""
        with self._lock:
            self._rejected.add(digest)
        self._tally.add(num_rejected=1)
        try:
            self._folder.remove(digest)
        except OSError as error:
            self._tally.add_trouble(
                f"a damaged part in {self._folder.path} cannot be removed: {error.strerror}"
            )

    def _stop_reading(self, reason: str) -> None:
        self._is_readable = False
        self._tally.add_trouble(f"nothing more is read from the part cache in {self._folder.path}: {reason}")
