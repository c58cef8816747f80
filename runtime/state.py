"""The states of an instance, as named by every API, and its forecast."""

from __future__ import annotations

import enum
from typing import NamedTuple


class State(enum.StrEnum):
    """The states in the order of an instance's life; any of them can end in DRAINING or FAILED.
    UNLOADED is the state of a server without an instance.
    """

    # Nothing can be answered yet; requests are accepted and wait.
    LOADING = "loading"
    # The first layers have arrived: a request runs as far as its weights have arrived.
    PARTIAL = "partial"
    READY = "ready"  # every weight is exact
    # Finishes running work and accepts no new work.
    DRAINING = "draining"
    # The load failed; `Instance.failure` has the reason.
    FAILED = "failed"
    # Its memory was freed on request; the server runs, and can load it again.
    UNLOADED = "unloaded"

    @property
    def can_answer(self) -> bool:
        """True if a request sent now is processed at once."""
        return self in (State.PARTIAL, State.READY)


class Forecast(NamedTuple):
    """The forecast of a running load, at the link's current rate."""

    rate_bytes_per_s: float
    # From now: the rest of the weights, and computing one token.
    first_token_s: float
    # A mixture's first token needs those experts alone that its router will choose.
    is_upper_bound: bool = False
