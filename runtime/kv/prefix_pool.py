"""Computed blocks into a running engine's pool and out of it, for who knows them by their hashes.

Everything happens under the roster's lock, a piece of at most a mebibyte at a time: so no step is held up for longer
than such a piece takes to copy, and no block is ever in hands that the roster does not know of. Nothing that is cached
is given up for what is put in. Where contents come from, and where they go, is not known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from .blocks import BlockAllocator
from .prefix_ledger import PrefixLedger
from .prefixes import PrefixCache, chain_hash, seed_hash

if TYPE_CHECKING:
    import threading

    from numpy.typing import NDArray

    from .pool import KVPool

PIECE_BYTES = 1 << 20  # copied at a time, or a block that is larger


class Holder(Protocol):
    """Whose pool it is: what is needed of an engine's `Lending`."""

    changed: threading.Condition
    allocator: BlockAllocator
    prefixes: PrefixCache
    ledger: PrefixLedger


class PrefixPool:
    """For any thread."""

    def __init__(self, holder: Holder, kv: KVPool, *, seed: bytes) -> None:
        """`seed` is what all chains of this pool begin with, before their salts."""
        self._holder = holder
        self._kv = kv
        self.seed = seed
        self._last: int | None = None  # block that something was put into

    @property
    def layout(self) -> str:
        """As `KVStorage.layout`."""
        return self._kv.layout

    @property
    def dtype(self) -> str:
        """That the model computes in."""
        return self._kv.dtype.label

    @property
    def block_size(self) -> int:
        """Tokens."""
        return self._kv.block_size

    @property
    def block_bytes(self) -> int:
        return self._kv.size_bytes // self._kv.num_blocks

    @property
    def element_bytes(self) -> int:
        """Of what a block's bytes are made of."""
        return self._kv.element_bytes

    def chain(self, tokens: Sequence[int], *, salt: str) -> tuple[bytes, ...]:
        """What the full blocks of these tokens are known by, to who gives this salt."""
        chain: list[bytes] = []
        last = seed_hash(self.seed, salt.encode())
        for start in range(0, len(tokens) // self.block_size * self.block_size, self.block_size):
            last = chain_hash(last, tokens[start : start + self.block_size])
            chain.append(last)
        return tuple(chain)

    def put(self, hashes: Sequence[bytes], content: NDArray[np.uint8]) -> int:
        """Have these blocks found, content (blocks, block_bytes), as long as there are free ones to put them in.

        Returns how many of them, from the first on, are there now; what was there before stays.
        """
        for start, end in self._pieces(len(hashes)):
            with self._holder.changed:
                is_there = self._holder.prefixes.find
                missing = [number for number in range(start, end) if not is_there((hashes[number],))]
                num_free = self._holder.allocator.free_count
                self._put(hashes, content, missing[:num_free])
                if len(missing) > num_free:
                    return missing[num_free]
        return len(hashes)

    def hold(self, chain: Sequence[bytes]) -> None:
        """The blocks of this whole chain follow one another, and were used just now: its end is given up before its
        beginning, and both after everything that was used before.
        """
        with self._holder.changed:
            self._holder.ledger.add(chain)
            blocks = self._holder.prefixes.find(chain)
            self._holder.prefixes.take(blocks)
            self._holder.prefixes.release(blocks)

    def most_wanted(self, limit_bytes: int, *, with_sessions: bool = False) -> list[tuple[bytes, ...]]:
        """As `PrefixLedger.most_wanted`, of what takes at most so many bytes. `with_sessions`: what sessions keep
        counts as found.
        """
        with self._holder.changed:
            pinned: set[bytes] = set()
            if with_sessions:
                pins = self._holder.prefixes.pins()
                pinned = {each for each, block in self._holder.prefixes.by_hash().items() if block in pins}
            return self._holder.ledger.most_wanted(limit_bytes // self.block_bytes, pinned)

    def get(self, hashes: Sequence[bytes]) -> NDArray[np.uint8]:
        """(blocks, block_bytes) What these blocks of a chain hold, as far as they are there, from the first on."""
        content = np.empty((len(hashes), self.block_bytes), np.uint8)
        for start, end in self._pieces(len(hashes)):
            with self._holder.changed:
                blocks = self._holder.prefixes.find(hashes[start:end])
                if blocks:
                    self._kv.copy_out(blocks, content[start : start + len(blocks)])
            if len(blocks) < end - start:
                return content[: start + len(blocks)]
        return content

    def _put(self, hashes: Sequence[bytes], content: NDArray[np.uint8], numbers: Sequence[int]) -> None:
        """Those with these numbers, for all of which there are free blocks. Under the lock."""
        if not numbers:
            return
        # Where the last ones ended: what is one run of blocks is read without a copy.
        blocks = self._holder.allocator.allocate(len(numbers), after=self._last)
        self._last = blocks[-1]
        self._kv.copy_in(blocks, content[list(numbers)])
        for block, number in zip(blocks, numbers, strict=True):
            self._holder.prefixes.add(block, hashes[number])
        self._holder.prefixes.release(blocks)

    def _pieces(self, num_blocks: int) -> Iterator[tuple[int, int]]:
        step = max(1, PIECE_BYTES // self.block_bytes)
        return ((start, min(start + step, num_blocks)) for start in range(0, num_blocks, step))
