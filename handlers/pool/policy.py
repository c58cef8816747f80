"""The scaling policy: how many instances a model should have, and which idle one gives up its memory.

Pure functions of numbers. `teneral pool run`, the simulator of `teneral pool plan` and the policy for Ray call these
and nothing else: what is planned is what runs.

The histogram of a model's idle gaps, and the window in which its next request is expected.

The hybrid histogram policy of "Serverless in the Wild" (Shahrad et al., USENIX ATC 2020): gaps between the end of a
model's last request and the arrival of its next one, in bins of a minute over four hours. An idle model has an instance
from the 5th to the 99th percentile of them. Pure: it knows neither a clock nor instances.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from .values import Model

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


class Demand(NamedTuple):
    """Requests of one model at one moment."""

    in_work: int  # at an instance
    waiting: int  # for an instance


class Quiet(NamedTuple):
    """A model without requests whose policy is hybrid, and the window in which the next one is expected."""

    idle_s: float  # since the last request ended
    window: Window

    @property
    def expects(self) -> bool:
        return self.window.prewarm_s <= self.idle_s < self.window.keep_s


def desired(model: Model, demand: Demand, quiet: Quiet | None = None) -> int:
    """Instances that the model should have, starting ones included. From `min_warm` to `max_instances`.

    `quiet` is None unless its policy is hybrid, it has no requests, and its next one can be expected.
    """
    busy = demand.in_work + demand.waiting
    wanted = math.ceil(busy / model.target_concurrency) + (model.buffer if busy else 0)
    if quiet is not None and not busy:
        wanted = int(quiet.expects)
    return max(model.min_warm, min(model.max_instances, wanted))


def max_starts(cores: int) -> int:
    """Starts of one machine that run at the same time; the others wait. More than its cores: a start leaves cores idle
    while it waits for its bytes and its process.
    """
    return 2 * cores


class Idle(NamedTuple):
    """A ready instance without work."""

    key: str
    idle_s: float  # since its last request ended, or since it was ready


def idle_limit_s(model: Model, quiet: Quiet | None) -> float:
    """Time until an idle instance beyond `desired` ends: none at all while no request is expected."""
    return model.idle_timeout_s if quiet is None or quiet.expects else 0.0


def to_end(
    model: Model, demand: Demand, *, ready: int, idle: Iterable[Idle], quiet: Quiet | None = None
) -> list[str]:
    """Keys of the idle instances whose time is over, the longest idle first.

    `ready` counts all instances that are ready, those in `idle` included. Leaves `desired` of them.
    """
    spare = ready - desired(model, demand, quiet)
    limit_s = idle_limit_s(model, quiet)
    late = sorted((each for each in idle if each.idle_s >= limit_s), key=lambda each: -each.idle_s)
    return [each.key for each in late[: max(0, spare)]]


class Candidate(NamedTuple):
    """An instance that could give up its memory for another model's: idle, and above its model's `min_warm`."""

    key: str
    frequency: float  # requests that it has answered since it was ready
    return_s: float  # time that a start of its model takes
    memory_bytes: int
    priority: int
    clock: float  # of the greedy-dual cache when it was last used


def value_of(candidate: Candidate) -> float:
    """Greedy-dual with frequency and size (FaasCache, ASPLOS 2021), by megabytes, times 2 for each 10 of priority."""
    megabytes = max(1.0, candidate.memory_bytes / 1e6)
    gain = candidate.frequency * candidate.return_s / megabytes * math.pow(2.0, candidate.priority / 10)
    return candidate.clock + gain


def victim(candidates: Iterable[Candidate]) -> Candidate | None:
    """The candidate of the least value. Its value becomes the clock of every instance that is used from then on.

    None when there is no candidate. Of equals the one whose key is first.
    """
    return min(candidates, key=lambda each: (value_of(each), each.key), default=None)


class InstanceLoad(NamedTuple):
    """A ready instance, as routing sees it."""

    key: str
    in_work: int
    has_session: bool = False  # the request's session, or the longest known beginning of its prompt


def route(model: Model, ready: Iterable[InstanceLoad]) -> str | None:
    """The instance for a request: one that has its session unless its queue is longer by more than 2 than the shortest;
    else the least loaded. None when every instance has `max_concurrency` requests.
    """
    free = [each for each in ready if each.in_work < model.max_concurrency]
    if not free:
        return None
    least = min(free, key=lambda each: (each.in_work, each.key))
    known = [each for each in free if each.has_session and each.in_work <= least.in_work + 2]
    return min(known, key=lambda each: (each.in_work, each.key)).key if known else least.key
