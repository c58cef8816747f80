"""The loop of the engine's thread: the wait for work, the plan of a step, its computation, the delivery of
its tokens, and what follows from a failed one.

After any error the thread survives, and each sequence of the step gets its last event. Out of memory, the
largest sequence ends and the others go on.

Tokens are given to their sequences at once, and delivered as events when nothing waits for it. The next
step needs the tokens, and which sequences end, but no text: where a device computes, it computes the next
step while the events of this one are made and delivered. Sequences whose text or grammar decides if they
end get their text before. A sequence whose events fail, or whose caller cancels it in `on_event`, ends like
one that is cancelled during a step. Invariant: a step's events are delivered before the tokens of the next
one are given, and before the engine waits, works in idle time or ends.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, cast

from ...loader.errors import TeneralError
from ...loader.process.cpu import quick_turns
from ..errors import WEIGHTS_LOST, CapacityError, DeviceLostError, as_teneral_error
from ..step.backend import Backend
from ..step.requests import GenerationEvent
from ..step.state import Choice
from .adapters import OvertakenError, followed
from .arrival import DecoderLike
from .early import EarlyPhase, TieredDecoder
from .look_ahead import LookAhead, Outcome
from .scheduler import (
    Preempted,
    SchedulerLimits,
    StepPlan,
    StepShare,
    is_out_of_memory,
    largest_first,
    make_way,
    plan_step,
)
from .sequence import Sequence as TokenSequence
from .sequence import Taken, accept, error_event
from .state import SchedulerState
from .trace import EngineTimeline

logger = logging.getLogger(__name__)

# Idle time before other work may use it.
IDLE_S = 0.1


class StepLoop:
    """The loop of one engine. Used by its thread alone, but for the construction."""

    def __init__(
        self,
        model: DecoderLike,
        kv: Any,
        state: SchedulerState,
        backend: Backend,
        *,
        limits: SchedulerLimits,
        timeline: EngineTimeline,
        look_ahead: LookAhead,
        early: EarlyPhase | None,
        has_states: bool,
        on_device_lost: Callable[[DeviceLostError], None] | None,
    ) -> None:
        """`early` comes first, if there is a draft. `has_states`: the model has recurrent states."""
        self._model, self._kv, self._state, self._backend = model, kv, state, backend
        self._limits, self._timeline = limits, timeline
        self._look_ahead = look_ahead
        self.early = early  # None once the weights are exact
        self._has_states = has_states
        self._on_device_lost = on_device_lost
        is_on_device = backend.returns_early
        self._delivery = Delivery(state, is_late=is_on_device)
        # A device is idle while this thread waits for the interpreter, which threads that write
        # answers keep for 5 ms otherwise.
        self._turns = quick_turns if is_on_device else nullcontext

    def run(self) -> None:
        """Compute steps until the engine stops. The body of the thread."""
        while True:
            try:
                if self.early is not None:
                    self._run_early(self.early)
                    continue
                if use_idle_time(self._state, self._backend, self._delivery.deliver):
                    continue
                plan = next_plan(self._state, self._limits, waits=not self._delivery.is_due)
                if plan is None or not plan.shares:
                    self._delivery.deliver()
                if plan is None:
                    self._state.blocks.stop_spill()
                    return
                if plan.shares:
                    with self._turns():
                        self._execute(plan.shares)
                del plan  # its sequences have adapters, whose memory others may need while this waits
            except Exception as error:  # a bug: no caller may be left waiting forever
                logger.exception("the engine failed")
                self._delivery.deliver()
                self._fail_all(as_teneral_error(error))

    def _run_early(self, early: EarlyPhase) -> None:
        """Run the early phase, if there is a draft, until the weights are exact."""
        try:
            early.run()
            self.early = None
            return
        except Exception as error:  # noqa: BLE001 - of the model's code, its weights, or memory
            if not is_out_of_memory(error):
                members = early.members
                early.reset()
                self._fail_step(as_teneral_error(error), members)
                return
            # Without its traceback, which keeps the step's memory alive.
            exhausted = str(error)
        members = early.members
        early.reset()
        # The remaining sequences start again: the state of their running passes is lost.
        victims = largest_first([(each, each.num_tokens) for each in members])
        self._run_out(exhausted, victims[:1], victims[1:])

    def _execute(self, shares: Sequence[StepShare[TokenSequence]]) -> None:
        choosing = [share.sequence for share in shares if share.is_last]
        exhausted: str | None = None
        try:
            outcomes = self._compute(shares)
        except OvertakenError:
            with self._state.changed:
                self._state.preempt([share.sequence for share in reversed(shares)], Preempted.ADAPTER)
            return
        except Exception as error:  # noqa: BLE001 - of the model's code, its weights, or memory
            self._delivery.deliver()
            if not is_out_of_memory(error):
                self._fail_step(as_teneral_error(error), [share.sequence for share in shares])
                return
            # Without its traceback, which keeps the step's memory alive.
            exhausted = str(error)
        if exhausted is not None:
            victims = largest_first([(share.sequence, share.num_tokens) for share in shares])
            # Recurrent states may be those of a later token.
            self._run_out(exhausted, victims[:1], victims[1:] if self._has_states else [])
            return
        self._delivery.give([share.sequence for share in shares], choosing, outcomes)

    def _compute(self, shares: Sequence[StepShare[TokenSequence]]) -> list[Outcome]:
        """Compute one step, and choose the next tokens."""
        backend, step, spill = self._backend, self._state.num_steps, self._state.blocks.spill
        rows = self._look_ahead.rows(shares)
        batch = backend.build(rows)
        start_s = time.monotonic()
        end_s: float | None = None
        try:
            on_layer = self._timeline.on_layer(step)
            if any(share.sequence.waits_for_adapter for share in shares):
                self._delivery.deliver()
                model = cast("TieredDecoder", self._model)
                logits = followed(model.begin(batch, self._kv, on_layer=on_layer), self._is_overtaken)
            else:
                if not batch.is_recorded:
                    self._delivery.deliver()
                logits = backend.forward(batch, on_layer=on_layer)
                self._delivery.deliver()
            end_s = None if backend.returns_early else time.monotonic()
            self._look_ahead.note_time(rows, (end_s or time.monotonic()) - start_s)
            return self._look_ahead.outcomes(shares, rows, logits, backend.choose)
        finally:
            end_s = end_s or time.monotonic()
            with self._state.changed:
                self._state.note_step(len(batch.tokens), end_s - start_s)
                if spill is not None:
                    spill.note_step(len(batch.tokens), end_s - start_s)
            self._timeline.add_step(step, batch, start_s, end_s)

    def _is_overtaken(self) -> bool:
        """True if there is something to do that need not wait for an adapter."""
        state = self._state
        with state.changed:
            return bool(state.ready()) or state.some_ended_early or state.is_stopping

    def _run_out(self, why: str, victims: Sequence[TokenSequence], others: Sequence[TokenSequence]) -> None:
        """Handle a step that ran out of memory: the victims end, the others start again, and all
        other sequences go on.
        """
        self._backend.make_room()
        logger.error("out of memory: %s", why)
        state = self._state
        with state.changed:
            state.num_exhausted += 1
            for sequence in victims:
                state.forget(sequence)
            state.preempt([each for each in others if each in state.running], Preempted.MEMORY)
            for sequence in state.running:  # including those that the step would have filled
                state.blocks.shrink(sequence.exact, sequence.num_computed)
            failure = CapacityError(
                "there was not enough memory to compute this request together with the others",
                retry_after_s=state.retry_after_s,
                hint="Try again later, or with a shorter prompt; --kv-bytes and --max-running leave more room.",
            )
        for sequence in victims:
            sequence.generation.emit(error_event(failure))

    def _fail_step(self, failure: TeneralError, sequences: Sequence[TokenSequence]) -> None:
        """End the sequences of a failed step; all sequences, now and later, if weights are lost."""
        if isinstance(failure, (*WEIGHTS_LOST, DeviceLostError)):
            self._fail_all(failure)
            return
        logger.error("a step failed: %s", failure.message, exc_info=failure)
        with self._state.changed:
            for sequence in sequences:
                self._state.forget(sequence)
        for sequence in sequences:
            sequence.generation.emit(error_event(failure))

    def _fail_all(self, failure: TeneralError) -> None:
        if isinstance(failure, DeviceLostError) and self._on_device_lost is not None:
            self._on_device_lost(failure)
        with self._state.changed:
            self._state.refuse(failure)
            sequences = self._state.forget_all()
        for sequence in sequences:
            sequence.generation.emit(error_event(failure))


def next_plan(
    state: SchedulerState, limits: SchedulerLimits, *, waits: bool = True
) -> StepPlan[TokenSequence] | None:
    """Wait for work, decide, and reserve the blocks for it. None: the engine stops.

    Without `waits`, the plan has no shares where there is nothing to compute now.
    """
    blocks = state.blocks
    with state.changed:
        while True:
            if state.some_ended_early:
                state.forget_ended()
            if state.is_stopping:
                # The stopping thread gives these their last events, maybe after this thread has
                # ended.
                state.forget_all()
                return None
            if not state.running and not state.waiting:
                if not waits:
                    return StepPlan((), (), ())
                state.changed.wait()
                continue
            _take_turns(state, limits)
            state.attach_prefixes()
            plan = plan_step(
                state.running,
                state.ready() or state.followers(),
                blocks.num_available,
                limits,
                freed_by=blocks.num_freed_by,
            )
            state.apply(plan)
            state.detach_prefixes()
            if plan.shares or not waits:
                return plan
            wait_s = None if blocks.spill is None else blocks.spill.wait_s()
            waits_for_others = any(each.waits_for_adapter or each.waits_for_images for each in state.waiting)
            assert wait_s is not None or waits_for_others, "the oldest sequence can always go on"
            state.changed.wait(wait_s)


def _take_turns(state: SchedulerState, limits: SchedulerLimits) -> None:
    """Arrange the waiting sequences in the order of their turns; preempt batch work for
    interactive work. Under the lock.
    """
    blocks = state.blocks
    blocks.sessions.expire(time.monotonic())
    has_batch = any(sequence.is_batch for sequence in state.running)
    if not state.waiting or (len(state.running) == limits.max_running and not has_batch):
        return
    state.waiting.arrange()
    if has_batch:
        victims = make_way(
            state.running,
            state.prospects(),
            blocks.num_available,
            limits,
            blocks.num_freed_by,
        )
        state.preempt(victims, Preempted.PRIORITY)


def use_idle_time(state: SchedulerState, backend: Backend, deliver: Callable[[], None]) -> bool:
    """Do one piece of work that makes later steps faster, unless a sequence waits for its first
    token. Returns whether to check again. Before any wait, `deliver` delivers the last step's events.
    """
    if not backend.wants_idle_time(has_running=bool(state.running)):  # on a CPU, never
        return False
    deliver()
    with state.changed:
        if state.some_ended_early:
            state.forget_ended()
        has_running = bool(state.running)
        if (
            state.owes_first_token
            or state.is_stopping
            or not backend.wants_idle_time(has_running=has_running)
        ):
            return False
        if not has_running and state.changed.wait(IDLE_S):
            return True
    backend.work_when_idle()
    return True


class Delivery:
    """The delivery of one engine. Used by its thread alone."""

    def __init__(self, state: SchedulerState, *, is_late: bool) -> None:
        """`is_late`: events wait for `deliver`."""
        self._state = state
        self._is_late = is_late
        self._events: deque[tuple[TokenSequence, GenerationEvent]] = deque()
        self._taken: deque[Taken] = deque()
        # Sequences with blocks that others may share.
        self._computed: Sequence[TokenSequence] = ()

    @property
    def is_due(self) -> bool:
        """True if there is something to deliver."""
        return bool(self._events or self._taken or self._computed)

    def give(
        self,
        computed: Sequence[TokenSequence],
        choosing: Sequence[TokenSequence],
        outcomes: Sequence[Outcome],
    ) -> None:
        """Give their tokens to the `choosing` ones of a step's sequences, unless look-ahead has, and
        free those that end.
        """
        assert not self.is_due, "the events of a step before"
        num_ended = 0
        for sequence, choice in zip(choosing, outcomes, strict=True):
            if sequence.generation.ended:
                num_ended += 1
            elif isinstance(choice, list):
                self._events += [(sequence, event) for event in choice]
            elif self._is_late and sequence.can_take and isinstance(choice, Choice):
                self._taken.append(Taken(sequence, choice, sequence.take(choice.token)))
            else:
                self._events.append((sequence, accept(sequence, choice)))
        state = self._state
        self._computed = computed
        with state.changed:
            # Those got no token and must not be planned again, although their end may not be
            # recorded yet.
            state.some_ended_early = state.some_ended_early or num_ended > 0
            if not self._is_late or state.waiting:
                self._share_blocks()
            state.note_events(self._events)
            state.note_taken(self._taken)
            if state.blocks.spill is not None:
                state.blocks.spill.poke()
        if not self._is_late:
            self.deliver()

    def deliver(self) -> None:
        """Deliver the events that are due. No lock may be held."""
        if self._computed:
            with self._state.changed:
                self._share_blocks()
        while self._events:
            sequence, event = self._events.popleft()
            sequence.generation.emit(event)
        while self._taken:
            taken = self._taken.popleft()
            taken.sequence.generation.emit(taken.event())

    def _share_blocks(self) -> None:
        """Make the computed blocks available to others. Under the lock."""
        computed, self._computed = self._computed, ()
        for sequence in computed:
            self._state.blocks.remember(sequence)
