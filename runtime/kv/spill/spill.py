"""Spilling of the pool's blocks to slower media before eviction, and fetching them on demand.

One thread does all copying, a piece at a time. It *saves* the idle blocks that are evicted next, in
otherwise idle time: a block evicted meanwhile is lost, as without spilling. And it *fetches* the
blocks after a found beginning, for a sequence that waits in the queue, as far as that is faster
than computing (`policy.py`); blocks not fetched in the time that computing would have taken are
computed. Spilling therefore never fails a request.

Invariants: the indexes are read and changed under the lock of the scheduler state; media are read
and written, and the pool's content is copied, without it. A block's key is its hash, so blocks that
a request must not find in the pool are not found here either. This module knows nothing of
sequences and tokens.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct

from ..blocks import BlockAllocator
from ..prefixes import PrefixCache
from .media import Bytes, Medium
from .policy import HERE, Fetch, PrefillMeter, ReadRate, is_worth_writing, plan_fetch
from .tiers import Found, SpillTiers, TierIndex

logger = logging.getLogger(__name__)

# Bytes copied at once, unless a single block is larger: a fetch may have to wait for that long.
PIECE_BYTES = 4 << 20
# Idle blocks are saved while less than this share of the pool is free, within bounds: a long prompt
# may come at any moment and need that many at once, and searching them takes the lock.
LOOKAHEAD_SHARE = 0.25
MIN_LOOKAHEAD_BLOCKS, MAX_LOOKAHEAD_BLOCKS = 256, 1024
# The change of the free count after which to look again: sequences take some at nearly every step.
POKE_BLOCKS = 16
MAX_FETCHES = 32  # that wait at the same time; later sequences compute
# A slow medium gets one of this many pieces, because it may have recovered.
TRY_EVERY = 16
# Of the engine, when all its work waits for a fetch.
MAX_WAIT_S = 0.05


class BlockContent(Protocol):
    """The pool's storage, as in `KVPool`."""

    def copy_out(self, blocks: Sequence[int], into: Bytes) -> None: ...

    def copy_in(self, blocks: Sequence[int], content: Bytes) -> None: ...


class SpillStatistics(Struct, frozen=True):
    """A snapshot of the counts; mappings are by medium, totals count from the start."""

    blocks: Mapping[str, int]
    bytes: Mapping[str, int]
    written_blocks_total: Mapping[str, int]
    restored_tokens_total: Mapping[str, int]
    dropped_blocks_total: Mapping[str, int]  # evicted, unreadable, or lost with their medium
    failures_total: Mapping[str, int]  # failed reads, and failures that turned a medium off
    read_bytes_s: Mapping[str, float]  # of those with a known rate
    prefill_tokens_s: float | None
    fetching: int  # sequences that wait for blocks
    fetches_total: int
    # Fetches whose rest was computed because they took too long.
    late_fetches_total: int
    overtaken_blocks_total: int  # evicted while they were copied


class Spill:
    """Saves and fetches blocks. `start` it once and `stop` it; or `pump` it, in a test. Callers
    hold the lock unless stated otherwise.
    """

    def __init__(
        self,
        media: Sequence[Medium],
        kv: BlockContent,
        allocator: BlockAllocator,
        prefixes: PrefixCache,
        *,
        block_size: int,
        changed: threading.Condition,
        num_promised: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Owns the media, of which there must be at least one; the fastest is the first.

        `changed` has the lock; its waiters are notified when blocks have been fetched.
        `num_promised` returns how many of the free or idle blocks are promised to sequences.
        """
        self._kv = kv
        self._allocator = allocator
        self._prefixes = prefixes
        self._changed = changed
        self._num_promised = num_promised
        self._clock = clock
        self._tiers = SpillTiers(media, changed, clock)
        self._block_bytes = self._tiers.block_bytes
        self._block_tokens = block_size
        self._prefill = PrefillMeter(min_tokens=2 * block_size)
        share = int(LOOKAHEAD_SHARE * allocator.num_blocks)
        self._lookahead = min(max(share, MIN_LOOKAHEAD_BLOCKS), MAX_LOOKAHEAD_BLOCKS)
        num_rows = max(1, PIECE_BYTES // self._block_bytes)
        self._piece = np.empty((num_rows, self._block_bytes), np.uint8)
        self._rows: list[Bytes] = list(self._piece)
        self._fetches: deque[Fetch] = deque()
        # Referenced blocks: a beginning, and the blocks being copied after it.
        self._held: Sequence[int] = ()
        self._is_poked = False  # there may be blocks to save
        # The pool's counts at the last search.
        self._seen: tuple[int, ...] = ()
        self._is_stopping = False
        self._thread: threading.Thread | None = None
        self._num_tries = 0
        self._num_fetches = 0
        self._num_late = 0
        self._num_overtaken = 0

    # -- lifecycle (without the lock)
    # ----------------------------------------------------------------------------

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="teneral-kv-spill", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Wait for the current piece, and free memory and disk space. Fetched blocks stay in the
        pool.
        """
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        else:
            self._tiers.close()

    def pump(self) -> bool:
        """Save or fetch one piece; False without work. Only the one thread calls it."""
        try:
            with self._changed:
                fetch = self._fetches[0] if self._fetches else None
            if fetch is None:
                return self._save_piece()
            self._bring_piece(fetch)
            return True
        except Exception:  # a bug, or no memory: the engine continues without the media
            logger.exception("spilling blocks failed and is turned off")
            self._give_up()
            return False

    # -- for the engine ------------------------------------------------------------------------------------------

    def note_step(self, num_tokens: int, took_s: float) -> None:
        """Record the time of a step, from which the cost of computing is estimated. Returns at
        once.
        """
        self._prefill.note_step(num_tokens, took_s)

    def poke(self) -> None:
        """Look for blocks to save: some may have become idle. Returns at once."""
        prefixes, num_free = self._prefixes.statistics(), self._allocator.free_count
        state = (prefixes.num_idle, prefixes.evictions_total, num_free // POKE_BLOCKS)
        if state != self._seen and num_free < self._lookahead:
            self._seen = state
            self._is_poked = True
            self._changed.notify_all()

    def fetch(self, hashes: Sequence[bytes], num_found: int, is_wanted: Callable[[], bool]) -> Fetch:
        """Begin to fetch blocks of this chain, whose first `num_found` are in the pool, if that is
        faster than computing.

        Returns at once. The fetch ends by itself, also when it is no longer wanted.
        """
        now_s = self._clock()
        may_wait = len(self._fetches) < MAX_FETCHES
        plan = plan_fetch(
            self._read_rates(hashes[num_found:]) if may_wait else (),
            block_bytes=self._block_bytes,
            block_tokens=self._block_tokens,
            prefill_tokens_s=self._prefill.tokens_s,
            ahead_s=max([0.0, *(each.expected_s - now_s for each in self._fetches)]),
        )
        fetch = Fetch(hashes, num_found, plan, is_wanted, now_s)
        if not fetch.is_done:
            beginning = self._prefixes.find(hashes[:num_found])
            self._prefixes.take(beginning)
            # Mark the beginning as just used, so that fetched blocks evict something else.
            self._prefixes.release(beginning)
            self._fetches.append(fetch)
            self._num_fetches += 1
            self._changed.notify_all()
        return fetch

    def end_late(self) -> None:
        """End the fetches that have taken as long as computing would."""
        now_s = self._clock()
        for fetch in [each for each in self._fetches if now_s >= each.deadline_s]:
            self._num_late += 1
            self._end(fetch)

    def wait_s(self) -> float | None:
        """The longest time until a fetch may make progress; None: no fetch is running."""
        if not self._fetches and not self._held:
            return None
        now_s = self._clock()
        return min([MAX_WAIT_S, *(max(0.0, fetch.deadline_s - now_s) for fetch in self._fetches)])

    def held_blocks(self) -> Sequence[int]:
        """The blocks referenced at the moment, one reference each."""
        return self._held

    def statistics(self) -> SpillStatistics:
        tiers = self._tiers.all
        rates = {tier.name: tier.reads.rate for tier in tiers}
        return SpillStatistics(
            blocks={tier.name: len(tier) for tier in tiers},
            bytes={tier.name: len(tier) * self._block_bytes for tier in tiers},
            written_blocks_total={tier.name: tier.num_written for tier in tiers},
            restored_tokens_total={tier.name: tier.num_restored * self._block_tokens for tier in tiers},
            dropped_blocks_total={tier.name: tier.num_dropped for tier in tiers},
            failures_total={tier.name: tier.num_failed for tier in tiers},
            read_bytes_s={name: rate.bytes_s for name, rate in rates.items() if rate is not None},
            prefill_tokens_s=self._prefill.tokens_s,
            fetching=len(self._fetches),
            fetches_total=self._num_fetches,
            late_fetches_total=self._num_late,
            overtaken_blocks_total=self._num_overtaken,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError if the indexes disagree. For tests."""
        self._tiers.check_integrity()
        for block in self._held:
            assert self._allocator.reference_count(block) >= 1, f"block {block} is held and free"
        assert not any(fetch.is_done for fetch in self._fetches)

    def _read_rates(self, hashes: Sequence[bytes]) -> list[ReadRate | None]:
        """The rates of the leading blocks that can be had without computing."""
        rates: list[ReadRate | None] = []
        for block_hash in hashes:
            found = self._tiers.find(block_hash)
            if self._prefixes.find((block_hash,)) or any(block_hash in each.wanted for each in self._fetches):
                rates.append(HERE)
            elif found is not None:
                rates.append(found.tier.reads.rate)
            else:
                break
        return rates

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_stopping or self._fetches or self._is_poked)
                if self._is_stopping:
                    break
            self.pump()
        self._give_up()
        self._tiers.close()

    def _give_up(self) -> None:
        """End all fetches, now and in the future: waiting sequences compute the missing blocks."""
        with self._changed:
            self._release_held()
            for fetch in list(self._fetches):
                self._end(fetch)
            self._tiers.clear()
            self._is_poked = False

    # -- saving --------------------------------------------------------------------------------------------------

    def _save_piece(self) -> bool:
        """Copy some of the blocks that are evicted next. Returns False without any."""
        with self._changed:
            tiers, chosen = self._choose()
            if not chosen:
                self._is_poked = False
                return False
            blocks = [block for block, _ in chosen]
            self._prefixes.watch(blocks)
        self._kv.copy_out(blocks, self._piece[: len(blocks)])
        with self._changed:
            whole = self._prefixes.unwatch()
            self._num_overtaken += len(blocks) - len(whole)
        for (block, block_hash), row in zip(chosen, self._rows, strict=False):
            if self._fetches or self._is_stopping:
                break  # the rest is saved later
            if block in whole:
                self._tiers.store(tiers, block_hash, row)
        return True

    def _choose(self) -> tuple[list[TierIndex], list[tuple[int, bytes]]]:
        """The tiers to use, and the next blocks to save with their hashes."""
        tiers = self._tiers.open()
        unsaved = self._unsaved(tiers)
        if not unsaved:
            return tiers, []
        worth = [tier for tier in tiers if self._is_worth_writing(tier)]
        if len(worth) < len(tiers):
            self._num_tries += 1
            if self._num_tries % TRY_EVERY:
                return worth, self._unsaved(worth)
            for tier in tiers:
                tier.num_until_probe = 0
        return tiers, unsaved

    def _unsaved(self, tiers: Sequence[TierIndex]) -> list[tuple[int, bytes]]:
        """The next blocks without a copy. Copies of blocks in the pool take at most half of the
        room; the other half adds capacity.
        """
        num_slots = sum(tier.medium.num_slots for tier in tiers)
        num_near = min(self._lookahead - self._allocator.free_count, (num_slots + 1) // 2)
        near = self._prefixes.next_idle(max(0, num_near))
        unsaved = [(block, block_hash) for block, block_hash in near if self._tiers.find(block_hash) is None]
        return unsaved[: len(self._rows)]

    def _is_worth_writing(self, tier: TierIndex) -> bool:
        rate = tier.reads.rate
        # The first block written measures the rate.
        return rate is None or is_worth_writing(
            rate,
            block_bytes=self._block_bytes,
            block_tokens=self._block_tokens,
            prefill_tokens_s=self._prefill.tokens_s,
        )

    # -- fetching ------------------------------------------------------------------------------------------------

    def _bring_piece(self, fetch: Fetch) -> None:
        """Fetch some blocks, or end the fetch."""
        with self._changed:
            num_found, piece = self._next_piece(fetch)
        if not piece:
            return
        read_s: dict[TierIndex, float] = {}
        num_read = 0
        for found, row in zip(piece, self._rows, strict=False):
            start_s = self._clock()
            if start_s >= fetch.deadline_s or not self._tiers.read(found, row):
                break
            num_read += 1
            read_s[found.tier] = read_s.get(found.tier, 0.0) + self._clock() - start_s
        start_s = self._clock()
        with self._changed:
            blocks = self._take_room(fetch, num_found, num_read)
        if blocks:
            self._kv.copy_in(blocks, self._piece[: len(blocks)])
        with self._changed:
            self._add(piece[: len(blocks)], blocks)
            copy_s = self._clock() - start_s
            for tier, took_s in read_s.items():
                num_here = sum(found.tier is tier for found in piece[:num_read])
                tier.reads.note_read(num_here * self._block_bytes, took_s + copy_s * num_here / num_read)
            self.end_late()
            if len(blocks) < len(piece):
                self._end(fetch)

    def _next_piece(self, fetch: Fetch) -> tuple[int, list[Found]]:
        """The number of the chain's blocks in the pool, and the next blocks to fetch; ends the
        fetch without any.
        """
        self.end_late()
        if fetch.is_done:
            return 0, []
        num_found = len(self._prefixes.find(fetch.hashes))
        piece: list[Found] = []
        for block_hash in fetch.hashes[num_found : num_found + len(self._rows)]:
            found = self._tiers.find(block_hash)
            if found is None or self._prefixes.find((block_hash,)):
                break
            piece.append(found)
        if not piece or not fetch.is_wanted():
            self._end(fetch)
            return num_found, []
        if not fetch.has_begun and len(self._fetches) == 1:
            piece[0].tier.reads.note_latency(self._clock() - fetch.asked_s)
        fetch.has_begun = True
        return num_found, piece

    def _take_room(self, fetch: Fetch, num_found: int, num_blocks: int) -> list[int]:
        """Allocate up to `num_blocks` blocks to copy into, and hold the beginning that they follow."""
        beginning = self._prefixes.find(fetch.hashes[:num_found])
        if fetch.is_done or len(beginning) < num_found:
            # The fetch was given up, or its beginning evicted.
            return []
        self._prefixes.take(beginning)
        self._held = tuple(beginning)
        num_available = self._allocator.free_count + self._prefixes.num_idle
        num_blocks = max(0, min(num_blocks, num_available - self._num_promised()))
        self._prefixes.make_room(num_blocks)
        blocks = self._allocator.allocate(num_blocks, after=beginning[-1] if beginning else None)
        self._held = (*beginning, *blocks)
        return blocks

    def _add(self, piece: Sequence[Found], blocks: Sequence[int]) -> None:
        """Cache the fetched blocks as idle."""
        for found, block in zip(piece, blocks, strict=True):
            self._prefixes.add(block, found.block_hash)
            found.tier.num_restored += 1
        self._release_held()

    def _release_held(self) -> None:
        held, self._held = self._held, ()
        self._prefixes.release(held)
        self._changed.notify_all()

    def _end(self, fetch: Fetch) -> None:
        if not fetch.is_done:
            fetch.is_done = True
            self._fetches.remove(fetch)
            # The end is evicted before the beginning, as in the pool.
            self._tiers.touch(reversed(fetch.hashes))
            self._changed.notify_all()
