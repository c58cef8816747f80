"""What all routes share, and each request's own record."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from aiohttp import web

from ...loader.errors import TeneralError
from ...runtime.engine.requests import FirstToken, Priority
from ...runtime.errors import ModelError, RequestError
from ...runtime.state import State
from .admission import Admission
from .connections import Connections
from .errors import ApiError, as_api_error
from .inflight import InFlight, Work
from .limits import MAX_HEAD_BYTES, Limits
from .mailbox import Bridge

if TYPE_CHECKING:
    from ...runtime.engine.engine import EngineStatistics
    from ...runtime.instance import Instance
    from ...runtime.metrics import Metrics
    from ...runtime.text.tokenizer import TextTokenizer

logger = logging.getLogger("teneral.http")

T = TypeVar("T")


@dataclass(slots=True)
class Call:
    """One HTTP request, from its arrival. `work` is there while the route's handler runs, for POST routes."""

    request_id: str
    arrived_s: float = field(default_factory=time.monotonic)
    work: Work | None = None
    error_status: int | None = None  # of the error that the client was told, which may be an item of a stream

    def age_s(self) -> float:
        return time.monotonic() - self.arrived_s

    @property
    def ended_by(self) -> TeneralError | None:
        """Why this side ended the work; None when it did not: a cancellation is the client's then."""
        return None if self.work is None else self.work.ended_by

    def limit(self, seconds: float) -> None:
        """Give the rest of the work so much time."""
        if self.work is not None:
            self.work.limit(seconds)

    def explain(self, error: Exception) -> ApiError:
        """What the client is told of an exception; the log is told the rest."""
        told = as_api_error(error)
        self.error_status = told.status
        if not isinstance(error, TeneralError | web.HTTPException | web.RequestPayloadError):
            logger.error("request %s failed", self.request_id, exc_info=error)
        elif told.status >= 500:
            logger.warning("request %s: %d %s", self.request_id, told.status, error)
        return told


# Each request is handled in a task of its own, so this is the request's. (aiohttp's own place for such things
# changed its keys' type between the versions that are supported.)
CALL: ContextVar[Call] = ContextVar("call")


class Service:
    """The instance behind the routes, with the bounds in front of it. One per application; used on its event
    loop only.
    """

    def __init__(self, instance: Instance, limits: Limits, metrics: Metrics) -> None:
        self.instance = instance
        self.limits = limits
        self.metrics = metrics
        self.admission = Admission(limits, self._num_in_engine)
        self.in_flight = InFlight(limits.max_in_flight)
        self.connections = Connections(
            max_connections=limits.max_connections,
            max_head_bytes=MAX_HEAD_BYTES,
            head_timeout_s=limits.head_timeout_s,
        )
        self.bridge = Bridge()

    @property
    def state(self) -> State:
        """The instance's, except that the instance of a server which drains still works."""
        state = self.instance.state
        return State.DRAINING if self.in_flight.draining and state is not State.FAILED else state

    @property
    def first_token(self) -> FirstToken:
        """For requests that do not say it."""
        return FirstToken(self.instance.config.first_token)

    async def tokenizer(self) -> TextTokenizer:
        return await self.ready(self.instance.tokenizer)

    async def ready(self, future: Future[T]) -> T:
        """One of the instance's parts; waits while it loads, however long.

        Raises the instance's failure, or `RequestError` when this model is not of the kind that has the part.
        """
        try:
            if not future.done():
                # The shield: a client that gives up must not cancel what all others wait for too.
                await asyncio.shield(asyncio.wrap_future(future))
            return future.result()
        except ModelError as error:
            if error is self.instance.failure:
                raise
            raise RequestError(error.message, param="model", hint=error.hint) from error

    def require_room(self, queue_name: str, priority: Priority, num_sequences: int) -> None:
        """Raises `CapacityError` where the engine would, before anything is done for the request. One that is still
        loading says so when it gets the request.
        """
        if self.instance.engine.done() and self.instance.engine.exception() is None:
            self.instance.engine.result().require_room(queue_name, priority, num_sequences)

    def check_model(self, name: str | None) -> None:
        """Raises 404 for another model than the one served; a request need not name one."""
        if name is not None and name != self.instance.model_name:
            raise ApiError(
                404,
                f"the model {name[:200]!r} does not exist here; this server has {self.instance.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def load_comment(self) -> str:
        """A sign of life for a stream that has nothing to say yet."""
        progress = self.instance.progress()
        fraction = progress.get("fraction", 1.0)
        return f"loading {100 * fraction:.0f} %" if fraction < 1 else "working"

    def _num_in_engine(self) -> int:
        future = self.instance.engine
        if not future.done() or future.exception() is not None:
            return 0
        statistics: EngineStatistics = future.result().statistics()
        return statistics.running + statistics.queued


SERVICE = web.AppKey("service", Service)  # the application's key for it
