"""Rate limits of API keys: a bucket of requests for each, which refills all the time."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..http.errors import ApiError, retry_after
from ..http.keys import ApiKeys

RATE_LIMIT_ERROR = "rate_limit_error"


class KeyRates:
    """One bucket a key, by its place in the setting: at most `MAX_KEYS` of them. Used on the event loop only."""

    def __init__(self, keys: ApiKeys, per_minute: int, now_s: Callable[[], float] = time.monotonic) -> None:
        """A key may send `per_minute` requests at once after a minute without any."""
        self._keys = keys
        self._per_minute = per_minute
        self._now_s = now_s
        self._full_at_s: dict[int, float] = {}  # when the bucket of a key is full again

    def take(self, given: bytes) -> None:
        """Count a request. Raises `ApiError` with 429, and counts nothing, where the key's bucket is empty."""
        place, now_s, each_s = self._keys.place_of(given), self._now_s(), 60.0 / self._per_minute
        full_at_s = max(now_s, self._full_at_s.get(place, 0.0)) + each_s
        if full_at_s > now_s + 60.0 + 1e-6:
            raise ApiError(
                429,
                f"this API key has sent {self._per_minute} requests in a minute, which is its limit",
                kind=RATE_LIMIT_ERROR,
                code="rate_limit_exceeded",
                headers=retry_after(full_at_s - now_s - 60.0),
            )
        self._full_at_s[place] = full_at_s
