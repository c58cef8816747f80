"""Speculation: the verification of proposed tokens, the length of drafts ahead of the exact weights,
and the exact passes that confirm them.

Verification is the same for the draft's proposals (`early.py`) and for look-ahead's
(`look_ahead.py`): one pass gives the logits after a sequence's last token and after each proposal.
The ordinary sampler chooses from them, position by position, with the sequence's grammar, penalties
and random numbers as they are there: a proposal is confirmed if it is the token that is chosen
anyway. The first other choice is the sequence's token, too, and ends the verification.

The length of drafts is a pure decision over measured times. A proposal that the exact weights
confirm saves a decode step. It costs a row in the pass that confirms, and is lost with the first
wrong proposal before it. All proposals must have caught up with that pass when the last exact
weights arrive, or they would delay the first exact token.

Exact passes run one after another through the layers as these become exact. Invariant: a pass never
reaches or overtakes an earlier one, so that the keys and values that its rows attend to have been
written; passes that meet are joined. This module knows neither blocks nor what drafts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from ..step.batch import Rows
from ..step.requests import GenerationEvent
from ..step.state import Chosen, SamplingState
from .sequence import Sequence as TokenSequence
from .sequence import accept

# Of one sequence: bounds the rows of a pass for any measured times.
MAX_PROPOSALS = 64
# Of a decode step's time, for one more row in a pass: few rows cost little compared to reading weights.
ROW_SHARE = 0.1
# The prior: the share of tokens on which draft and exact weights agree.
USUAL_ACCEPTANCE = 0.9
# The number of judged proposals that the prior counts for.
USUAL_WEIGHT = 10


class Acceptance(Struct):
    """The rate of confirmed proposals, among those whose predecessors were all confirmed."""

    num_judged: int = 0
    num_accepted: int = 0

    def add(self, is_right: bool) -> None:
        """Count one proposal."""
        self.num_judged += 1
        self.num_accepted += is_right

    @property
    def rate(self) -> float:
        """The estimate, in (0, 1)."""
        confirmed = self.num_accepted + USUAL_ACCEPTANCE * USUAL_WEIGHT
        return min(confirmed / (self.num_judged + USUAL_WEIGHT), 0.999)


def max_proposals(acceptance: float) -> int:
    """The number of proposals worth their rows: the last one is confirmed often enough to pay for
    its own.
    """
    return max(1, min(MAX_PROPOSALS, int(math.log(ROW_SHARE) / math.log(acceptance))))


def catch_up_s(num_rows: int, step_s: float) -> float:
    """The time of `num_rows` rows through all layers, if one row takes `step_s`."""
    return step_s * (1 + ROW_SHARE * num_rows)


def may_draft(num_pending: int, left_s: float, step_s: float) -> bool:
    """True if there is time for another draft step before the `num_pending` tokens, and its own, must catch up."""
    return left_s > step_s + catch_up_s(num_pending + 1, step_s)


class PassLike(Protocol):
    """A `ForwardPass`, or a test double."""

    stage: int

    @property
    def is_done(self) -> bool: ...

    @property
    def logits(self) -> Any: ...

    def can_advance(self, timeout_s: float = 0.0) -> bool: ...

    def advance(self, *, is_behind: bool = False) -> None: ...

    def joined(self, behind: Any) -> Any: ...

    def without(self, numbers: Collection[int]) -> Any: ...


class Sent(Struct):
    """A pass and its sequences, in the order of its batch's spans."""

    under_way: PassLike
    parts: list[tuple[TokenSequence, Rows]]

    @property
    def num_rows(self) -> int:
        return sum(rows.end - rows.first for _, rows in self.parts)


class ExactPasses:
    """The running passes, in the order of their start."""

    def __init__(self, max_rows: int) -> None:
        """Passes that meet are joined if they have at most `max_rows` together."""
        self._max_rows = max_rows
        self._passes: list[Sent] = []

    def __bool__(self) -> bool:
        return bool(self._passes)

    def send(self, under_way: PassLike, parts: list[tuple[TokenSequence, Rows]]) -> None:
        """Add a pass after all others."""
        self._passes.append(Sent(under_way, parts))

    def can_advance(self) -> bool:
        """True if some pass can compute its next layer now. Raises the load's error."""
        return any(self._may_advance(number) for number in range(len(self._passes)))

    def wait(self, timeout_s: float) -> None:
        """Wait until the first pass can compute its next layer, at most `timeout_s`. Raises the
        load's error.
        """
        self._passes[0].under_way.can_advance(timeout_s)

    def advance(self) -> Sent | None:
        """Compute one layer of the first pass that can. Returns that pass when it is finished."""
        number = next(number for number in range(len(self._passes)) if self._may_advance(number))
        sent = self._passes[number]
        # The last weights may have come since this was asked: a pass that then went through all layers would overtake.
        sent.under_way.advance(is_behind=number > 0)
        if sent.under_way.is_done:
            return self._passes.pop(number)
        self._join(number)
        return None

    def drop(self, sequences: Collection[TokenSequence]) -> None:
        """Remove the rows of these sequences."""
        remaining: list[Sent] = []
        for sent in self._passes:
            gone = {number for number, (sequence, _) in enumerate(sent.parts) if sequence in sequences}
            if len(gone) == len(sent.parts):
                continue
            if gone:
                sent.under_way = sent.under_way.without(gone)
                sent.parts = [part for number, part in enumerate(sent.parts) if number not in gone]
            remaining.append(sent)
        self._passes = remaining

    def clear(self) -> None:
        self._passes = []

    def _may_advance(self, number: int) -> bool:
        """True if that pass can compute its next layer: it is exact, and the previous pass has
        computed it.
        """
        under_way = self._passes[number].under_way
        is_behind = number == 0 or under_way.stage < self._passes[number - 1].under_way.stage
        return is_behind and under_way.can_advance()

    def _join(self, number: int) -> None:
        """Join this pass and the one that it has caught up with, so that they read the weights
        once.
        """
        if number == 0:
            return
        ahead, behind = self._passes[number - 1], self._passes[number]
        fits = ahead.num_rows + behind.num_rows <= self._max_rows
        if ahead.under_way.stage == behind.under_way.stage and fits:
            ahead.under_way = ahead.under_way.joined(behind.under_way)
            ahead.parts += behind.parts
            del self._passes[number]


Choose = Callable[[Any, Sequence[SamplingState]], list[Chosen]]
"""`Backend.choose`."""


def verify(
    sequence: TokenSequence, rows: Rows, logits: Any, choose: Choose
) -> tuple[list[GenerationEvent], bool]:
    """Append the tokens that follow from `logits`, (rows.num_logits, vocab) as `choose` takes them.
    Returns their events, and whether the proposals are settled: none of them is left to verify.

    `rows` were computed in the sequence's exact lane. Their tokens are the sequence's own, and from
    there on proposals. The lane's computed tokens are then those that both have.
    """
    known, num_before = rows.tokens, sequence.num_tokens
    events, is_settled = _judge(sequence, rows, logits, choose)
    num_agreed = _num_common(known, sequence.tokens, min(num_before, rows.end), rows.end)
    sequence.exact.num_computed = min(num_agreed, sequence.num_tokens - 1)
    return events, is_settled


def _judge(
    sequence: TokenSequence, rows: Rows, logits: Any, choose: Choose
) -> tuple[list[GenerationEvent], bool]:
    known = rows.tokens
    events: list[GenerationEvent] = []
    for number in range(rows.num_logits):
        position = rows.end - rows.num_logits + number
        if position != sequence.num_tokens - 1:
            continue  # more was sent since, or a grammar forced the next token
        proposals = known[position + 1 :]
        (choice,) = choose(logits[number : number + 1], [sequence.sampling])
        event = accept(sequence, choice)
        if not proposals:
            return [*events, event], True
        num_right = _num_common(event.tokens, proposals, 0, len(event.tokens))
        # Tokens that a grammar forces may go beyond the proposals.
        is_right = event.error is None and num_right == len(event.tokens)
        is_settled = not is_right or event.finish_reason is not None
        num_lost = len(proposals) - num_right if is_settled else 0
        events.append(replace(event, num_accepted=num_right, num_rejected=num_lost))
        if is_settled:
            return events, True
    return events, False


def _num_common(left: Sequence[int], right: Sequence[int], start: int, end: int) -> int:
    """The number of equal leading tokens, `end` at most, the first `start` being equal."""
    end = min(end, len(left), len(right))
    while start < end and left[start] == right[start]:
        start += 1
    return start
