"""The blocks of the KV pool that sequences hold: new ones, and shared ones of common prefixes.

While the scheduler decides, a waiting sequence holds the cached blocks of its prefix, and returns
them unless it is admitted. Full blocks are shared from the step on that computed them. Where a
prompt diverges in the middle of a block, the common part is copied into the first new block: blocks
of the cache are never written.

Invariants: a sequence holds one reference to each of its blocks, in the order of its tokens, and to
the block that it will copy from until it has; and the cache's indexes of found, pinned and spilled
blocks are changed only here and by imports of blocks. No sequence holds blocks that would leave too
few for earlier ones. Callers hold `changed`. This module knows nothing of queues, steps and events.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

from ..kv.blocks import BlockAllocator
from ..kv.prefixes import PrefixCache, PrefixLedger
from ..kv.sessions import SessionPins
from ..step.batch import StateSave
from .options import EngineOptions
from .scheduler import Prospect
from .sequence import Lane, Sequence

if TYPE_CHECKING:
    from ..kv.spill.spill import BlockContent, Spill
    from ..kv.states import StatePlaces

CopyState = Callable[[int, int], None]
"""`KVPool.copy_state`: from a place, to a place."""
CopyTokens = Callable[[int, int, int], None]
"""`KVPool.copy_tokens`: from a block, to a block, how many."""


class BlockManager:
    """The allocation of one pool's blocks, without their content."""

    def __init__(
        self,
        num_blocks: int,
        options: EngineOptions,
        changed: threading.Condition,
        *,
        prefix_seed: bytes,
        max_pinned_blocks: int,
        copy_tokens: CopyTokens,
        num_states: int = 0,
        copy_state: CopyState | None = None,
    ) -> None:
        """`prefix_seed` identifies the model of these keys and values; with another seed no block
        of this pool is found.

        `copy_tokens` is called under `changed`, before the step whose sequence needs them; as is
        `copy_state`, of models with recurrent states, for which the pool has `num_states` places.
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
        self.spill: Spill | None = None  # the destination of evicted blocks
        self._options = options
        self._block_size = options.block_size
        self._prefix_seed = prefix_seed
        self._copy_tokens = copy_tokens
        self._states: StatePlaces | None = None
        if num_states:
            from ..kv.states import StatePlaces  # of few models

            self._states = StatePlaces(num_states)
        self._copy_state = copy_state

    def open_spill(self, kv: BlockContent, block_bytes: int, num_promised: Callable[[], int]) -> None:
        """Open the spill media of the options; `num_promised` is that of `Spill`. Once, at the
        beginning, by the owner that starts and stops it. Raises UsageError for an unusable medium.
        """
        options = self._options
        if not options.spills:
            return
        from ..kv.spill.media import open_media
        from ..kv.spill.spill import Spill

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

    def stop_spill(self) -> None:
        if self.spill is not None:
            self.spill.stop()

    # -- availability
    # ----------------------------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """The number of free and evictable blocks."""
        return self.allocator.free_count + self.prefixes.num_idle

    def num_missing(self, lane: Lane, num_tokens: int) -> int:
        """The number of blocks that the lane lacks for `num_tokens` tokens; negative: it has too
        many.
        """
        return -(-num_tokens // self._block_size) - len(lane.blocks)

    def num_promised(self, running: Collection[Sequence]) -> int:
        """The available blocks that running sequences will need: for all of their tokens, and one
        more each.
        """
        missing = (self.num_missing(each.exact, each.num_tokens + 1) for each in running)
        return sum(max(0, num_blocks) for num_blocks in missing) + len(running)

    def num_freed_by(self, sequences: Collection[Sequence]) -> int:
        """The number of blocks freed by preempting these: those without other users."""
        num_given_up = Counter(block for each in sequences for block in each.blocks)
        return sum(self.prefixes.num_users(block) == count for block, count in num_given_up.items())

    def prospect(self, sequence: Sequence) -> Prospect:
        """The waiting sequence as it would be planned with the cached blocks of its prefix. Idle
        ones among those count as blocks still to allocate.
        """
        found = self._usable(self._hashes_to_find(sequence))[0]
        return Prospect(
            num_tokens=sequence.num_tokens,
            num_blocks=len(found) - self.prefixes.num_idle_among(found),
            num_computed=len(found) * self._block_size,
            queue_name=sequence.queue_name,
        )

    # -- prefixes --------------------------------------------------------------------------------------------

    def attach(self, waiting: Iterable[Sequence], *, num_places: int, num_promised: int) -> None:
        """Attach the cached prefixes to the first of these, with at least one token left to
        compute, while there are places and blocks for all of it. Sequences that wait for spilled
        blocks let others go first.
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
            found, num_cached = self._usable(hashes)
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
            if self._states is None:
                left -= self._attach_source(sequence, left)
            elif found:
                sequence.exact.state_source = self._states.hold(hashes[len(found) - 1])
            sequence.branch = num_cached * self._block_size if num_cached > len(found) else 0

    def detach(self, waiting: Iterable[Sequence]) -> None:
        """Detach the blocks of `attach` from sequences that were not admitted."""
        for sequence in waiting:
            if sequence.num_computed:
                self.take_back(sequence)

    def note_begin(self, sequence: Sequence) -> None:
        """Count the cache hits of a sequence at its first admission."""
        self.prefixes.count_lookup(sequence.num_prompt_tokens, sequence.num_computed)
        if not sequence.num_remembered:
            return
        self.ledger.count_hits(self._hashes(sequence, sequence.num_remembered))
        self._tell_tokens(sequence, 0, sequence.num_remembered)  # of blocks that were imported

    def remember(self, sequence: Sequence) -> None:
        """Make the sequence's full blocks available to others with the same prefix."""
        self._keep_saved(sequence)
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
        """Pin the sequence's shared blocks for the next turn of its session, if any. Before its
        blocks are released.
        """
        session = sequence.generation.request.session_key
        if session is not None and sequence.num_remembered:
            self.sessions.keep(session, self._hashes(sequence, sequence.num_remembered), time.monotonic())

    # -- blocks ----------------------------------------------------------------------------------------------

    def grow(self, lane: Lane, num_blocks: int) -> None:
        """Allocate that many more blocks, which must be available. The lane's source is copied to
        the first of them.
        """
        self.prefixes.make_room(num_blocks)
        last = lane.blocks[-1] if lane.blocks else None
        new = self.allocator.allocate(num_blocks, after=last, epoch=lane.epoch)
        num_before = len(lane.blocks)
        lane.blocks = (*lane.blocks, *new)
        if lane.source is not None:
            self._copy_tokens(lane.source, new[0], lane.num_computed - num_before * self._block_size)
            source, lane.source = lane.source, None
            self.prefixes.release((source,))

    def place_states(self, amounts: Iterable[tuple[Sequence, int]]) -> None:
        """Give the recurrent states of the next step's sequences places, and as far as there are some
        left, the copies that it makes of them. The amounts are tokens to compute. Nothing for models
        without states.
        """
        states = self._states
        if states is None:
            return
        amounts = tuple(amounts)
        for sequence, _ in amounts:
            lane = sequence.exact
            if lane.state is None:
                lane.state = states.take()
                assert lane.state is not None, "more sequences than half of the places of states"
            if lane.state_source is not None:
                assert self._copy_state is not None
                self._copy_state(lane.state_source, lane.state)
                states.let_go(lane.state_source)
                lane.state_source = None
        for sequence, num_tokens in amounts:
            lane = sequence.exact
            self._drop_saves(lane)  # of a step that gave nothing
            if not self._options.prefix_cache or sequence.waits_for_adapter:
                continue
            ends = states.ends_to_save(
                lane.num_computed,
                lane.num_computed + num_tokens,
                num_prompt_tokens=sequence.num_prompt_tokens,
                branch=sequence.branch,
                block_size=self._block_size,
            )
            places = [(end, states.take()) for end in ends]
            lane.saves = tuple(StateSave(end, place) for end, place in places if place is not None)

    def _keep_saved(self, sequence: Sequence) -> None:
        """Let others find the copies of the sequence's state that the last step has made."""
        states, lane = self._states, sequence.exact
        if states is None or not lane.saves or lane.saves[-1].num_tokens > lane.num_computed:
            return  # or the step failed
        size = self._block_size
        hashes = self._hashes(sequence, lane.saves[-1].num_tokens // size)
        of_prompt = (sequence.num_prompt_tokens - 1) // size * size
        for save in lane.saves:
            block_hash = hashes[save.num_tokens // size - 1]
            is_new = block_hash not in states
            states.keep(block_hash, save.state)
            if save.num_tokens > of_prompt:
                if sequence.latest_save is not None:
                    states.drop(sequence.latest_save)
                sequence.latest_save = block_hash if is_new else None
        lane.saves = ()

    def _drop_saves(self, lane: Lane) -> None:
        if self._states is not None:
            for save in lane.saves:
                self._states.release(save.state)
            lane.saves = ()

    def shrink(self, lane: Lane, num_tokens: int) -> None:
        """Release the lane's blocks beyond `num_tokens` tokens."""
        surplus = -self.num_missing(lane, num_tokens)
        if surplus > 0:
            lane.blocks, freed = lane.blocks[:-surplus], lane.blocks[-surplus:]
            self.prefixes.release(freed)

    def take_back(self, sequence: Sequence) -> None:
        """Release all blocks of a sequence, and its state's place; it keeps its tokens."""
        lane = sequence.exact
        if self._states is not None:
            self._drop_saves(lane)
            if lane.state is not None:
                self._states.release(lane.state)
            if lane.state_source is not None:
                self._states.let_go(lane.state_source)
            lane.state = lane.state_source = None
        self.prefixes.release(sequence.forget_computed())

    def drop_draft(self, sequence: Sequence) -> None:
        """Drop the draft lane of a sequence."""
        if sequence.draft is not None:
            self.allocator.release(sequence.draft.blocks)
            sequence.draft = None

    def check_integrity(self, lanes: Collection[Lane]) -> None:
        """Raise AssertionError if the indexes disagree, these lanes being all that have blocks. For
        tests.
        """
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
            assert lane.source is None, "a running sequence has not copied its source block"
        if self._states is not None:
            taken = [lane.state for lane in lanes if lane.state is not None]
            taken += [save.state for lane in lanes for save in lane.saves]
            self._states.check_integrity(taken, [])

    # ----------------------------------------------------------------------------------------------------------

    def _chain(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        return sequence.chain(num_blocks, self._block_size, self._prefix_seed)

    def _hashes(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        return self._chain(sequence, num_blocks)[1:]

    def _hashes_to_find(self, sequence: Sequence) -> list[bytes]:
        """The hashes of the full blocks that need not be computed."""
        if not self._options.prefix_cache:
            return []
        return self._hashes(sequence, sequence.num_reusable // self._block_size)

    def _usable(self, hashes: list[bytes]) -> tuple[list[int], int]:
        """The cached blocks of this chain, from the first one on, that a sequence can begin with; and the number of
        those that are cached. With recurrent states they end where one was kept.
        """
        found = self.prefixes.find(hashes)
        if self._states is None:
            return found, len(found)
        return found[: self._states.num_usable(hashes[: len(found)])], len(found)

    def _attach_source(self, sequence: Sequence, num_available: int) -> int:
        """Attach the cached block that shares the longest beginning with the sequence's next
        tokens.

        Returns the number of available blocks that it uses until it is copied, so that it never
        starves another sequence.
        """
        lane, size, end = sequence.exact, self._block_size, sequence.num_reusable
        if end <= lane.num_computed:
            return 0
        tokens = sequence.keys(lane.num_computed, min(lane.num_computed + size, end))
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
        """Record the tokens of the full blocks [first, end), so that others can use their
        beginnings.
        """
        chain, size = self._chain(sequence, end), self._block_size
        for number in range(first, end):
            tokens = sequence.keys(number * size, (number + 1) * size)
            self.prefixes.tell_tokens(chain[number + 1], chain[number], tokens)

    def _num_to_take(self, sequence: Sequence, found: list[int]) -> int:
        """The number of available blocks that it would use, for the found ones, and for all its
        tokens and one more.
        """
        num_new = self.num_missing(sequence.exact, sequence.num_tokens + 1) - len(found)
        return num_new + self.prefixes.num_idle_among(found)

    def _send_for_more(self, sequence: Sequence, hashes: list[bytes], num_found: int) -> bool:
        """True if spilled blocks after the found ones are being fetched; starts the fetch once."""
        if self.spill is not None and sequence.fetch is None:
            generation = sequence.generation
            sequence.fetch = self.spill.fetch(hashes, num_found, lambda: not generation.ended)
        return sequence.waits_for_blocks
