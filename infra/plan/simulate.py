"""A pool under a trace of arrivals, event by event, with the policy that also runs it.

Starts and work on one host share its cores (processor sharing): everything there slows down by the same factor, so
completions are kept in a clock of the host's that runs slower than time while it has too much to do. Starts share the
link to the store, too, and have a clock of their own, which is never ahead of the host's. Within an instance, sequences
slow each other down as their batch was measured to. Pure: the same inputs give the same result.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...handlers.pool.policy import Demand, IdleGaps, Quiet, Window, desired, idle_limit_s, max_starts
from ...handlers.pool.values import Model
from .instance_model import Profile
from .trace import ArrivedRequest

_INFINITY = float("inf")
_PLATFORM_READY, _IDLE, _EXPECTED = 0, 1, 2
_ROUNDING_S = 1e-9


@dataclass(slots=True)
class Outcome:
    """Of one model. `first_token_s` are from arrival to first token, in order of the requests' admission."""

    requests: int = 0
    cold: int = 0
    refused: int = 0  # waited longer than the model's queue_timeout_s
    first_token_s: array[float] = field(default_factory=lambda: array("d"))
    instance_s: float = 0.0  # from an instance's start to its end
    busy_s: float = 0.0  # with at least one request
    starts: int = 0
    most: int = 0  # instances at the same time

    @property
    def cold_share(self) -> float:
        return self.cold / self.requests if self.requests else 0.0

    def percentile(self, percent: float) -> float:
        """Of the first token; 0 without answers."""
        ordered = sorted(self.first_token_s)
        if not ordered:
            return 0.0
        return ordered[min(len(ordered) - 1, round(percent / 100 * (len(ordered) - 1)))]


class _Instance:
    __slots__ = (
        "began_s",
        "busy_since_s",
        "clock",
        "ends",
        "held",
        "idle_since_s",
        "in_work",
        "model",
        "own",
        "ready_s",
        "stamp",
    )

    def __init__(self, model: _Model, began_s: float) -> None:
        self.model = model
        self.began_s = began_s
        self.ready_s = began_s
        self.in_work = 0
        self.own = 0.0  # its own clock: work done for each of its sequences
        self.clock = 0.0  # the host's clock when that was looked at
        self.ends: list[float] = []  # of its sequences, on its own clock
        self.stamp = 0  # of its next completion; an older one is void
        self.held: list[tuple[float, float]] | None = []  # arrival and prefill of requests until it is loaded
        self.idle_since_s = 0.0
        self.busy_since_s = 0.0


class _Model:
    __slots__ = (
        "cores",
        "gaps",
        "idle",
        "link_share",
        "max_in_work",
        "outcome",
        "present",
        "profile",
        "quiet_since_s",
        "ready",
        "scaled",
        "slots",
        "speeds",
        "starting",
        "waiting",
        "wanted",
        "window",
        "work_cores",
    )

    def __init__(self, model: Model, profile: Profile) -> None:
        self.scaled = model
        self.profile = profile
        self.outcome = Outcome()
        self.ready: list[_Instance] = []
        self.idle: deque[tuple[float, _Instance]] = deque()  # since when; some are busy again
        self.starting = 0
        self.present = 0  # starting and ready
        self.waiting: deque[tuple[float, ArrivedRequest]] = deque()
        self.max_in_work = model.max_concurrency
        self.speeds = [1.0, *(profile.speed(batch) for batch in range(1, model.max_concurrency + 1))]
        self.slots = [0.0] * profile.standby  # times from which standby processes can be taken
        self.cores = profile.start_cores
        self.link_share = profile.link_share
        self.work_cores = profile.work_cores
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
        busy = len(self.waiting) + sum(instance.in_work for instance in self.ready)
        return self.wanted[busy] if busy < len(self.wanted) else self.wanted[-1]

    def quiet(self, now_s: float) -> Quiet | None:
        if self.window is None or self.quiet_since_s is None:
            return None
        return Quiet(now_s - self.quiet_since_s + _ROUNDING_S, self.window)


def simulate(
    requests: Sequence[ArrivedRequest],
    models: Mapping[str, Model],
    profiles: Mapping[str, Profile],
    *,
    cores: float | None = None,
    until_s: float | None = None,
) -> dict[str, Outcome]:
    """Outcomes by model. `requests` are in order of time. `cores` are those of the one host that all instances share;
    None: each has enough of its own. The `min_warm` instances are ready at time 0. Instances are paid for until
    `until_s`, or until all requests have ended.
    """
    return _Simulation(models, profiles, cores).run(requests, until_s)


class _Simulation:
    def __init__(
        self, models: Mapping[str, Model], profiles: Mapping[str, Profile], cores: float | None
    ) -> None:
        self.models = {name: _Model(model, profiles[name]) for name, model in models.items()}
        self.is_one_host = cores is not None
        self.cores = _INFINITY if cores is None else cores
        self.start_places = _INFINITY if cores is None else max_starts(math.ceil(cores))
        self.queue: deque[_Instance] = deque()  # that wait for a place to start
        self.now_s = 0.0
        self.clock = 0.0  # the host's
        self.pace = 1.0  # of the clock
        self.start_clock = 0.0
        self.start_pace = 1.0
        self.demand = 0.0  # cores that are wanted now
        self.link_demand = 0.0  # of the link's rate, by starts
        self.timers: list[tuple[float, int, int, _Model, _Instance]] = []
        self.completions: list[tuple[float, int, int, _Instance]] = []  # clock, number, stamp
        self.loading: list[
            tuple[float, int, bool, _Instance]
        ] = []  # clock of starts, number, whether at its end
        self.num_starting = 0  # not ready yet
        self.number = 0

    def run(self, requests: Sequence[ArrivedRequest], until_s: float | None) -> dict[str, Outcome]:
        for model in self.models.values():
            self._begin_warm(model)
        position, count = 0, len(requests)
        next_arrival_s = requests[0].t_s if count else _INFINITY
        completions, loading, timers = self.completions, self.loading, self.timers
        end_s = _INFINITY if until_s is None else until_s
        while True:
            timer_s = timers[0][0] if timers else _INFINITY
            done_s = self.now_s + (completions[0][0] - self.clock) / self.pace if completions else _INFINITY
            ready_s = (
                self.now_s + (loading[0][0] - self.start_clock) / self.start_pace if loading else _INFINITY
            )
            next_s = min(next_arrival_s, timer_s, done_s, ready_s)
            is_over = position >= count and not completions and not loading and not self._is_waiting()
            if next_s > end_s or next_s == _INFINITY or (is_over and until_s is None):
                break
            self.clock += (next_s - self.now_s) * self.pace
            self.start_clock += (next_s - self.now_s) * self.start_pace
            self.now_s = next_s
            if next_s == next_arrival_s:
                self._arrive(requests[position])
                position += 1
                next_arrival_s = requests[position].t_s if position < count else _INFINITY
            elif next_s == done_s:
                self._complete(heapq.heappop(completions))
            elif next_s == ready_s:
                _, _, is_end, instance = heapq.heappop(loading)
                self._loaded(instance) if is_end else self._started(instance)
            else:
                self._ring(heapq.heappop(timers))
        last_s = self.now_s if until_s is None else until_s
        for model in self.models.values():
            for instance in model.ready:
                self._pay(instance, last_s)
        return {name: model.outcome for name, model in self.models.items()}

    def _is_waiting(self) -> bool:
        return any(model.waiting or model.starting for model in self.models.values())

    # events

    def _arrive(self, request: ArrivedRequest) -> None:
        model = self.models.get(request.model)
        if model is None:
            return
        model.outcome.requests += 1
        if model.gaps is not None and model.quiet_since_s is not None:
            model.gaps.observe(self.now_s - model.quiet_since_s)
            model.quiet_since_s = None
        instance = None if model.waiting else self._least(model)
        if instance is None:
            model.waiting.append((self.now_s, request))
        else:
            self._admit(model, instance, request, self.now_s)
        self._start_missing(model)

    def _complete(self, entry: tuple[float, int, int, _Instance]) -> None:
        _, _, stamp, instance = entry
        model = instance.model
        if stamp != instance.stamp:
            return
        self._advance(instance)
        heapq.heappop(instance.ends)
        instance.in_work -= 1
        while model.waiting and (free := self._least(model)) is not None:
            self._take_waiting(model, free)
        if instance.in_work == 0:
            self._idle(model, instance)
        else:
            self._expect(instance)
        if model.gaps is not None and not model.waiting and not any(each.in_work for each in model.ready):
            self._begin_gap(model, model.gaps, instance)
        self._end_late(model)

    def _begin_gap(self, model: _Model, gaps: IdleGaps, last: _Instance) -> None:
        """The last request has ended, at the instance `last`; the policy is hybrid."""
        model.quiet_since_s, model.window = self.now_s, gaps.window()
        for kind, after_s in zip((_EXPECTED, _IDLE), model.window or (), strict=False):
            self.number += 1
            heapq.heappush(self.timers, (self.now_s + after_s, self.number, kind, model, last))

    def _ring(self, timer: tuple[float, int, int, _Model, _Instance]) -> None:
        _, _, kind, model, instance = timer
        if kind == _PLATFORM_READY:
            self.queue.append(instance)
            self._load_next()
        elif kind == _EXPECTED:
            self._start_missing(model)
        else:
            self._end_late(model)

    # instances

    def _begin_warm(self, model: _Model) -> None:
        """Have its `min_warm` instances ready."""
        for _ in range(model.wants(None)):
            model.present += 1
            model.starting += 1
            model.outcome.starts += 1
            model.outcome.most = max(model.outcome.most, model.present)
            instance = _Instance(model, self.now_s)
            instance.held = None
            self._ready(model, instance)

    def _load_next(self) -> None:
        """Begin the starts that have a place."""
        while self.queue and self.num_starting < self.start_places:
            instance = self.queue.popleft()
            model = instance.model
            self._want(model.cores, model.link_share)
            self.num_starting += 1
            for work_s, is_end in ((model.profile.ready_work_s, False), (model.profile.start_work_s, True)):
                self.number += 1
                heapq.heappush(self.loading, (self.start_clock + work_s, self.number, is_end, instance))

    def _started(self, instance: _Instance) -> None:
        self.num_starting -= 1
        self._ready(instance.model, instance)
        self._load_next()

    def _loaded(self, instance: _Instance) -> None:
        """All of its weights are there: what it took meanwhile begins."""
        model = instance.model
        self._want(-model.cores, -model.link_share)
        held, instance.held = instance.held, None
        instance.clock = self.clock
        if held:
            self._want(model.work_cores)
            for number, (arrived_s, prefill_s) in enumerate(held, 1):
                self._note_first(model, number, arrived_s, prefill_s)
            self._expect(instance)

    def _start_missing(self, model: _Model) -> None:
        wanted = model.wants(model.quiet(self.now_s))
        while model.present < wanted:
            model.present += 1
            model.starting += 1
            model.outcome.starts += 1
            model.outcome.most = max(model.outcome.most, model.present)
            instance = _Instance(model, self.now_s)
            begin_s = self.now_s + model.profile.platform_s
            if model.slots:
                slot_s = heapq.heappop(model.slots)
                begin_s = max(begin_s, slot_s)
                heapq.heappush(model.slots, begin_s + model.profile.refill_s)
            self.number += 1
            heapq.heappush(self.timers, (begin_s, self.number, _PLATFORM_READY, model, instance))

    def _ready(self, model: _Model, instance: _Instance) -> None:
        model.starting -= 1
        model.ready.append(instance)
        instance.ready_s = self.now_s
        instance.clock = self.clock
        while model.waiting and instance.in_work < model.max_in_work:
            self._take_waiting(model, instance)
        if instance.in_work == 0:
            instance.busy_since_s = self.now_s
            self._rest(model, instance)

    def _take_waiting(self, model: _Model, instance: _Instance) -> None:
        arrived_s, request = model.waiting.popleft()
        if self.now_s - arrived_s > model.scaled.queue_timeout_s:
            model.outcome.refused += 1
            return
        if instance.ready_s > arrived_s:
            model.outcome.cold += 1
        self._admit(model, instance, request, arrived_s)

    def _admit(self, model: _Model, instance: _Instance, request: ArrivedRequest, arrived_s: float) -> None:
        profile = model.profile
        if instance.in_work == 0:
            instance.busy_since_s = self.now_s
            if instance.held is None:
                self._want(model.work_cores)
        self._advance(instance)
        instance.in_work += 1
        prefill_s = profile.prefill_s(request.prompt_tokens)
        work_s = request.work_s
        if work_s is None:
            work_s = prefill_s + profile.decode_s(request.output_tokens)
        heapq.heappush(instance.ends, instance.own + work_s)
        if instance.held is not None:
            instance.held.append((arrived_s, prefill_s))
            return
        self._note_first(model, instance.in_work, arrived_s, prefill_s)
        self._expect(instance)

    def _note_first(self, model: _Model, batch: int, arrived_s: float, prefill_s: float) -> None:
        slowed = model.speeds[batch] * self.pace
        model.outcome.first_token_s.append(self.now_s - arrived_s + prefill_s / slowed)

    def _idle(self, model: _Model, instance: _Instance) -> None:
        self._want(-model.work_cores)
        model.outcome.busy_s += self.now_s - instance.busy_since_s
        self._rest(model, instance)

    def _rest(self, model: _Model, instance: _Instance) -> None:
        instance.idle_since_s = self.now_s
        instance.stamp += 1
        model.idle.append((self.now_s, instance))
        self.number += 1
        heapq.heappush(
            self.timers, (self.now_s + model.scaled.idle_timeout_s, self.number, _IDLE, model, instance)
        )

    def _end_late(self, model: _Model) -> None:
        """End idle instances whose time is over, as `policy.to_end` has it."""
        quiet = model.quiet(self.now_s)
        idle, timeout_s = model.idle, idle_limit_s(model.scaled, quiet)
        while idle:
            since_s, instance = idle[0]
            if instance.in_work or instance.idle_since_s != since_s:  # it was busy since
                idle.popleft()
                continue
            if since_s + timeout_s > self.now_s + _ROUNDING_S:
                return
            if len(model.ready) <= model.wants(quiet):
                return
            idle.popleft()
            model.ready.remove(instance)
            model.present -= 1
            self._pay(instance, self.now_s)

    def _pay(self, instance: _Instance, until_s: float) -> None:
        instance.model.outcome.instance_s += until_s - instance.began_s

    # clocks

    def _least(self, model: _Model) -> _Instance | None:
        """The ready instance with fewest requests, if it takes one more."""
        best, fewest = None, model.max_in_work
        for instance in model.ready:
            if instance.in_work < fewest:
                best, fewest = instance, instance.in_work
                if fewest == 0:
                    break
        return best

    def _advance(self, instance: _Instance) -> None:
        if instance.held is None:
            instance.own += (self.clock - instance.clock) * instance.model.speeds[instance.in_work]
        instance.clock = self.clock

    def _expect(self, instance: _Instance) -> None:
        instance.stamp += 1
        left = max(0.0, instance.ends[0] - instance.own) / instance.model.speeds[instance.in_work]
        self.number += 1
        heapq.heappush(self.completions, (self.clock + left, self.number, instance.stamp, instance))

    def _want(self, cores: float, link: float = 0.0) -> None:
        self.demand += cores
        self.pace = 1.0 if self.demand <= self.cores else self.cores / self.demand
        self.link_demand += link
        is_shared = self.is_one_host and self.link_demand > 1.0
        self.start_pace = self.pace / self.link_demand if is_shared else self.pace
