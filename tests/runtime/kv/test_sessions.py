"""Pins on blocks: kept for their session, within bounds, and never blocking other work."""

from __future__ import annotations

import random

import pytest

from teneral.runtime.kv.blocks import BlockAllocator
from teneral.runtime.kv.prefixes import PrefixCache, chain_hash, seed_hash
from teneral.runtime.kv.sessions import SessionKey, SessionPins, Unpinned

A, B, C = [("", "", name) for name in "abc"]


class Pool:
    """A pool without engine: chains come, are used, and end."""

    def __init__(self, num_blocks: int = 16, **bounds: float) -> None:
        self.allocator = BlockAllocator(num_blocks)
        self.prefixes = PrefixCache(self.allocator)
        self.sessions = SessionPins(
            self.prefixes,
            max_blocks=int(bounds.get("max_blocks", 8)),
            max_sessions=int(bounds.get("max_sessions", 10)),
            max_idle_s=bounds.get("max_idle_s", 100.0),
        )

    def chain(self, name: str, length: int) -> list[bytes]:
        hashes = [seed_hash(name.encode())]
        for number in range(length):
            hashes.append(chain_hash(hashes[-1], [number]))
        return hashes[1:]

    def begin(self, name: str, length: int) -> list[int]:
        """A sequence that computes this chain, behind what is there of it."""
        hashes = self.chain(name, length)
        found = self.prefixes.find(hashes)
        self.prefixes.take(found)
        self.prefixes.make_room(length - len(found))
        blocks = [*found, *self.allocator.allocate(length - len(found))]
        for block, each in zip(blocks, hashes, strict=True):
            self.prefixes.add(block, each)
        return blocks

    def run(self, name: str, length: int, *, session: SessionKey | None = None, now_s: float = 0.0) -> None:
        blocks = self.begin(name, length)
        if session is not None:
            self.sessions.keep(session, self.chain(name, length), now_s)
        self.prefixes.release(blocks)
        self.check()

    def num_found(self, name: str, length: int) -> int:
        return len(self.prefixes.find(self.chain(name, length)))

    def check(self) -> None:
        self.allocator.check_integrity()
        self.prefixes.check_integrity()
        self.sessions.check_integrity()


def test_what_is_pinned_outlives_the_traffic_of_others() -> None:
    pool = Pool()
    pool.run("mine", 4, session=A)
    pool.run("other", 4)
    for number in range(20):
        pool.run(f"traffic {number}", 8)
    assert (pool.num_found("mine", 4), pool.num_found("other", 4)) == (4, 0)
    assert pool.prefixes.num_idle + pool.allocator.free_count == 16  # and all of it could be had


def test_the_next_turn_moves_the_pins_on() -> None:
    pool = Pool()
    pool.run("mine", 3, session=A)
    pool.run("mine", 6, session=A)
    assert pool.sessions.statistics().num_pinned_blocks == 6
    pool.run("something else", 2, session=A)
    statistics = pool.sessions.statistics()
    assert (statistics.num_sessions, statistics.num_pinned_blocks) == (1, 2)
    assert pool.num_found("mine", 6) == 6  # idle now, like any other


def test_beyond_the_budget_the_session_used_least_recently_loses_its_pins() -> None:
    pool = Pool()
    pool.run("a", 3, session=A, now_s=1)
    pool.run("b", 3, session=B, now_s=2)
    pool.sessions.touch(A, 3)
    pool.run("c", 3, session=C, now_s=4)
    assert pool.sessions.statistics().unpinned_total == {Unpinned.BUDGET: 1}
    for number in range(20):
        pool.run(f"traffic {number}", 6)
    assert [pool.num_found(name, 3) for name in "abc"] == [3, 0, 3]


def test_blocks_that_several_sessions_pin_count_once() -> None:
    pool = Pool()
    for key in (A, B, C):
        pool.run("system prompt", 6, session=key)
    statistics = pool.sessions.statistics()
    assert (statistics.num_sessions, statistics.num_pinned_blocks) == (3, 6)


def test_a_session_larger_than_the_budget_keeps_its_beginning() -> None:
    pool = Pool()
    pool.run("long", 12, session=A)
    assert pool.sessions.statistics().num_pinned_blocks == 8
    for number in range(20):
        pool.run(f"traffic {number}", 8)
    assert pool.num_found("long", 12) == 8


def test_there_is_a_bound_to_the_number_of_sessions() -> None:
    pool = Pool(max_sessions=2)
    for key in (A, B, C):
        pool.run(key[2], 1, session=key)
    assert pool.sessions.statistics().num_sessions == 2


@pytest.mark.parametrize("bounds", [{"max_sessions": 0}, {"max_blocks": 0}])
def test_a_bound_of_nothing_turns_sessions_off(bounds: dict[str, int]) -> None:
    pool = Pool(**bounds)
    pool.run("a", 3, session=A)
    assert pool.sessions.statistics().num_sessions == 0


def test_who_does_not_come_back_in_time_loses_its_pins() -> None:
    pool = Pool(max_idle_s=100.0)
    pool.run("a", 3, session=A, now_s=0)
    pool.run("b", 3, session=B, now_s=50)
    pool.sessions.expire(100.0)
    assert pool.sessions.statistics().num_sessions == 2
    pool.sessions.expire(101.0)
    statistics = pool.sessions.statistics()
    assert (statistics.num_sessions, statistics.unpinned_total) == (1, {Unpinned.IDLE: 1})


def test_pins_give_way_when_nothing_else_is_left_the_least_recently_used_session_first() -> None:
    pool = Pool()
    pool.run("a", 4, session=A, now_s=1)
    pool.run("b", 4, session=B, now_s=2)
    blocks = pool.begin("needs much", 12)
    assert pool.sessions.statistics().unpinned_total == {Unpinned.PRESSURE: 1}
    assert (pool.num_found("a", 4), pool.num_found("b", 4)) == (0, 4)
    pool.prefixes.release(blocks)
    blocks = pool.begin("needs all", 16)
    assert pool.sessions.statistics().num_sessions == 0
    pool.prefixes.release(blocks)
    pool.check()


def test_more_than_the_pool_has_unpins_no_session() -> None:
    pool = Pool()
    pool.run("a", 4, session=A)
    running = pool.begin("running", 8)
    with pytest.raises(ValueError, match="9 blocks requested"):
        pool.prefixes.make_room(9)
    assert pool.sessions.statistics().num_sessions == 1
    pool.prefixes.release(running)


def test_the_same_name_of_another_tenant_or_salt_is_another_session() -> None:
    pool = Pool()
    keys = [("", "", "s"), ("t", "", "s"), ("", "salt", "s")]
    for number, key in enumerate(keys):
        pool.run(f"chain {number}", 2, session=key)
    statistics = pool.sessions.statistics()
    assert (statistics.num_sessions, statistics.num_owners) == (3, 3)


def test_clearing_the_cache_forgets_pins_too() -> None:
    pool = Pool()
    pool.run("a", 4, session=A)
    running = pool.begin("a", 6)
    pool.prefixes.clear()
    pool.check()
    assert (pool.num_found("a", 6), pool.sessions.statistics().num_sessions) == (0, 0)
    pool.prefixes.release(running)
    assert pool.allocator.free_count == 16


@pytest.mark.parametrize("seed", range(8))
def test_any_traffic_leaves_the_books_right(seed: int) -> None:
    chance = random.Random(seed)
    pool = Pool(24, max_blocks=chance.choice([0, 3, 12, 24]), max_sessions=4, max_idle_s=30.0)
    running: list[tuple[str, int, list[int]]] = []
    for now_s in range(1_500):
        action = chance.random()
        if action < 0.5:
            name, length = chance.choice("abcdef"), chance.randrange(1, 9)
            num_found = pool.num_found(name, length)
            idle = pool.prefixes.num_idle_among(pool.prefixes.find(pool.chain(name, length)))
            if length - num_found <= pool.allocator.free_count + pool.prefixes.num_idle - idle:
                running.append((name, length, pool.begin(name, length)))
        elif action < 0.9 and running:
            name, length, blocks = running.pop(chance.randrange(len(running)))
            if chance.random() < 0.6:
                key = ("", "", chance.choice("stuvwxyz"))
                pool.sessions.keep(key, pool.chain(name, length), float(now_s))
            pool.prefixes.release(blocks)
        elif action < 0.95:
            pool.sessions.touch(("", "", chance.choice("stuvwxyz")), float(now_s))
        else:
            pool.sessions.expire(float(now_s))
        pool.check()
    assert pool.prefixes.statistics().evictions_total > 0
