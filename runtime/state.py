"""The states of an instance's life, as every face of it names them."""

from __future__ import annotations

import enum


class State(enum.StrEnum):
    """In the order in which an instance goes through them; any of them can end in DRAINING or FAILED. UNLOADED is no
    instance's, but that of a server which has none at the moment.
    """

    LOADING = "loading"  # nothing can be answered yet; requests are taken in and wait
    PARTIAL = "partial"  # the first layers are there: a request runs as far as its weights have arrived
    READY = "ready"  # every weight is exact
    DRAINING = "draining"  # finishes what it has begun and takes nothing new
    FAILED = "failed"  # the load failed; `Instance.failure` says why
    UNLOADED = "unloaded"  # somebody asked for its memory back; the server lives on, and can load it again

    @property
    def can_answer(self) -> bool:
        """Whether a request that is sent now is worked on at once."""
        return self in (State.PARTIAL, State.READY)
