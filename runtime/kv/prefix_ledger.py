"""Usage counts of a pool's prefixes: the order of blocks, and the number of requests that found
each.

Counts are of this process. A request that finds a block has found all those before it, so no block
counts more than its predecessor. This module knows nothing of tokens, block numbers or contents;
the caller serialises access.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Entry:
    """The usage of one block."""

    parent: bytes | None  # None: the block is the first of its chain
    depth: int
    used_s: float  # when the block was added, or last found
    num_hits: int = 0


class PrefixLedger:
    """The usage of at most `max_entries` blocks; beyond them, blocks for which `is_there` is False
    are forgotten.
    """

    def __init__(self, max_entries: int, is_there: Callable[[bytes], bool]) -> None:
        self._max_entries = max_entries
        self._is_there = is_there
        self._entries: dict[bytes, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, hashes: Sequence[bytes], first: int = 0) -> None:
        """Record that the blocks of this chain from number `first` on can be found from now on."""
        now_s = time.monotonic()
        for depth in range(first, len(hashes)):
            if hashes[depth] not in self._entries:
                self._entries[hashes[depth]] = Entry(hashes[depth - 1] if depth else None, depth, now_s)
        if len(self._entries) > self._max_entries:
            self._forget()

    def count_hits(self, hashes: Sequence[bytes]) -> None:
        """Count a request that found these blocks, from the first of a chain on."""
        now_s = time.monotonic()
        for each in hashes:
            entry = self._entries.get(each)
            if entry is not None:
                entry.num_hits += 1
                entry.used_s = now_s

    def entry(self, block_hash: bytes) -> Entry | None:
        """The usage of this block, read-only."""
        return self._entries.get(block_hash)

    def most_wanted(self, max_blocks: int, pinned: Collection[bytes] = ()) -> list[tuple[bytes, ...]]:
        """Chains of the present blocks that were found most often, in descending order.

        Together they have at most `max_blocks` different blocks, each found at least once; `pinned`
        blocks count as found. None of the chains is the beginning of another.
        """
        num_hits = self._hits_of_whole(pinned)
        ranked = sorted(num_hits, key=lambda each: (-num_hits[each], self._entries[each].depth))
        # With each block its predecessors, which rank before it.
        chosen = dict.fromkeys(ranked[:max_blocks])
        inner = {self._entries[each].parent for each in chosen}
        return [self._chain(each) for each in chosen if each not in inner]

    def _hits_of_whole(self, pinned: Collection[bytes]) -> dict[bytes, int]:
        """The hits of blocks that were found at least once and are present with all their
        predecessors.

        A block's hits are capped by those of its predecessors.
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
        """Make room for as many entries again. If all blocks are present, the newest are forgotten:
        only their future hits are lost.
        """
        kept = [(each, entry) for each, entry in self._entries.items() if self._is_there(each)]
        self._entries = dict(kept[: self._max_entries // 2])
