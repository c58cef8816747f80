"""Speculation ahead of the exact weights: the length of drafts, and the exact passes that confirm
them.

The length of drafts is a pure decision over measured times. A proposal that the exact weights
confirm saves a decode step. It costs a row in the pass that confirms, and is lost with the first
wrong proposal before it. All proposals must have caught up with that pass when the last exact
weights arrive, or they would delay the first exact token.

Exact passes run one after another through the layers as these become exact. Invariant: a pass never
reaches or overtakes an earlier one, so that the keys and values that its rows attend to have been
written; passes that meet are joined. This module does not know the purpose of rows or logits.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Protocol

from msgspec import Struct

from ..step.batch import Rows
from .sequence import Sequence

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
    parts: list[tuple[Sequence, Rows]]

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

    def send(self, under_way: PassLike, parts: list[tuple[Sequence, Rows]]) -> None:
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

    def drop(self, sequences: Collection[Sequence]) -> None:
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
