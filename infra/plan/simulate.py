"""A pool under a trace of arrivals, event by event, with the policy that also runs it.

Starts and work on one host share its cores (processor sharing): everything there slows down by the same factor, so
completions are kept in a clock of the host's that runs slower than time while it has too much to do. Starts share the
link to the store, too, and have a clock of their own, which is never ahead of the host's. An instance computes prompts
one after the other, first come first served, and decodes nothing meanwhile, as an engine whose steps a prompt fills; a
step has one overhead for all requests that wait for it. Then its sequences slow each other down as their batch was
measured to. Starts and prompts vary as the measured ones did: each takes a measured one's ratio to the median, drawn
from a seeded sequence. Pure: the same inputs give the same result.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Mapping, Sequence

from ...handlers.pool.policy import IdleGaps, idle_limit_s, max_starts
from ...handlers.pool.values import Model
from .fleet import ByteSource, Fleet, Nodes
from .instance_model import PACKED_OVERHEAD, Profile
from .outcome import Outcome
from .state import ROUNDING_S, SimulatedInstance, SimulatedModel
from .trace import ArrivedRequest

_INFINITY = float("inf")
_PLATFORM_READY, _IDLE, _EXPECTED, _TICK, _READY, _LOADED = range(6)


def simulate(
    requests: Sequence[ArrivedRequest],
    models: Mapping[str, Model],
    profiles: Mapping[str, Profile],
    *,
    cores: float | None = None,
    until_s: float | None = None,
    fleet: Fleet | None = None,
) -> dict[str, Outcome]:
    """Outcomes by model. `requests` are in order of time. `cores` are those of the one host that all instances share;
    None: each has enough of its own. In a `fleet`, which has room for all of the models' `max_instances`, starts share
    the store's link, and not those of nodes. The `min_warm` instances are ready at time 0. Instances are paid for until
    `until_s`, or until all requests have ended.
    """
    return _Simulation(models, profiles, cores, fleet).run(requests, until_s)


class _Simulation:
    def __init__(
        self,
        models: Mapping[str, Model],
        profiles: Mapping[str, Profile],
        cores: float | None,
        fleet: Fleet | None,
    ) -> None:
        self.fleet = fleet or Fleet(1)
        self.nodes = None if fleet is None else Nodes(fleet)
        self.models = {name: SimulatedModel(model, profiles[name]) for name, model in models.items()}
        self.shares_link = cores is not None or fleet is not None
        self.cores = _INFINITY
        if cores is not None:  # less what the machine of the figures did meanwhile
            used = [max(cores - profiles[name].other_cores, profiles[name].work_cores) for name in models]
            self.cores = min([cores, *used])
        self.start_places = _INFINITY if cores is None else max_starts(math.ceil(cores))
        self.queue: deque[SimulatedInstance] = deque()  # that wait for a place to start
        self.now_s = 0.0
        self.clock = 0.0  # the host's
        self.pace = 1.0  # of the clock
        self.start_clock = 0.0
        self.start_pace = 1.0
        self.demand = 0.0  # cores that are wanted now
        self.link_demand = 0.0  # of the link's rate, by starts
        self.timers: list[tuple[float, int, int, SimulatedModel, SimulatedInstance]] = []
        self.completions: list[tuple[float, int, int, SimulatedInstance]] = []  # clock, number, stamp
        self.loading: list[
            tuple[float, int, bool, SimulatedInstance]
        ] = []  # clock of starts, number, whether at its end
        self.num_starting = 0  # not ready yet
        self.num_loading = 0  # not loaded yet
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
            is_over = position >= count and not (completions or self.num_loading or self._is_waiting())
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
        instance = None if model.waiting else model.least()
        if instance is None:
            model.waiting.append((self.now_s, request))
        else:
            self._admit(model, instance, request, self.now_s)
        self._start_missing(model)

    def _complete(self, entry: tuple[float, int, int, SimulatedInstance]) -> None:
        _, _, stamp, instance = entry
        model = instance.model
        if stamp != instance.stamp:
            return
        self._advance(instance)
        heapq.heappop(instance.ends)
        instance.in_work -= 1
        model.in_work -= 1
        model.note_load(instance)
        while model.waiting and (free := model.least()) is not None:
            self._take_waiting(model, free)
        if instance.in_work == 0:
            self._idle(model, instance)
        else:
            self._expect(instance)
        if model.gaps is not None and not model.waiting and not any(each.in_work for each in model.ready):
            self._begin_gap(model, model.gaps, instance)
        self._end_late(model)

    def _begin_gap(self, model: SimulatedModel, gaps: IdleGaps, last: SimulatedInstance) -> None:
        """The last request has ended, at the instance `last`; the policy is hybrid."""
        model.quiet_since_s, model.window = self.now_s, gaps.window()
        for kind, after_s in zip((_EXPECTED, _IDLE), model.window or (), strict=False):
            self.number += 1
            heapq.heappush(self.timers, (self.now_s + after_s, self.number, kind, model, last))

    def _ring(self, timer: tuple[float, int, int, SimulatedModel, SimulatedInstance]) -> None:
        _, _, kind, model, instance = timer
        if kind == _PLATFORM_READY:
            self.queue.append(instance)
            self._load_next()
        elif kind == _EXPECTED:
            self._start_missing(model)
        elif kind == _TICK:
            self._begin_missing(model)
        elif kind == _READY:
            self._started(instance)
        elif kind == _LOADED:
            self._loaded(instance)
        else:
            self._end_late(model)

    # instances

    def _begin_warm(self, model: SimulatedModel) -> None:
        """Have its `min_warm` instances ready."""
        for _ in range(model.wants(None)):
            instance = self._new(model)
            instance.held = None
            if self.nodes is not None and instance.node is not None:
                list(self.nodes.loaded(instance.node, model.scaled.name))
            self._ready(model, instance)

    def _new(self, model: SimulatedModel) -> SimulatedInstance:
        self.number += 1
        instance = SimulatedInstance(model, self.now_s, self.number)
        if self.nodes is not None:
            instance.node = self.nodes.place(model.scaled.name)
        model.starting += 1
        model.outcome.starts += 1
        self._count(model, 1)
        return instance

    def _count(self, model: SimulatedModel, number: int) -> None:
        model.present += number
        model.outcome.counts.append((self.now_s, model.present))

    def _load_next(self) -> None:
        """Begin the starts that have a place."""
        while self.queue and self.num_starting < self.start_places:
            instance = self.queue.popleft()
            self.num_starting += 1
            self.num_loading += 1
            instance.ready_s = self.now_s
            source: ByteSource | None = ByteSource.STORE
            if self.nodes is not None and instance.node is not None:
                source = self.nodes.fetch(instance.node, instance.model.scaled.name, instance)
            if source is not None:
                self._load(instance, source)

    def _load(self, instance: SimulatedInstance, source: ByteSource) -> None:
        """Read the weights, and count their bytes."""
        model, profile = instance.model, instance.model.profile
        work_s = profile.start_s * model.draw(model.start_ratios)
        if source is ByteSource.STORE:
            slowest = min(profile.link_bytes_s, self.fleet.node_bytes_s)
            model.outcome.store_bytes += profile.bytes
        else:
            slowest = self.fleet.peer_bytes_s if source is ByteSource.PEER else _INFINITY
            model.outcome.peer_bytes += profile.bytes if source is ByteSource.PEER else 0
        work_s = max(work_s, PACKED_OVERHEAD * profile.bytes / slowest, 1e-6)
        if source is ByteSource.STORE:
            instance.link_share = profile.wire_s / work_s
        self._want(model.cores, instance.link_share)
        for share, is_end in ((min(1.0, profile.ready_share), False), (1.0, True)):
            self.number += 1
            if source is ByteSource.STORE:
                end = self.start_clock + share * work_s
                heapq.heappush(self.loading, (end, self.number, is_end, instance))
            else:  # of a fleet, where nothing slows it down
                kind = _LOADED if is_end else _READY
                end_s = max(self.now_s, instance.ready_s + share * work_s)  # it may have waited for its bytes
                heapq.heappush(self.timers, (end_s, self.number, kind, model, instance))

    def _started(self, instance: SimulatedInstance) -> None:
        self.num_starting -= 1
        self._ready(instance.model, instance)
        self._load_next()

    def _loaded(self, instance: SimulatedInstance) -> None:
        """All of its weights are there: what it took meanwhile begins."""
        model = instance.model
        self._want(-model.cores, -instance.link_share)
        self.num_loading -= 1
        held, instance.held = instance.held, None
        instance.clock = self.clock
        if held:
            self._want(model.work_cores)
            for arrived_s, request in held:
                self._compute_prompt(model, instance, request, arrived_s)
            self._expect(instance)
        if self.nodes is not None and instance.node is not None:
            for waiting, source in self.nodes.loaded(instance.node, model.scaled.name):
                self._load(waiting, source)

    def _start_missing(self, model: SimulatedModel) -> None:
        """Begin the starts that are missing when the platform decides the next time."""
        if model.present >= model.wants(model.quiet(self.now_s)):
            return
        decides_s = self.fleet.scaling.next_tick_s(self.now_s, model.present)
        if decides_s <= self.now_s + ROUNDING_S:
            self._begin_missing(model)
        elif decides_s != model.decides_s:
            model.decides_s = decides_s
            self.number += 1
            unused = SimulatedInstance(model, self.now_s, self.number)
            heapq.heappush(self.timers, (decides_s, self.number, _TICK, model, unused))

    def _begin_missing(self, model: SimulatedModel) -> None:
        wanted = model.wants(model.quiet(self.now_s))
        scaling = self.fleet.scaling
        while model.present < wanted:
            instance = self._new(model)
            begin_s = self.now_s + model.profile.platform_s
            if scaling.per_s:
                begin_s = max(begin_s, model.limited_s - (scaling.burst - 1) / scaling.per_s)
                model.limited_s = max(model.limited_s, begin_s) + 1 / scaling.per_s
            if standby := model.profile.standby:
                node = 0 if instance.node is None else instance.node.number
                slots = model.slots.setdefault(node, [0.0] * standby)
                begin_s = max(begin_s, slots[0])
                heapq.heapreplace(slots, begin_s + model.profile.refill_s)
            self.number += 1
            heapq.heappush(self.timers, (begin_s, self.number, _PLATFORM_READY, model, instance))

    def _ready(self, model: SimulatedModel, instance: SimulatedInstance) -> None:
        model.starting -= 1
        model.ready.append(instance)
        model.note_load(instance)
        instance.ready_s = self.now_s
        instance.clock = self.clock
        while model.waiting and instance.in_work < model.max_in_work:
            self._take_waiting(model, instance)
        if instance.in_work == 0:
            instance.busy_since_s = self.now_s
            self._rest(model, instance)

    def _take_waiting(self, model: SimulatedModel, instance: SimulatedInstance) -> None:
        arrived_s, request = model.waiting.popleft()
        if self.now_s - arrived_s > model.scaled.queue_timeout_s:
            model.outcome.refused += 1
            return
        if instance.ready_s > arrived_s:
            model.outcome.cold += 1
        self._admit(model, instance, request, arrived_s)

    def _admit(
        self, model: SimulatedModel, instance: SimulatedInstance, request: ArrivedRequest, arrived_s: float
    ) -> None:
        if instance.in_work == 0:
            instance.busy_since_s = self.now_s
            if instance.held is None:
                self._want(model.work_cores)
        self._advance(instance)
        instance.in_work += 1
        model.in_work += 1
        model.note_load(instance)
        if instance.held is not None:
            heapq.heappush(instance.ends, self._own_work_s(model, request))
            instance.held.append((arrived_s, request))
            return
        heapq.heappush(instance.ends, instance.own + self._own_work_s(model, request))
        self._compute_prompt(model, instance, request, arrived_s)
        self._expect(instance)

    def _own_work_s(self, model: SimulatedModel, request: ArrivedRequest) -> float:
        """Of the instance with this sequence alone, after its prompt."""
        if request.work_s is not None:
            return request.work_s
        return model.profile.decode_s(request.output_tokens)

    def _compute_prompt(
        self, model: SimulatedModel, instance: SimulatedInstance, request: ArrivedRequest, arrived_s: float
    ) -> None:
        """Note the request's first token: after the prompts before its own, and its own. A step has the overhead once,
        for all that wait for it.
        """
        work = model.draw(model.prompt_ratios) * model.profile.prompt_s(request.prompt_tokens)
        if self.clock >= instance.step_begin:  # else the last step has not begun, and takes this one, too
            instance.step_begin = max(self.clock, instance.prompts_end)
            work += model.draw(model.overhead_ratios) * model.profile.overhead_s
        instance.prompts_end = max(self.clock, instance.prompts_end) + work
        waited_s = self.now_s - arrived_s
        model.outcome.first_token_s.append(waited_s + (instance.prompts_end - self.clock) / self.pace)

    def _idle(self, model: SimulatedModel, instance: SimulatedInstance) -> None:
        self._want(-model.work_cores)
        model.outcome.busy_s += self.now_s - instance.busy_since_s
        self._rest(model, instance)

    def _rest(self, model: SimulatedModel, instance: SimulatedInstance) -> None:
        instance.idle_since_s = self.now_s
        instance.stamp += 1
        model.idle.append((self.now_s, instance))
        self.number += 1
        heapq.heappush(
            self.timers, (self.now_s + model.scaled.idle_timeout_s, self.number, _IDLE, model, instance)
        )

    def _end_late(self, model: SimulatedModel) -> None:
        """End idle instances whose time is over, as `policy.to_end` has it."""
        quiet = model.quiet(self.now_s)
        idle, timeout_s = model.idle, idle_limit_s(model.scaled, quiet)
        while idle:
            since_s, instance = idle[0]
            if instance.in_work or instance.idle_since_s != since_s:  # it was busy since
                idle.popleft()
                continue
            if since_s + timeout_s > self.now_s + ROUNDING_S:
                return
            if len(model.ready) <= model.wants(quiet):
                return
            idle.popleft()
            model.ready.remove(instance)
            instance.number = -1
            if self.nodes is not None and instance.node is not None:
                self.nodes.leave(instance.node, model.scaled.name)
            self._count(model, -1)
            self._pay(instance, self.now_s)

    def _pay(self, instance: SimulatedInstance, until_s: float) -> None:
        instance.model.outcome.instance_s += until_s - instance.began_s

    # clocks

    def _advance(self, instance: SimulatedInstance) -> None:
        if instance.held is None:
            begin = max(instance.clock, min(self.clock, instance.prompts_end))
            instance.own += (self.clock - begin) * instance.model.speeds[instance.in_work]
        instance.clock = self.clock

    def _expect(self, instance: SimulatedInstance) -> None:
        instance.stamp += 1
        left = max(0.0, instance.ends[0] - instance.own) / instance.model.speeds[instance.in_work]
        end = max(self.clock, instance.prompts_end) + left
        self.number += 1
        heapq.heappush(self.completions, (end, self.number, instance.stamp, instance))

    def _want(self, cores: float, link: float = 0.0) -> None:
        self.demand += cores
        self.pace = 1.0 if self.demand <= self.cores else self.cores / self.demand
        self.link_demand += link
        is_shared = self.shares_link and self.link_demand > 1.0
        self.start_pace = self.pace / self.link_demand if is_shared else self.pace
