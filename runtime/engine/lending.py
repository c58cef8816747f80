"""The blocks of the KV pool that sequences hold: new ones, and those of others who began in the same way.

Who waits for a place is lent what is there of its beginning while the scheduler decides, and gives it back unless it
gets one. Full blocks are found by others from the step on that computed them. Where a prompt leaves them in the middle
of a block, what it has in common with that is copied into the first block that it gets: blocks of the cache are never
written to.

Invariants: a sequence holds one reference to each of its blocks, in the order of its tokens, and to the block that it
is going to copy from until it has; and the cache's books of found, pinned and spilled blocks are changed nowhere else
but by those who copy blocks in. Nobody is lent what would leave too little for who comes before. Callers hold
`changed`. Nothing is known here of queues, steps and events.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable

from ..kv.blocks import BlockAllocator
from ..kv.prefix_ledger import PrefixLedger
from ..kv.prefixes import PrefixCache
from ..kv.sessions import SessionPins
from ..kv.spill.media import open_media
from ..kv.spill.spill import BlockContent, Spill
from .options import EngineOptions
from .scheduler import Prospect
from .sequence import Lane, Sequence

CopyTokens = Callable[[int, int, int], None]
"""As `KVPool.copy_tokens`: from a block, to a block, how many."""


class Lending:
    """One pool's blocks, without their content."""

    def __init__(
        self,
        num_blocks: int,
        options: EngineOptions,
        changed: threading.Condition,
        *,
        prefix_seed: bytes,
        max_pinned_blocks: int,
        copy_tokens: CopyTokens,
    ) -> None:
        """`prefix_seed` says whose keys and values these are; with another one nothing of this pool is found.

        `copy_tokens` is called under `changed`, before the step whose sequence needs them.
        """
        self.changed = changed
        self.allocator = BlockAllocator(num_blocks)
        self.prefixes = PrefixCache(self.allocator)
        self.ledger = PrefixLedger(2 * num_blocks, lambda block_hash: bool(self.prefixes.find((block_hash,))))
        self.sessions = SessionPins(
            self.prefixes,
            max_blocks=max_pinned_blocks,
            max_sessions=options.max_sessions,
            max_idle_s=options.session_idle_s,
        )
        self.spill: Spill | None = None  # where blocks go before they are given up
        self._options = options
        self._block_size = options.block_size
        self._prefix_seed = prefix_seed
        self._copy_tokens = copy_tokens

    def open_spill(self, kv: BlockContent, block_bytes: int, num_promised: Callable[[], int]) -> None:
        """Have blocks go where the options say before they are given up; `num_promised` as for `Spill`. Once, at the
        beginning, by who will start and stop it. UsageError when there is no such place.
        """
        options = self._options
        media = open_media(
            block_bytes,
            host_bytes=options.kv_host_bytes,
            disk_bytes=options.kv_disk_bytes,
            disk_dir=options.kv_disk_dir,
        )
        if media:
            self.spill = Spill(
                media,
                kv,
                self.allocator,
                self.prefixes,
                block_size=options.block_size,
                changed=self.changed,
                num_promised=num_promised,
            )

    # -- what could be had -----------------------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Blocks that are free, and those whose content can be given up."""
        return self.allocator.free_count + self.prefixes.num_idle

    def num_missing(self, lane: Lane, num_tokens: int) -> int:
        """How many more blocks the lane needs to hold so many tokens; below 0, so many it has too many."""
        return -(-num_tokens // self._block_size) - len(lane.blocks)

    def num_promised(self, running: Collection[Sequence]) -> int:
        """Available ones that those who run will need: for all of their tokens, and one more each."""
        missing = (self.num_missing(each.exact, each.num_tokens + 1) for each in running)
        return sum(max(0, num_blocks) for num_blocks in missing) + len(running)

    def num_freed_by(self, sequences: Collection[Sequence]) -> int:
        """How many blocks could be had if these gave up theirs: those that nobody beside them uses."""
        num_given_up = Counter(block for each in sequences for block in each.blocks)
        return sum(self.prefixes.num_users(block) == count for block, count in num_given_up.items())

    def prospect(self, sequence: Sequence) -> Prospect:
        """The waiting sequence as it would be planned with the blocks of its prefix that are cached. Idle ones among
        those count as blocks still to take.
        """
        found = self.prefixes.find(self._hashes_to_find(sequence))
        return Prospect(
            num_tokens=sequence.num_tokens,
            num_blocks=len(found) - self.prefixes.num_idle_among(found),
            num_computed=len(found) * self._block_size,
            queue_name=sequence.queue_name,
        )

    # -- prefixes --------------------------------------------------------------------------------------------

    def attach(self, waiting: Iterable[Sequence], *, num_places: int, num_promised: int) -> None:
        """Give the first of these what is there of their beginnings, at least one token being left to compute, as long
        as there are places and blocks for all of it. Who waits for blocks on their way back lets others go first.
        """
        if not self._options.prefix_cache:
            return
        if self.spill is not None:
            self.spill.end_late()
        left = self.num_available - num_promised
        for sequence in [each for each in waiting if not each.waits_for_blocks]:
            if num_places < 1:
                return
            hashes = self._hashes_to_find(sequence)
            found = self.prefixes.find(hashes)
            num_needed = self._num_to_take(sequence, found)
            if num_needed > left:
                return
            if self._send_for_more(sequence, hashes, len(found)):
                continue
            left -= num_needed
            num_places -= 1
            self.prefixes.take(found)
            sequence.exact.blocks = tuple(found)
            sequence.exact.num_computed = len(found) * self._block_size
            sequence.num_remembered = len(found)
            left -= self._attach_source(sequence, left)

    def detach(self, waiting: Iterable[Sequence]) -> None:
        """Have those who got no place give back what `attach` gave them."""
        for sequence in waiting:
            if sequence.num_computed:
                self.take_back(sequence)

    def note_begin(self, sequence: Sequence) -> None:
        """Count what it found: it has a place for the first time."""
        self.prefixes.count_lookup(sequence.num_prompt_tokens, sequence.num_computed)
        if not sequence.num_remembered:
            return
        self.ledger.count_hits(self._hashes(sequence, sequence.num_remembered))
        self._tell_tokens(sequence, 0, sequence.num_remembered)  # of those that came from elsewhere

    def remember(self, sequence: Sequence) -> None:
        """Have the sequence's full blocks found by who begins in the same way."""
        num_full = sequence.num_computed // self._block_size
        if not self._options.prefix_cache or sequence.num_remembered == num_full:
            return
        if sequence.waits_for_adapter:
            return  # blocks are named by its digest, which comes a moment after its last layer
        hashes = self._hashes(sequence, num_full)
        for number in range(sequence.num_remembered, num_full):
            self.prefixes.add(sequence.blocks[number], hashes[number])
        self._tell_tokens(sequence, sequence.num_remembered, num_full)
        self.ledger.add(hashes, sequence.num_remembered)
        sequence.num_remembered = num_full

    def keep_for_session(self, sequence: Sequence) -> None:
        """Pin what it has remembered for the next turn of its session, if it is of one. Before its blocks go."""
        session = sequence.generation.request.session_key
        if session is not None and sequence.num_remembered:
            self.sessions.keep(session, self._hashes(sequence, sequence.num_remembered), time.monotonic())

    # -- blocks ----------------------------------------------------------------------------------------------

    def grow(self, lane: Lane, num_blocks: int) -> None:
        """That many more blocks, which must be available. What the lane is to copy is in the first of them then."""
        self.prefixes.make_room(num_blocks)
        last = lane.blocks[-1] if lane.blocks else None
        new = self.allocator.allocate(num_blocks, after=last, epoch=lane.epoch)
        num_before = len(lane.blocks)
        lane.blocks = (*lane.blocks, *new)
        if lane.source is not None:
            self._copy_tokens(lane.source, new[0], lane.num_computed - num_before * self._block_size)
            source, lane.source = lane.source, None
            self.prefixes.release((source,))

    def shrink(self, lane: Lane, num_tokens: int) -> None:
        """Give back what the lane does not need for so many tokens."""
        surplus = -self.num_missing(lane, num_tokens)
        if surplus > 0:
            lane.blocks, freed = lane.blocks[:-surplus], lane.blocks[-surplus:]
            self.prefixes.release(freed)

    def take_back(self, sequence: Sequence) -> None:
        """All of its blocks; it keeps its tokens."""
        self.prefixes.release(sequence.forget_computed())

    def drop_draft(self, sequence: Sequence) -> None:
        """Forget what the draft made of it."""
        if sequence.draft is not None:
            self.allocator.release(sequence.draft.blocks)
            sequence.draft = None

    def check_integrity(self, lanes: Collection[Lane]) -> None:
        """Raises AssertionError unless the books agree, these lanes being all that have blocks. For tests."""
        self.allocator.check_integrity()
        self.prefixes.check_integrity()
        self.sessions.check_integrity()
        holders = Counter(block for lane in lanes for block in lane.blocks)
        holders.update(self.prefixes.blocks())
        if self.spill is not None:
            self.spill.check_integrity()
            holders.update(self.spill.held_blocks())
        for block in range(self.allocator.num_blocks):
            assert self.allocator.reference_count(block) == holders[block], f"block {block} leaked"
        for lane in lanes:
            assert all(self.allocator.epoch(block) is lane.epoch for block in lane.blocks)
            assert lane.num_computed <= len(lane.blocks) * self._block_size
            assert lane.source is None, "somebody has a place, and has not copied what it was lent"

    # ----------------------------------------------------------------------------------------------------------

    def _chain(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        return sequence.chain(num_blocks, self._block_size, self._prefix_seed)

    def _hashes(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        return self._chain(sequence, num_blocks)[1:]

    def _hashes_to_find(self, sequence: Sequence) -> list[bytes]:
        """Of the full blocks before its last token, which is computed in any case."""
        if not self._options.prefix_cache or sequence.needs_all_rows:
            return []
        return self._hashes(sequence, (sequence.num_tokens - 1) // self._block_size)

    def _attach_source(self, sequence: Sequence, num_available: int) -> int:
        """Lend the sequence, which has its full blocks, the one that goes on like it for longest, for its first tokens.
        Returns how many of the available blocks that takes, until they are copied: nobody does without a place for it.
        """
        if sequence.needs_all_rows:
            return 0
        lane, size = sequence.exact, self._block_size
        tokens = sequence.tokens[lane.num_computed : min(lane.num_computed + size, sequence.num_tokens - 1)]
        previous = self._chain(sequence, len(lane.blocks))[-1]
        found = self.prefixes.find_beginning(previous, tokens)
        if found is None:
            return 0
        source, num_tokens = found
        num_taken = self.prefixes.num_idle_among((source,))
        if num_taken > num_available:
            return 0
        self.prefixes.take((source,))
        lane.source = source
        lane.num_computed += num_tokens
        return num_taken

    def _tell_tokens(self, sequence: Sequence, first: int, end: int) -> None:
        """What the full blocks [first, end) hold: so that others can use their beginnings."""
        chain, size = self._chain(sequence, end), self._block_size
        for number in range(first, end):
            tokens = sequence.tokens[number * size : (number + 1) * size]
            self.prefixes.tell_tokens(chain[number + 1], chain[number], tokens)

    def _num_to_take(self, sequence: Sequence, found: list[int]) -> int:
        """Available blocks that are no longer so once it has these, and all else for its tokens and one more."""
        num_new = self.num_missing(sequence.exact, sequence.num_tokens + 1) - len(found)
        return num_new + self.prefixes.num_idle_among(found)

    def _send_for_more(self, sequence: Sequence, hashes: list[bytes], num_found: int) -> bool:
        """Whether blocks behind those that were found are on their way back; they are sent for once."""
        if self.spill is not None and sequence.fetch is None:
            generation = sequence.generation
            sequence.fetch = self.spill.fetch(hashes, num_found, lambda: not generation.ended)
        return sequence.waits_for_blocks
