"""How often something that costs the store extra may be done: now and then, and in proportion to what goes well."""

from __future__ import annotations

import threading


class Budget:
    """A purse of tokens. Thread-safe; never blocks."""

    def __init__(self, *, at_first: float, share: float, most: float) -> None:
        """Hold `at_first` tokens; every success earns `share` of one, up to `most` in all."""
        self._tokens = at_first
        self._share = share
        self._most = most
        self._lock = threading.Lock()

    def earn(self) -> None:
        with self._lock:
            self._tokens = max(self._tokens, min(self._most, self._tokens + self._share))

    def spend(self) -> bool:
        """Take one token; False when there is none."""
        with self._lock:
            if self._tokens < 1:
                return False
            self._tokens -= 1
            return True
