"""The index of the blocks on one medium and their slots, in order of use.

Least recently used first. Invariant: each slot is free, reserved for a block being written, or
holds one block. This module knows nothing of threads; the caller serialises access.
"""

from __future__ import annotations

from collections import OrderedDict

from .media import Medium
from .policy import ReadMeter


class Shelf:
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
