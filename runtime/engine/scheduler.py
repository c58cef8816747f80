"""The scheduler: the sequences of the next step and the number of their tokens, as a pure decision
over values.

- Every sequence that decodes takes one token. Prompts (and preempted sequences, which are computed
  again) take the rest, in chunks; while another sequence decodes no more than `max_prefill_tokens`
  of a step, so that the pauses between tokens stay short. With none decoding they may fill the
  step, so that a prompt follows arriving weights in one pass. An image whose tokens see one another
  is computed as a whole, even if that exceeds these limits.
- Prompts are served in the order of turns (`waiting.py`), running ones before waiting ones; but
  within each tenant the one with the least left to compute takes the first of the tenant's turns,
  and so on. The oldest prompt of all keeps a part of each step, `1/OLDEST_SHARE`: however many
  short ones arrive, it takes at most that many times as long.
- A sequence is admitted if the pool has room for all of its tokens in addition to the running ones'
  needs. One that overtakes the first of the queue leaves a place and blocks for that one.
- When blocks run out the sequence admitted last gives up all of its blocks to an older one and is
  computed again later. The oldest one can therefore always go on, given that the pool holds one
  sequence of full length.
- Batch work counts as admitted after all interactive work, independent of arrival: it computes
  prompts, is admitted and keeps its blocks only if no interactive work needs the same. `make_way`
  selects the batch work to preempt for waiting interactive work.
- When memory runs out in a step, the sequences that take most of it end first.

Nothing is changed, allocated or computed here; this module knows nothing of tensors and threads.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

T = TypeVar("T")


class Schedulable(Protocol):
    """The fields of a sequence that the decision uses."""

    @property
    def num_tokens(self) -> int:
        """Known tokens, prompt and output."""

    @property
    def num_blocks(self) -> int:
        """Blocks held."""

    @property
    def num_computed(self) -> int:
        """Tokens whose keys and values are in those blocks."""

    def uncut(self, end: int) -> int:
        """The end of its next tokens, at most this one, that cuts nothing which is computed as a whole. Where there is
        none, the end of that whole.
        """

    @property
    def queue_name(self) -> str:
        """The tenant."""

    @property
    def is_batch(self) -> bool:
        """True if it yields to interactive sequences."""


class Preempted(enum.StrEnum):
    """The reason of a preemption."""

    BLOCKS = "blocks"  # an older sequence needed them
    PRIORITY = "priority"  # it was batch work, and interactive work waited
    ADAPTER = "adapter"  # it followed a loading adapter alone, and another one came
    MEMORY = "memory"  # the step ran out of memory


SequenceT = TypeVar("SequenceT", bound=Schedulable)
OLDEST_SHARE = 4


class SchedulerLimits(Struct, frozen=True):
    max_running: int
    max_step_tokens: int
    max_prefill_tokens: int  # of a step with decoding sequences
    block_size: int


class StepShare(Struct, Generic[SequenceT], frozen=True):
    """One sequence's part of a step: its next `num_tokens` tokens, which need `num_new_blocks` more
    blocks.
    """

    sequence: SequenceT
    num_tokens: int
    num_new_blocks: int
    # No known token is left to compute then, so the next one can be chosen.
    is_last: bool


class StepPlan(Struct, Generic[SequenceT], frozen=True):
    """A plan, to be applied in this order."""

    # The latest admitted first, so that they return to the front of the queue.
    preempted: tuple[SequenceT, ...]
    admitted: tuple[SequenceT, ...]  # in the order of admission
    shares: tuple[StepShare[SequenceT], ...]  # of running or admitted sequences, in the order of admission


FreedBy = Callable[[Sequence[SequenceT]], int]
"""The number of blocks freed by preempting these: those without other users."""


def plan_step(
    running: Sequence[SequenceT],
    waiting: Iterable[SequenceT],
    num_free_blocks: int,
    limits: SchedulerLimits,
    *,
    freed_by: FreedBy[SequenceT] | None = None,
) -> StepPlan[SequenceT]:
    """Plan the next step. `running` is in the order of admission, `waiting` in that of the queue,
    batch work last. Without `freed_by`, no two sequences share a block.
    """
    queue = list(waiting)
    step = _Step(running, num_free_blocks, limits, freed_by or _all_their_own)
    step.decode()
    all_are_in = step.prefill([each for each in queue if not each.is_batch], is_batch=False)
    step.prefill([each for each in queue if each.is_batch] if all_are_in else (), is_batch=True)
    shares = tuple(filter(None, map(step.shares.get, map(id, step.active))))
    return StepPlan(tuple(step.preempted), tuple(step.admitted), shares)


class Prospect(Struct, frozen=True):
    """A waiting sequence as it would be planned with the cached blocks of its prefix."""

    num_tokens: int
    num_blocks: int
    num_computed: int
    queue_name: str
    is_batch: bool = False

    def uncut(self, end: int) -> int:
        return end


def make_way(
    running: Sequence[SequenceT],
    waiting: Sequence[Schedulable],
    num_free_blocks: int,
    limits: SchedulerLimits,
    freed_by: FreedBy[SequenceT],
) -> tuple[SequenceT, ...]:
    """The batch work to preempt before the next step is planned, the latest admitted first.

    `waiting` holds the interactive sequences of the queue, in order. The planner itself counts how
    many of them the next step admits: the result is the smallest number of batch sequences without
    which it admits as many as without any.
    """
    batch = [sequence for sequence in reversed(running) if sequence.is_batch]

    def num_admitted(num_leaving: int) -> int:
        leaving = batch[:num_leaving]
        gone = set(map(id, leaving))
        staying = [sequence for sequence in running if id(sequence) not in gone]
        num_freed = freed_by(leaving)

        def freed_after(victims: Sequence[Schedulable]) -> int:
            chosen = set(map(id, victims))
            return freed_by([*leaving, *(each for each in staying if id(each) in chosen)]) - num_freed

        plan = plan_step(
            list[Schedulable](staying), waiting, num_free_blocks + num_freed, limits, freed_by=freed_after
        )
        return len(plan.admitted)

    most = num_admitted(len(batch))
    # The count never falls as more leave, because more blocks and places only extend the list of
    # admitted ones.
    return tuple(batch[: bisect_left(range(len(batch)), most, key=num_admitted)])


def shortest_first(candidates: Sequence[SequenceT]) -> list[SequenceT]:
    """The turns of tenants in order, and within each tenant the sequences with the least left to
    compute first; ties keep their order.
    """
    of_tenant: dict[str, list[SequenceT]] = {}
    for each in candidates:
        of_tenant.setdefault(each.queue_name, []).append(each)
    queues = {tenant: iter(sorted(own, key=_num_missing)) for tenant, own in of_tenant.items()}
    return [next(queues[each.queue_name]) for each in candidates]


def _amounts(
    members: Sequence[SequenceT], oldest: SequenceT, num_tokens: int
) -> Iterator[tuple[SequenceT, int]]:
    """Each sequence's tokens of a step, in the order of service; a part is reserved for the oldest."""
    kept = 0
    if members[0] is not oldest:
        kept = min(_num_missing(oldest), max(1, num_tokens // OLDEST_SHARE))
    left = num_tokens - kept
    for sequence in members:
        own = kept if sequence is oldest else 0
        amount = min(_num_missing(sequence), left + own)
        left -= amount - own
        yield sequence, amount


def _all_their_own(sequences: Sequence[Schedulable]) -> int:
    return sum(sequence.num_blocks for sequence in sequences)


class _Step(Generic[SequenceT]):
    """A plan in progress. Sequences are compared by identity."""

    def __init__(
        self,
        running: Sequence[SequenceT],
        num_free_blocks: int,
        limits: SchedulerLimits,
        freed_by: FreedBy[SequenceT],
    ) -> None:
        self.limits = limits
        # Later ones are preempted first.
        self.active = sorted(running, key=attrgetter("is_batch"))
        self.shares: dict[int, StepShare[SequenceT]] = {}
        self.preempted: list[SequenceT] = []
        self.admitted: list[SequenceT] = []
        self.num_free_blocks = num_free_blocks
        self.freed_by = freed_by
        self.num_freed_blocks = 0  # by preempted sequences
        self.tokens_left = limits.max_step_tokens
        self.prefill_left = limits.max_step_tokens
        self.num_prompts = len(running)  # of the running ones

    def decode(self) -> None:
        decoding = [each for each in self.active if each.num_tokens - each.num_computed == 1]
        self.num_prompts = len(self.active) - len(decoding)
        if decoding:
            self.prefill_left = self.limits.max_prefill_tokens
        if len(decoding) <= min(self.num_free_blocks, self.tokens_left):
            self._give_one_each(decoding)
            return
        for sequence in decoding:
            self._give(sequence, min(1, self.tokens_left))

    def prefill(self, waiting: Sequence[SequenceT], *, is_batch: bool) -> bool:
        """Share the tokens among the running prompts and those of `waiting` that can be admitted,
        all of one priority. Returns whether all waiting ones were admitted.
        """
        if self.preempted:
            waiting = ()
        if not self.num_prompts and not waiting:  # as in most steps
            return not self.preempted
        running = [each for each in self.active if each.is_batch is is_batch and _num_missing(each) > 1]
        if not running and not waiting:
            return not self.preempted
        num_tokens = min(self.tokens_left, self.prefill_left)
        order = shortest_first([*running, *waiting])
        admissible = self._admissible(order, waiting, num_tokens)
        taking_part = admissible | set(map(id, running))
        members = [each for each in order if id(each) in taking_part]
        if num_tokens >= 1 and members:
            oldest = next(each for each in (*running, *waiting) if id(each) in taking_part)
            for sequence, wanted in _amounts(members, oldest, num_tokens):
                if id(sequence) in admissible and wanted >= 1:
                    self._admit(sequence)
                self.prefill_left -= self._give(sequence, wanted)
        return not self.preempted and all(id(each) in self.shares for each in waiting)

    def _admissible(
        self, order: Iterable[SequenceT], waiting: Sequence[SequenceT], num_tokens: int
    ) -> set[int]:
        """Those of `waiting` that have places and blocks, until the tokens are used up. One that
        overtakes the first of the queue leaves a place and blocks for it, so that this one gets
        them when it is the oldest.
        """
        chosen: dict[int, SequenceT] = {}
        num_places = self.limits.max_running - len(self.active)
        # One more for each running one, or the next decode steps would preempt the sequences just
        # admitted.
        room = self.num_free_blocks - self._num_promised_blocks() - len(self.active)
        heads = iter(waiting)
        head = next(heads, None)
        ids = set(map(id, waiting))
        is_refused = False
        for sequence in order:
            if head is None or num_tokens < 1 or is_refused:
                break
            num_tokens -= _num_missing(sequence)
            if id(sequence) not in ids:
                continue
            kept = 0 if sequence is head else self._num_needed(head) + 1
            needed = self._num_needed(sequence)
            is_refused = needed + kept > room or num_places < (1 if sequence is head else 2)
            if not is_refused:
                chosen[id(sequence)] = sequence
                room, num_places = room - needed - 1, num_places - 1
                while head is not None and id(head) in chosen:
                    head = next(heads, None)
        if head is not None and self._num_needed(head) <= room and num_places >= 1:
            # Its turn comes at the latest when another one is refused.
            chosen[id(head)] = head
        return set(chosen)

    def _admit(self, sequence: SequenceT) -> None:
        num_before = len(self.active) - (0 if sequence.is_batch else self._num_batch())
        self.active.insert(num_before, sequence)
        self.admitted.append(sequence)

    def _num_needed(self, sequence: SequenceT) -> int:
        """The blocks for its tokens and the next one."""
        return self._num_blocks_for(sequence.num_tokens + 1) - sequence.num_blocks

    def _give_one_each(self, decoding: Sequence[SequenceT]) -> None:
        """Plan one token for each, where there is a free block for each: as `_give`, in less time."""
        block_size = self.limits.block_size
        for sequence in decoding:
            # The block of the last token, which is the one to compute.
            num_new_blocks = (sequence.num_tokens - 1) // block_size + 1 - sequence.num_blocks
            self.shares[id(sequence)] = StepShare(sequence, 1, num_new_blocks, True)
            self.num_free_blocks -= num_new_blocks
        self.tokens_left -= len(decoding)

    def _give(self, sequence: SequenceT, wanted: int) -> int:
        """Plan up to `wanted` tokens, or those of a first whole, preempting later sequences for the
        first one; returns the number.
        """
        if wanted < 1 or any(sequence is other for other in self.preempted):
            return 0
        first = sequence.num_computed
        least = sequence.uncut(first + 1) - first
        while (room := self._room(sequence)) < least:
            if self.active[-1] is sequence:
                # It keeps its blocks and waits for an older one to end.
                return 0
            self._preempt(self.active.pop())
        num_tokens = sequence.uncut(first + min(wanted, room)) - first
        num_new_blocks = self._num_blocks_for(first + num_tokens) - sequence.num_blocks
        is_last = num_tokens == _num_missing(sequence)
        self.shares[id(sequence)] = StepShare(sequence, num_tokens, num_new_blocks, is_last)
        self.num_free_blocks -= num_new_blocks
        self.tokens_left -= num_tokens
        return num_tokens

    def _preempt(self, victim: SequenceT) -> None:
        self.preempted.append(victim)
        num_freed_blocks = self.freed_by(self.preempted)
        self.num_free_blocks += num_freed_blocks - self.num_freed_blocks
        self.num_freed_blocks = num_freed_blocks
        share = self.shares.pop(id(victim), None)
        if share is not None:
            self.num_free_blocks += share.num_new_blocks
            self.tokens_left += share.num_tokens

    def _room(self, sequence: SequenceT) -> int:
        """The tokens that fit in its own and the free blocks."""
        num_blocks = sequence.num_blocks + self.num_free_blocks
        return num_blocks * self.limits.block_size - sequence.num_computed

    def _num_promised_blocks(self) -> int:
        """The free blocks that the active sequences will need for known tokens that are not planned
        yet.
        """
        promised = 0
        for sequence in self.active:
            share = self.shares.get(id(sequence))
            held = sequence.num_blocks + (share.num_new_blocks if share is not None else 0)
            promised += max(0, self._num_blocks_for(sequence.num_tokens + 1) - held)
        return promised

    def _num_batch(self) -> int:
        return sum(sequence.is_batch for sequence in self.active)

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.block_size)


def _num_missing(sequence: Schedulable) -> int:
    return sequence.num_tokens - sequence.num_computed


def largest_first(members: Sequence[tuple[T, int]]) -> list[T]:
    """The members of a step by the memory that they take of it, in descending order; ties by latest
    admission.

    `members` are in the order of admission. Memory for a step grows with its rows: the first ones
    made it too large.
    """
    order = sorted(range(len(members)), key=lambda number: (members[number][1], number), reverse=True)
    return [members[number][0] for number in order]


def is_out_of_memory(error: BaseException) -> bool:
    """True if memory ran out, here or on a device. torch's error is detected by its name, to not
    import it here.
    """
    return isinstance(error, MemoryError) or any(
        kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__
    )
