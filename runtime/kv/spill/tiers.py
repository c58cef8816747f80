"""The tiers of spilled blocks, the fastest first, and the index of each medium.

Blocks evicted from one medium move to the next, and from the last are dropped. Within a medium, the least recently
used block comes first; each slot is free, reserved for a block being written, or holds one block.

The media's failures are isolated. Content that does not read back as written is forgotten, and a
medium that cannot be written, or fails too often, is turned off, which is logged once.

Invariants: a block lies on at most one medium. One thread stores and reads, without the lock, and
only it moves blocks; the indexes are read and changed under the lock. This module knows nothing of
the pool.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from msgspec import Struct

from ....loader.errors import IntegrityError
from .media import Bytes, Medium
from .policy import ReadMeter


class TierIndex:
    """The index of one medium. After `close` it is empty and takes no blocks."""

    def __init__(self, medium: Medium) -> None:
        self.medium = medium
        self.name = medium.name
        self.reads = ReadMeter()
        self.is_open = True
        # Blocks to write until the next probe reads one back to measure the medium.
        self.num_until_probe = 0
        self.num_written = 0  # in blocks, like all counts below
        self.num_restored = 0
        self.num_dropped = 0
        self.num_failed = 0
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # by hash
        self._free = list(reversed(range(medium.num_slots)))
        self._reserved: set[int] = set()

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._slots

    @property
    def has_room(self) -> bool:
        return bool(self._free)

    def slot(self, block_hash: bytes) -> int:
        return self._slots[block_hash]

    def oldest(self) -> bytes:
        """The hash of the least recently used block; there must be one."""
        return next(iter(self._slots))

    def touch(self, block_hash: bytes) -> None:
        """Mark the block as just used."""
        self._slots.move_to_end(block_hash)

    def reserve(self) -> int:
        """Reserve a free slot, to `put` a block there or to `give_back`."""
        slot = self._free.pop()
        self._reserved.add(slot)
        return slot

    def give_back(self, slot: int) -> None:
        self._reserved.remove(slot)
        self._free.append(slot)

    def put(self, block_hash: bytes, slot: int) -> None:
        """Record that this reserved slot holds the block, which no other slot holds."""
        self._reserved.remove(slot)
        self._slots[block_hash] = slot
        self.num_until_probe -= 1
        self.num_written += 1

    def remove(self, block_hash: bytes) -> None:
        self._free.append(self._slots.pop(block_hash))

    def close(self) -> None:
        """Forget everything for good. The medium is not closed: its owner may be using it."""
        self.is_open = False
        self.num_dropped += len(self._slots)
        self._slots.clear()
        self._reserved.clear()
        self._free.clear()

    def hashes(self) -> set[bytes]:
        return set(self._slots)

    def check_integrity(self) -> None:
        """Raise AssertionError unless each slot is in exactly one state. For tests."""
        places = [*self._slots.values(), *self._free, *self._reserved]
        expected = range(self.medium.num_slots) if self.is_open else range(0)
        assert sorted(places) == list(expected), f"the slots of {self.name} are lost or used twice"


logger = logging.getLogger(__name__)

# Blocks written to a medium for each one read back to measure it.
PROBE_EVERY = 64
# Failures after which a medium is turned off.
MAX_READ_FAILURES = 16


class Found(Struct, frozen=True):
    """The location of a block."""

    block_hash: bytes
    tier: TierIndex
    slot: int


class SpillTiers:
    """The tiers. Owns the media, of which there must be at least one."""

    def __init__(
        self, media: Sequence[Medium], lock: threading.Condition, clock: Callable[[], float]
    ) -> None:
        self.block_bytes = media[0].block_bytes
        self.all = [TierIndex(medium) for medium in media]
        self._lock = lock
        self._clock = clock
        self._scratch: Bytes = np.empty(self.block_bytes, np.uint8)

    # -- under the lock ------------------------------------------------------------------------------------------

    def open(self) -> list[TierIndex]:
        """The indexes that are not turned off."""
        return [tier for tier in self.all if tier.is_open]

    def find(self, block_hash: bytes) -> Found | None:
        tier = next((tier for tier in self.all if block_hash in tier), None)
        return None if tier is None else Found(block_hash, tier, tier.slot(block_hash))

    def touch(self, hashes: Iterable[bytes]) -> None:
        """Mark these blocks as just used, in this order, on whichever medium they are."""
        for block_hash in hashes:
            found = self.find(block_hash)
            if found is not None:
                found.tier.touch(block_hash)

    def clear(self) -> None:
        """Forget all blocks, and store none from now on."""
        for tier in self.open():
            tier.close()

    def check_integrity(self) -> None:
        """Raise AssertionError if the indexes disagree. For tests."""
        seen: set[bytes] = set()
        for tier in self.all:
            tier.check_integrity()
            assert not seen & tier.hashes(), "a block lies on two tiers"
            seen |= tier.hashes()

    # -- for the one thread, without the lock --------------------------------------------------------------------

    def store(
        self, tiers: Sequence[TierIndex], block_hash: bytes, content: Bytes, above: TierIndex | None = None
    ) -> None:
        """Store a block on the first of these tiers, its oldest on the next, and so on; without any
        tier it is dropped.

        A block that was on the tier `above` is removed there.
        """
        for number, tier in enumerate(tiers):
            slot = self._reserve(tier, tiers[number + 1 :])
            if slot is None:
                continue
            try:
                tier.medium.write(slot, content)
            except OSError as error:
                self._turn_off(tier, error)
                continue
            with self._lock:
                tier.put(block_hash, slot)
                if above is not None:
                    above.remove(block_hash)
            if tier.num_until_probe < 0:
                self._probe(tier)
            return
        with self._lock:
            if above is not None:
                above.remove(block_hash)
                above.num_dropped += 1

    def read(self, found: Found, into: Bytes) -> bool:
        """Read a block. Returns False, and forgets it, if it does not read back as written."""
        try:
            found.tier.medium.read(found.slot, into)
            return True
        except (OSError, IntegrityError) as error:
            failure = error
        tier = found.tier
        logger.warning("a spilled block is lost: %s", failure)
        with self._lock:
            tier.num_failed += 1
            tier.num_dropped += 1
            tier.remove(found.block_hash)
        if tier.num_failed >= MAX_READ_FAILURES:
            self._turn_off(tier, failure)
        return False

    def close(self) -> None:
        """Free memory and disk space."""
        with self._lock:
            self.clear()
        for tier in self.all:
            tier.medium.close()

    def _reserve(self, tier: TierIndex, below: Sequence[TierIndex]) -> int | None:
        """Reserve a slot, if needed that of the oldest block; None: the tier is turned off."""
        with self._lock:
            if tier.has_room:
                return tier.reserve()
            if not tier.is_open:
                return None
            oldest = Found(tier.oldest(), tier, tier.slot(tier.oldest()))
        if not below or self.read(oldest, self._scratch):
            self.store(below, oldest.block_hash, self._scratch, above=tier)
        with self._lock:
            return tier.reserve() if tier.has_room else None

    def _probe(self, tier: TierIndex) -> None:
        """Measure a read of the oldest block from the medium itself, past the caches."""
        with self._lock:
            tier.num_until_probe = PROBE_EVERY
            oldest = Found(tier.oldest(), tier, tier.slot(tier.oldest()))
        try:
            tier.medium.forget_cached(oldest.slot)
        except OSError as error:
            self._turn_off(tier, error)
            return
        start_s = self._clock()
        if self.read(oldest, self._scratch):
            took_s = self._clock() - start_s
            with self._lock:
                tier.reads.note_read(self.block_bytes, took_s)

    def _turn_off(self, tier: TierIndex, reason: Exception) -> None:
        logger.warning("blocks are no longer spilled to the %s: %s", tier.name, reason)
        with self._lock:
            tier.num_failed += 1
            tier.close()
        tier.medium.close()
