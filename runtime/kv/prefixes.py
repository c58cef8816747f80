"""The prefix cache: blocks of keys and values that can be reused, found by the hashes of their
tokens.

A full block's key is a chain of hashes: SHA-256 over the hash of the block before it and its own
tokens, the first one over a seed of the model, precision, layout and tenant. Equal hashes therefore
mean equal keys and values, and without a seed its blocks cannot be named, found or timed.

The cache holds one reference to each of its blocks. A block without other references is *idle*: it
can be found again, or evicted for new content, least recently used first. A block is evicted before
its predecessor, so a find always returns a whole beginning. Where a chain is left in the middle of
a block, a block that begins in the same way can be found, too, to copy that part
of it. Blocks may be *pinned* (`sessions.py`): these are evicted only when no other idle block is
left, and the pins' owner chooses which. This module knows nothing of tensors, sequences or threads;
the caller serialises access.

An index of cached blocks by their predecessor and tokens.

Where a prompt leaves a chain in the middle of a block, one of these blocks may begin with its next
tokens. A block is listed under the hash of its predecessor, or under the seed of its chain, so it
cannot be found without that, just like whole blocks. There is at most one entry for each block, and
a search looks at `MAX_SEEN` successors of one predecessor: its time is bounded, however many of
them a client makes.

Usage counts of a pool's prefixes: the order of blocks, and the number of requests that found
each.

Counts are of this process. A request that finds a block has found all those before it, so no block
counts more than its predecessor.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain, islice

from msgspec import Struct

from ..step.batch import Epoch
from .blocks import BlockAllocator

# Successors of one predecessor to look at, the most recently used ones.
MAX_SEEN = 16


class Followers:
    """The index of one pool. `tokens` are all tokens of a block."""

    def __init__(self) -> None:
        # By predecessor; each with its tokens, least recently used first.
        self._tokens: dict[bytes, OrderedDict[int, array[int]]] = {}
        self._previous: dict[int, bytes] = {}  # by block

    def __contains__(self, block: int) -> bool:
        return block in self._previous

    def add(self, block: int, previous: bytes, tokens: Sequence[int]) -> None:
        """List this new block, with these tokens, under `previous`."""
        self._previous[block] = previous
        self._tokens.setdefault(previous, OrderedDict())[block] = array("q", tokens)

    def discard(self, block: int) -> None:
        previous = self._previous.pop(block, None)
        if previous is None:
            return
        siblings = self._tokens[previous]
        del siblings[block]
        if not siblings:
            del self._tokens[previous]

    def clear(self) -> None:
        self._tokens.clear()
        self._previous.clear()

    def note_use(self, block: int) -> None:
        """Mark this block as the most recently used of its siblings."""
        previous = self._previous.get(block)
        if previous is not None:
            self._tokens[previous].move_to_end(block)

    def find(self, previous: bytes, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Find the block after `previous` that shares the longest beginning with these tokens.

        Returns the block and the number of shared tokens; ties go to the most recently used one.
        None: no block begins with the first token.
        """
        best: tuple[int, int] | None = None
        siblings = self._tokens.get(previous)
        if siblings is None:
            return None
        for block, own in islice(reversed(siblings.items()), MAX_SEEN):
            num_equal = _num_equal(own, tokens)
            if num_equal > (best[1] if best is not None else 0):
                best = block, num_equal
        return best

    def entries(self) -> Mapping[int, tuple[bytes, Sequence[int]]]:
        """Each block's predecessor and tokens. O(blocks); for tests."""
        return {block: (each, self._tokens[each][block]) for block, each in self._previous.items()}

    def check_integrity(self) -> None:
        """Raise AssertionError if the two maps disagree. For tests."""
        listed = {block: each for each, siblings in self._tokens.items() for block in siblings}
        assert listed == self._previous
        assert all(self._tokens.values()), "a predecessor has no successors"


def _num_equal(some: Sequence[int], others: Sequence[int]) -> int:
    """The length of their common beginning."""
    number = 0
    for one, other in zip(some, others, strict=False):
        if one != other:
            break
        number += 1
    return number


class BlockUsage(Struct):
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
        self._entries: dict[bytes, BlockUsage] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, hashes: Sequence[bytes], first: int = 0) -> None:
        """Record that the blocks of this chain from number `first` on can be found from now on."""
        now_s = time.monotonic()
        for depth in range(first, len(hashes)):
            if hashes[depth] not in self._entries:
                self._entries[hashes[depth]] = BlockUsage(hashes[depth - 1] if depth else None, depth, now_s)
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

    def entry(self, block_hash: bytes) -> BlockUsage | None:
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


def seed_hash(*parts: bytes) -> bytes:
    """The beginning of a chain, (32,) bytes: equal only for equal lists of parts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def chain_hash(previous: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of a full block with these tokens after `previous`, (32,) bytes."""
    return hashlib.sha256(previous + array("q", tokens).tobytes()).digest()


class PrefixStatistics(Struct, frozen=True):
    """A snapshot of the blocks; totals count from the start. Tokens are those of prompts that were
    looked up.
    """

    num_cached: int
    num_idle: int
    hit_tokens_total: int
    lookup_tokens_total: int
    evictions_total: int


class PrefixCache:
    """The reusable blocks of one pool."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator
        self._blocks: dict[bytes, int] = {}  # by hash
        self._hashes: dict[int, bytes] = {}  # by block
        self._followers = Followers()  # the cached blocks whose tokens are known
        # Blocks, least recently used first, without those of `_idle_pinned`.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._idle_pinned: set[int] = set()
        self._pins: Counter[int] = Counter()  # by block
        self._on_shortage: Callable[[], None] | None = None
        self._watched: set[int] = set()  # cached blocks whose eviction is recorded
        self._num_hit_tokens = 0
        self._num_lookup_tokens = 0
        self._num_evictions = 0

    @property
    def num_idle(self) -> int:
        """The number of blocks that evictions can free."""
        return len(self._idle) + len(self._idle_pinned)

    @property
    def num_pinned(self) -> int:
        return len(self._pins)

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest cached beginning of this chain. Takes no references."""
        blocks: list[int] = []
        for each in hashes:
            block = self._blocks.get(each)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def find_beginning(self, previous: bytes, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Find a cached block after `previous` that begins like these tokens, as `Followers.find`
        does. Takes no reference.
        """
        return self._followers.find(previous, tokens)

    def num_idle_among(self, blocks: Iterable[int]) -> int:
        return sum(block in self._idle or block in self._idle_pinned for block in blocks)

    def num_users(self, block: int) -> int:
        """The number of a block's references other than the cache's."""
        return self._allocator.reference_count(block) - (block in self._hashes)

    def take(self, blocks: Sequence[int]) -> None:
        """Add a reference to each of these blocks, which were found."""
        self._allocator.share(blocks)
        for block in blocks:
            self._idle.pop(block, None)
            self._idle_pinned.discard(block)
            self._followers.note_use(block)

    def count_lookup(self, num_tokens: int, num_hit_tokens: int) -> None:
        self._num_lookup_tokens += num_tokens
        self._num_hit_tokens += num_hit_tokens

    def add(self, block: int, block_hash: bytes) -> None:
        """Cache this full block, which the caller holds, under its hash. If another block has that
        hash, it stays instead.
        """
        if block_hash in self._blocks or block in self._hashes:
            return
        if self._allocator.epoch(block) is not Epoch.EXACT:
            raise ValueError(f"block {block} was not computed with exact weights")
        self._allocator.share((block,))
        self._blocks[block_hash] = block
        self._hashes[block] = block_hash

    def tell_tokens(self, block_hash: bytes, previous: bytes, tokens: Sequence[int]) -> None:
        """Record the tokens of the block with this hash, if cached; the hash is
        `chain_hash(previous, tokens)`.

        The caller of `add` may not know the tokens; until they are recorded, no beginning of the
        block can be found.
        """
        block = self._blocks.get(block_hash)
        if block is not None and block not in self._followers:
            self._followers.add(block, previous, tokens)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference of each of a sequence's blocks, given in order. Cached blocks stay, and
        become idle without other references.
        """
        self._allocator.release(blocks)
        # In reverse, so that a block is evicted before its predecessors.
        for block in reversed(blocks):
            if block in self._hashes and self._allocator.reference_count(block) == 1:
                self._note_idle(block)

    def pin(self, blocks: Iterable[int]) -> None:
        """Pin these distinct cached blocks: they are evicted only after everything else."""
        for block in blocks:
            self._pins[block] += 1
            if block in self._idle:
                del self._idle[block]
                self._idle_pinned.add(block)

    def unpin(self, blocks: Sequence[int]) -> None:
        """Undo one `pin` of each of these blocks, given in their order."""
        for block in reversed(blocks):
            self._pins[block] -= 1
            if not self._pins[block]:
                del self._pins[block]
                if block in self._idle_pinned:
                    self._idle_pinned.remove(block)
                    self._note_idle(block)

    def on_shortage(self, unpin_some: Callable[[], None]) -> None:
        """Set the callback that unpins some blocks. It is called until enough idle blocks are not
        pinned.
        """
        self._on_shortage = unpin_some

    def make_room(self, num_blocks: int) -> None:
        """Evict idle blocks until `num_blocks` are free. Raises ValueError, with nothing changed,
        if there are too few.
        """
        missing = num_blocks - self._allocator.free_count
        if missing > self.num_idle:
            raise ValueError(
                f"{num_blocks} blocks requested, {self._allocator.free_count + self.num_idle} are free or idle"
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
        """Evict all idle blocks; blocks in use can no longer be found."""
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
        """Up to `limit` idle blocks and their hashes, in the order of eviction; without pinned
        ones, which come last in no fixed order.
        """
        return [(block, self._hashes[block]) for block in islice(chain(self._idle, self._idle_pinned), limit)]

    def watch(self, blocks: Iterable[int]) -> None:
        """Record evictions among these cached blocks.

        A cached block is never written, so the content read from the blocks that `unwatch` returns
        is valid, without a lock while reading. There can be one reader.
        """
        self._watched = set(blocks)

    def unwatch(self) -> set[int]:
        """The watched blocks that stayed cached all the time."""
        kept, self._watched = self._watched, set()
        return kept

    def blocks(self) -> Iterable[int]:
        """The blocks to which the cache holds a reference."""
        return self._hashes.keys()

    def by_hash(self) -> Mapping[bytes, int]:
        """The cached blocks by their hashes, read-only."""
        return self._blocks

    def pins(self) -> dict[int, int]:
        """The number of pins of each pinned block."""
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
        """Raise AssertionError if the maps disagree. For tests."""
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
        """Mark a block without other references as the most recently used idle one."""
        if block in self._pins:
            self._idle_pinned.add(block)
        else:
            self._idle[block] = None
            self._idle.move_to_end(block)

    def _unpin_some(self) -> None:
        if self._on_shortage is None:
            raise ValueError("blocks are pinned, but no callback unpins them")
        self._on_shortage()
