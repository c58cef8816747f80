"""Statistics of measurements."""

from __future__ import annotations

from collections.abc import Sequence


def area_under_curve(positives: Sequence[float], negatives: Sequence[float]) -> float:
    """How often a positive is larger than a negative, ties counting half: 0.5 says nothing, 1 and 0 say all."""
    ranked = sorted([(value, True) for value in positives] + [(value, False) for value in negatives])
    rank_sum, first = 0.0, 0
    while first < len(ranked):
        end = first
        while end < len(ranked) and ranked[end][0] == ranked[first][0]:
            end += 1
        num_positive = sum(is_positive for _, is_positive in ranked[first:end])
        rank_sum += num_positive * (first + 1 + end) / 2
        first = end
    num = len(positives)
    return (rank_sum - num * (num + 1) / 2) / (num * len(negatives))
