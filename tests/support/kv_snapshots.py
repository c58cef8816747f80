"""Pools with known content, and snapshots of them, without any model."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from tests.support.load import patience_s

from teneral.loader.sources.base import SourceOptions, Store
from teneral.loader.timeline import Timeline
from teneral.runtime.kv.blocks import BlockAllocator
from teneral.runtime.kv.prefix_pool import PrefixPool
from teneral.runtime.kv.prefixes import PrefixCache, PrefixLedger
from teneral.runtime.kv.snapshots.parts import open_snapshot
from teneral.runtime.kv.snapshots.service import SnapshotService, identity_of
from teneral.runtime.kv.snapshots.snapshot import Identity, Snapshot
from teneral.runtime.kv.snapshots.writer import NamedChain, find_published, write_generation
from teneral.runtime.kv.storage import KVStorage, PoolShape
from teneral.runtime.tensors import DType

WAIT_S = patience_s(20)
MODEL = bytes(range(32))
SEED = b"of this model"
BLOCK_SIZE = 4


@dataclass(frozen=True)
class Opened:
    """All that is needed of the manifest of an artifact that was opened."""

    digest: bytes = MODEL


class Service(SnapshotService):
    """A service whose fetch a test can wait for."""

    def __init__(
        self,
        address: object,
        options: SourceOptions | None = None,
        *,
        limit_bytes: int = 1 << 20,
        saves: bool = True,
    ) -> None:
        self.timeline = Timeline()
        self.has_run = threading.Event()
        super().__init__(
            str(address),
            options or SourceOptions(),
            limit_bytes=limit_bytes,
            saves=saves,
            timeline=self.timeline,
        )

    def _run(self, opened: Any) -> None:
        super()._run(opened)
        self.has_run.set()

    def fetch(self) -> Service:
        """Start, and wait until the fetch is over."""
        opened: Any = Future()
        opened.set_result((None, Opened()))
        self.start(opened)
        assert self.has_run.wait(WAIT_S)
        return self

    def marks(self) -> list[str]:
        return [span.name for span in self.timeline.spans()]


class Pool:
    """A pool as an engine has it, and its books."""

    def __init__(self, num_blocks: int = 16, *, storage: Any = None, seed: bytes = SEED) -> None:
        self.changed = threading.Condition()
        self.allocator = BlockAllocator(num_blocks)
        self.prefixes = PrefixCache(self.allocator)
        self.ledger = PrefixLedger(64, lambda each: bool(self.prefixes.find((each,))))
        self.kv = storage or KVStorage(PoolShape(2, 2, 8, num_blocks, BLOCK_SIZE, DType.BF16))
        self.pool = PrefixPool(self, self.kv, seed=seed)

    @property
    def identity(self) -> Identity:
        return identity_of(self.pool, model=MODEL)

    def compute(self, tokens: Sequence[int], *, salt: str = "", hits: int = 0) -> tuple[bytes, ...]:
        """The chain of full blocks that a sequence leaves behind; they hold `contents_of` its tokens."""
        chain = self.pool.chain(tokens, salt=salt)
        assert self.pool.put(chain, contents_of(chain, self.pool.block_bytes)) == len(chain)
        self.pool.hold(chain)
        for _ in range(hits):
            self.ledger.count_hits(chain)
        return chain

    def check(self, chain: Sequence[bytes]) -> None:
        """All of this chain can be found, and holds what was computed."""
        assert len(self.prefixes.find(chain)) == len(chain)
        np.testing.assert_array_equal(self.pool.get(chain), contents_of(chain, self.pool.block_bytes))
        self.prefixes.check_integrity()
        self.allocator.check_integrity()


def contents_of(chain: Sequence[bytes], block_bytes: int) -> np.ndarray:
    """What a block holds follows from what it is known by: (blocks, block_bytes), finite in every float dtype."""
    rows = [np.resize(np.frombuffer(each, np.uint8), block_bytes) & 0x3F for each in chain]
    return np.stack(rows)


def tokens_of(number: int, num_blocks: int) -> list[int]:
    """A prompt of that number of full blocks, unlike any other."""
    return [1000 * number + index for index in range(num_blocks * BLOCK_SIZE)]


def write(store: Store, identity: Identity, chains: dict[str, tuple[bytes, ...]]) -> Snapshot:
    """A snapshot of these prefixes, in the place of what is there."""

    def read(hashes: Sequence[bytes]) -> np.ndarray:
        return contents_of(hashes, identity.block_bytes)

    named = [NamedChain(name, chain) for name, chain in chains.items()]
    write_generation(store, identity, named, read, replaced=find_published(store))
    return open_snapshot(store)[0]
