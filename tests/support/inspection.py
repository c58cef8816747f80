"""Looks inside parts whose state no API shows: the one place where tests name it."""

from __future__ import annotations

from typing import Any


def state_of(engine: Any) -> Any:
    """An engine's `SchedulerState`. Hold its `changed` while the engine runs."""
    return engine._state


def capacity_of(engine: Any) -> Any:
    """Its `Capacity`."""
    return engine._state._capacity


def kv_of(engine: Any) -> Any:
    """Its storage of keys and values."""
    return engine._kv


def backend_of(engine: Any) -> Any:
    return engine._backend


def drafting_of(engine: Any) -> Any:
    """The members that its early phase would draft for now."""
    return engine._early._who_drafts()


def connections_of(source: Any) -> Any:
    """The pool of connections of a source over HTTP."""
    return source._client._pool


def tiers_of(spill: Any) -> Any:
    """The tiers of spilled blocks."""
    return spill._tiers
