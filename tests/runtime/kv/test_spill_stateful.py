"""Whatever happens to pool, prefixes, sessions, snapshots and media, and in whatever order: what is found is what was
computed.
"""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from tests.support.inspection import file_of
from tests.support.load import patience_s
from tests.support.spill_rig import BLOCK_SIZE, HASH_BYTES, POISON, HashPool, SpillRig, chain

from teneral.runtime.kv import prefix_pool
from teneral.runtime.kv.prefix_pool import PrefixPool
from teneral.runtime.kv.prefixes import PrefixLedger, seed_hash
from teneral.runtime.kv.sessions import SessionKey, SessionPins
from teneral.runtime.kv.spill.policy import Fetch

SEEDS = {tenant: seed_hash(b"model", tenant.encode()) for tenant in ("", "tenant")}
NUM_STEPS = int(os.environ.get("TENERAL_TEST_STEPS", "100000"))  # a million takes minutes
STEPS_A_WORLD = 500
MAX_TOKENS = 40


@dataclass(eq=False)
class Holder:
    """A sequence: what it says, and what of it is computed, or the fetch that it waits for."""

    tokens: list[int]
    seed: bytes
    session: SessionKey | None
    fetch: Fetch | None = None
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0


class LockedContent:
    """The pool's storage for snapshots, which copy under the lock: nothing can happen in the middle."""

    block_size = BLOCK_SIZE

    def __init__(self, kv: HashPool, mutex: threading.Lock) -> None:
        self._data = kv.data
        self._mutex = mutex
        self.num_blocks, self.size_bytes = len(kv.data), kv.data.nbytes

    def copy_out(self, blocks: Sequence[int], into: np.ndarray) -> None:
        assert self._mutex.locked()
        into[:] = self._data[list(blocks)]

    def copy_in(self, blocks: Sequence[int], content: np.ndarray) -> None:
        assert self._mutex.locked()
        self._data[list(blocks)] = content


class SlowDoor:
    """A lock that others may get first: `meanwhile` is what they do then."""

    def __init__(self, lock: threading.Condition, meanwhile: Callable[[], None]) -> None:
        self._lock = lock
        self._meanwhile = meanwhile

    def __enter__(self) -> None:
        self._meanwhile()
        self._lock.__enter__()

    def __exit__(self, *error: object) -> None:
        self._lock.__exit__(*error)


class World:
    """Random sequences and snapshots over one pool with sessions and spill; anything may happen in the middle of every
    copy that is made without the lock, and between the pieces of those that are made with it.
    """

    def __init__(self, number: int, folder: object) -> None:
        self.random = chance = random.Random(number)
        self.mutex = threading.Lock()
        self.rig = rig = SpillRig(
            chance.choice([4, 9, 24]),
            host=chance.choice([0, 3, 10]),
            disk=chance.choice([2, 8, 40]),
            folder=folder,
            mutex=self.mutex,
        )
        self.fault_rate = chance.choice([0, 0, 0.01, 0.1])
        rig.kv.meanwhile = self.interrupt
        for medium in rig.media:
            medium.meanwhile = self.interrupt
            medium.read_fails = lambda: chance.random() < self.fault_rate
            medium.write_fails = lambda: chance.random() < self.fault_rate / 20
        self.sessions = SessionPins(
            rig.prefixes,
            max_blocks=rig.allocator.num_blocks // chance.choice([1, 2, 4]),
            max_sessions=chance.choice([0, 2, 6]),
            max_idle_s=chance.choice([0.1, 1.0, 100.0]),
        )
        # Like an engine's `BlockManager`, to a `PrefixPool`.
        self.changed = SlowDoor(rig.lock, self.have_turns)
        self.allocator, self.prefixes = rig.allocator, rig.prefixes
        self.ledger = PrefixLedger(
            2 * rig.allocator.num_blocks, lambda block_hash: bool(rig.prefixes.find((block_hash,)))
        )
        self.pool = PrefixPool(self, LockedContent(rig.kv, self.mutex), seed=SEEDS[""])
        self.holders: list[Holder] = []
        self.histories: dict[SessionKey, list[int]] = {}  # what each session ended with
        self.is_pumping = False
        self.num_events = 0
        self.seen: Counter[str] = Counter()

    # -- events ------------------------------------------------------------------------------------------------

    def step(self) -> None:
        chance = self.random.random()
        if chance < 0.35:
            self.pump()
        elif chance < 0.36:
            self.rig.clock.now_s += self.random.choice([0.01, 0.1, 1.0])
        elif chance < 0.365:
            self.flip_a_byte()
        else:
            self.act()
        self.check()

    def pump(self) -> None:
        """The spill's thread does a piece."""
        self.num_events += 1
        with self.rig.lock:
            self.rig.spill.poke()
        self.is_pumping = True
        self.rig.spill.pump()
        self.is_pumping = False

    def interrupt(self) -> None:
        """What all others do while one of them copies without the lock."""
        assert not self.mutex.locked()
        while self.random.random() < 0.3:
            self.act()
            self.check()
        if self.random.random() < 0.01:
            self.rig.clock.now_s += 1.0

    def have_turns(self) -> None:
        """What they do while one waits for the lock."""
        self.interrupt()
        if not self.is_pumping and self.random.random() < 0.2:
            self.pump()
            self.check()

    def act(self) -> None:
        self.num_events += 1
        if self.random.random() < 0.1:
            self.random.choice([self.put, self.get, self.save])()
        else:
            with self.rig.lock:
                go_on = [self.go_on] * 3
                self.random.choice([self.begin, *go_on, self.end, self.expire])()

    def flip_a_byte(self) -> None:
        """The file goes bad in one place."""
        file = file_of(self.rig.media[-1].inner)
        if self.fault_rate and not file.closed:
            offset = 4096 * self.random.randrange(self.rig.media[-1].num_slots) + self.random.randrange(32)
            os.pwrite(file.fileno(), bytes([self.random.randrange(256)]), offset)

    # -- sequences and sessions, under the lock ------------------------------------------------------------------

    def begin(self) -> None:
        """Somebody comes: often as others before, or with the next turn of a session."""
        tenant = self.random.choice(list(SEEDS))
        session = (tenant, "", self.random.choice("abcde")) if self.random.random() < 0.4 else None
        tokens = self.histories[session] if session in self.histories else self.some_beginning()
        tokens = tokens + [self.random.randrange(2) for _ in range(self.random.randrange(1, 12))]
        holder = Holder(tokens[:MAX_TOKENS], SEEDS[tenant], session)
        if session is not None:
            self.sessions.touch(session, self.rig.clock())
        hashes = chain(holder.tokens[:-1], holder.seed)
        num_found = len(self.rig.prefixes.find(hashes))
        holder.fetch = self.rig.spill.fetch(hashes, num_found, lambda: holder in self.holders)
        self.holders.append(holder)
        if holder.fetch.is_done:
            self.attach(holder)

    def some_beginning(self) -> list[int]:
        base = self.random.choice(self.holders).tokens if self.holders and self.random.random() < 0.6 else []
        return base[: self.random.randrange(len(base) + 1)]

    def attach(self, holder: Holder) -> None:
        """It starts behind what is there."""
        hashes = chain(holder.tokens[:-1], holder.seed)
        self.seen["attached"] += self.rig.found(hashes)
        holder.blocks = self.rig.prefixes.find(hashes)
        self.ledger.count_hits(hashes[: len(holder.blocks)])
        holder.num_computed = len(holder.blocks) * BLOCK_SIZE
        holder.fetch = None
        self.rig.prefixes.take(holder.blocks)

    def go_on(self) -> None:
        """Somebody computes a few tokens, or says one more."""
        if not self.holders:
            return
        holder = self.random.choice(self.holders)
        if holder.fetch is not None:
            self.rig.spill.end_late()
            if holder.fetch.is_done:
                self.attach(holder)
            return
        if holder.num_computed == len(holder.tokens) - 1 and len(holder.tokens) < MAX_TOKENS:
            holder.tokens.append(self.random.randrange(2))
        end = min(len(holder.tokens), holder.num_computed + self.random.randrange(1, 9))
        missing = -(-end // BLOCK_SIZE) - len(holder.blocks)
        rig = self.rig
        if missing > rig.allocator.free_count + rig.prefixes.num_idle:
            self.end()
            return
        if missing > 0:
            rig.prefixes.make_room(missing)
            new = rig.allocator.allocate(missing)
            rig.kv.data[new] = POISON
            holder.blocks += new
        hashes = chain(holder.tokens[:end], holder.seed)
        num_full_before = holder.num_computed // BLOCK_SIZE
        for number in range(num_full_before, len(hashes)):
            rig.kv.write(holder.blocks[number], hashes[number])
            rig.prefixes.add(holder.blocks[number], hashes[number])
        self.ledger.add(hashes, num_full_before)
        holder.num_computed = end

    def end(self) -> None:
        """Somebody leaves, or has to."""
        if not self.holders:
            return
        holder = self.holders.pop(self.random.randrange(len(self.holders)))
        if holder.session is not None:
            self.histories[holder.session] = holder.tokens
            self.sessions.keep(
                holder.session, chain(holder.tokens[: holder.num_computed], holder.seed), self.rig.clock()
            )
        self.rig.prefixes.release(holder.blocks)

    def expire(self) -> None:
        self.sessions.expire(self.rig.clock())

    # -- snapshots, which take the lock themselves ---------------------------------------------------------------

    def put(self) -> None:
        """Computed blocks come from elsewhere."""
        hashes = self.some_chain()
        before, evictions = self.num_events, self.rig.prefixes.statistics().evictions_total
        content = np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, HASH_BYTES).copy()
        num_there = self.pool.put(hashes, content)
        self.seen["put"] += num_there
        if self.num_events == before:
            assert self.rig.found(hashes) == num_there
            assert num_there == len(hashes) or not self.rig.allocator.free_count
            assert self.rig.prefixes.statistics().evictions_total == evictions, (
                "something was given up for it"
            )
            self.seen["put without enough room"] += num_there < len(hashes)
        else:
            self.seen["put while others acted"] += 1
        self.pool.hold(hashes[:num_there])

    def get(self) -> None:
        self.read(self.some_chain())

    def save(self) -> None:
        """What is asked for most is read, as far as it is still there by then."""
        max_blocks = self.random.randrange(1, 12)
        wanted = self.pool.most_wanted(max_blocks * HASH_BYTES)
        assert len({each for hashes in wanted for each in hashes}) <= max_blocks
        for hashes in wanted:
            num_read = self.read(hashes)
            self.seen["saved"] += num_read
            self.seen["saved without what was given up"] += num_read < len(hashes)

    def some_chain(self) -> list[bytes]:
        tokens = self.some_beginning() + [self.random.randrange(2) for _ in range(self.random.randrange(24))]
        return chain(tokens, self.random.choice(list(SEEDS.values())))

    def read(self, hashes: Sequence[bytes]) -> int:
        content = self.pool.get(hashes)
        assert content.tobytes() == b"".join(hashes[: len(content)]), "what was read is not what was computed"
        self.seen["got"] += len(content)
        return len(content)

    # -- what must hold ----------------------------------------------------------------------------------------

    def check(self) -> None:
        rig = self.rig
        rig.check()
        self.sessions.check_integrity()
        counts = Counter(block for holder in self.holders for block in holder.blocks)
        counts.update(rig.prefixes.blocks())
        counts.update(rig.spill.held_blocks())
        assert all(rig.allocator.reference_count(block) == counts[block] for block in range(len(rig.kv.data)))
        for block_hash, block in rig.prefixes.by_hash().items():
            assert rig.kv.holds(block, block_hash), "a cached block was changed"

    def close(self) -> None:
        for holder in self.holders:
            for number, block_hash in enumerate(chain(holder.tokens[: holder.num_computed], holder.seed)):
                assert self.rig.kv.holds(holder.blocks[number], block_hash)
        while self.holders:
            self.end()
        for each in (self.rig.kv, *self.rig.media):
            each.meanwhile = lambda: None
        self.rig.pump()
        self.rig.spill.stop()
        self.check()
        num_blocks = self.rig.allocator.num_blocks
        assert self.rig.allocator.free_count + self.rig.prefixes.num_idle == num_blocks
        self.rig.prefixes.make_room(num_blocks)
        self.check()
        assert self.sessions.statistics().num_sessions == 0, "pins kept somebody from running"
        self.note_statistics()

    def note_statistics(self) -> None:
        statistics = self.rig.spill.statistics()
        for name, figures in (
            ("restored", statistics.restored_tokens_total),
            ("dropped", statistics.dropped_blocks_total),
            ("failed", statistics.failures_total),
            ("unpinned for", self.sessions.statistics().unpinned_total),
        ):
            self.seen.update({f"{name} {reason}": count for reason, count in figures.items()})
        self.seen["overtaken"] += statistics.overtaken_blocks_total
        self.seen["late"] += statistics.late_fetches_total


@pytest.mark.timeout(max(120, NUM_STEPS // 1_000))
def test_whatever_happens_what_is_found_is_what_was_computed(tmp_path, monkeypatch):
    """Many small worlds, each of them checked after every step, and in the middle of copies."""
    monkeypatch.setattr(prefix_pool, "PIECE_BYTES", 2 * HASH_BYTES)
    seen: Counter[str] = Counter()
    for number in range(NUM_STEPS // STEPS_A_WORLD):
        world = World(number, tmp_path)
        for _ in range(STEPS_A_WORLD):
            world.step()
        world.close()
        seen += world.seen
    # All of it has happened, or the test would show less than it says.
    rare = {"late", "overtaken", "failed host", "failed disk", "saved without what was given up"}
    common = {"attached", "restored host", "restored disk", "dropped host", "dropped disk"}
    common |= {"unpinned for budget", "unpinned for idle", "unpinned for pressure"}
    common |= {"put", "put without enough room", "put while others acted", "got", "saved"}
    assert all(seen[name] > NUM_STEPS // 20_000 for name in rare), seen
    assert all(seen[name] > NUM_STEPS // 1_000 for name in common), seen


def test_with_threads_what_is_found_is_what_was_computed(tmp_path):
    """One thread computes, gives up and fetches, while the other one saves and restores."""
    rig = SpillRig(24, host=16, disk=64, folder=tmp_path)
    chance = random.Random(7)
    chains = [chain([number] * 4 * chance.randrange(1, 9), SEEDS[""]) for number in range(16)]
    rig.spill.start()
    for number in range(1_000):
        hashes = chance.choice(chains)
        with rig.lock:
            fetch = rig.spill.fetch(hashes, rig.found(hashes), lambda: True)
            if number % 3 == 0:
                assert rig.lock.wait_for(lambda fetch=fetch: fetch.is_done, patience_s(30))
            rig.check()
            num_missing = len(hashes) - rig.found(hashes)
            if num_missing <= rig.allocator.free_count + rig.prefixes.num_idle:
                rig.compute(hashes)
            if number % 10 == 0:
                rig.give_up_all()
            rig.spill.poke()
            rig.lock.wait(0.001)  # let the other one in
    rig.spill.stop()
    rig.check()
    statistics = rig.spill.statistics()
    assert sum(statistics.restored_tokens_total.values()) > 100
    assert sum(statistics.failures_total.values()) == 0
    assert rig.allocator.free_count + rig.prefixes.num_idle == 24
    for block, block_hash in rig.prefixes.next_idle(24):
        assert rig.kv.holds(block, block_hash)
