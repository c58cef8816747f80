"""The models and instances of a simulation, while it runs."""

from __future__ import annotations

import heapq
import random
import statistics
from collections import deque
from collections.abc import Sequence

from ...handlers.pool.policy import Demand, IdleGaps, Quiet, Window, desired
from ...handlers.pool.values import Model
from .fleet import Site
from .instance_model import Profile
from .outcome import Outcome
from .trace import ArrivedRequest

ROUNDING_S = 1e-9


class SimulatedInstance:
    def __init__(self, model: SimulatedModel, began_s: float, number: int) -> None:
        self.model = model
        self.node: Site | None = None
        self.link_share = 0.0  # of the store's link, while it reads from there
        self.number = number  # in order of the starts; -1: it has ended
        self.began_s = began_s
        self.ready_s = began_s
        self.in_work = 0
        self.own = 0.0  # its own clock: work done for each of its sequences
        self.clock = 0.0  # the host's clock when that was looked at
        self.ends: list[float] = []  # of its sequences, on its own clock
        self.stamp = 0  # of its next completion; an older one is void
        self.prompts_end = 0.0  # of the prompts that it has, on the host's clock
        self.step_begin = 0.0  # of the last of the steps that compute them
        # Requests, with arrivals, until it is loaded.
        self.held: list[tuple[float, ArrivedRequest]] | None = []
        self.idle_since_s = 0.0
        self.busy_since_s = 0.0


class SimulatedModel:
    def __init__(self, model: Model, profile: Profile) -> None:
        self.scaled = model
        self.profile = profile
        self.outcome = Outcome()
        self.ready: list[SimulatedInstance] = []
        self.in_work = 0  # requests at all of them
        # A heap: requests, number; outdated ones too.
        self.loads: list[tuple[int, int, SimulatedInstance]] = []
        self.idle: deque[tuple[float, SimulatedInstance]] = deque()  # since when; some are busy again
        self.starting = 0
        self.present = 0  # starting and ready
        self.waiting: deque[tuple[float, ArrivedRequest]] = deque()
        self.max_in_work = model.max_concurrency
        self.speeds = [1.0, *(profile.speed(batch) for batch in range(1, model.max_concurrency + 1))]
        # By node: times from which its standby processes can be taken, as heaps.
        self.slots: dict[int, list[float]] = {}
        self.cores = profile.start_cores
        self.decides_s = -1.0  # the platform, next
        self.limited_s = 0.0  # by the platform's rate: when a start after those that were begun has its turn
        self.work_cores = profile.work_cores
        self.chance = random.Random(model.name)  # noqa: S311 - a plan is no secret
        self.start_ratios = _ratios(profile.starts_s)
        self.overhead_ratios = _ratios(profile.overhead_ratios)
        self.prompt_ratios = _ratios(profile.prompt_ratios)
        self.gaps = IdleGaps() if model.policy == "hybrid" else None
        self.quiet_since_s: float | None = None  # when its last request ended
        self.window: Window | None = None
        # The policy's answer by the number of requests: it depends on nothing else.
        most = model.target_concurrency * model.max_instances + 1
        self.wanted = [desired(model, Demand(busy, 0)) for busy in range(most + 1)]

    def wants(self, quiet: Quiet | None) -> int:
        """Instances, by the policy."""
        if quiet is not None:
            return desired(self.scaled, Demand(0, 0), quiet)
        busy = len(self.waiting) + self.in_work
        return self.wanted[busy] if busy < len(self.wanted) else self.wanted[-1]

    def draw(self, ratios: tuple[float, ...]) -> float:
        """One of them, by chance."""
        return ratios[0] if len(ratios) == 1 else self.chance.choice(ratios)

    def least(self) -> SimulatedInstance | None:
        """The ready instance with fewest requests, of equals the oldest, if it takes one more."""
        loads = self.loads
        while loads and (loads[0][0] != loads[0][2].in_work or loads[0][2].number < 0):
            heapq.heappop(loads)
        return loads[0][2] if loads and loads[0][0] < self.max_in_work else None

    def note_load(self, instance: SimulatedInstance) -> None:
        """Call it when the instance's number of requests has changed."""
        if len(self.loads) > 8 * len(self.ready) + 64:  # most are outdated
            self.loads = [(each.in_work, each.number, each) for each in self.ready]
            heapq.heapify(self.loads)
        heapq.heappush(self.loads, (instance.in_work, instance.number, instance))

    def quiet(self, now_s: float) -> Quiet | None:
        if self.window is None or self.quiet_since_s is None:
            return None
        return Quiet(now_s - self.quiet_since_s + ROUNDING_S, self.window)


def _ratios(measured: Sequence[float]) -> tuple[float, ...]:
    """Of each to the median."""
    return tuple(each / statistics.median(measured) for each in measured) or (1.0,)
