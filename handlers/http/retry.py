"""When a client that is sent away may come back, where no engine can tell it yet: an estimate from the load so far."""

from __future__ import annotations

NOT_READY_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 30.0  # a load gets faster and slower, and its first layers are enough


def expected_wait_s(fraction: float, elapsed_s: float) -> float:
    """How long to wait before asking again: until all is loaded, if the rest goes as fast as what has come so far,
    within bounds. `fraction` is what has come of the load in `elapsed_s`.
    """
    if fraction <= 0:
        return NOT_READY_RETRY_AFTER_S
    return min(MAX_RETRY_AFTER_S, max(NOT_READY_RETRY_AFTER_S, elapsed_s * (1 - fraction) / fraction))
