"""Whether a block is worth keeping outside the pool, and worth bringing back: by what was measured, never slower than
computing it again.

Decisions are pure functions of rates. A rate that is not known counts as too slow. The meters turn measurements into
rates, erring towards computing again: what counts is the slowest of the latest reads but one, which was bad luck, and
the fastest of the latest steps. Nothing here looks at a clock, a disk or a lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

MARGIN = 1.5  # how much faster than computing a way back must promise to be
NUM_RECENT_READS = 8
NUM_RECENT_STEPS = 16  # among which the fastest one counts


@dataclass(frozen=True, slots=True)
class ReadRate:
    """How fast whole blocks come from a medium into the pool, and how long it takes until the first one begins to."""

    bytes_s: float
    latency_s: float = 0.0


HERE = ReadRate(float("inf"))  # of a block that need not be read: it is in the pool, or on its way


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """How many blocks of a chain to bring back; the times are those of these blocks."""

    num_blocks: int
    predicted_s: float
    recompute_s: float


NOTHING = FetchPlan(0, 0.0, 0.0)


def plan_fetch(
    rates: Sequence[ReadRate | None],
    *,
    block_bytes: int,
    block_tokens: int,
    prefill_tokens_s: float | None,
    ahead_s: float = 0.0,
) -> FetchPlan:
    """What to bring back of a chain whose blocks lie where `rates` says (None: unknown), in order: the beginning of it
    that saves most time, or nothing. `ahead_s` is the time that others' blocks take before.
    """
    if prefill_tokens_s is None:
        return NOTHING
    block_s = block_tokens / prefill_tokens_s
    best, best_saved_s = NOTHING, 0.0
    predicted_s = ahead_s
    seen: set[ReadRate] = set()
    for number, rate in enumerate(rates, 1):
        if rate is None:
            break
        if rate not in seen:
            seen.add(rate)
            predicted_s += rate.latency_s
        predicted_s += block_bytes / rate.bytes_s
        saved_s = number * block_s - MARGIN * predicted_s
        if saved_s > best_saved_s:
            best, best_saved_s = FetchPlan(number, predicted_s, number * block_s), saved_s
    return best


def is_worth_writing(
    rate: ReadRate | None, *, block_bytes: int, block_tokens: int, prefill_tokens_s: float | None
) -> bool:
    """Whether a block on this medium could be brought back sooner than computed, given a long enough chain."""
    if rate is None or prefill_tokens_s is None:
        return False
    return MARGIN * block_bytes / rate.bytes_s <= block_tokens / prefill_tokens_s


class ReadMeter:
    """What reading from one medium is like."""

    def __init__(self) -> None:
        self._bytes_s: deque[float] = deque(maxlen=NUM_RECENT_READS)
        self._latencies_s: deque[float] = deque(maxlen=NUM_RECENT_READS)

    def note_read(self, num_bytes: int, took_s: float) -> None:
        """So many bytes came back in that time."""
        self._bytes_s.append(num_bytes / max(took_s, 1e-9))

    def note_latency(self, latency_s: float) -> None:
        """From the wish until the first read began."""
        self._latencies_s.append(latency_s)

    @property
    def rate(self) -> ReadRate | None:
        if not self._bytes_s:
            return None
        latencies_s = sorted(self._latencies_s, reverse=True) or [0.0]
        return ReadRate(_worst_but_one(sorted(self._bytes_s)), _worst_but_one(latencies_s))


class PrefillMeter:
    """How fast prompts are computed."""

    def __init__(self, min_tokens: int) -> None:
        """Steps of fewer tokens say nothing about prompts."""
        self._min_tokens = min_tokens
        self._recent: deque[float] = deque(maxlen=NUM_RECENT_STEPS)

    def note_step(self, num_tokens: int, took_s: float) -> None:
        if num_tokens >= self._min_tokens:
            self._recent.append(num_tokens / max(took_s, 1e-9))

    @property
    def tokens_s(self) -> float | None:
        return max(self._recent, default=None)


def _worst_but_one(from_worst: Sequence[float]) -> float:
    """Of two, the worst: nobody knows which of them is the usual one."""
    return from_worst[1] if len(from_worst) > 2 else from_worst[0]
