"""What the prefix cache finds is what was computed, under every order of events."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field

import pytest

from teneral.runtime.kv.blocks import BlockAllocator, Epoch
from teneral.runtime.kv.prefixes import PrefixCache, chain_hash, seed_hash

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
    for block, block_hash in zip(blocks, chain(tokens, seed), strict=True):
        cache.add(block, block_hash)
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
    with pytest.raises(ValueError, match="can be had"):
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


@dataclass(eq=False)
class Holder:
    """A sequence: what it says, and what of it is computed."""

    tokens: list[int]
    seed: bytes
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0


class World:
    """Random sequences over one pool; `content` is what each block holds, as the tokens that led to it."""

    def __init__(self, num_blocks: int, number: int) -> None:
        self.random = random.Random(number)
        self.allocator = BlockAllocator(num_blocks)
        self.cache = PrefixCache(self.allocator)
        self.holders: list[Holder] = []
        self.content: dict[int, tuple[bytes, tuple[int, ...]]] = {}
        self.num_found = 0

    def step(self) -> None:
        actions = [self.begin, self.go_on, self.go_on, self.go_on, self.end]
        self.random.choice(actions)()
        self.cache.check_integrity()
        holders = [block for holder in self.holders for block in holder.blocks] + list(self.cache.blocks())
        for block in range(self.allocator.num_blocks):
            assert self.allocator.reference_count(block) == holders.count(block)

    def begin(self) -> None:
        """Somebody comes: often as others before."""
        base = self.random.choice(self.holders).tokens if self.holders and self.random.random() < 0.6 else []
        tokens = base[: self.random.randrange(len(base) + 1)]
        tokens = tokens + [self.random.randrange(2) for _ in range(self.random.randrange(1, 12))]
        holder = Holder(tokens, self.random.choice([SEED, seed_hash(b"other")]))
        found = self.cache.find(chain(tokens[:-1], holder.seed))
        self.num_found += len(found)
        for number, block in enumerate(found):
            history = tuple(tokens[: (number + 1) * BLOCK_SIZE])
            assert self.content[block] == (holder.seed, history), "what was found is something else"
        self.cache.take(found)
        holder.blocks, holder.num_computed = list(found), len(found) * BLOCK_SIZE
        self.holders.append(holder)

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
            holder.blocks += self.allocator.allocate(missing)
        holder.num_computed = end
        hashes = chain(holder.tokens[:end], holder.seed)
        for number, block_hash in enumerate(hashes):
            block = holder.blocks[number]
            self.content[block] = (holder.seed, tuple(holder.tokens[: (number + 1) * BLOCK_SIZE]))
            self.cache.add(block, block_hash)

    def end(self) -> None:
        """Somebody leaves, or has to."""
        if self.holders:
            holder = self.holders.pop(self.random.randrange(len(self.holders)))
            self.cache.release(holder.blocks)


def test_whatever_happens_what_is_found_is_what_was_computed():
    """Many small worlds, each of them checked after every step."""
    steps_a_world = 500
    num_found = 0
    for number in range(NUM_STEPS // steps_a_world):
        world = World(num_blocks=random.Random(number).choice([4, 9, 24]), number=number)
        for _ in range(steps_a_world):
            world.step()
        num_found += world.num_found
        while world.holders:
            world.end()
        assert world.allocator.free_count + world.cache.num_idle == world.allocator.num_blocks
        world.allocator.check_integrity()
    assert num_found > NUM_STEPS // 100
