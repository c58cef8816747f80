"""The calls of a user's function, each from its start until its thread or coroutine has ended.

A client that goes away, and a deadline that passes, end a request at once, but not a plain function: Python has no way
to end a thread. Such a call is abandoned and still counts, so that functions which hang never pile up without bound:
beyond the bound new calls are refused. It knows no threads.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from ...runtime.errors import HandlerBusyError

DEFAULT_MAX_CALLS = 352  # as many as a server's requests in work, by default
TOLD_AFTER_S = 1.0  # a function that looks at `context.cancelled` has ended by then
TOLD_EVERY_S = 10.0  # of refusals
MAX_NAMED = 8
RETRY_AFTER_S = 5.0  # nothing says when a function ends that hangs

logger = logging.getLogger("teneral.handler")


@dataclass(eq=False, slots=True)
class FunctionCall:
    """One call of the function."""

    request_id: str
    started_s: float = field(default_factory=time.monotonic)
    abandoned_s: float | None = None  # when its reader left
    is_told: bool = False  # the log has it


class CallStatistics(NamedTuple):
    calls: int  # that have not ended
    abandoned_calls: int  # of these, whose readers have left
    max_calls: int
    refused_calls_total: int


class FunctionCalls:
    """Thread-safe."""

    def __init__(self, name: str, max_calls: int = DEFAULT_MAX_CALLS) -> None:
        """`name` is the function's, for the log."""
        self.max_calls = max_calls
        self._name = name
        self._lock = threading.Lock()
        self._calls: dict[FunctionCall, None] = {}  # the oldest first
        self._num_refused = 0
        self._told_s = float("-inf")

    def begin(self, request_id: str) -> FunctionCall:
        """Count one more. Raises `HandlerBusyError` when there are as many as may be."""
        with self._lock:
            if len(self._calls) < self.max_calls:
                call = FunctionCall(request_id)
                self._calls[call] = None
                return call
            self._num_refused += 1
            is_told = time.monotonic() - self._told_s < TOLD_EVERY_S
            if not is_told:
                self._told_s = time.monotonic()
        if not is_told:
            logger.warning("calls of %s are refused: %s", self._name, self.describe())
        raise HandlerBusyError(
            f"{self.max_calls} calls of {self._name} have not ended, which is as many as may run",
            retry_after_s=RETRY_AFTER_S,
            hint="Have the function end when context.cancelled is set or its deadline passes.",
        )

    def end(self, call: FunctionCall) -> None:
        """Its thread or coroutine has ended."""
        with self._lock:
            self._calls.pop(call, None)
            is_told = call.is_told
        if is_told and call.abandoned_s is not None:
            logger.info(
                "request %s: %s has ended, %.1f s after its reader left",
                call.request_id,
                self._name,
                time.monotonic() - call.abandoned_s,
            )

    def abandon(self, call: FunctionCall) -> None:
        """Its reader leaves, on a running event loop. A call that goes on is told in the log soon."""
        with self._lock:
            if call not in self._calls:
                return
            call.abandoned_s = time.monotonic()
        asyncio.get_running_loop().call_later(TOLD_AFTER_S, self._tell, call)

    def statistics(self) -> CallStatistics:
        with self._lock:
            num_abandoned = sum(call.abandoned_s is not None for call in self._calls)
            return CallStatistics(len(self._calls), num_abandoned, self.max_calls, self._num_refused)

    def describe(self) -> str:
        """How many have not ended, and of those that were abandoned the oldest ones by their requests."""
        now_s = time.monotonic()
        with self._lock:
            num_calls = len(self._calls)
            abandoned = [call for call in self._calls if call.abandoned_s is not None]
        named = ", ".join(
            f"{call.request_id} ({now_s - call.started_s:.0f} s)" for call in abandoned[:MAX_NAMED]
        )
        more = f" and {len(abandoned) - MAX_NAMED} more" if len(abandoned) > MAX_NAMED else ""
        left = f"; {len(abandoned)} go on although their readers left: {named}{more}" if abandoned else ""
        return f"{num_calls} of {self.max_calls} run{left}"

    def _tell(self, call: FunctionCall) -> None:
        with self._lock:
            if call not in self._calls:
                return
            call.is_told = True
        logger.warning(
            "request %s: %s goes on although its reader left; %s",
            call.request_id,
            self._name,
            self.describe(),
        )
