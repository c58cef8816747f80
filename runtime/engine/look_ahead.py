"""Look-ahead: the engine proposes tokens from the prompt and the answer so far, and verifies them
in the step that computes the sequence's next token.

An answer that repeats its prompt (a quotation, an edit, JSON, a call of a function) gets several
tokens from one step. Only on backends whose rows' bits do not depend on other rows: there, the
tokens are those that the sequence would get without proposals.

Invariants: proposed rows take blocks that the step's plan left, and those of rejected ones are given
back before the next plan. A lane's computed tokens never include a rejected proposal, so that no
block with one is shared. Used by the engine's thread alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ..errors import as_teneral_error
from ..step.batch import Rows
from ..step.requests import GenerationEvent
from ..step.state import Chosen
from .proposals import MAX_PROPOSALS, Chance, MatchAcceptance, NgramProposer, RowCosts, proposal_lengths
from .scheduler import StepShare
from .sequence import Sequence as TokenSequence
from .sequence import error_event
from .speculation import Choose, verify
from .state import SchedulerState

logger = logging.getLogger(__name__)

Outcome = Chosen | list[GenerationEvent]
"""A sequence's result of a step: its next token, or the events of those that were verified."""


class Prospects(Struct, eq=False):
    """The look-ahead of one sequence."""

    proposer: NgramProposer
    acceptance: MatchAcceptance


class ShareProposals(Struct, eq=False):
    """A sequence's proposals for a step."""

    number: int  # of its share
    sequence: TokenSequence
    prospects: Prospects
    tokens: list[int]
    num_matched: int


class LookAhead:
    """The look-ahead of one engine."""

    def __init__(self, state: SchedulerState, model: Any, max_proposals: int | None) -> None:
        """`max_proposals` of a sequence in a step are made wherever there is a match; None: as many
        as pay; 0: none.
        """
        self._state = state
        self._model = model
        self._max_proposals = max_proposals
        self._costs = RowCosts()
        self._candidates: list[ShareProposals] = []
        promises = bool(getattr(model, "is_batch_invariant", False))  # test doubles say nothing
        self.is_on = promises and max_proposals != 0

    def rows(self, shares: Sequence[StepShare[TokenSequence]]) -> list[Rows]:
        """The rows of these shares, with those of proposals, for which blocks are allocated.
        `outcomes` must follow; after an error, the caller shrinks the lanes.
        """
        rows = [rows_of(share) for share in shares]
        self._candidates = []
        if not self.is_on or not getattr(self._model, "is_exact", True):
            return rows
        for each in self._chosen(shares):
            own = rows[each.number]
            num_known = own.end
            del each.tokens[self._make_room(each.sequence, num_known + len(each.tokens)) - num_known :]
            if each.tokens:
                self._candidates.append(each)
                rows[each.number] = replace(
                    own,
                    tokens=[*own.tokens, *each.tokens],
                    end=num_known + len(each.tokens),
                    num_logits=1 + len(each.tokens),
                )
        return rows

    def note_time(self, rows: Sequence[Rows], took_s: float) -> None:
        """Record the time of the forward pass over these rows."""
        if self.is_on and all(own.end - own.first == own.num_logits for own in rows):
            self._costs.add(len(rows), sum(own.num_logits - 1 for own in rows), took_s)

    def outcomes(
        self, shares: Sequence[StepShare[TokenSequence]], rows: Sequence[Rows], logits: Any, choose: Choose
    ) -> list[Outcome]:
        """The outcomes for the shares that are the last of their sequences, from the logits of all
        rows; and the computed tokens of all of the shares' lanes.
        """
        choosing = [share.sequence for share in shares if share.is_last]
        if not self._candidates:
            outcomes = list[Outcome](choose(logits, [sequence.sampling for sequence in choosing]))
        else:
            outcomes, first = [], 0
            for sequence, own in zip(choosing, (own for own in rows if own.num_logits), strict=True):
                outcomes.append(_outcome(sequence, own, logits[first : first + own.num_logits], choose))
                first += own.num_logits
        for share, own in zip(shares, rows, strict=True):
            if own.num_logits <= 1:
                share.sequence.exact.num_computed += share.num_tokens
        if self._candidates:
            self._settle(dict(zip(choosing, outcomes, strict=True)))
        return outcomes

    # -- before a step
    # ----------------------------------------------------------------------------------------

    def _chosen(self, shares: Sequence[StepShare[TokenSequence]]) -> list[ShareProposals]:
        if any(share.sequence.waits_for_adapter for share in shares):
            return []
        num_left = self._state.options.max_step_tokens - sum(share.num_tokens for share in shares)
        # Interactive sequences never wait for batch work's proposals.
        is_batch = all(share.sequence.is_batch for share in shares)
        candidates = [
            found
            for number, share in enumerate(shares)
            if share.is_last
            and share.sequence.is_batch is is_batch
            and (found := self._candidate(number, share.sequence)) is not None
        ]
        if not candidates:
            return []
        num_sequences = sum(share.is_last for share in shares)
        for each, length in zip(candidates, self._lengths(candidates, num_sequences, num_left), strict=True):
            del each.tokens[length:]
            each.tokens = each.sequence.sampling.possible(each.tokens)
        return [each for each in candidates if each.tokens]

    def _candidate(self, number: int, sequence: TokenSequence) -> ShareProposals | None:
        """The sequence's proposals, if there is a match, up to a token that ends it."""
        num_outputs = sequence.sampling.num_outputs
        if not num_outputs or sequence.scores is not None or sequence.generation.ended:
            return None
        if sequence.look_ahead is None:
            sequence.look_ahead = Prospects(NgramProposer(sequence.tokens), MatchAcceptance())
        prospects: Prospects = sequence.look_ahead
        # One token comes without being proposed.
        limit = min(self._max_proposals or MAX_PROPOSALS, sequence.max_new_tokens - num_outputs - 1)
        found = prospects.proposer.propose(limit)
        if found is None:
            return None
        ends = (place for place, token in enumerate(found.tokens) if token in sequence.end_tokens)
        del found.tokens[next(ends, limit) :]
        return ShareProposals(number, sequence, prospects, *found) if found.tokens else None

    def _lengths(self, candidates: Sequence[ShareProposals], num_sequences: int, num_left: int) -> list[int]:
        if self._max_proposals is not None:
            lengths = []
            for each in candidates:
                lengths.append(min(len(each.tokens), num_left))
                num_left -= lengths[-1]
            return lengths
        lengths = proposal_lengths(
            [
                Chance(each.prospects.acceptance.rate(each.num_matched), len(each.tokens))
                for each in candidates
            ],
            num_sequences,
            num_left,
            lambda num_added: self._costs.added(num_sequences, num_added),
        )
        for number, each in enumerate(candidates):
            if not lengths[number] and sum(lengths) < num_left and each.prospects.acceptance.skip():
                lengths[number] = 1
        return lengths

    def _make_room(self, sequence: TokenSequence, num_tokens: int) -> int:
        """Allocate blocks for `num_tokens` tokens, as far as there are any. Returns the number of
        tokens that have room, `num_tokens` at most.
        """
        state, lane = self._state, sequence.exact
        num_missing = state.blocks.num_missing(lane, num_tokens)
        if num_missing > 0:
            with state.changed:
                state.blocks.grow(lane, min(num_missing, state.blocks.num_available))
        return min(num_tokens, len(lane.blocks) * state.options.block_size)

    # -- after it
    # ----------------------------------------------------------------------------------------

    def _settle(self, outcomes: Mapping[TokenSequence, Outcome]) -> None:
        """Give back the blocks of rejected proposals, and learn from the outcomes."""
        with self._state.changed:
            for each in self._candidates:
                lane = each.sequence.exact
                self._state.blocks.shrink(lane, lane.num_computed)
        for each in self._candidates:
            events = outcomes[each.sequence]
            if isinstance(events, list):
                num_accepted = sum(event.num_accepted for event in events)
                each.prospects.acceptance.add(each.num_matched, len(each.tokens), num_accepted)


def rows_of(share: StepShare[TokenSequence]) -> Rows:
    """The rows of the scheduler's share of a sequence."""
    lane = share.sequence.exact
    end = lane.num_computed + share.num_tokens
    return Rows(lane, lane.tokens, lane.num_computed, end, int(share.is_last), share.sequence.scores)


def _outcome(sequence: TokenSequence, rows: Rows, logits: Any, choose: Choose) -> Outcome:
    """The outcome of one sequence. An error ends only that one: others' tokens may be theirs already."""
    try:
        if rows.num_logits == 1:
            return choose(logits, [sequence.sampling])[0]
        return [] if sequence.generation.ended else verify(sequence, rows, logits, choose)[0]
    except Exception as error:
        logger.exception("request %s: no token could be chosen", sequence.generation.request.request_id)
        return [error_event(as_teneral_error(error))]
