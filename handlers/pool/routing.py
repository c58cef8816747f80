"""The choice of a model and a version for a request: names, aliases, weights and sticky keys.

Pure but for the counters of requests that have no key. It knows no HTTP and no instances.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Mapping
from typing import Generic, NamedTuple, TypeVar

from .keys import VERSION_NAME
from .values import Pool

T = TypeVar("T", bound=Hashable)


class RouteTarget(NamedTuple):
    """A model, and the version that the request names; None: by the model's weights."""

    model: str
    version: int | None = None


def rendezvous(weights: Mapping[T, int], key: str) -> T:
    """The choice that `key` always gets, by weighted rendezvous hashing: a change of weights moves only the share of
    keys that it must. At least one weight is positive.
    """

    def score(choice: T) -> float:
        digest = hashlib.blake2b(f"{choice}\0{key}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
        draw = (int.from_bytes(digest, "big") + 1) / (2**64 + 1)
        return -math.log(draw) / weights[choice]

    return min((choice for choice, weight in weights.items() if weight > 0), key=score)


class RoundRobin(Generic[T]):
    """Choices in turn by weight, as evenly mixed as whole requests allow (smooth weighted round robin)."""

    def __init__(self) -> None:
        self._credit: dict[T, int] = {}

    def next(self, weights: Mapping[T, int]) -> T:
        """At least one weight is positive. Weights may change from call to call."""
        if self._credit.keys() != weights.keys():
            self._credit = {choice: self._credit.get(choice, 0) for choice in weights}
        for choice, weight in weights.items():
            self._credit[choice] += weight
        chosen = max(
            (choice for choice, weight in weights.items() if weight > 0), key=self._credit.__getitem__
        )
        self._credit[chosen] -= sum(weights.values())
        return chosen


class Chooser:
    """Targets by served name. One per pool; used on one thread."""

    def __init__(self) -> None:
        self._turns: dict[str, RoundRobin[str]] = {}
        self._version_turns: dict[str, RoundRobin[int]] = {}

    def target(self, pool: Pool, name: str, key: str | None) -> RouteTarget | None:
        """The target of a served name: `name`, `name@8` or an alias, whatever its case. None where there is none."""
        base, _, version = name.partition("@")
        found = _find(pool.models, base)
        if found is not None:
            if not version:
                return RouteTarget(found)
            return RouteTarget(found, int(version)) if VERSION_NAME.fullmatch(version) else None
        alias = _find(pool.aliases, name)
        if alias is None:
            return None
        weights = pool.aliases[alias]
        turns = self._turns.setdefault(alias, RoundRobin())
        chosen = rendezvous(weights, key) if key is not None else turns.next(weights)
        base, _, version = chosen.partition("@")
        return RouteTarget(base, int(version) if version else None)

    def version(self, model: str, weights: Mapping[int, int], key: str | None) -> int:
        """By these weights, of which one is positive; the same for the same key."""
        if len(weights) == 1:
            return next(iter(weights))
        if key is not None:
            return rendezvous(weights, key)
        return self._version_turns.setdefault(model, RoundRobin()).next(weights)


def _find(names: Mapping[str, object], name: str) -> str | None:
    """The name as the file has it."""
    if name in names:
        return name
    folded = name.casefold()
    return next((each for each in names if each.casefold() == folded), None)
