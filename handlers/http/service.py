"""What all routes share, and each request's own record."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from aiohttp import web

from ...runtime.errors import ModelError, RequestError
from .admission import Admission
from .errors import ApiError
from .inflight import InFlight, Work
from .limits import Limits
from .mailbox import Bridge

if TYPE_CHECKING:
    from ...runtime.instance import Instance
    from ...runtime.metrics import Metrics
    from ...runtime.tokenizer import TextTokenizer

logger = logging.getLogger("teneral.http")

CALL = "teneral.call"  # the request's key for its Call

T = TypeVar("T")


@dataclass(slots=True)
class Call:
    """One HTTP request, from its arrival. `work` is there while the route's handler runs, for POST routes."""

    request_id: str
    arrived_s: float = field(default_factory=time.monotonic)
    work: Work | None = None

    def age_s(self) -> float:
        return time.monotonic() - self.arrived_s

    def limit(self, seconds: float) -> None:
        """Give the rest of the work so much time."""
        if self.work is not None:
            self.work.limit(seconds)


def call_of(request: web.BaseRequest) -> Call:
    call = request[CALL]
    assert isinstance(call, Call)
    return call


class Service:
    """The instance behind the routes, with the bounds in front of it. One per application; used on its event loop only."""

    def __init__(self, instance: Instance, limits: Limits, metrics: Metrics) -> None:
        self.instance = instance
        self.limits = limits
        self.metrics = metrics
        self.admission = Admission(limits, self._engine_queued)
        self.in_flight = InFlight(limits.max_in_flight)
        self.bridge = Bridge()

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

    def _engine_queued(self) -> int:
        future = self.instance.engine
        if not future.done() or future.exception() is not None:
            return 0
        return future.result().statistics().queued
