"""The waiting and running sequences, and the engine's statistics.

Invariants: all state is read and changed under `changed`, whose waiters are notified of arrivals
and ends. A sequence's blocks are free before its last event is visible; if it ends during a step,
at the end of that step. Nothing is computed or delivered here, and no scheduling decision is made.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator

from ...loader.errors import TeneralError
from ..step.backend import BackendDeviceStatistics
from ..step.batch import Epoch
from ..step.requests import FinishReason, GenerationEvent, Priority
from .block_manager import BlockManager, CopyState, CopyTokens
from .capacity import Capacity, steps_until_place
from .generation import Generation
from .options import EngineOptions, EngineStatistics
from .scheduler import Preempted, Prospect, StepPlan, shortest_first
from .sequence import Sequence, Taken
from .waiting import WaitingList


class SchedulerState:
    """The scheduler state. Mutable, and public within the engine: unless stated otherwise, callers
    hold `changed`.
    """

    def __init__(
        self,
        num_blocks: int,
        options: EngineOptions,
        *,
        prefix_seed: bytes,
        max_pinned_blocks: int,
        copy_tokens: CopyTokens,
        num_states: int = 0,
        copy_state: CopyState | None = None,
    ) -> None:
        """The arguments from `prefix_seed` on are those of `BlockManager` and `SessionPins`."""
        self.changed = threading.Condition()
        self.options = options
        self.blocks = BlockManager(
            num_blocks,
            options,
            self.changed,
            prefix_seed=prefix_seed,
            max_pinned_blocks=max_pinned_blocks,
            copy_tokens=copy_tokens,
            num_states=num_states,
            copy_state=copy_state,
        )
        self.waiting: WaitingList[Sequence] = WaitingList()
        self.running: list[Sequence] = []  # in the order of admission
        self.refusal: TeneralError | None = None  # why new requests are refused
        self.is_stopping = False
        # Some sequences ended outside a step and must be forgotten.
        self.some_ended_early = False
        self.num_ended: Counter[FinishReason] = Counter()
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.num_computed_tokens = 0
        self.num_steps = 0
        self.forward_s = 0.0
        self.num_preemptions: Counter[Preempted] = Counter()
        self.num_drafted_tokens = 0
        self.num_accepted_proposals = 0
        self.num_rejected_proposals = 0
        self.num_accepted_look_ahead = 0
        self.num_rejected_look_ahead = 0
        self.num_exhausted = 0
        # When the latest step was planned: some wait although a place is free.
        self._is_short_of_blocks = False
        self._capacity = Capacity(
            options,
            steps_until_free=lambda: self._steps_until_place(self.running, self.waiting),
            num_waiting=lambda: len(self.waiting),
        )

    @property
    def owes_first_token(self) -> bool:
        return bool(self.waiting) or any(each.exact.num_missing > 1 for each in self.running)

    # -- admission
    # -------------------------------------------------------------------------------------------

    def enqueue(self, sequence: Sequence, *, joins: bool = False) -> None:
        """Queue a sequence. Raises the refusal, or CapacityError, with nothing changed. One that
        `joins` another of the same request may wait for any time.
        """
        self.require_open()
        self._require_queue(sequence.queue_name, sequence.priority)
        if not joins:
            self._require_soon(sequence.queue_name, sequence.priority)
        if not self.running and not self.waiting:
            self._capacity.note_arrival()
        self.waiting.join(sequence)
        session = sequence.generation.request.session_key
        if session is not None:
            self.blocks.sessions.touch(session, time.monotonic())
        self.changed.notify_all()

    def require_room(self, queue_name: str, priority: Priority, num_sequences: int = 1) -> None:
        """Raise CapacityError unless that many sequences of one request fit now."""
        self._require_queue(queue_name, priority, num_sequences)
        self._require_soon(queue_name, priority)

    def _require_queue(self, queue_name: str, priority: Priority, num_sequences: int = 1) -> None:
        waiting = self.waiting
        self._capacity.require_room(
            num_sequences,
            num_running=len(self.running),
            num_waiting=len(waiting),
            num_of_tenant=waiting.num_of_tenant(queue_name) if queue_name else None,
            num_batch=waiting.num_by_priority()[priority] if priority is Priority.BATCH else None,
        )

    def _require_soon(self, queue_name: str, priority: Priority) -> None:
        """Check the expected wait. Batch work uses the capacity left by others, at any time, so it
        is not refused for it.
        """
        if self.options.max_wait_s is None or priority is Priority.BATCH:
            return
        running = [each for each in self.running if not each.is_batch]  # batch work is preempted
        num_steps = self._steps_until_place(running, self._ahead_of(queue_name))
        if num_steps is not None:
            self._capacity.require_soon(num_steps)

    def _ahead_of(self, queue_name: str) -> Iterator[Sequence]:
        """The waiting sequences that certainly go before new interactive work of this tenant: all
        of its own, and of each other tenant one more than those, as if none of them owed anything.
        """
        num_turns = Counter[str]()
        num_own = sum(each.queue_name == queue_name for each in self.waiting.of(Priority.INTERACTIVE))
        for each in self.waiting.of(Priority.INTERACTIVE):
            num_turns[each.queue_name] += 1
            if each.queue_name == queue_name or num_turns[each.queue_name] <= num_own + 1:
                yield each

    def _steps_until_place(self, running: Iterable[Sequence], ahead: Iterable[Sequence] = ()) -> int | None:
        """The maximum of steps until there is a place after these. None: there are places, but
        blocks are short.
        """
        if self._is_short_of_blocks:
            return None
        steps = self._steps_left
        return steps_until_place([*map(steps, running)], map(steps, ahead), self.options.max_running)

    def _steps_left(self, sequence: Sequence) -> int:
        """The maximum of its remaining steps, from now or from its admission. May be off by one for
        a running sequence, whose tokens are added without the lock.
        """
        if sequence.generation.ended:
            return 0
        num_tokens_left = sequence.max_new_tokens - sequence.sampling.num_outputs
        chunk = min(self.options.max_prefill_tokens, self.options.max_step_tokens)
        num_prompt_steps = -(-sequence.exact.num_missing // chunk)
        # The prompt's last step gives a token.
        return num_prompt_steps - 1 + num_tokens_left

    @property
    def retry_after_s(self) -> float:
        """The time for the client to retry, for `CapacityError`."""
        return self._capacity.retry_after_s

    def require_open(self) -> None:
        if self.refusal is not None:
            # Without the previous traceback, to which each raise would add.
            raise self.refusal.with_traceback(None)

    def refuse(self, refusal: TeneralError) -> None:
        """Refuse new requests from now on; the first reason is kept."""
        self.refusal = self.refusal or refusal

    def admit(self, sequence: Sequence) -> None:
        """Move a sequence from the queue to the running ones."""
        self.waiting.start(sequence)
        self.running.append(sequence)
        if sequence.generation.mark_started(num_cached_tokens=sequence.num_computed):
            num_to_compute = sequence.num_prompt_tokens - sequence.num_computed
            self.waiting.charge(sequence, num_prompt_tokens=num_to_compute)
            self.num_prompt_tokens += sequence.num_prompt_tokens
            self.blocks.note_begin(sequence)

    def apply(self, plan: StepPlan[Sequence]) -> None:
        """Apply the scheduler's plan. Each admitted sequence gets a share, and a block: the last
        one is never full.
        """
        self._capacity.note_step(follows=bool(self.running))
        self.preempt(plan.preempted, Preempted.BLOCKS)
        for sequence in plan.admitted:
            self.admit(sequence)
        is_short = len(self.running) < self.options.max_running
        self._is_short_of_blocks = is_short and not all(
            each.waits_for_adapter or each.waits_for_images for each in self.waiting
        )
        for share in plan.shares:
            if share.num_new_blocks:
                self.blocks.grow(share.sequence.exact, share.num_new_blocks)
        self.blocks.place_states((share.sequence, share.num_tokens) for share in plan.shares)

    def preempt(self, sequences: Iterable[Sequence], reason: Preempted) -> None:
        """Move running sequences back to the queue. They keep their tokens."""
        for sequence in sequences:
            self.running.remove(sequence)
            self.blocks.take_back(sequence)
            # Its evicted blocks may now be worth fetching.
            sequence.fetch = None
            self.waiting.put_back(sequence)
            self.num_preemptions[reason] += 1

    # -- blocks ----------------------------------------------------------------------------------------------

    def ready(self) -> list[Sequence]:
        """The waiting sequences that do not wait for blocks, images or an adapter being loaded."""
        return [
            each
            for each in self.waiting
            if not (each.waits_for_blocks or each.waits_for_images or each.waits_for_adapter)
        ]

    def followers(self) -> list[Sequence]:
        """Those that may follow an adapter on its way, layer by layer, while nothing else can be computed: the first
        one, and all with the same adapter.
        """
        if self.running:
            return []
        found = [each for each in self.waiting if _may_follow(each)]
        return [each for each in found if each.adapter is found[0].adapter]

    def attach_prefixes(self) -> None:
        """Attach cached prefixes to waiting sequences. Those that are not admitted return them:
        `detach_prefixes`.
        """
        if self.waiting:
            self.blocks.attach(
                [each for each in self.waiting if not (each.waits_for_adapter or each.waits_for_images)],
                num_places=self.options.max_running - len(self.running),
                num_promised=self.num_promised_blocks(),
            )

    def detach_prefixes(self) -> None:
        self.blocks.detach(self.waiting)

    def num_promised_blocks(self) -> int:
        """The available blocks that running sequences will need."""
        return self.blocks.num_promised(self.running)

    def prospects(self) -> list[Prospect]:
        """The interactive sequences of the queue that the next step could admit, in the queue's
        order: its first one, and as many as can run of those that the scheduler takes first.
        """
        interactive = [each for each in self.ready() if not each.is_batch]
        first = {
            id(each) for each in (*interactive[:1], *shortest_first(interactive)[: self.options.max_running])
        }
        return [self.blocks.prospect(each) for each in interactive if id(each) in first]

    # -- ending ----------------------------------------------------------------------------------------------

    def forget(self, sequence: Sequence) -> None:
        if sequence in self.running:
            self.running.remove(sequence)
            self.waiting.end(sequence)
        else:
            self.waiting.withdraw(sequence)
        self.blocks.remember(sequence)
        self.blocks.keep_for_session(sequence)
        self.blocks.take_back(sequence)

    def forget_ended(self) -> list[Sequence]:
        """Forget the sequences that have ended meanwhile, and return them."""
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
        """Count a forward pass, or a part of one."""
        self.num_steps += 1
        self.forward_s += took_s
        self.num_computed_tokens += num_tokens

    def note_events(
        self, events: Iterable[tuple[Sequence, GenerationEvent]], *, is_early: bool = False
    ) -> None:
        """Count events about to be delivered, and free the sequences that end with them. `is_early`:
        they are of the early phase, whose proposals are the draft's.
        """
        for sequence, event in events:
            self.num_output_tokens += len(event.tokens)
            self.waiting.charge(sequence, num_output_tokens=len(event.tokens))
            self.num_drafted_tokens += event.num_drafted
            if is_early:
                self.num_accepted_proposals += event.num_accepted
                self.num_rejected_proposals += event.num_rejected
            else:
                self.num_accepted_look_ahead += event.num_accepted
                self.num_rejected_look_ahead += event.num_rejected
            if event.finish_reason is not None:
                self.forget(sequence)

    def note_taken(self, taken: Iterable[Taken]) -> None:
        """Count tokens that become events later, and free the sequences that end with them."""
        for each in taken:
            self.num_output_tokens += 1
            self.waiting.charge(each.sequence, num_output_tokens=1)
            if each.finish_reason is not None:
                self.forget(each.sequence)

    def note_end(self, generation: Generation, reason: FinishReason) -> None:
        """Record a generation's last event before it is visible; called by the thread that ends it,
        without `changed`.
        """
        with self.changed:
            self.num_ended[reason] += 1
            self._capacity.note_end()
            # Its place in the queue is free at once; the current step may be using its blocks.
            waiting = next((each for each in self.waiting if each.generation is generation), None)
            if waiting is not None:
                self.waiting.withdraw(waiting)
            self.some_ended_early = True
            self.changed.notify_all()

    # -- for tests -------------------------------------------------------------------------------------------

    def check_integrity(self, max_context: int) -> None:
        """Raise AssertionError if sequences and block pool disagree."""
        self.waiting.check_integrity()
        self.blocks.check_integrity([lane for sequence in self.running for lane in sequence.lanes])
        for sequence in self.running:
            assert sequence.num_computed <= sequence.num_tokens <= max_context
            assert sequence.exact.epoch is Epoch.EXACT
        assert not any(lane.blocks or lane.num_computed for each in self.waiting for lane in each.lanes)
        assert len(self.running) <= self.options.max_running


def statistics_of(
    state: SchedulerState, *, kv_bytes: int, max_context: int, device: BackendDeviceStatistics | None
) -> EngineStatistics:
    """Take a snapshot under the scheduler state's lock."""
    blocks = state.blocks
    with state.changed:
        prefixes, sessions = blocks.prefixes.statistics(), blocks.sessions.statistics()
        return EngineStatistics(
            running=len(state.running),
            queued=len(state.waiting),
            num_blocks=blocks.allocator.num_blocks,
            free_blocks=blocks.num_available,
            block_size=state.options.block_size,
            kv_bytes=kv_bytes,
            max_context=max_context,
            steps_total=state.num_steps,
            forward_s_total=state.forward_s,
            prompt_tokens_total=state.num_prompt_tokens,
            output_tokens_total=state.num_output_tokens,
            computed_tokens_total=state.num_computed_tokens,
            preemptions_total=state.num_preemptions.total(),
            ended_total=dict(state.num_ended),
            drafted_tokens_total=state.num_drafted_tokens,
            accepted_proposals_total=state.num_accepted_proposals,
            rejected_proposals_total=state.num_rejected_proposals,
            accepted_look_ahead_total=state.num_accepted_look_ahead,
            rejected_look_ahead_total=state.num_rejected_look_ahead,
            cached_blocks=prefixes.num_cached,
            idle_blocks=prefixes.num_idle,
            prefix_hit_tokens_total=prefixes.hit_tokens_total,
            prefix_lookup_tokens_total=prefixes.lookup_tokens_total,
            prefix_evictions_total=prefixes.evictions_total,
            spill=None if blocks.spill is None else blocks.spill.statistics(),
            device=device,
            exhausted_total=state.num_exhausted,
            queued_by_priority=state.waiting.num_by_priority(),
            tenants_waiting=state.waiting.num_tenants(),
            preemptions_by_reason_total=dict(state.num_preemptions),
            sessions=sessions.num_sessions,
            pinned_blocks=sessions.num_pinned_blocks,
            sessions_unpinned_total=sessions.unpinned_total,
            retry_after_s=state.retry_after_s,
        )


def _may_follow(sequence: Sequence) -> bool:
    if not sequence.waits_for_adapter or sequence.waits_for_images:
        return False
    return sequence.adapter is not None and sequence.adapter.has_begun
