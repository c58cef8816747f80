"""The early phase: the engine drafts while weights arrive, and confirms tokens as the weights
become exact.

Each sequence has two lanes of keys and values, which never mix. In the *draft* lane its tokens are
computed with the current weights, as soon as the whole draft has arrived. In the *exact* lane the
same tokens follow the weights that become exact, layer by layer: the prompt's at once, drafted ones
in time to catch up. When the last layer is exact, that pass gives the logits of all these
positions. A sequence that requested exact tokens then gets those that the exact weights choose, for
as long as these match the draft, and one more; one that accepts drafted tokens, and has received
them, continues exactly. Either way its exact lane is complete, and the draft's is dropped.

Choices depend only on the logits and the sequence's own numbers (`sampling.py`), so an exact
sequence gets, token for token, the result without a draft.

Runs in the engine's thread, between draft steps and single layers, where sequences may join or
leave.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ...loader.format.manifest import Tier
from ...loader.load.options import Order
from ..errors import GrammarError
from ..step.backend import Backend, OnLayer
from ..step.batch import Rows, StepBatch
from ..step.requests import GenerationEvent
from ..step.state import Choice, Chosen
from .arrival import Arrival
from .early_member import (
    Member,
    draft_lane,
    drafted,
    exact_rows,
    first_token_of,
    lane_of,
)
from .sequence import Lane, accept
from .sequence import Sequence as TokenSequence
from .speculation import Acceptance, ExactPasses, PassLike, Sent, catch_up_s, max_proposals, may_draft, verify
from .state import SchedulerState
from .trace import EngineTimeline

DRAFT_TIERS = (Tier.SKETCH, Tier.DRAFT)
# For weights, between two checks for sequences that joined or left.
WAIT_S = 0.01
IDLE_WAIT_S = 0.25  # an arrival wakes it
# Twice the prompt's time, for the draft and for the exact weights, and half of it as a margin:
# drafting must not delay the first token of exact sequences.
EXACT_MARGIN = 2.5

Events = list[tuple[TokenSequence, GenerationEvent]]


class TieredDecoder(Protocol):
    """A model that can compute before its weights are exact."""

    def begin(
        self, batch: StepBatch, kv: Any, *, tier: Tier = Tier.REFINE, on_layer: OnLayer | None = None
    ) -> PassLike: ...

    def want(self, tokens: npt.NDArray[np.int64], tier: Tier) -> None: ...


class EarlyPhase:
    """The early phase, made once. It owns its sequences' lanes; all other state is in `SchedulerState`."""

    def __init__(
        self,
        model: TieredDecoder,
        kv: Any,
        state: SchedulerState,
        arrival: Arrival,
        *,
        timeline: EngineTimeline,
        backend: Backend,
        drafter: TieredDecoder | None = None,
    ) -> None:
        """`drafter` computes the draft lanes: an exact model that shares the KV storage. By default
        the model itself does, with the weights that it has.
        """
        self._model = model
        self._drafter = drafter
        self._kv = kv
        self._state = state
        self._arrival = arrival
        self._timeline = timeline
        self._backend = backend
        self._max_rows = state.options.max_step_tokens
        self._members: list[Member] = []
        self._passes = ExactPasses(self._max_rows)
        self._acceptance = Acceptance()
        # Of a draft step, until one was measured.
        self._step_s = arrival.token_s()
        self._num_draft_steps = 0
        # Sequences without a place at the last check.
        self._num_waiting = 0
        self._is_through = False  # the layers and the head are exact
        self._exact_is_next = True

    def run(self) -> None:
        """Serve until every weight is exact and all passes that followed them are done, or the
        engine stops.

        Unfinished sequences are left running, with their computed tokens. Raises the model's
        errors; `members` are then the affected sequences, and `reset` prepares another call.
        """
        while self._take_stock():
            if self._members:
                self._act()
        if self._num_draft_steps:
            self._timeline.add_outcome(
                num_draft_steps=self._num_draft_steps,
                step_s=round(self._step_s, 4),
                num_judged=self._acceptance.num_judged,
                num_accepted=self._acceptance.num_accepted,
                refine_wait_s=round(self._arrival.refine_wait_s(), 4),
            )

    @property
    def members(self) -> list[TokenSequence]:
        return [member.sequence for member in self._members]

    def reset(self) -> None:
        """Drop all passes and members. The block manager owns their blocks."""
        self._members = []
        self._passes.clear()

    # -- members
    # ---------------------------------------------------------------------------------------------

    def _take_stock(self) -> bool:
        """Remove ended members and admit new ones; sleep briefly if there are none. Returns whether
        to continue.
        """
        state = self._state
        with state.changed:
            if state.some_ended_early:
                self._leave(state.forget_ended())
            if state.is_stopping:
                return False
            order = self._arrival.order()
            if self._is_through or order is Order.EXACT or self._arrival.is_exact():
                return bool(self._members)
            new = self._admit() if order is Order.DRAFT_FIRST else []
            self._num_waiting = len(state.waiting)
            if not self._members:
                state.changed.wait(WAIT_S if state.waiting else IDLE_WAIT_S)
        for member in new:
            self._want(member.sequence.tokens)
        return True

    def _want(self, tokens: Sequence[int]) -> None:
        """Prefetch the embeddings of these tokens; their refining bytes not before the rest of the
        draft.
        """
        tier = Tier.REFINE if self._arrival.holds(Tier.DRAFT) else Tier.DRAFT
        self._model.want(np.array(tokens, dtype=np.int64), tier)

    def _admit(self) -> list[Member]:
        """Admit waiting sequences, in the order of their turns, while there is room for them in
        both lanes, or in one.

        Cached blocks of their beginnings are reused: the exact lane continues after them. Running
        batch work keeps its place: preempted now, it would start again just when its weights are
        about to be exact.
        """
        state = self._state
        new: list[Member] = []
        state.waiting.arrange()
        state.attach_prefixes()
        for sequence in state.ready():
            num_blocks = state.blocks.num_missing(sequence.exact, sequence.num_tokens + 1)
            if len(state.running) >= state.options.max_running or num_blocks > state.blocks.num_available:
                break
            state.admit(sequence)
            state.blocks.grow(sequence.exact, num_blocks)
            member = Member(sequence, first_token_of(sequence), sequence.num_computed)
            num_draft_blocks = num_blocks + sequence.num_remembered
            is_worth_it = sequence.scores is None and self._has_time(member)
            if is_worth_it and num_draft_blocks <= state.blocks.num_available:
                sequence.draft = draft_lane(sequence, shares_tokens=member.sends_drafts)
                state.blocks.grow(sequence.draft, num_draft_blocks)
            new.append(member)
        state.detach_prefixes()
        self._members += new
        return new

    def _has_time(self, member: Member) -> bool:
        """True if a draft is useful. One that is overtaken while it computes the prompt is not; and
        its later tokens are useful only if they are sent, since proposals have to follow the prompt
        through the exact layers.
        """
        prompt_s = catch_up_s(member.sequence.num_tokens, self._step_s)
        return self._arrival.left_s() > prompt_s * (1 if member.sends_drafts else EXACT_MARGIN)

    def _leave(self, sequences: Collection[TokenSequence]) -> None:
        """Remove these members; none of their tokens are computed any more."""
        if not sequences:
            return
        self._members = [member for member in self._members if member.sequence not in sequences]
        self._passes.drop(sequences)

    def _graduate(self, members: Collection[Member]) -> None:
        """Make these ordinary sequences. Under the lock."""
        self._leave([member.sequence for member in members])
        # A pass has been through all layers and the head, so a draft has no advantage any more; any
        # step waits for missing rows of embeddings.
        self._is_through = self._is_through or bool(members)
        for member in members:
            sequence = member.sequence
            if sequence in self._state.running:
                self._state.blocks.drop_draft(sequence)
                self._state.blocks.shrink(sequence.exact, sequence.num_tokens)

    # -- the next action
    # -------------------------------------------------------------------------------------

    def _act(self) -> None:
        """One draft step, one layer, or a short wait."""
        fresh = [member for member in self._draftable() if lane_of(member).num_missing > 1]
        if fresh:
            # A prompt: follows the draft as it arrives.
            self._draft(fresh)
            return
        self._plan_passes(is_time=False)
        drafting = self._who_drafts()
        if not drafting:
            self._plan_passes(is_time=True)
        can_follow = self._passes.can_advance()
        # Sequences that get drafted tokens should not wait for a whole prompt to pass through the
        # exact layers.
        is_drafts_turn = not self._exact_is_next and any(member.sends_drafts for member in drafting)
        self._exact_is_next = is_drafts_turn or not can_follow
        if can_follow and not is_drafts_turn:
            self._follow()
        elif drafting:
            self._draft(drafting)
        elif self._passes:
            self._passes.wait(WAIT_S)
        else:
            with self._state.changed:
                self._state.changed.wait(WAIT_S)

    def _draftable(self) -> list[Member]:
        """Members with a draft lane. Those that need the draft tier wait, while others use the
        sketch that has arrived.
        """
        members = [member for member in self._members if member.draft is not None]
        if {member.tier for member in members} == set(DRAFT_TIERS) and not self._arrival.holds(Tier.DRAFT):
            return [member for member in members if member.tier is Tier.SKETCH]
        return members

    def _who_drafts(self) -> list[Member]:
        """Members whose draft continues now; with room for one more token in both lanes."""
        num_pending = sum(member.num_pending for member in self._members)
        if not may_draft(num_pending, self._arrival.left_s(), self._step_s):
            return []
        limit = max_proposals(self._acceptance.rate)
        chosen: list[Member] = []
        with self._state.changed:
            for member in self._draftable():
                sequence, lane = member.sequence, lane_of(member)
                if not member.can_draft or sequence.generation.ended:
                    continue
                num_proposals = len(lane.tokens) - sequence.num_tokens
                if num_proposals >= limit or not self._make_room(sequence, lane, len(lane.tokens)):
                    continue
                if lane.sampling.num_outputs < sequence.max_new_tokens:
                    chosen.append(member)
        return chosen

    def _make_room(self, sequence: TokenSequence, lane: Lane, num_tokens: int) -> bool:
        """Allocate blocks for `num_tokens` tokens in the lane, and for one more in the exact lane,
        if available.
        """
        state = self._state
        missing = [(lane, num_tokens), (sequence.exact, num_tokens + 1)]
        needed = [(each, max(0, state.blocks.num_missing(each, num))) for each, num in missing]
        if sum(num for _, num in needed) > state.blocks.num_available:
            return False
        for each, num in needed:
            if num:
                state.blocks.grow(each, num)
        return True

    def _plan_passes(self, *, is_time: bool) -> None:
        """Send pending tokens through the exact layers: prompts at once, and drafted tokens once it
        `is_time`, so that as many as possible go together.
        """
        parts: list[tuple[TokenSequence, Rows]] = []
        num_rows = 0
        for member in self._members:
            is_prompt_through = member.num_planned >= member.sequence.num_given_tokens
            if not member.num_pending or (is_prompt_through and not is_time):
                continue
            end = min(member.num_known, member.num_planned + self._max_rows - num_rows)
            if end <= member.num_planned:
                break
            end = member.sequence.exact.uncut(member.num_planned, end)
            parts.append((member.sequence, exact_rows(member, end)))
            num_rows += end - member.num_planned
            member.num_planned = end
        if parts:
            batch = self._backend.build([rows for _, rows in parts])
            on_layer = None if self._passes else self._timeline.on_exact_layer()
            self._passes.send(self._model.begin(batch, self._kv, on_layer=on_layer), parts)

    # -- the draft -------------------------------------------------------------------------------------------

    def _draft(self, members: Sequence[Member]) -> None:
        """Compute the missing tokens of these draft lanes in one pass, and choose a token for each
        complete lane.

        Does nothing if it would wait for weights while there are new sequences.
        """
        parts: list[Rows] = []
        takers: list[Member] = []
        num_rows = 0
        for member in members:
            lane = member.draft
            assert lane is not None
            end = min(len(lane.tokens), lane.num_computed + self._max_rows - num_rows)
            if end <= lane.num_computed:
                break
            end = lane.uncut(lane.num_computed, end)
            parts.append(Rows(lane, lane.tokens, lane.num_computed, end, int(end == len(lane.tokens))))
            takers += [member] if end == len(lane.tokens) else []
            num_rows += end - lane.num_computed
        start_s = time.monotonic()
        batch = self._backend.build(parts)
        under_way = (self._drafter or self._model).begin(
            batch,
            self._kv,
            tier=Tier.REFINE if self._drafter else max(member.tier for member in members),
            on_layer=self._timeline.on_draft_layer(),
        )
        if not self._complete(under_way):
            return
        choices = self._backend.choose(under_way.logits, [lane_of(member).sampling for member in takers])
        end_s = time.monotonic()
        for part in parts:
            part.lane.num_computed = part.end
        if all(part.first > 0 and part.end - part.first == 1 for part in parts):
            self._step_s += 0.3 * (end_s - start_s - self._step_s)
        self._num_draft_steps += 1
        self._timeline.add_draft(batch, start_s, end_s)
        self._take_drafted(takers, choices, num_rows, end_s - start_s)

    def _complete(self, under_way: PassLike) -> bool:
        """Take this pass through all layers, as they arrive.

        Returns False if it was abandoned, because a sequence joined or left while it waited. Its
        work is repeated with the current members; the network is the bottleneck anyway.
        """
        while not under_way.is_done:
            while not under_way.can_advance(WAIT_S):
                if self._is_other_company():
                    return False
            under_way.advance()
        return True

    def _is_other_company(self) -> bool:
        state = self._state
        with state.changed:
            is_new = len(state.waiting) > self._num_waiting
            return is_new or state.some_ended_early or state.is_stopping

    def _take_drafted(
        self, members: Sequence[Member], choices: Sequence[Chosen], num_rows: int, took_s: float
    ) -> None:
        """Handle drafted tokens: they are sent if permitted, and otherwise become proposals."""
        events: Events = []
        proposed: list[int] = []
        for member, choice in zip(members, choices, strict=True):
            sequence, lane = member.sequence, lane_of(member)
            if not isinstance(choice, Choice):
                # A weight that only the missing bits make finite: the exact ones decide.
                member.can_draft = False
            elif member.sends_drafts:
                if not sequence.generation.ended:
                    events.append((sequence, drafted(accept(sequence, choice))))
            else:
                begun = len(lane.tokens)
                member.can_draft = self._propose(sequence, lane, choice.token)
                proposed += lane.tokens[begun:]
        if wanted := proposed + [token for _, event in events for token in event.tokens]:
            self._want(wanted)
        self._hand_out(events, num_rows, took_s)

    def _propose(self, sequence: TokenSequence, lane: Lane, token: int) -> bool:
        """Continue the draft by this token, and by the tokens that a grammar then forces, as far as
        there is room.

        Returns whether there is more to draft after them.
        """
        sampling = lane.sampling
        try:
            lane.tokens.append(token)
            sampling.add(token)
            for forced in () if token in sequence.end_tokens else sampling.forced():
                with self._state.changed:
                    if not self._make_room(sequence, lane, len(lane.tokens) + 1):
                        break
                lane.tokens.append(forced)
                sampling.add(forced)
        except GrammarError:  # the exact weights' own pass will report it
            return False
        is_finished = sampling.grammar is not None and sampling.grammar.is_finished
        return lane.tokens[-1] not in sequence.end_tokens and not is_finished

    # -- the exact weights -----------------------------------------------------------------------------------

    def _follow(self) -> None:
        start_s = time.monotonic()
        through = self._passes.advance()
        took_s = time.monotonic() - start_s
        if through is not None:
            self._judge(through, took_s)
            return
        with self._state.changed:
            self._state.note_step(0, took_s)

    def _judge(self, through: Sent, took_s: float) -> None:
        """Process the logits of a finished exact pass."""
        logits = through.under_way.logits
        events: Events = []
        settled: list[Member] = []
        first = 0
        members = {member.sequence: member for member in self._members}
        for sequence, rows in through.parts:
            member = members[sequence]
            own = logits[first : first + rows.num_logits]
            first += rows.num_logits
            if member in settled or sequence.generation.ended:
                continue
            chosen, is_settled = verify(sequence, rows, own, self._backend.choose)
            for event in chosen:
                if event.num_accepted or event.num_rejected:
                    self._acceptance.add(bool(event.num_accepted))
            events += [(sequence, event) for event in chosen]
            if is_settled:
                settled.append(member)
        with self._state.changed:
            self._graduate(settled)
        self._hand_out(events, through.num_rows, took_s)

    # -- events
    # ----------------------------------------------------------------------------------------------

    def _hand_out(self, events: Events, num_rows: int, took_s: float) -> None:
        with self._state.changed:
            self._state.note_step(num_rows, took_s)
            ended = [sequence for sequence, event in events if event.finish_reason is not None]
            self._leave(ended)
            self._state.note_events(events, is_early=True)
        for sequence, event in events:
            sequence.generation.emit(event)
