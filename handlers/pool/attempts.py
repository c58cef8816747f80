"""The attempts of one request: at which instances it is asked, and when again elsewhere, or of another version.

Knows no HTTP: the caller asks the instance. Used on the event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from ...loader.errors import InsufficientMemoryError
from ...runtime.errors import CapacityError
from .deployment import Affinity, Deployment, FailingError, Lease
from .routing import Chooser
from .supervisor import Supervisor

MAX_ASKED = 2  # instances that a request is sent to
# A process that ends closes its connections before it is seen to have ended, and would be asked again meanwhile. One
# that has not ended after this time has lost a connection only.
SEEN_TO_END_S = 1.0
logger = logging.getLogger("teneral.pool")
T = TypeVar("T")


class LostError(Exception):
    """The instance ended before the first byte of its answer."""


@dataclass(slots=True)
class Verdict:
    """A request's judgement of its instance."""

    is_error: bool = False  # the instance was at fault
    is_late: bool = False  # the request's time ran out
    is_hung: bool = False  # it does nothing more
    was_given_up: bool = False  # by its client: that says nothing


async def ask_instances(
    supervisor: Supervisor,
    chooser: Chooser,
    deployment: Deployment,
    version: int | None,
    ask: Callable[[Lease, Verdict], Awaitable[T]],
    *,
    affinities: Sequence[Affinity] = (),
    is_repeatable: bool = True,
) -> T:
    """The answer of an instance; a request that is repeatable is asked again once where the first one is lost. One that
    names no version is answered by another one where `deployment` cannot be started.

    `ask` fills in the verdict. Raises what `Supervisor.acquire` and `ask` raise; `LostError` when the
    last instance is lost.
    """
    lost: Lease | None = None
    for attempt in range(MAX_ASKED):
        if lost is not None:
            await _seen_to_end(lost)
            deployment = _replacement(supervisor, chooser, deployment, version)
        lease = await _place(supervisor, deployment, version, affinities)
        verdict = Verdict()
        try:
            return await ask(lease, verdict)
        except LostError:
            if attempt == MAX_ASKED - 1 or not is_repeatable:
                raise
            lost = lease
            logger.warning("%s ended before it answered, asking again", lease.server.key)
        except asyncio.CancelledError:
            verdict.was_given_up = not verdict.is_hung
            raise
        finally:
            if verdict.was_given_up:
                supervisor.hand_back(lease)
            else:
                supervisor.release(lease, is_error=verdict.is_error, is_hung=verdict.is_hung)
    raise AssertionError("every attempt returns or raises")


async def _seen_to_end(lost: Lease) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(SEEN_TO_END_S):
            await lost.server.process.ended.wait()


async def _place(
    supervisor: Supervisor, deployment: Deployment, version: int | None, affinities: Sequence[Affinity]
) -> Lease:
    """A place at an instance, of another version where this one has no instance and gets none."""
    try:
        lease = await supervisor.acquire(deployment, affinities)
    except (FailingError, CapacityError, InsufficientMemoryError) as error:
        state = supervisor.models.get(deployment.model.name)
        other = (
            None if state is None or version is not None or deployment.ready else state.stand_in(deployment)
        )
        if other is None:
            raise
        logger.warning("%s takes a request that %s cannot: %s", other.name, deployment.name, error.message)
        lease = await supervisor.acquire(other, affinities)
    assert lease is not None
    return lease


def _replacement(
    supervisor: Supervisor, chooser: Chooser, deployment: Deployment, version: int | None
) -> Deployment:
    """The deployment that has replaced this one, if any."""
    state = supervisor.models.get(deployment.model.name)
    if not deployment.retired or state is None:
        return deployment
    return state.choose(version, None, chooser) or deployment
