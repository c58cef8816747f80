"""The cost of an outcome. Prices are the user's: none is shipped."""

from __future__ import annotations

from typing import NamedTuple

from ...handlers.pool.values import Model
from ...loader.errors import UsageError
from .simulate import Outcome


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
