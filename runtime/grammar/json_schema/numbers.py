"""Bounds of numbers, without those that the library gets wrong.

In a range below 1, such as 1 to 1.5, it allows an exclusive bound that is an integer. Such bounds become inclusive
ones that are a little narrower.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

NARROWER = 1e-6


def bounds(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema's exclusive bounds, with `minimum` and `maximum` where these change."""
    result: dict[str, Any] = {}
    for key, rule in (("exclusiveMinimum", above), ("exclusiveMaximum", below)):
        if (bound := schema.get(key)) is None:
            continue
        if schema.get("type") == "integer":
            result[key] = bound
            continue
        ((name, value),) = rule(bound).items()
        if name in schema:
            value = (max if name == "minimum" else min)(value, schema[name])
        result[name] = value
    return result


def above(bound: float) -> dict[str, Any]:
    """Numbers greater than this one."""
    if bound < 0 or bound != int(bound):
        return {"exclusiveMinimum": bound}
    inner = bound + NARROWER
    return {"minimum": inner if inner > bound else math.nextafter(bound, math.inf)}


def below(bound: float) -> dict[str, Any]:
    """Numbers less than this one."""
    if bound > 0 or bound != int(bound):
        return {"exclusiveMaximum": bound}
    inner = bound - NARROWER
    return {"maximum": inner if inner < bound else math.nextafter(bound, -math.inf)}
