"""Whether there is time for another part: a guess from how long the others took. Pure."""

from __future__ import annotations

import math
from collections import deque

NUM_RECENT = 32
MIN_MARGIN_S = 3.0  # for reporting, and for the store to be slow once
MARGIN = 0.25  # of a part, beside that


class PartPace:
    """Notes the times of parts that one worker has done."""

    def __init__(self) -> None:
        self._recent_s: deque[float] = deque(maxlen=NUM_RECENT)

    def note(self, seconds: float) -> None:
        self._recent_s.append(seconds)

    def expected_s(self) -> float:
        """Of nearly all parts: the longest but one in twenty. 0 while none is known."""
        if not self._recent_s:
            return 0.0
        ordered = sorted(self._recent_s)
        return ordered[min(len(ordered) - 1, math.ceil(0.95 * len(ordered)) - 1)]

    def has_time(self, remaining_s: float) -> bool:
        """Whether a part that begins now is likely to be done. Without experience: whether there is time to try."""
        return remaining_s > (1 + MARGIN) * self.expected_s() + MIN_MARGIN_S
