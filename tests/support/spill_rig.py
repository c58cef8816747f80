"""A pool whose blocks hold their own hashes, so that every mix-up shows, with a spill that is pumped by hand."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from teneral.runtime.kv.blocks import BlockAllocator
from teneral.runtime.kv.prefixes import PrefixCache, chain_hash, seed_hash
from teneral.runtime.kv.spill.media import DiskMedium, HostMedium, Medium
from teneral.runtime.kv.spill.policy import Fetch
from teneral.runtime.kv.spill.spill import Spill

BLOCK_SIZE = 4
HASH_BYTES = 32
POISON = 0xEE


def chain(tokens: Sequence[int], seed: bytes) -> list[bytes]:
    """The hashes of the full blocks."""
    hashes, last = [], seed
    for start in range(0, len(tokens) // BLOCK_SIZE * BLOCK_SIZE, BLOCK_SIZE):
        last = chain_hash(last, tokens[start : start + BLOCK_SIZE])
        hashes.append(last)
    return hashes


class Clock:
    """A clock whose seconds pass on demand, and a microsecond at each look."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1e-6
        return self.now_s


class HashPool:
    """The content of a pool's blocks: (num_blocks, HASH_BYTES). `meanwhile` is called in the middle of each copy."""

    def __init__(self, num_blocks: int) -> None:
        self.data = np.full((num_blocks, HASH_BYTES), POISON, np.uint8)
        self.meanwhile: Callable[[], None] = lambda: None

    def copy_out(self, blocks: Sequence[int], into: np.ndarray) -> None:
        rows, half = into, HASH_BYTES // 2
        rows[:, :half] = self.data[list(blocks), :half]
        self.meanwhile()
        rows[:, half:] = self.data[list(blocks), half:]

    def copy_in(self, blocks: Sequence[int], content: np.ndarray) -> None:
        rows, half = content, HASH_BYTES // 2
        self.data[list(blocks), :half] = rows[:, :half]
        self.meanwhile()
        self.data[list(blocks), half:] = rows[:, half:]

    def write(self, block: int, block_hash: bytes) -> None:
        self.data[block] = np.frombuffer(block_hash, np.uint8)

    def holds(self, block: int, block_hash: bytes) -> bool:
        return self.data[block].tobytes() == block_hash


class FaultyMedium:
    """Another medium, with faults on demand. `meanwhile` is called in the middle of each transfer."""

    def __init__(self, inner: Medium) -> None:
        self.inner = inner
        self.name, self.block_bytes, self.num_slots = inner.name, inner.block_bytes, inner.num_slots
        self.meanwhile: Callable[[], None] = lambda: None
        self.read_fails: Callable[[], bool] = lambda: False
        self.write_fails: Callable[[], bool] = lambda: False
        self.is_closed = False

    def write(self, slot: int, content: np.ndarray) -> None:
        self.meanwhile()
        if self.write_fails():
            raise OSError("the device is out of order")
        self.inner.write(slot, content)

    def read(self, slot: int, into: np.ndarray) -> None:
        self.meanwhile()
        if self.read_fails():
            into.fill(POISON)
            raise OSError("the device is out of order")
        self.inner.read(slot, into)

    def forget_cached(self, slot: int) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True
        self.inner.close()


class SpillRig:
    """`clock` stands still but for what tests do with it, and computing takes 10 ms a token."""

    def __init__(
        self,
        num_blocks: int,
        *,
        host: int = 0,
        disk: int = 0,
        folder: object = ".",
        mutex: threading.Lock | None = None,
    ) -> None:
        """`mutex` is the lock's, by default one that may be taken twice, as an engine's is."""
        self.clock = Clock()
        self.lock = threading.Condition(mutex)
        self.allocator = BlockAllocator(num_blocks)
        self.prefixes = PrefixCache(self.allocator)
        self.kv = HashPool(num_blocks)
        self.media: list[FaultyMedium] = []
        if host:
            self.media.append(FaultyMedium(HostMedium(host, HASH_BYTES)))
        if disk:
            self.media.append(FaultyMedium(DiskMedium(disk, HASH_BYTES, os.fspath(folder))))
        self.num_promised = 0
        self.spill = Spill(
            self.media,
            self.kv,
            self.allocator,
            self.prefixes,
            block_size=BLOCK_SIZE,
            changed=self.lock,
            num_promised=lambda: self.num_promised,
            clock=self.clock,
        )
        self.spill.note_step(100, 1.0)

    def compute(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of a sequence that computed these, and has gone."""
        blocks = self.prefixes.find(hashes)
        self.prefixes.take(blocks)
        num_missing = len(hashes) - len(blocks)
        self.prefixes.make_room(num_missing)
        for block in self.allocator.allocate(num_missing):
            self.kv.write(block, hashes[len(blocks)])
            self.prefixes.add(block, hashes[len(blocks)])
            blocks.append(block)
        self.prefixes.release(blocks)
        return blocks

    def give_up_all(self) -> None:
        """Have the pool's idle blocks given up, and overwritten."""
        self.prefixes.make_room(self.allocator.free_count + self.prefixes.num_idle)
        for block in range(self.allocator.num_blocks):
            if not self.allocator.reference_count(block):
                self.kv.data[block] = POISON

    def save(self) -> None:
        with self.lock:
            self.spill.poke()
        self.pump()

    def fetch(
        self, hashes: Sequence[bytes], num_found: int = 0, is_wanted: Callable[[], bool] = lambda: True
    ) -> Fetch:
        with self.lock:
            return self.spill.fetch(hashes, num_found, is_wanted)

    def pump(self) -> None:
        while self.spill.pump():
            self.check()

    def found(self, hashes: Sequence[bytes]) -> int:
        """How many blocks of the chain are in the pool; each of them is checked."""
        blocks = self.prefixes.find(hashes)
        for block, block_hash in zip(blocks, hashes, strict=False):
            assert self.kv.holds(block, block_hash), "a block holds something else than its hash says"
        return len(blocks)

    def check(self) -> None:
        self.allocator.check_integrity()
        self.prefixes.check_integrity()
        self.spill.check_integrity()


SEED = seed_hash(b"model")
A = chain([1] * 24, SEED)  # six blocks
B = chain([2] * 24, SEED)
C = chain([3] * 24, SEED)


KINDS = ("host", "disk", "both")


@contextmanager
def small_rig(kind: str, folder: Path) -> Iterator[SpillRig]:
    """Twelve blocks in the pool, and twice as many on a medium."""
    sizes = {"host": {"host": 24}, "disk": {"disk": 24}, "both": {"host": 5, "disk": 19}}[kind]
    rig = SpillRig(12, folder=folder, **sizes)
    yield rig
    rig.check()
    rig.spill.stop()
    assert all(medium.is_closed for medium in rig.media)


def fetched(rig: SpillRig, hashes: list[bytes]) -> int:
    """How many blocks of a chain are there after a fetch."""
    fetch = rig.fetch(hashes, rig.found(hashes))
    rig.pump()
    assert fetch.is_done
    return rig.found(hashes)


def total(figures) -> float:
    return sum(figures.values())
