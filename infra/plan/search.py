"""The search for settings: a grid of pools under one trace, those that no other beats, and the cheapest that is fast
enough.

Prices are the user's: none is shipped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...handlers.pool.values import Model
from ...loader.errors import UsageError
from .instance_model import Profile
from .simulate import Outcome, simulate
from .trace import ArrivedRequest

MIN_WARM = (0, 1, 2, 4)
BUFFER = (0, 1, 2)
IDLE_TIMEOUT_S = (30.0, 60.0, 300.0, 900.0, 3600.0)
HYBRID_TIMEOUT_S = 300.0  # until enough gaps have been seen


class Price(NamedTuple):
    """`per_hour` of an instance, and `per_gb_s` of memory while it is there. Both add up."""

    per_hour: float = 1.0
    per_gb_s: float = 0.0
    unit: str = "instance-h"


def cost_of(outcome: Outcome, model: Model, price: Price) -> float:
    """In the price's unit. Where the price is one an hour, it is instance-hours."""
    gigabytes = (model.instance.memory_bytes or 0) / 1e9
    return outcome.instance_s / 3600 * price.per_hour + outcome.instance_s * gigabytes * price.per_gb_s


def parse_price(text: str | None) -> Price:
    """Of `0.10/h` or `0.0000166667/GB-s`. Raises `UsageError`."""
    if text is None:
        return Price()
    amount, _, unit = text.partition("/")
    try:
        value = float(amount)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9 or unit not in ("h", "GB-s"):
        raise UsageError(
            f"--price {text}: must be a number and /h or /GB-s", key="price", hint="Such as 0.10/h."
        )
    return Price(value, 0.0, "cost") if unit == "h" else Price(0.0, value, "cost")


class PoolChoice(NamedTuple):
    """One pool of the grid, and what became of it."""

    model: Model
    outcome: Outcome
    ttft_p50_s: float
    ttft_p99_s: float
    cost: float

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


def try_out(
    requests: Sequence[ArrivedRequest], model: Model, profile: Profile, price: Price, cores: float | None
) -> PoolChoice:
    """One pool under the requests of its model."""
    outcome = simulate(requests, {model.name: model}, {model.name: profile}, cores=cores)[model.name]
    ordered = sorted(outcome.first_token_s)
    half, most = (ordered[round(share * (len(ordered) - 1))] if ordered else 0.0 for share in (0.5, 0.99))
    return PoolChoice(model, outcome, half, most, cost_of(outcome, model, price))


def search(
    requests: Sequence[ArrivedRequest],
    model: Model,
    profile: Profile,
    price: Price,
    cores: float | None = None,
) -> list[PoolChoice]:
    """The grid, in its order."""
    return [try_out(requests, each, profile, price, cores) for each in candidates(model)]


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
