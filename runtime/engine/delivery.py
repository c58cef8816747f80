"""The tokens of a step on their way to the callers: given to their sequences at once, delivered as
events when nothing waits for it.

The next step needs the tokens, and which sequences end, but no text: where a device computes, it
computes the next step while the events of this one are made and delivered. Sequences whose text or
grammar decides if they end get their text before. A sequence whose events fail, or whose caller
cancels it in `on_event`, ends like one that is cancelled during a step.

Invariant: a step's events are delivered before the tokens of the next one are given, and before
the engine waits, works in idle time or ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..step.requests import GenerationEvent
from ..step.state import Choice
from .look_ahead import Outcome
from .sequence import Sequence as TokenSequence
from .sequence import Taken, accept
from .state import SchedulerState


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
