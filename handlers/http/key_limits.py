"""Limits of API keys: requests and tokens in a minute and in a day, each a bucket that refills all the time.

    --key-limits requests_minute=60,tokens_minute=20000,tokens_day=1000000

A request is refused before any work. The tokens of an answer are known at its end, so they may take a bucket below
zero, and the key waits until it is above again: no answer is cut, and over time no key gets more than its limits.
Buckets are in memory: they are full at a start.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from ...loader.errors import UsageError
from .errors import ApiError, retry_after
from .keys import ApiKeys, given_key

if TYPE_CHECKING:
    from prometheus_client.core import Metric

RATE_LIMIT_ERROR = "rate_limit_error"
MAX_LIMIT = 10**12
# By name: what is counted, and the time in seconds in which an empty bucket is full.
LIMITS = {
    f"{unit}_{period}": (unit, period_s)
    for unit in ("requests", "tokens")
    for period, period_s in (("minute", 60.0), ("day", 86_400.0))
}


def parse_key_limits(setting: str) -> dict[str, int]:
    """The limits in a setting, by name. Raises `UsageError`."""
    limits: dict[str, int] = {}
    for item in setting.split(","):
        name, _, text = (part.strip() for part in item.partition("="))
        is_number = text.isascii() and text.isdigit() and len(text) <= len(str(MAX_LIMIT))
        if name not in LIMITS or name in limits or not is_number or not 0 < int(text) <= MAX_LIMIT:
            raise UsageError(
                f"key_limits has {item.strip()[:100]!r}: each is one of {', '.join(LIMITS)}, once, "
                f"and a number from 1 to {MAX_LIMIT:,}",
                key="key_limits",
                hint="Write them as tokens_minute=20000,tokens_day=1000000.",
            )
        limits[name] = int(text)
    return limits


def make_key_limits(setting: str | None, keys: ApiKeys | None) -> KeyLimits | None:
    """The limits of `keys`; None without a setting. Raises `UsageError` for a setting without keys."""
    if setting is None:
        return None
    limits = parse_key_limits(setting)
    if keys is None:
        raise UsageError("there are no API keys to limit", key="key_limits", hint="Set TENERAL_API_KEY.")
    return KeyLimits(keys, limits)


class KeyUsage(NamedTuple):
    """Counts by the key's place in the setting, from 1."""

    requests: Mapping[str, int]  # that were admitted
    tokens: Mapping[str, int]  # of prompts and answers
    refused: Mapping[tuple[str, ...], int]  # key and limit

    def families(self) -> Iterator[Metric]:
        """For Prometheus. The first call imports its client."""
        from ...runtime.metrics import counter  # lazy: most servers have no limits

        by = "by the key's place in the setting"
        yield counter("teneral_key_requests", f"Requests admitted, {by}.", self.requests, ("key",))
        yield counter("teneral_key_tokens", f"Tokens of prompts and answers, {by}.", self.tokens, ("key",))
        yield counter(
            "teneral_key_refused", f"Requests beyond a limit, {by}.", self.refused, ("key", "limit")
        )


class KeyLimits:
    """The buckets of at most `MAX_KEYS` keys. Used on the event loop only."""

    def __init__(
        self, keys: ApiKeys, limits: Mapping[str, int], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        """`limits` are as from `parse_key_limits`."""
        self._keys = keys
        self._limits = limits
        self._now_s = now_s
        self._full_at_s: dict[tuple[int, str], float] = {}  # when the bucket of a key is full again
        self._requests: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._refused: Counter[tuple[str, ...]] = Counter()

    def admit(self, given: bytes) -> int:
        """Count a request of a key. Returns the key's place.

        Raises `ApiError` with 429, and counts nothing, where one of the key's buckets is empty.
        """
        place = self._keys.place_of(given)
        waits_s = {name: self._wait_s(place, name) for name in self._limits}
        name = max(waits_s, key=waits_s.__getitem__)
        if waits_s[name] > 1e-6:
            self._refused[str(place), name] += 1
            raise ApiError(
                429,
                f"this API key has used the {self._limits[name]:,} {name.replace('_', ' a ')} that it may",
                kind=RATE_LIMIT_ERROR,
                code="rate_limit_exceeded",
                headers=self.headers(place) | retry_after(waits_s[name]),
            )
        self._requests[str(place)] += 1
        self._take(place, "requests", 1)
        return place

    def admit_request(self, headers: Mapping[str, str]) -> int:
        """`admit` with the key in a request."""
        return self.admit(given_key(headers))

    def spend(self, place: int, num_tokens: int) -> None:
        """Count the tokens of a request that has ended."""
        self._tokens[str(place)] += num_tokens
        self._take(place, "tokens", num_tokens)

    def headers(self, place: int) -> dict[str, str]:
        """The headers of OpenAI's limits; of a minute and a day, those of which less is left."""
        found: dict[str, str] = {}
        for unit in ("requests", "tokens"):
            names = [name for name in self._limits if LIMITS[name][0] == unit]
            if not names:
                continue
            name = min(names, key=lambda name: self._left(place, name))
            found |= {
                f"x-ratelimit-limit-{unit}": str(self._limits[name]),
                f"x-ratelimit-remaining-{unit}": str(max(0, math.floor(self._left(place, name) + 1e-6))),
                f"x-ratelimit-reset-{unit}": f"{self._owed_s(place, name):.3f}s",
            }
        return found

    def usage(self) -> KeyUsage:
        return KeyUsage(dict(self._requests), dict(self._tokens), dict(self._refused))

    def _take(self, place: int, unit: str, number: int) -> None:
        for name, limit in self._limits.items():
            if LIMITS[name][0] == unit:
                owed_s = self._owed_s(place, name) + number * LIMITS[name][1] / limit
                self._full_at_s[place, name] = self._now_s() + owed_s

    def _owed_s(self, place: int, name: str) -> float:
        """The time until a bucket is full, in seconds."""
        return max(0.0, self._full_at_s.get((place, name), 0.0) - self._now_s())

    def _left(self, place: int, name: str) -> float:
        """The content of a bucket; below zero after answers that took more."""
        return self._limits[name] * (1 - self._owed_s(place, name) / LIMITS[name][1])

    def _wait_s(self, place: int, name: str) -> float:
        """The time until there is one in a bucket; zero or less where there is."""
        period_s = LIMITS[name][1]
        return self._owed_s(place, name) + period_s / self._limits[name] - period_s
