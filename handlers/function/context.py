"""What a handler is given beside its event: who asks, how long it may take, the model, a logger, the KV
session.

It knows no platform: whoever receives the request makes a `Context`, and cancels it when the client goes
away.
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
    """One invocation's surroundings. Thread-safe; valid until the invocation ends, which cancels what it left
    running.
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
        """`host` is the instance that serves the model; `timeout_s` counts from now, None is no deadline. RequestError
        for an invalid `session`. `platform` is what the place where this runs tells of the invocation.
        """
        check_owner(session=session or "")
        self.request_id = request_id
        self.platform = (
            platform  # on Lambda: its name, the function's ARN, client context, identity and so on
        )
        self.trace_id = trace_id  # as the platform writes it, of X-Ray for one; None: nobody traces
        self.session = (
            session  # what is computed is kept for the next invocation that names the same; None: none
        )
        self.logger: logging.LoggerAdapter[logging.Logger] = logging.LoggerAdapter(
            logging.getLogger(LOGGER_NAME), {"request_id": request_id}
        )
        self.host = host  # for handlers that are a part of Teneral; `model` is for all others
        self._on_progress = on_progress
        self._lifetime = Lifetime(timeout_s)
        self.model = Model(host, self._lifetime, request_id, session=session)

    @property
    def deadline(self) -> float | None:
        """The moment on `time.monotonic()`'s clock by which the invocation must be done; None: no limit."""
        return self._lifetime.deadline

    def remaining_time_s(self) -> float:
        """Seconds until the deadline, never below 0; `math.inf` without one."""
        return self._lifetime.remaining_s()

    @property
    def cancelled(self) -> bool:
        """Whether the client has gone away. Calls of the model then raise `CancelledError`; long work should
        stop.
        """
        return self._lifetime.cancelled

    def progress(self, value: Any) -> None:
        """Tell whoever waits how far this is, where the platform has a way for it (RunPod's queue); elsewhere nothing
        happens. `value` is JSON; of several in one second, one is told.
        """
        if self._on_progress is not None:
            self._on_progress(value)

    def cancel(self) -> None:
        """End the invocation: generations stop within one step, waiting calls raise `CancelledError`.
        Idempotent.
        """
        self._lifetime.cancel()

    def __repr__(self) -> str:
        return f"Context(request_id={self.request_id!r}, model={self.model.name!r})"
