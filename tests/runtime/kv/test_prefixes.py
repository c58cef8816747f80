"""Blocks that the prefix cache finds, whole ones and beginnings, are those that were computed, in
every order of events.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field

import pytest

from teneral.runtime.kv.blocks import BlockAllocator
from teneral.runtime.kv.prefixes import MAX_SEEN, Followers, PrefixCache, chain_hash, seed_hash
from teneral.runtime.step.batch import Epoch

SEED = seed_hash(b"model")
BLOCK_SIZE = 4
NUM_STEPS = int(os.environ.get("TENERAL_TEST_STEPS", "100000"))  # a million takes a minute


def chain(tokens, seed=SEED):
    hashes, last = [], seed
    for start in range(0, len(tokens) // BLOCK_SIZE * BLOCK_SIZE, BLOCK_SIZE):
        last = chain_hash(last, tokens[start : start + BLOCK_SIZE])
        hashes.append(last)
    return hashes


def cached(cache, allocator, tokens, seed=SEED):
    """The blocks of a sequence that has come and gone."""
    blocks = allocator.allocate(len(tokens) // BLOCK_SIZE)
    last = seed
    for number, (block, block_hash) in enumerate(zip(blocks, chain(tokens, seed), strict=True)):
        cache.add(block, block_hash)
        cache.tell_tokens(block_hash, last, tokens[number * BLOCK_SIZE : (number + 1) * BLOCK_SIZE])
        last = block_hash
    cache.release(blocks)
    return blocks


@pytest.fixture
def allocator():
    return BlockAllocator(8)


@pytest.fixture
def cache(allocator):
    return PrefixCache(allocator)


def test_the_longest_common_beginning_is_found(cache, allocator):
    blocks = cached(cache, allocator, [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9])
    assert cache.find(chain([1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0])) == blocks[:2]
    assert cache.find(chain([1, 2, 3, 5])) == []
    assert cache.find(chain([5, 6, 7, 8])) == []  # the same tokens after others are something else


def test_who_has_another_seed_finds_nothing(cache, allocator):
    tokens = [1, 2, 3, 4]
    cached(cache, allocator, tokens, seed_hash(b"model", b"tenant a"))
    for other in (
        SEED,
        seed_hash(b"model", b"tenant b"),
        seed_hash(b"modeltenant a"),
        seed_hash(b"m", b"odeltenant a"),
    ):
        assert cache.find(chain(tokens, other)) == []


def test_the_block_used_least_recently_is_given_up_first_and_ends_before_beginnings(cache, allocator):
    old = cached(cache, allocator, [1, 2, 3, 4, 5, 6, 7, 8])
    new = cached(cache, allocator, [1, 1, 1, 1, 2, 2, 2, 2])
    found = cache.find(chain([1, 2, 3, 4]))
    cache.take(found)
    cache.release(found)  # the old one's beginning was used again
    given_up = []
    while cache.num_idle:
        before = {block for block in (*old, *new) if allocator.reference_count(block)}
        cache.make_room(allocator.free_count + 1)
        given_up += before - {block for block in (*old, *new) if allocator.reference_count(block)}
    assert given_up == [old[1], new[1], new[0], old[0]]
    assert cache.statistics().evictions_total == 4


def test_what_is_in_use_is_never_given_up(cache, allocator):
    blocks = cached(cache, allocator, [1, 2, 3, 4, 5, 6, 7, 8])
    cache.take(blocks[:1])
    cache.make_room(7)
    with pytest.raises(ValueError, match="are free or idle"):
        cache.make_room(8)
    assert cache.find(chain([1, 2, 3, 4])) == blocks[:1]


def test_draft_blocks_are_refused(cache, allocator):
    (block,) = allocator.allocate(1, epoch=Epoch.DRAFT)
    with pytest.raises(ValueError, match="exact"):
        cache.add(block, chain([1, 2, 3, 4])[0])


def test_clearing_forgets_also_what_is_in_use(cache, allocator):
    blocks = cached(cache, allocator, [1, 2, 3, 4, 5, 6, 7, 8])
    cache.take(blocks)
    cache.clear()
    assert cache.find(chain([1, 2, 3, 4])) == []
    cache.release(blocks)
    assert allocator.free_count == 8


def test_lookups_are_counted(cache, allocator):
    cache.count_lookup(10, 4)
    cache.count_lookup(6, 0)
    statistics = cache.statistics()
    assert (statistics.lookup_tokens_total, statistics.hit_tokens_total) == (16, 4)


# Beginnings of blocks


def test_of_the_blocks_behind_a_beginning_the_one_that_goes_on_alike_for_longest_is_found(cache, allocator):
    first, short = cached(cache, allocator, [1, 2, 3, 4, 5, 0, 0, 0])
    (long,) = cached(cache, allocator, [1, 2, 3, 4, 5, 6, 7, 0])[1:]
    (root, behind) = SEED, chain([1, 2, 3, 4])[0]
    assert cache.find_beginning(behind, [5, 6, 7, 8]) == (long, 3)
    assert cache.find_beginning(behind, [5, 6, 7]) == (long, 3)
    assert cache.find_beginning(behind, [5, 0]) == (short, 2)
    assert cache.find_beginning(behind, [5]) == (long, 1)  # that came last
    assert cache.find_beginning(behind, [6, 7]) is None
    assert cache.find_beginning(behind, []) is None
    assert cache.find_beginning(root, [1, 2, 9, 9]) == (first, 2)
    assert cache.find_beginning(seed_hash(b"other"), [1, 2]) is None


def test_evicted_or_unknown_blocks_have_no_prefix(cache, allocator):
    cached(cache, allocator, [1, 2, 3, 4])
    (unknown,) = allocator.allocate(1)
    cache.add(unknown, chain([5, 6, 7, 8])[0])
    cache.release((unknown,))
    assert cache.find_beginning(SEED, [5, 6]) is None
    cache.make_room(7)
    assert cache.find_beginning(SEED, [1, 2]) is None
    cache.tell_tokens(chain([5, 6, 7, 8])[0], SEED, [5, 6, 7, 8])
    cache.tell_tokens(chain([1, 2, 3, 4])[0], SEED, [1, 2, 3, 4])  # which is gone
    assert cache.find_beginning(SEED, [5, 6]) == (unknown, 2)
    assert cache.find_beginning(SEED, [1, 2]) is None
    cache.check_integrity()
    cache.clear()
    assert cache.find_beginning(SEED, [5, 6]) is None
    cache.check_integrity()


def test_a_search_looks_at_the_ones_used_last_however_many_there_are():
    class Counted(list):
        """Tokens that count how often somebody looks at them."""

        num_looks = 0

        def __iter__(self):
            Counted.num_looks += 1
            return super().__iter__()

    followers = Followers()
    for block in range(10_000):
        followers.add(block, SEED, [block, 1, 1, 1])
    assert followers.find(SEED, Counted([9_999 - MAX_SEEN, 1, 1, 1])) is None
    assert Counted.num_looks == MAX_SEEN
    assert followers.find(SEED, [10_000 - MAX_SEEN, 1]) == (10_000 - MAX_SEEN, 2)
    followers.note_use(3)
    assert followers.find(SEED, [3, 1, 2]) == (3, 2)
    assert followers.find(SEED, [10_000 - MAX_SEEN, 1]) is None
    for block in range(10_000):
        followers.discard(block)
    followers.discard(5)
    assert not followers.entries()
    followers.check_integrity()


@dataclass(eq=False)
class Holder:
    """A sequence: what it says, and what of it is computed."""

    tokens: list[int]
    seed: bytes
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0


class World:
    """Random sequences over one pool; `content` is what each token's place in a block holds: the tokens that led to it.

    Blocks are empty when they are given out. There are two tokens, so a search for a beginning sees all that follow.
    """

    def __init__(self, num_blocks: int, number: int) -> None:
        self.random = random.Random(number)
        self.tells_all = number % 3 > 0
        self.allocator = BlockAllocator(num_blocks)
        self.cache = PrefixCache(self.allocator)
        self.holders: list[Holder] = []
        self.content: dict[int, list[tuple[bytes, tuple[int, ...]] | None]] = {}
        self.num_found = 0
        self.num_copied = 0

    def step(self) -> None:
        actions = [self.begin, self.go_on, self.go_on, self.go_on, self.end]
        if self.random.random() < 0.002:
            self.cache.clear()
        self.random.choice(actions)()
        self.cache.check_integrity()
        holders = [block for holder in self.holders for block in holder.blocks] + list(self.cache.blocks())
        for block in range(self.allocator.num_blocks):
            assert self.allocator.reference_count(block) == holders.count(block)
        for holder in self.holders:
            for block, number in zip(holder.blocks, range(0, holder.num_computed, BLOCK_SIZE), strict=False):
                for slot in range(min(BLOCK_SIZE, holder.num_computed - number)):
                    self.expect(block, slot, holder, number + slot)

    def expect(self, block: int, slot: int, holder: Holder, position: int) -> None:
        """That the holder's token at this position, after those before it, is there."""
        history = holder.seed, tuple(holder.tokens[: position + 1])
        assert self.content[block][slot] == history, "a block holds something else"

    def begin(self) -> None:
        """Somebody comes: often as others before."""
        base = self.random.choice(self.holders).tokens if self.holders and self.random.random() < 0.6 else []
        tokens = base[: self.random.randrange(len(base) + 1)]
        tokens = tokens + [self.random.randrange(2) for _ in range(self.random.randrange(1, 12))]
        holder = Holder(tokens, self.random.choice([SEED, seed_hash(b"other")]))
        found = self.cache.find(chain(tokens[:-1], holder.seed))
        self.num_found += len(found)
        self.cache.take(found)
        holder.blocks, holder.num_computed = list(found), len(found) * BLOCK_SIZE
        self.holders.append(holder)
        if self.random.random() < 0.9:
            self.copy_beginning(holder)

    def copy_beginning(self, holder: Holder) -> None:
        """It begins behind what it has in common with a block that goes on otherwise."""
        first = holder.num_computed
        hashes = [holder.seed, *chain(holder.tokens, holder.seed)]
        tokens = holder.tokens[first : min(first + BLOCK_SIZE, len(holder.tokens) - 1)]
        found = self.cache.find_beginning(hashes[len(holder.blocks)], tokens)
        longest = self.longest_beginning(holder, first, len(tokens))
        num_tokens = found[1] if found is not None else 0
        assert num_tokens <= longest
        assert num_tokens == longest or not self.tells_all
        if found is None:
            return
        source = found[0]
        self.cache.take((source,))
        if self.allocator.free_count + self.cache.num_idle > 0:
            self.cache.make_room(1)
            (target,) = self.allocate(1)
            self.content[target][:num_tokens] = self.content[source][:num_tokens]
            holder.blocks.append(target)
            holder.num_computed += num_tokens
            self.num_copied += 1
        self.cache.release((source,))

    def longest_beginning(self, holder: Holder, first: int, limit: int) -> int:
        """The longest beginning, by the blocks' contents."""
        longest = 0
        for block in self.cache.blocks():
            for slot in range(limit):
                if self.content[block][slot] != (holder.seed, tuple(holder.tokens[: first + slot + 1])):
                    break
                longest = max(longest, slot + 1)
        return longest

    def allocate(self, num_blocks: int) -> list[int]:
        blocks = self.allocator.allocate(num_blocks)
        self.content |= {block: [None] * BLOCK_SIZE for block in blocks}
        return blocks

    def go_on(self) -> None:
        """Somebody computes a few tokens, or says one more."""
        if not self.holders:
            return
        holder = self.random.choice(self.holders)
        if holder.num_computed == len(holder.tokens) - 1 and len(holder.tokens) < 40:
            holder.tokens.append(self.random.randrange(2))
        end = min(len(holder.tokens), holder.num_computed + self.random.randrange(1, 9))
        missing = -(-end // BLOCK_SIZE) - len(holder.blocks)
        if missing > self.allocator.free_count + self.cache.num_idle:
            self.end()
            return
        if missing > 0:
            self.cache.make_room(missing)
            holder.blocks += self.allocate(missing)
        for position in range(holder.num_computed, end):
            block = holder.blocks[position // BLOCK_SIZE]
            assert block not in self.cache.blocks(), "a cached block is written to"
            history = holder.seed, tuple(holder.tokens[: position + 1])
            self.content[block][position % BLOCK_SIZE] = history
        holder.num_computed = end
        last = holder.seed
        for number, block_hash in enumerate(chain(holder.tokens[:end], holder.seed)):
            self.cache.add(holder.blocks[number], block_hash)
            if self.tells_all or self.random.random() < 0.5:
                tokens = holder.tokens[number * BLOCK_SIZE : (number + 1) * BLOCK_SIZE]
                self.cache.tell_tokens(block_hash, last, tokens)
            last = block_hash

    def end(self) -> None:
        """Somebody leaves, or has to."""
        if self.holders:
            holder = self.holders.pop(self.random.randrange(len(self.holders)))
            self.cache.release(holder.blocks)


def test_whatever_happens_what_is_found_is_what_was_computed():
    """Many small worlds, each of them checked after every step."""
    steps_a_world = 500
    num_found = num_copied = 0
    for number in range(NUM_STEPS // steps_a_world):
        world = World(num_blocks=random.Random(number).choice([4, 9, 24]), number=number)
        for _ in range(steps_a_world):
            world.step()
        num_found += world.num_found
        num_copied += world.num_copied
        while world.holders:
            world.end()
        assert world.allocator.free_count + world.cache.num_idle == world.allocator.num_blocks
        world.allocator.check_integrity()
    assert num_found > NUM_STEPS // 100
    assert num_copied > NUM_STEPS // 100
