"""A request for blocks that are no longer in the pool, shared by `spill.py` and the waiting
sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .policy import FetchPlan


class Fetch:
    """The blocks of a chain that are being read back, until it `is_done`. Only `Spill` changes it,
    under its lock.
    """

    __slots__ = (
        "asked_s",
        "deadline_s",
        "expected_s",
        "has_begun",
        "hashes",
        "is_done",
        "is_wanted",
        "wanted",
    )

    def __init__(
        self,
        hashes: Sequence[bytes],
        num_found: int,
        plan: FetchPlan,
        is_wanted: Callable[[], bool],
        now_s: float,
    ) -> None:
        """`hashes` are the chain's, of which the first `num_found` are in the pool; `is_wanted` must not block."""
        self.hashes = hashes[: num_found + plan.num_blocks]  # of the whole beginning
        self.wanted = frozenset(self.hashes[num_found:])
        self.is_wanted = is_wanted
        self.asked_s = now_s
        self.expected_s = now_s + plan.predicted_s
        self.deadline_s = now_s + plan.recompute_s
        self.has_begun = False
        self.is_done = not plan.num_blocks
