"""The decision whether there is time for another part, from the times of earlier ones. Pure."""

from __future__ import annotations

import math
from collections import deque

NUM_RECENT = 32
# For reporting, and for one slow operation of the store.
MIN_MARGIN_S = 3.0
MARGIN = 0.25  # in addition, as a share of a part's time


class PartPace:
    """The times of the parts of one worker."""

    def __init__(self) -> None:
        self._recent_s: deque[float] = deque(maxlen=NUM_RECENT)

    def note(self, seconds: float) -> None:
        self._recent_s.append(seconds)

    def expected_s(self) -> float:
        """An upper bound for nearly all parts: the longest but one in twenty. 0 before the first."""
        if not self._recent_s:
            return 0.0
        ordered = sorted(self._recent_s)
        return ordered[min(len(ordered) - 1, math.ceil(0.95 * len(ordered)) - 1)]

    def has_time(self, remaining_s: float) -> bool:
        """Whether a part started now would probably finish. Before the first part: whether there is
        time to try.
        """
        return remaining_s > (1 + MARGIN) * self.expected_s() + MIN_MARGIN_S
