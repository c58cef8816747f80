"""The running calls of a user's function, each counted until its thread or coroutine has ended.

A disconnected client and a passed deadline end a request at once, but not a plain function: Python
cannot end a thread. Such a call is abandoned and still counts, so that functions that hang never
accumulate without bound: beyond the bound new calls are refused. This module does not manage
threads.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from ...runtime.errors import HandlerBusyError

# The default of a server's running requests.
DEFAULT_MAX_CALLS = 352
# A function that checks `context.cancelled` has ended by then.
LOG_AFTER_S = 1.0
# Between log lines of refusals.
LOG_EVERY_S = 10.0
MAX_NAMED = 8
# The end of a function that hangs is unknown.
RETRY_AFTER_S = 5.0

logger = logging.getLogger("teneral.handler")


@dataclass(eq=False, slots=True)
class FunctionCall:
    """One call of the function."""

    request_id: str
    started_s: float = field(default_factory=time.monotonic)
    abandoned_s: float | None = None  # when its client left
    is_logged: bool = False  # it is in the log


class CallStatistics(NamedTuple):
    calls: int  # running
    abandoned_calls: int  # running although their clients left
    max_calls: int
    refused_calls_total: int


class FunctionCalls:
    """The calls of one function. Thread-safe."""

    def __init__(self, name: str, max_calls: int = DEFAULT_MAX_CALLS) -> None:
        """`name` is the function's, for logs."""
        self.max_calls = max_calls
        self._name = name
        self._lock = threading.Lock()
        self._calls: dict[FunctionCall, None] = {}  # the oldest first
        self._num_refused = 0
        self._logged_s = float("-inf")

    def begin(self, request_id: str) -> FunctionCall:
        """Count a new call. Raises `HandlerBusyError` at the bound."""
        with self._lock:
            if len(self._calls) < self.max_calls:
                call = FunctionCall(request_id)
                self._calls[call] = None
                return call
            self._num_refused += 1
            is_logged = time.monotonic() - self._logged_s < LOG_EVERY_S
            if not is_logged:
                self._logged_s = time.monotonic()
        if not is_logged:
            logger.warning("calls of %s are refused: %s", self._name, self.describe())
        raise HandlerBusyError(
            f"{self.max_calls} calls of {self._name} have not ended, which is the limit",
            retry_after_s=RETRY_AFTER_S,
            hint="Have the function end when context.cancelled is set or its deadline passes.",
        )

    def end(self, call: FunctionCall) -> None:
        """Count the end of the call's thread or coroutine."""
        with self._lock:
            self._calls.pop(call, None)
            is_logged = call.is_logged
        if is_logged and call.abandoned_s is not None:
            logger.info(
                "request %s: %s has ended, %.1f s after its reader left",
                call.request_id,
                self._name,
                time.monotonic() - call.abandoned_s,
            )

    def abandon(self, call: FunctionCall) -> None:
        """Mark a call whose client left, on a running event loop. If it goes on, this is logged
        soon.
        """
        with self._lock:
            if call not in self._calls:
                return
            call.abandoned_s = time.monotonic()
        asyncio.get_running_loop().call_later(LOG_AFTER_S, self._tell, call)

    def statistics(self) -> CallStatistics:
        with self._lock:
            num_abandoned = sum(call.abandoned_s is not None for call in self._calls)
            return CallStatistics(len(self._calls), num_abandoned, self.max_calls, self._num_refused)

    def describe(self) -> str:
        """The number of running calls, and the requests of the oldest abandoned ones."""
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
            call.is_logged = True
        logger.warning(
            "request %s: %s goes on although its reader left; %s",
            call.request_id,
            self._name,
            self.describe(),
        )
