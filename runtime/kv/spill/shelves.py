"""The tiers of spilled blocks, the fastest first: blocks evicted from one medium move to the next,
and from the last are dropped.

The media's failures are isolated. Content that does not read back as written is forgotten, and a
medium that cannot be written, or fails too often, is turned off, which is logged once.

Invariants: a block lies on at most one medium. One thread stores and reads, without the lock, and
only it moves blocks; the indexes are read and changed under the lock. This module knows nothing of
the pool.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ....loader.errors import IntegrityError
from .media import Bytes, Medium
from .shelf import Shelf

logger = logging.getLogger(__name__)

# Blocks written to a medium for each one read back to measure it.
PROBE_EVERY = 64
# Failures after which a medium is turned off.
MAX_READ_FAILURES = 16


@dataclass(frozen=True, slots=True)
class Found:
    """The location of a block."""

    block_hash: bytes
    shelf: Shelf
    slot: int


class Shelves:
    """The tiers. Owns the media, of which there must be at least one."""

    def __init__(
        self, media: Sequence[Medium], lock: threading.Condition, clock: Callable[[], float]
    ) -> None:
        self.block_bytes = media[0].block_bytes
        self.all = [Shelf(medium) for medium in media]
        self._lock = lock
        self._clock = clock
        self._scratch: Bytes = np.empty(self.block_bytes, np.uint8)

    # -- under the lock ------------------------------------------------------------------------------------------

    def open(self) -> list[Shelf]:
        """The indexes that are not turned off."""
        return [shelf for shelf in self.all if shelf.is_open]

    def find(self, block_hash: bytes) -> Found | None:
        shelf = next((shelf for shelf in self.all if block_hash in shelf), None)
        return None if shelf is None else Found(block_hash, shelf, shelf.slot(block_hash))

    def touch(self, hashes: Iterable[bytes]) -> None:
        """Mark these blocks as just used, in this order, on whichever medium they are."""
        for block_hash in hashes:
            found = self.find(block_hash)
            if found is not None:
                found.shelf.touch(block_hash)

    def clear(self) -> None:
        """Forget all blocks, and store none from now on."""
        for shelf in self.open():
            shelf.close()

    def check_integrity(self) -> None:
        """Raise AssertionError if the indexes disagree. For tests."""
        seen: set[bytes] = set()
        for shelf in self.all:
            shelf.check_integrity()
            assert not seen & shelf.hashes(), "a block lies on two shelves"
            seen |= shelf.hashes()

    # -- for the one thread, without the lock --------------------------------------------------------------------

    def store(
        self, shelves: Sequence[Shelf], block_hash: bytes, content: Bytes, above: Shelf | None = None
    ) -> None:
        """Store a block on the first of these tiers, its oldest on the next, and so on; without any
        tier it is dropped.

        A block that was on the tier `above` is removed there.
        """
        for number, shelf in enumerate(shelves):
            slot = self._reserve(shelf, shelves[number + 1 :])
            if slot is None:
                continue
            try:
                shelf.medium.write(slot, content)
            except OSError as error:
                self._turn_off(shelf, error)
                continue
            with self._lock:
                shelf.put(block_hash, slot)
                if above is not None:
                    above.remove(block_hash)
            if shelf.num_until_probe < 0:
                self._probe(shelf)
            return
        with self._lock:
            if above is not None:
                above.remove(block_hash)
                above.num_dropped += 1

    def read(self, found: Found, into: Bytes) -> bool:
        """Read a block. Returns False, and forgets it, if it does not read back as written."""
        try:
            found.shelf.medium.read(found.slot, into)
            return True
        except (OSError, IntegrityError) as error:
            failure = error
        shelf = found.shelf
        logger.warning("a spilled block is lost: %s", failure)
        with self._lock:
            shelf.num_failed += 1
            shelf.num_dropped += 1
            shelf.remove(found.block_hash)
        if shelf.num_failed >= MAX_READ_FAILURES:
            self._turn_off(shelf, failure)
        return False

    def close(self) -> None:
        """Free memory and disk space."""
        with self._lock:
            self.clear()
        for shelf in self.all:
            shelf.medium.close()

    def _reserve(self, shelf: Shelf, below: Sequence[Shelf]) -> int | None:
        """Reserve a slot, if needed that of the oldest block; None: the tier is turned off."""
        with self._lock:
            if shelf.has_room:
                return shelf.reserve()
            if not shelf.is_open:
                return None
            oldest = Found(shelf.oldest(), shelf, shelf.slot(shelf.oldest()))
        if not below or self.read(oldest, self._scratch):
            self.store(below, oldest.block_hash, self._scratch, above=shelf)
        with self._lock:
            return shelf.reserve() if shelf.has_room else None

    def _probe(self, shelf: Shelf) -> None:
        """Measure a read of the oldest block from the medium itself, past the caches."""
        with self._lock:
            shelf.num_until_probe = PROBE_EVERY
            oldest = Found(shelf.oldest(), shelf, shelf.slot(shelf.oldest()))
        try:
            shelf.medium.forget_cached(oldest.slot)
        except OSError as error:
            self._turn_off(shelf, error)
            return
        start_s = self._clock()
        if self.read(oldest, self._scratch):
            took_s = self._clock() - start_s
            with self._lock:
                shelf.reads.note_read(self.block_bytes, took_s)

    def _turn_off(self, shelf: Shelf, reason: Exception) -> None:
        logger.warning("blocks are no longer spilled to the %s: %s", shelf.name, reason)
        with self._lock:
            shelf.num_failed += 1
            shelf.close()
        shelf.medium.close()
