"""The search for settings: a grid of pools under one trace, those that no other beats, and the cheapest that is fast
enough; and a pool kept warm, started from standby processes, or cold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...handlers.pool.values import Model
from .fleet import Fleet
from .instance_model import Profile
from .outcome import Outcome, Price, cost_of
from .simulate import simulate
from .trace import ArrivedRequest

MIN_WARM = (0, 1, 2, 4)
BUFFER = (0, 1, 2)
IDLE_TIMEOUT_S = (30.0, 60.0, 300.0, 900.0, 3600.0)
HYBRID_TIMEOUT_S = 300.0  # until enough gaps have been seen


class PoolChoice(NamedTuple):
    """One pool of the grid, and what became of it."""

    model: Model
    outcome: Outcome
    ttft_p50_s: float
    ttft_p99_s: float
    cost: float
    standby_s: float = 0.0  # of all standby processes

    @property
    def settings(self) -> str:
        model = self.model
        kept = "policy=hybrid" if model.policy == "hybrid" else f"idle_timeout_s={model.idle_timeout_s:g}"
        return f"min_warm={model.min_warm} buffer={model.buffer} {kept}"


def candidates(model: Model) -> Iterable[Model]:
    """The grid's pools that the model's `max_instances` allows, and hybrid ones, which keep nothing warm."""
    for buffer in BUFFER:
        if buffer <= model.max_instances:
            yield dataclasses.replace(
                model, min_warm=0, buffer=buffer, idle_timeout_s=HYBRID_TIMEOUT_S, policy="hybrid"
            )
    for min_warm in MIN_WARM:
        for buffer in BUFFER:
            if min_warm + buffer <= model.max_instances:
                for idle_timeout_s in IDLE_TIMEOUT_S:
                    yield dataclasses.replace(
                        model, min_warm=min_warm, buffer=buffer, idle_timeout_s=idle_timeout_s, policy="fixed"
                    )


class Host(NamedTuple):
    """The machines that instances run on: a fleet, one host with these cores, or (both None) one for each instance."""

    cores: float | None = None
    fleet: Fleet | None = None


OWN = Host()


def try_out(
    requests: Sequence[ArrivedRequest], model: Model, profile: Profile, price: Price, host: Host = OWN
) -> PoolChoice:
    """One pool under the requests of its model."""
    outcomes = simulate(
        requests, {model.name: model}, {model.name: profile}, cores=host.cores, fleet=host.fleet
    )
    outcome = outcomes[model.name]
    nodes = 1 if host.fleet is None else host.fleet.nodes
    standby_s = requests[-1].t_s * profile.standby * nodes
    half_s, most_s = outcome.percentiles(50, 99)
    cost = cost_of(outcome, model, price, standby_s=standby_s)
    return PoolChoice(model, outcome, half_s, most_s, cost, standby_s)


def search(
    requests: Sequence[ArrivedRequest], model: Model, profile: Profile, price: Price, host: Host = OWN
) -> list[PoolChoice]:
    """The grid, in its order."""
    return [try_out(requests, each, profile, price, host) for each in candidates(model)]


def three_ways(
    requests: Sequence[ArrivedRequest], model: Model, profile: Profile, price: Price, host: Host = OWN
) -> dict[str, PoolChoice]:
    """The pool by how it keeps capacity. `standby` and `cold` have instances while there are requests, started from
    standby processes or without them, where the profile has figures for that; `warm` always has the most that these
    had.
    """
    scaled = dataclasses.replace(model, min_warm=0, buffer=0, policy="fixed")
    alone = profile.without_standby()
    found = {}
    if profile.standby:
        found["standby"] = try_out(requests, scaled, profile, price, host)
    if alone is not None:
        found["cold"] = try_out(requests, scaled, alone, price, host)
    most = max([1, *(choice.outcome.most for choice in found.values())])
    always = dataclasses.replace(scaled, min_warm=most, max_instances=most)
    warm = try_out(requests, always, dataclasses.replace(profile, standby=0), price, host)
    return {"warm": warm, **found}


def pareto(choices: Iterable[PoolChoice]) -> list[PoolChoice]:
    """Those that no other beats in both cost and p99, the cheapest first."""
    front: list[PoolChoice] = []
    for choice in sorted(choices, key=lambda each: (each.cost, each.ttft_p99_s)):
        if not front or choice.ttft_p99_s < front[-1].ttft_p99_s:
            front.append(choice)
    return front


def cheapest(choices: Iterable[PoolChoice], ttft_p99_s: float) -> PoolChoice | None:
    """Of those whose p99 is at most that and that refuse no request. None is an answer."""
    good = [each for each in choices if each.ttft_p99_s <= ttft_p99_s and each.outcome.refused == 0]
    return min(good, key=lambda each: (each.cost, each.ttft_p99_s), default=None)
