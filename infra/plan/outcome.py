"""The outcome of a simulated pool: first tokens, instances over time, bytes of the store, and what that costs.

Prices are the user's: none is shipped.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...handlers.pool.values import Model
from ...loader.errors import UsageError


@dataclass(slots=True)
class Outcome:
    """Of one model. `first_token_s` are from arrival to first token, in order of the prompts' computation."""

    requests: int = 0
    cold: int = 0
    refused: int = 0  # waited longer than the model's queue_timeout_s
    first_token_s: array[float] = field(default_factory=lambda: array("d"))
    instance_s: float = 0.0  # from an instance's start to its end
    busy_s: float = 0.0  # with at least one request
    starts: int = 0
    store_bytes: int = 0  # that starts read from the store
    peer_bytes: int = 0  # that they read from other nodes
    counts: list[tuple[float, int]] = field(default_factory=list)  # seconds, instances from then on

    @property
    def most(self) -> int:
        """Instances at the same time."""
        return max((count for _, count in self.counts), default=0)

    @property
    def cold_share(self) -> float:
        return self.cold / self.requests if self.requests else 0.0

    def percentiles(self, *percents: float) -> list[float]:
        """Of the first token; 0 without answers."""
        ordered = sorted(self.first_token_s)
        if not ordered:
            return [0.0] * len(percents)
        return [ordered[round(percent / 100 * (len(ordered) - 1))] for percent in percents]

    def over_time(self, duration_s: float, num: int) -> list[int]:
        """The most instances in each of `num` equal parts of the time."""
        most = [0] * num
        until = [*(t_s for t_s, _ in self.counts[1:]), duration_s]
        for (from_s, count), until_s in zip(self.counts, until, strict=False):
            if from_s <= duration_s:
                first = min(num - 1, int(from_s / max(duration_s, 1e-9) * num))
                last = min(num - 1, int(until_s / max(duration_s, 1e-9) * num))
                most[first : last + 1] = [max(count, each) for each in most[first : last + 1]]
        return most


class Price(NamedTuple):
    """`per_hour` of an instance and `per_gb_s` of its memory; `standby_per_hour` of a standby process; `per_gb` of
    bytes from the store. All add up; None: not given, and not in the sum.
    """

    per_hour: float = 1.0
    per_gb_s: float = 0.0
    standby_per_hour: float | None = None
    per_gb: float | None = None
    unit: str = "instance-h"


def cost_of(outcome: Outcome, model: Model, price: Price, *, standby_s: float = 0.0) -> float:
    """In the price's unit. Where the price is one an hour, it is instance-hours."""
    gigabytes = (model.instance.memory_bytes or 0) / 1e9
    cost = outcome.instance_s / 3600 * price.per_hour + outcome.instance_s * gigabytes * price.per_gb_s
    cost += standby_s / 3600 * (price.standby_per_hour or 0.0)
    return cost + outcome.store_bytes / 1e9 * (price.per_gb or 0.0)


def parse_price(text: str | None, standby: str | None = None, store: str | None = None) -> Price:
    """Of `0.10/h` or `0.0000166667/GB-s`, of a standby process's `0.01/h`, and of the store's `0.02/GB`.

    Raises `UsageError`.
    """
    price = Price(standby_per_hour=_amount(standby, ("h",)), per_gb=_amount(store, ("GB",)))
    value = _amount(text, ("h", "GB-s"))
    if text is None or value is None:
        return price
    by_hour = text.endswith("/h")
    return price._replace(per_hour=value if by_hour else 0.0, per_gb_s=0.0 if by_hour else value, unit="cost")


def _amount(text: str | None, units: Sequence[str]) -> float | None:
    if text is None:
        return None
    amount, _, unit = text.partition("/")
    try:
        value = float(amount)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9 or unit not in units:
        wanted = " or ".join(f"/{each}" for each in units)
        raise UsageError(f"price {text}: must be a number and {wanted}", key="price", hint="Such as 0.10/h.")
    return value
