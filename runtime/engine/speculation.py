"""The length of drafts ahead of the exact weights: pure decisions over measured times.

A proposal that the exact weights confirm saves a decode step. It costs a row in the pass that
confirms, and is lost with the first wrong proposal before it. All proposals must have caught up
with that pass when the last exact weights arrive, or they would delay the first exact token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Of one sequence: bounds the rows of a pass for any measured times.
MAX_PROPOSALS = 64
ROW_SHARE = (
    # Of a decode step's time, for one more row in a pass: few rows cost little compared to reading
    # weights.
    0.1
)
# The prior: the share of tokens on which draft and exact weights agree.
USUAL_ACCEPTANCE = 0.9
# The number of judged proposals that the prior counts for.
USUAL_WEIGHT = 10


@dataclass(slots=True)
class Acceptance:
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
    """Whether there is time for another draft step before the `num_pending` tokens, and its own, must catch up."""
    return left_s > step_s + catch_up_s(num_pending + 1, step_s)
