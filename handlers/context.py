"""What a handler is given beside its event: who asks, how long it may take, the model, a logger, the KV
session.

It knows no platform: whoever receives the request makes a `Context`, and cancels it when the client goes
away.
"""

from __future__ import annotations

import logging

from ..runtime.engine.requests import check_owner
from .lifetime import Lifetime
from .model import Model, ModelHost

LOGGER_NAME = "teneral.handler"


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
    ) -> None:
        """`host` is the instance that serves the model; `timeout_s` counts from now, None is no deadline. RequestError
        for a `session` that cannot be meant.
        """
        check_owner(session=session or "")
        self.request_id = request_id
        self.session = (
            session  # what is computed is kept for the next invocation that names the same; None: none
        )
        self.logger: logging.LoggerAdapter[logging.Logger] = logging.LoggerAdapter(
            logging.getLogger(LOGGER_NAME), {"request_id": request_id}
        )
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

    def cancel(self) -> None:
        """End the invocation: generations stop within one step, waiting calls raise `CancelledError`.
        Idempotent.
        """
        self._lifetime.cancel()

    def __repr__(self) -> str:
        return f"Context(request_id={self.request_id!r}, model={self.model.name!r})"
