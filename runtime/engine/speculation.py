"""How far a draft should run ahead of the exact weights: pure decisions over measured times.

A proposal that the exact weights confirm saves a decode step. It costs a row in the pass that confirms, and is lost
with the first proposal before it that was wrong. All proposals must have caught up with that pass when the last exact
weights come, or they would hold up the first exact token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_PROPOSALS = 64  # of one sequence: bounds what a pass may take, whatever was measured
ROW_SHARE = (
    0.1  # of a decode step's time, for one more row in a pass: few rows cost little beside reading weights
)
USUAL_ACCEPTANCE = 0.9  # before anything was seen: the share of tokens on which draft and exact weights agree
USUAL_WEIGHT = 10  # how many judged proposals that assumption is worth


@dataclass(slots=True)
class Acceptance:
    """How often proposals were confirmed, of those whose predecessors all were."""

    num_judged: int = 0
    num_accepted: int = 0

    def add(self, is_right: bool) -> None:
        """Count one proposal."""
        self.num_judged += 1
        self.num_accepted += is_right

    @property
    def rate(self) -> float:
        """In (0, 1)."""
        confirmed = self.num_accepted + USUAL_ACCEPTANCE * USUAL_WEIGHT
        return min(confirmed / (self.num_judged + USUAL_WEIGHT), 0.999)


def max_proposals(acceptance: float) -> int:
    """How many proposals are worth their rows: the last one is right often enough to pay for its own."""
    return max(1, min(MAX_PROPOSALS, int(math.log(ROW_SHARE) / math.log(acceptance))))


def catch_up_s(num_rows: int, step_s: float) -> float:
    """How long so many rows take through all layers, when one row takes `step_s`."""
    return step_s * (1 + ROW_SHARE * num_rows)


def may_draft(num_pending: int, left_s: float, step_s: float) -> bool:
    """Whether there is time for another draft step before the `num_pending` tokens, and its own, must catch up."""
    return left_s > step_s + catch_up_s(num_pending + 1, step_s)
