"""Import and export of computed blocks, by their hashes, while the engine runs.

All copies happen under the lock of the engine's scheduler state, at most a mebibyte at a time: no
step is delayed for longer than one such copy, and no block is ever held without the allocator's
knowledge. Importing evicts nothing that is cached. This module does not know the source or the
destination of contents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from .blocks import BlockAllocator
from .prefixes import PrefixCache, PrefixLedger, chain_hash, seed_hash

if TYPE_CHECKING:
    import threading

    from numpy.typing import NDArray

    from .storage import KVPool

PIECE_BYTES = 1 << 20  # bytes copied at a time, unless one block is larger


class Holder(Protocol):
    """The owner of the pool: the part of the engine's `BlockManager` that is needed here."""

    changed: threading.Condition
    allocator: BlockAllocator
    prefixes: PrefixCache
    ledger: PrefixLedger


class PrefixPool:
    """Access to an engine's pool from any thread."""

    def __init__(self, holder: Holder, kv: KVPool, *, seed: bytes) -> None:
        """`seed` begins all chains of this pool, before their salts."""
        self._holder = holder
        self._kv = kv
        self.seed = seed
        self._last: int | None = None  # the block filled last

    @property
    def layout(self) -> str:
        """The layout of a block, as in `KVPool.layout`."""
        return self._kv.layout

    @property
    def dtype(self) -> str:
        """The name of the model's compute dtype."""
        return self._kv.dtype.label

    @property
    def block_size(self) -> int:
        """The number of tokens in a block."""
        return self._kv.block_size

    @property
    def block_bytes(self) -> int:
        return self._kv.size_bytes // self._kv.num_blocks

    @property
    def element_bytes(self) -> int:
        """The size of the numbers in a block's bytes."""
        return self._kv.element_bytes

    @property
    def has_states(self) -> bool:
        """True if blocks are of no use without recurrent states, which are not exported (`states.py`)."""
        return bool(getattr(self._kv, "num_states", 0))  # only a host's pools have some

    def chain(self, tokens: Sequence[int], *, salt: str) -> tuple[bytes, ...]:
        """The hashes of these tokens' full blocks, under this salt."""
        chain: list[bytes] = []
        last = seed_hash(self.seed, salt.encode())
        for start in range(0, len(tokens) // self.block_size * self.block_size, self.block_size):
            last = chain_hash(last, tokens[start : start + self.block_size])
            chain.append(last)
        return tuple(chain)

    def put(self, hashes: Sequence[bytes], content: NDArray[np.uint8]) -> int:
        """Import these blocks, content (blocks, block_bytes), while there are free blocks for them.

        Returns how many of them, from the first on, are present now. Blocks that were present
        before stay.
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
        """Mark this whole chain as just used: its end is evicted before its beginning, and both
        after all earlier uses.
        """
        with self._holder.changed:
            self._holder.ledger.add(chain)
            blocks = self._holder.prefixes.find(chain)
            self._holder.prefixes.take(blocks)
            self._holder.prefixes.release(blocks)

    def most_wanted(self, limit_bytes: int, *, with_sessions: bool = False) -> list[tuple[bytes, ...]]:
        """The chains of `PrefixLedger.most_wanted` that take at most `limit_bytes`.

        With `with_sessions`, blocks that sessions pin count as found.
        """
        with self._holder.changed:
            pinned: set[bytes] = set()
            if with_sessions:
                pins = self._holder.prefixes.pins()
                pinned = {each for each, block in self._holder.prefixes.by_hash().items() if block in pins}
            return self._holder.ledger.most_wanted(limit_bytes // self.block_bytes, pinned)

    def get(self, hashes: Sequence[bytes]) -> NDArray[np.uint8]:
        """The content of these blocks of a chain, (blocks, block_bytes), from the first up to the
        first missing one.
        """
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
        """Import the blocks with these numbers, for all of which there are free blocks. The caller
        holds the lock.
        """
        if not numbers:
            return
        # Continue where the last ones ended: one run of blocks is read without a copy.
        blocks = self._holder.allocator.allocate(len(numbers), after=self._last)
        self._last = blocks[-1]
        self._kv.copy_in(blocks, content[list(numbers)])
        for block, number in zip(blocks, numbers, strict=True):
            self._holder.prefixes.add(block, hashes[number])
        self._holder.prefixes.release(blocks)

    def _pieces(self, num_blocks: int) -> Iterator[tuple[int, int]]:
        step = max(1, PIECE_BYTES // self.block_bytes)
        return ((start, min(start + step, num_blocks)) for start in range(0, num_blocks, step))
