"""Which blocks hold keys and values that somebody may need again: found by what led to them.

A full block is known by a chain of hashes: SHA-256 over the hash of the block before it and its own tokens, the first
one over a seed that says which model, precision, layout and tenant it belongs to. So equal hashes mean equal keys and
values, and who does not know a seed cannot name, find or time what lies under it.

The cache holds one reference to each of its blocks. One that nobody else refers to is *idle*: it can be found again,
or given up for new content, least recently used first. A block is given up before the one it follows, so what is
found is always a whole beginning. Where a chain is left in the middle of a block, a block that begins in the same way
can be found, too (`followers.py`), for that much of it to be copied. Blocks may be *pinned* (`sessions.py`): these are
given up only when no other idle one is left, and whoever pinned them says which. Nothing is known here of tensors,
sequences or threads; the caller serialises access.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from ..step.batch import Epoch
from .blocks import BlockAllocator
from .followers import Followers

HASH_BYTES = 32


def seed_hash(*parts: bytes) -> bytes:
    """(32,) The beginning of a chain: two lists of parts give the same only if they are the same."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def chain_hash(previous: bytes, tokens: Sequence[int]) -> bytes:
    """(32,) Of a full block with these tokens, after what `previous` stands for."""
    return hashlib.sha256(previous + array("q", tokens).tobytes()).digest()


@dataclass(frozen=True, slots=True)
class PrefixStatistics:
    """A moment's view of blocks; totals count from the start. Tokens are those of prompts that were looked up."""

    num_cached: int
    num_idle: int
    hit_tokens_total: int
    lookup_tokens_total: int
    evictions_total: int


class PrefixCache:
    """The blocks of one pool that can be found again."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator
        self._blocks: dict[bytes, int] = {}  # by hash
        self._hashes: dict[int, bytes] = {}  # by block
        self._followers = Followers()  # the cached blocks whose tokens are known
        self._idle: OrderedDict[int, None] = OrderedDict()  # blocks, least recently used first, without …
        self._idle_pinned: set[int] = set()  # … these
        self._pins: Counter[int] = Counter()  # by block
        self._on_shortage: Callable[[], None] | None = None
        self._watched: set[int] = set()  # cached blocks whose giving up is to be noticed
        self._num_hit_tokens = 0
        self._num_lookup_tokens = 0
        self._num_evictions = 0

    @property
    def num_idle(self) -> int:
        """Blocks that can be had by giving up what they hold."""
        return len(self._idle) + len(self._idle_pinned)

    @property
    def num_pinned(self) -> int:
        return len(self._pins)

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest beginning of this chain that is there. Takes no references."""
        blocks: list[int] = []
        for each in hashes:
            block = self._blocks.get(each)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def find_beginning(self, previous: bytes, tokens: Sequence[int]) -> tuple[int, int] | None:
        """A cached block after what `previous` stands for that begins as these tokens do, and with how many of them: as
        `Followers.find`. Takes no reference.
        """
        return self._followers.find(previous, tokens)

    def num_idle_among(self, blocks: Iterable[int]) -> int:
        return sum(block in self._idle or block in self._idle_pinned for block in blocks)

    def num_users(self, block: int) -> int:
        """How many refer to it beside the cache."""
        return self._allocator.reference_count(block) - (block in self._hashes)

    def take(self, blocks: Sequence[int]) -> None:
        """One more reference to each of these blocks, which were found."""
        self._allocator.share(blocks)
        for block in blocks:
            self._idle.pop(block, None)
            self._idle_pinned.discard(block)
            self._followers.note_use(block)

    def count_lookup(self, num_tokens: int, num_hit_tokens: int) -> None:
        self._num_lookup_tokens += num_tokens
        self._num_hit_tokens += num_hit_tokens

    def add(self, block: int, block_hash: bytes) -> None:
        """This block, which the caller refers to, is full and stands for that. If another does, that one stays."""
        if block_hash in self._blocks or block in self._hashes:
            return
        if self._allocator.epoch(block) is not Epoch.EXACT:
            raise ValueError(f"block {block} was not made by exact weights")
        self._allocator.share((block,))
        self._blocks[block_hash] = block
        self._hashes[block] = block_hash

    def tell_tokens(self, block_hash: bytes, previous: bytes, tokens: Sequence[int]) -> None:
        """What the block that stands for this hash has of its own, if there is one: `chain_hash` of these gives it. Who
        adds a block may not know that; until it is told, no beginning of the block is found.
        """
        block = self._blocks.get(block_hash)
        if block is not None and block not in self._followers:
            self._followers.add(block, previous, tokens)

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each of a sequence's blocks, given in its order; what is cached stays there, idle when
        nobody else refers to it.
        """
        self._allocator.release(blocks)
        for block in reversed(blocks):  # the last one first: it is given up before those that it follows
            if block in self._hashes and self._allocator.reference_count(block) == 1:
                self._note_idle(block)

    def pin(self, blocks: Iterable[int]) -> None:
        """Keep these different blocks, which are cached, for as long as there is something else to give up."""
        for block in blocks:
            self._pins[block] += 1
            if block in self._idle:
                del self._idle[block]
                self._idle_pinned.add(block)

    def unpin(self, blocks: Sequence[int]) -> None:
        """Take back one `pin` of each of these blocks, given in their order."""
        for block in reversed(blocks):
            self._pins[block] -= 1
            if not self._pins[block]:
                del self._pins[block]
                if block in self._idle_pinned:
                    self._idle_pinned.remove(block)
                    self._note_idle(block)

    def on_shortage(self, unpin_some: Callable[[], None]) -> None:
        """Have this called, whenever idle blocks are needed that are pinned, until enough of them are not."""
        self._on_shortage = unpin_some

    def make_room(self, num_blocks: int) -> None:
        """Give up idle blocks until so many are free. ValueError, and nothing has changed, when there are too few."""
        missing = num_blocks - self._allocator.free_count
        if missing > self.num_idle:
            raise ValueError(
                f"{num_blocks} blocks asked for, {self._allocator.free_count + self.num_idle} can be had"
            )
        while missing > len(self._idle):
            self._unpin_some()
        for _ in range(missing):
            block, _ = self._idle.popitem(last=False)
            self._watched.discard(block)
            self._followers.discard(block)
            del self._blocks[self._hashes.pop(block)]
            self._allocator.release((block,))
            self._num_evictions += 1

    def clear(self) -> None:
        """Give up everything idle; what is in use is no longer found."""
        while self._pins:
            self._unpin_some()
        self.make_room(self._allocator.free_count + self.num_idle)
        for block in list(self._hashes):
            self._allocator.release((block,))
        self._blocks.clear()
        self._hashes.clear()
        self._followers.clear()
        self._watched.clear()

    def next_idle(self, limit: int) -> list[tuple[int, bytes]]:
        """Up to `limit` idle blocks and their hashes, in the order in which they are given up; of pinned ones, which
        come last, nobody knows it.
        """
        return [(block, self._hashes[block]) for block in islice(chain(self._idle, self._idle_pinned), limit)]

    def watch(self, blocks: Iterable[int]) -> None:
        """Notice if one of these cached blocks is given up. A cached block is never written to, so what was read of
        those that `unwatch` returns was theirs to the end; and nobody had to wait for the reader. There can be one.
        """
        self._watched = set(blocks)

    def unwatch(self) -> set[int]:
        """Those of the watched blocks that have been cached all the time."""
        kept, self._watched = self._watched, set()
        return kept

    def blocks(self) -> Iterable[int]:
        """All that the cache holds a reference to."""
        return self._hashes.keys()

    def by_hash(self) -> Mapping[bytes, int]:
        """The same by their hashes, to be read only."""
        return self._blocks

    def pins(self) -> dict[int, int]:
        """How often each block that is pinned is."""
        return dict(self._pins)

    def statistics(self) -> PrefixStatistics:
        return PrefixStatistics(
            num_cached=len(self._hashes),
            num_idle=self.num_idle,
            hit_tokens_total=self._num_hit_tokens,
            lookup_tokens_total=self._num_lookup_tokens,
            evictions_total=self._num_evictions,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless the books agree. For tests."""
        assert self._hashes == {block: each for each, block in self._blocks.items()}
        idle = set(self._idle) | self._idle_pinned
        for block in self._hashes:
            count = self._allocator.reference_count(block)
            assert count >= 1, f"block {block} is cached and free"
            assert (count == 1) == (block in idle), f"block {block} has {count} references"
            assert self._allocator.epoch(block) is Epoch.EXACT
        assert idle <= set(self._hashes)
        assert all(count > 0 for count in self._pins.values())
        assert set(self._pins) <= set(self._hashes), "a block is pinned that cannot be found"
        assert self._idle_pinned == idle & set(self._pins)
        assert self._watched <= set(self._hashes)
        self._followers.check_integrity()
        for block, (previous, tokens) in self._followers.entries().items():
            assert self._hashes.get(block) == chain_hash(previous, tokens), f"block {block} is listed wrongly"

    def _note_idle(self, block: int) -> None:
        """Nobody refers to it but the cache; of all that is idle it was used last."""
        if block in self._pins:
            self._idle_pinned.add(block)
        else:
            self._idle[block] = None
            self._idle.move_to_end(block)

    def _unpin_some(self) -> None:
        if self._on_shortage is None:
            raise ValueError("blocks are pinned, and nobody is there to unpin them")
        self._on_shortage()
