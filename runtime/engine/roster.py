"""Who waits for a place, who runs, and which blocks of the KV pool each of them holds.

Invariants: all of it is read and changed under `changed`, whose waiters are told when something comes or ends. A
sequence's blocks are free before its last event can be seen; if it ends in the middle of a step, as soon as that step
is over. Nothing is computed or handed out here, and no scheduling decision is taken.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from itertools import islice

from ...loader.errors import TeneralError
from ..errors import CapacityError
from ..kv.blocks import BlockAllocator, Epoch
from ..kv.prefixes import PrefixCache
from .generation import Generation
from .options import EngineOptions
from .requests import FinishReason, GenerationEvent
from .scheduler import StepPlan
from .sequence import Lane, Sequence

NUM_RECENT_ENDS = 16  # for the estimate of when a place becomes free
MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 1.0, 30.0


class Roster:
    """Mutable, and public within the engine: but for what says so, callers hold `changed`."""

    def __init__(self, num_blocks: int, options: EngineOptions, *, prefix_seed: bytes) -> None:
        """`prefix_seed` says whose keys and values these are; with another one nothing of this pool is found."""
        self.changed = threading.Condition()
        self.options = options
        self.allocator = BlockAllocator(num_blocks)
        self.prefixes = PrefixCache(self.allocator)
        self._prefix_seed = prefix_seed
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order of admission
        self.refusal: TeneralError | None = None  # why nothing new is taken
        self.is_stopping = False
        self.some_ended_early = False  # sequences to forget, which ended outside of a step
        self.num_ended: Counter[FinishReason] = Counter()
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.num_computed_tokens = 0
        self.num_steps = 0
        self.forward_s = 0.0
        self.num_preemptions = 0
        self.num_drafted_tokens = 0
        self.num_accepted_proposals = 0
        self.num_rejected_proposals = 0
        self._recent_ends_s: deque[float] = deque(maxlen=NUM_RECENT_ENDS)

    # -- taking in -------------------------------------------------------------------------------------------

    def enqueue(self, sequence: Sequence) -> None:
        """Raises the refusal, or CapacityError: then nothing has changed."""
        self.require_open()
        num_taken = len(self.waiting) + len(self.running)
        if num_taken >= self.options.max_queued + self.options.max_running:
            ends_s = self._recent_ends_s
            between_ends_s = (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1) if len(ends_s) > 1 else 0.0
            raise CapacityError(
                f"{num_taken} requests are running or waiting: that is all that this instance takes",
                retry_after_s=min(max(between_ends_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S),
                hint="Try again later, or run more instances.",
            )
        self.waiting.append(sequence)
        self.changed.notify_all()

    def require_open(self) -> None:
        if self.refusal is not None:
            # Without the traceback of the last time, to which each raise would add.
            raise self.refusal.with_traceback(None)

    def refuse(self, refusal: TeneralError) -> None:
        """From now on nothing new is taken; the first reason stands."""
        self.refusal = self.refusal or refusal

    def admit(self, sequence: Sequence) -> None:
        """From the queue to those that run."""
        self.waiting.remove(sequence)
        self.running.append(sequence)
        if sequence.generation.mark_started(num_cached_tokens=sequence.num_computed):
            self.num_prompt_tokens += sequence.num_prompt_tokens
            self.prefixes.count_lookup(sequence.num_prompt_tokens, sequence.num_computed)

    def apply(self, plan: StepPlan[Sequence]) -> None:
        """Do as the scheduler decided."""
        for sequence in plan.preempted:
            self.running.remove(sequence)
            self.prefixes.release(sequence.forget_computed())
            self.waiting.appendleft(sequence)
        self.num_preemptions += len(plan.preempted)
        for sequence in plan.admitted:
            self.admit(sequence)
        for share in plan.shares:
            if share.num_new_blocks:
                self.grow(share.sequence.exact, share.num_new_blocks)

    # -- blocks ----------------------------------------------------------------------------------------------

    @property
    def num_available_blocks(self) -> int:
        """Those that are free, and those whose content can be given up."""
        return self.allocator.free_count + self.prefixes.num_idle

    def attach_prefixes(self) -> None:
        """Give those who wait for a place what is there of their beginnings, at least one token being left to compute.
        Who gets no place gives it back: `detach_prefixes`. Nobody gets what would leave too little for the ones before.
        """
        if not self.options.prefix_cache or not self.waiting:
            return
        block_size = self.options.block_size
        promised = (max(0, self.num_missing_blocks(each.exact, each.num_tokens + 1)) for each in self.running)
        left = self.num_available_blocks - sum(promised) - len(self.running)
        for sequence in islice(self.waiting, max(0, self.options.max_running - len(self.running))):
            num_blocks = (sequence.num_tokens - 1) // block_size
            hashes = sequence.block_hashes(num_blocks, block_size, self._prefix_seed)
            found = self.prefixes.find(hashes[:num_blocks])
            num_new = self.num_missing_blocks(sequence.exact, sequence.num_tokens + 1) - len(found)
            left -= num_new + self.prefixes.num_idle_among(found)
            if left < 0:
                return
            self.prefixes.take(found)
            sequence.exact.blocks = tuple(found)
            sequence.exact.num_computed = len(found) * block_size
            sequence.num_remembered = len(found)

    def detach_prefixes(self) -> None:
        for sequence in self.waiting:
            if sequence.blocks:
                self.prefixes.release(sequence.forget_computed())

    def remember(self, sequence: Sequence) -> None:
        """Have the sequence's full blocks found by who begins in the same way."""
        block_size = self.options.block_size
        num_full = sequence.num_computed // block_size
        if not self.options.prefix_cache or sequence.num_remembered == num_full:
            return
        hashes = sequence.block_hashes(num_full, block_size, self._prefix_seed)
        for number in range(sequence.num_remembered, num_full):
            self.prefixes.add(sequence.blocks[number], hashes[number])
        sequence.num_remembered = num_full

    def grow(self, lane: Lane, num_blocks: int) -> None:
        """That many more blocks, which must be available."""
        self.prefixes.make_room(num_blocks)
        last = lane.blocks[-1] if lane.blocks else None
        lane.blocks = (*lane.blocks, *self.allocator.allocate(num_blocks, after=last, epoch=lane.epoch))

    def num_missing_blocks(self, lane: Lane, num_tokens: int) -> int:
        """How many more blocks the lane needs to hold so many tokens; below 0, so many it has too many."""
        return -(-num_tokens // self.options.block_size) - len(lane.blocks)

    def shrink(self, lane: Lane, num_tokens: int) -> None:
        """Give back what the lane does not need for so many tokens."""
        surplus = -self.num_missing_blocks(lane, num_tokens)
        if surplus > 0:
            lane.blocks, freed = lane.blocks[:-surplus], lane.blocks[-surplus:]
            self.prefixes.release(freed)

    def drop_draft(self, sequence: Sequence) -> None:
        """Forget what the draft made of it."""
        if sequence.draft is not None:
            self.allocator.release(sequence.draft.blocks)
            sequence.draft = None

    # -- ending ----------------------------------------------------------------------------------------------

    def forget(self, sequence: Sequence) -> None:
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self.prefixes.release(sequence.forget_computed())

    def forget_ended(self) -> list[Sequence]:
        """Forget those that have ended meanwhile, which it returns."""
        self.some_ended_early = False
        ended = [each for each in (*self.running, *self.waiting) if each.generation.ended]
        for sequence in ended:
            self.forget(sequence)
        return ended

    def forget_all(self) -> list[Sequence]:
        everybody = self.everybody()
        for sequence in everybody:
            self.forget(sequence)
        return everybody

    def everybody(self) -> list[Sequence]:
        return [*self.running, *self.waiting]

    def all_ended(self) -> bool:
        return all(sequence.generation.ended for sequence in self.everybody())

    def note_step(self, num_tokens: int, took_s: float) -> None:
        """Count a forward pass, or a piece of one."""
        self.num_steps += 1
        self.forward_s += took_s
        self.num_computed_tokens += num_tokens

    def note_events(self, events: Iterable[tuple[Sequence, GenerationEvent]]) -> None:
        """Count what is about to be handed out, and free what ends with it."""
        for sequence, event in events:
            self.num_output_tokens += len(event.tokens)
            self.num_drafted_tokens += event.num_drafted
            self.num_accepted_proposals += event.num_accepted
            self.num_rejected_proposals += event.num_rejected
            if event.finish_reason is not None:
                self.forget(sequence)

    def note_end(self, generation: Generation, reason: FinishReason) -> None:
        """A generation's last event is about to be seen; called by the thread that ends it, without `changed`."""
        with self.changed:
            self.num_ended[reason] += 1
            self._recent_ends_s.append(time.monotonic())
            # Its place in the queue is free at once; blocks may be in use by the step that is running.
            waiting = next((each for each in self.waiting if each.generation is generation), None)
            if waiting is not None:
                self.waiting.remove(waiting)
            self.some_ended_early = True
            self.changed.notify_all()

    # -- for tests -------------------------------------------------------------------------------------------

    def check_integrity(self, max_context: int) -> None:
        """Raises AssertionError unless sequences and block pool agree."""
        self.allocator.check_integrity()
        self.prefixes.check_integrity()
        lanes = [lane for sequence in self.running for lane in sequence.lanes]
        holders = Counter(block for lane in lanes for block in lane.blocks)
        holders.update(self.prefixes.blocks())
        for block in range(self.allocator.num_blocks):
            assert self.allocator.reference_count(block) == holders[block], f"block {block} leaked"
        for lane in lanes:
            assert all(self.allocator.epoch(block) is lane.epoch for block in lane.blocks)
            assert lane.num_computed <= len(lane.blocks) * self.options.block_size
        for sequence in self.running:
            assert sequence.num_computed <= sequence.num_tokens <= max_context
            assert sequence.exact.epoch is Epoch.EXACT
        assert not any(lane.blocks or lane.num_computed for each in self.waiting for lane in each.lanes)
        assert len(self.running) <= self.options.max_running
