"""The histogram of a model's idle gaps, and the window in which its next request is expected.

The hybrid histogram policy of "Serverless in the Wild" (Shahrad et al., USENIX ATC 2020): gaps between the end of a
model's last request and the arrival of its next one, in bins of a minute over four hours. An idle model has an instance
from the 5th to the 99th percentile of them. Pure: it knows neither a clock nor instances.
"""

from __future__ import annotations

import math
from typing import NamedTuple

BIN_S = 60.0
NUM_BINS = 240  # four hours
MIN_GAPS = 10  # fewer say nothing
MIN_VARIATION = 2.0  # coefficient of variation of the bins' counts: a flatter histogram says nothing
HEAD_SHARE, TAIL_SHARE = 0.05, 0.99
MAX_GAPS = 4096  # then all counts are halved, so that old habits are forgotten


class Window(NamedTuple):
    """Seconds after a model's last request ended: `prewarm_s` included, `keep_s` excluded."""

    prewarm_s: float
    keep_s: float


class IdleGaps:
    """Counts of gaps. `observe` takes constant time but for the halving, `window` time linear in the bins."""

    def __init__(self) -> None:
        self._counts = [0] * NUM_BINS
        self._num_counted = 0
        self._sum_of_squares = 0
        self._num_longer = 0  # than all bins

    def copy(self) -> IdleGaps:
        other = IdleGaps()
        other._counts = list(self._counts)
        other._num_counted = self._num_counted
        other._sum_of_squares = self._sum_of_squares
        other._num_longer = self._num_longer
        return other

    def observe(self, gap_s: float) -> None:
        """Count one gap of at least 0 s."""
        number = int(max(0.0, gap_s) / BIN_S)
        if number >= NUM_BINS:
            self._num_longer += 1
        else:
            self._sum_of_squares += 2 * self._counts[number] + 1
            self._counts[number] += 1
            self._num_counted += 1
        if self._num_counted + self._num_longer > MAX_GAPS:
            self._halve()

    def window(self) -> Window | None:
        """When the next request is expected. None where too few gaps, too many longer ones or too flat a histogram say
        nothing: then the model's `idle_timeout_s` applies.
        """
        if (
            self._num_counted < MIN_GAPS
            or self._num_longer > self._num_counted
            or self._variation < MIN_VARIATION
        ):
            return None
        head = self._bin_at(HEAD_SHARE)
        return Window(head * BIN_S, (self._bin_at(TAIL_SHARE) + 1) * BIN_S)

    @property
    def _variation(self) -> float:
        """Standard deviation of the bins' counts over their mean."""
        mean = self._num_counted / NUM_BINS
        variance = max(0.0, self._sum_of_squares / NUM_BINS - mean * mean)
        return math.sqrt(variance) / mean

    def _bin_at(self, share: float) -> int:
        """The first bin at which at least this share of the gaps have been counted."""
        left = share * self._num_counted
        for number, count in enumerate(self._counts):
            left -= count
            if left <= 1e-9:
                return number
        return NUM_BINS - 1

    def _halve(self) -> None:
        self._counts = [count // 2 for count in self._counts]
        self._num_counted = sum(self._counts)
        self._sum_of_squares = sum(count * count for count in self._counts)
        self._num_longer //= 2
