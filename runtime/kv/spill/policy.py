"""The spill policy: whether storing and fetching a block is faster than computing it again, by
measured rates.

Decisions are pure functions of rates. An unknown rate counts as too slow. The meters turn
measurements into rates, biased towards computing: they use the second slowest of the latest reads
(the slowest counts as an outlier) and the fastest of the latest steps. This module reads no clock
and no disk, and takes no lock.

A request for blocks that are no longer in the pool, shared by `spill.py` and the waiting
sequence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from msgspec import Struct

# Required advantage of a fetch over computing.
MARGIN = 1.5
NUM_RECENT_READS = 8
NUM_RECENT_STEPS = 16  # latest steps, of which the fastest counts


class ReadRate(Struct, frozen=True):
    """A medium's throughput in whole blocks, and the latency until the first read begins."""

    bytes_s: float
    latency_s: float = 0.0


# Of a block that needs no read: it is in the pool, or on its way.
HERE = ReadRate(float("inf"))


class FetchPlan(Struct, frozen=True):
    """The number of blocks of a chain to fetch; the times are those of these blocks."""

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
    """Plan the fetch of a chain whose blocks have these rates, in order (None: unknown).

    Returns the beginning that saves the most time, or nothing. `ahead_s` is the time of the fetches
    queued before.
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
    """True if a block on this medium could be fetched sooner than computed, given a long enough
    chain.
    """
    if rate is None or prefill_tokens_s is None:
        return False
    return MARGIN * block_bytes / rate.bytes_s <= block_tokens / prefill_tokens_s


class ReadMeter:
    """The read rate of one medium."""

    def __init__(self) -> None:
        self._bytes_s: deque[float] = deque(maxlen=NUM_RECENT_READS)
        self._latencies_s: deque[float] = deque(maxlen=NUM_RECENT_READS)

    def note_read(self, num_bytes: int, took_s: float) -> None:
        """Record a read of `num_bytes`."""
        self._bytes_s.append(num_bytes / max(took_s, 1e-9))

    def note_latency(self, latency_s: float) -> None:
        """Record the time from a request to its first read."""
        self._latencies_s.append(latency_s)

    @property
    def rate(self) -> ReadRate | None:
        if not self._bytes_s:
            return None
        latencies_s = sorted(self._latencies_s, reverse=True) or [0.0]
        return ReadRate(_worst_but_one(sorted(self._bytes_s)), _worst_but_one(latencies_s))


class PrefillMeter:
    """The throughput of prompt computation."""

    def __init__(self, min_tokens: int) -> None:
        """Steps of fewer than `min_tokens` tokens are ignored."""
        self._min_tokens = min_tokens
        self._recent: deque[float] = deque(maxlen=NUM_RECENT_STEPS)

    def note_step(self, num_tokens: int, took_s: float) -> None:
        if num_tokens >= self._min_tokens:
            self._recent.append(num_tokens / max(took_s, 1e-9))

    @property
    def tokens_s(self) -> float | None:
        return max(self._recent, default=None)


def _worst_but_one(from_worst: Sequence[float]) -> float:
    """The second worst value; of two, the worst, since either may be the outlier."""
    return from_worst[1] if len(from_worst) > 2 else from_worst[0]


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
