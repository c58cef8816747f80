"""What of a pool's prefixes was of use: which block follows which, and how often each was found by a request.

Counts are of this process. Who finds a block has found all those before it, so no block counts more than the one it
follows. Nothing is known here of tokens, of blocks' numbers, or of what they hold; the caller serialises access.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Entry:
    """What is known of a block."""

    parent: bytes | None  # None: the block is the first of its chain
    depth: int
    used_s: float  # when it was there for the first time, or found last
    num_hits: int = 0


class PrefixLedger:
    """Of at most `max_entries` blocks; beyond, those that are gone are forgotten, as `is_there` says."""

    def __init__(self, max_entries: int, is_there: Callable[[bytes], bool]) -> None:
        self._max_entries = max_entries
        self._is_there = is_there
        self._entries: dict[bytes, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, hashes: Sequence[bytes], first: int = 0) -> None:
        """The blocks of this chain from number `first` on can be found from now on."""
        now_s = time.monotonic()
        for depth in range(first, len(hashes)):
            if hashes[depth] not in self._entries:
                self._entries[hashes[depth]] = Entry(hashes[depth - 1] if depth else None, depth, now_s)
        if len(self._entries) > self._max_entries:
            self._forget()

    def count_hits(self, hashes: Sequence[bytes]) -> None:
        """Somebody found these blocks, from the first of a chain on."""
        now_s = time.monotonic()
        for each in hashes:
            entry = self._entries.get(each)
            if entry is not None:
                entry.num_hits += 1
                entry.used_s = now_s

    def entry(self, block_hash: bytes) -> Entry | None:
        """What is known of this block, to be read only."""
        return self._entries.get(block_hash)

    def most_wanted(self, max_blocks: int, pinned: Collection[bytes] = ()) -> list[tuple[bytes, ...]]:
        """Chains of the blocks that were found most often and are there: those found most often first.

        Together they have at most `max_blocks` different blocks, each found at least once; being `pinned` counts as
        that. None of them is the beginning of another.
        """
        num_hits = self._hits_of_whole(pinned)
        ranked = sorted(num_hits, key=lambda each: (-num_hits[each], self._entries[each].depth))
        chosen = dict.fromkeys(ranked[:max_blocks])  # with each block those before it, which rank before it
        inner = {self._entries[each].parent for each in chosen}
        return [self._chain(each) for each in chosen if each not in inner]

    def _hits_of_whole(self, pinned: Collection[bytes]) -> dict[bytes, int]:
        """Blocks that were found at least once, and are there with all those before them; how often they were, which
        counts for no more than those before them have.
        """
        num_hits: dict[bytes, int] = {}
        for each, entry in sorted(self._entries.items(), key=lambda item: item[1].depth):
            own = entry.num_hits + (each in pinned)
            at_most = own if entry.parent is None else num_hits.get(entry.parent, 0)
            if own and at_most and self._is_there(each):
                num_hits[each] = min(own, at_most)
        return num_hits

    def _chain(self, last: bytes) -> tuple[bytes, ...]:
        chain: list[bytes] = []
        each: bytes | None = last
        while each is not None:
            chain.append(each)
            each = self._entries[each].parent
        return tuple(reversed(chain))

    def _forget(self) -> None:
        """Leave room for as many again. Where all are there the newest are forgotten: they can only be missed later."""
        kept = [(each, entry) for each, entry in self._entries.items() if self._is_there(each)]
        self._entries = dict(kept[: self._max_entries // 2])
