"""The context of a handler's invocation: the client, the time limit, the model, a logger, the KV
session.

It knows no platform: the platform's code makes a `Context` for a request, and cancels it when the
client disconnects.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ...runtime.step.requests import check_owner
from .lifetime import Lifetime
from .model import Model, ModelHost

LOGGER_NAME = "teneral.handler"
NO_FACTS: Mapping[str, Any] = MappingProxyType({})


class Context:
    """The context of one invocation. Thread-safe; valid until the invocation ends, which cancels
    its remaining work.
    """

    def __init__(
        self,
        host: ModelHost,
        *,
        request_id: str,
        timeout_s: float | None = None,
        session: str | None = None,
        platform: Mapping[str, Any] = NO_FACTS,
        trace_id: str | None = None,
        on_progress: Callable[[Any], object] | None = None,
    ) -> None:
        """`host` is the instance that serves the model; `timeout_s` counts from now, None is no
        deadline. `platform` is the platform's information about the invocation. Raises RequestError
        for an invalid `session`.
        """
        check_owner(session=session or "")
        self.request_id = request_id
        self.platform = (
            # On Lambda: its name, the function's ARN, client context, identity and so on.
            platform
        )
        # In the platform's format, such as X-Ray's; None: not traced.
        self.trace_id = trace_id
        self.session = (
            # The KV cache is kept for the next invocation with the same session; None: none.
            session
        )
        self.logger: logging.LoggerAdapter[logging.Logger] = logging.LoggerAdapter(
            logging.getLogger(LOGGER_NAME), {"request_id": request_id}
        )
        # For handlers that are part of Teneral; all others use `model`.
        self.host = host
        self._on_progress = on_progress
        self._lifetime = Lifetime(timeout_s)
        self.model = Model(host, self._lifetime, request_id, session=session)

    @property
    def deadline(self) -> float | None:
        """The deadline on `time.monotonic()`'s clock; None: no limit."""
        return self._lifetime.deadline

    def remaining_time_s(self) -> float:
        """Seconds until the deadline, never below 0; `math.inf` without one."""
        return self._lifetime.remaining_s()

    @property
    def cancelled(self) -> bool:
        """True if the client has disconnected. Calls of the model then raise `CancelledError`; long
        work should stop.
        """
        return self._lifetime.cancelled

    def progress(self, value: Any) -> None:
        """Report progress to the client, where the platform supports it (RunPod's queue); otherwise
        do nothing.

        `value` is JSON; at most one a second is sent.
        """
        if self._on_progress is not None:
            self._on_progress(value)

    def cancel(self) -> None:
        """End the invocation: generations stop within one step, waiting calls raise
        `CancelledError`. Idempotent.
        """
        self._lifetime.cancel()

    def __repr__(self) -> str:
        return f"Context(request_id={self.request_id!r}, model={self.model.name!r})"
