"""Calls that wait for a result. Each is claimed once, under its queue's lock, and resolved by the
thread that claimed it, without the lock.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, Protocol

from ...loader.errors import TeneralError


class Call(Protocol):
    future: Future[Any]
    # True: its owner can no longer cancel it; False: it was cancelled before.
    claimed: bool | None


def claim(call: Call) -> bool:
    """Claim a call for resolving, so that its owner can no longer cancel it. Returns False if it
    was cancelled.

    Call it under the lock: a future may be claimed only once.
    """
    if call.claimed is None:
        call.claimed = call.future.set_running_or_notify_cancel()
    return call.claimed


def fail(calls: Iterable[Call], error: TeneralError) -> None:
    """Resolve claimed calls with this error."""
    for call in calls:
        call.future.set_exception(error)
