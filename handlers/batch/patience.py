"""Retries of a line, and the attribution of errors to the line or the instance.

A line refused by an overloaded instance is retried with growing delays. After an error of the
instance, the line is retried without other failed lines in parallel: a line that breaks the model
breaks the step that others share. If it still fails, the error is the line's own if the model
answers a simple request at that moment; otherwise the instance is broken, and no line is at fault.
This module does not know the requests.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from ...loader.errors import TeneralError
from ...runtime.errors import WEIGHTS_LOST, CapacityError, DrainingError, ModelError, RequestError
from ...runtime.state import State
from .errors import ModelBrokenError

if TYPE_CHECKING:
    from ...runtime.instance import Instance

MAX_TRIES_AS_SUSPECT = 2
# The time in which a failed instance reports it.
SUSPECT_PAUSE_S = 0.05
# Of a line that finds no capacity although no other request of the job uses any.
MAX_TRIES_ALONE = 20
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 5.0

T = TypeVar("T")


class LineFault(Exception):
    """A line's own error: `error`."""

    def __init__(self, error: TeneralError) -> None:
        super().__init__(error.message)
        self.error = error


class Patience:
    """The retry policy of one job. Lives on one event loop. `probe` sends a request that the model
    can always answer.
    """

    def __init__(self, host: Instance, probe: Callable[[], Awaitable[object]]) -> None:
        self._host = host
        self._probe = probe
        self._suspects = asyncio.Lock()
        self._num_asking = 0

    async def until_answered(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Call `ask` until it has a result.

        Raises `LineFault`, or the error that keeps this instance from answering any line:
        `DrainingError`, its failure, or `ModelBrokenError`.
        """
        try:
            return await self._once(ask)
        except (LineFault, DrainingError):
            raise
        except TeneralError as error:
            last = error
        async with self._suspects:
            for _ in range(MAX_TRIES_AS_SUSPECT):
                await asyncio.sleep(SUSPECT_PAUSE_S)
                self._check_host(last)
                try:
                    return await self._once(ask)
                except (LineFault, DrainingError):
                    raise
                except TeneralError as error:
                    last = error
            self._check_host(last)
            await self._check_model(last)
        raise LineFault(last)

    async def _once(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Retry until there is capacity.

        `CapacityError` is the line's own error only if it repeats while no other request of this
        job uses any capacity: the line then needs more than there is.
        """
        pause_s, num_alone = FIRST_PAUSE_S, 0
        self._num_asking += 1
        try:
            while True:
                try:
                    return await ask()
                except CapacityError as error:
                    num_alone += self._num_asking == 1
                    if num_alone >= MAX_TRIES_ALONE:
                        raise LineFault(error) from error
                except RequestError as error:
                    raise LineFault(error) from error
                except ModelError as error:
                    if not self._is_refused(error):
                        raise
                    raise LineFault(RequestError(error.message, hint=error.hint)) from error
                # jittered, to not retry all at once
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
        finally:
            self._num_asking -= 1

    def _is_refused(self, error: ModelError) -> bool:
        """Whether this kind of model does not support it, however often it is retried."""
        parts: tuple[Future[Any], ...] = (self._host.engine, self._host.embedder)
        return error is not self._host.failure and any(
            part.done() and part.exception() is error for part in parts
        )

    def _check_host(self, error: TeneralError) -> None:
        """Raise if the instance itself reports that it cannot answer."""
        if self._host.failure is not None:
            raise self._host.failure
        if isinstance(error, WEIGHTS_LOST):
            raise error
        if self._host.state is State.DRAINING:
            raise DrainingError("the instance is shutting down")

    async def _check_model(self, error: TeneralError) -> None:
        """Raise `ModelBrokenError` if the model does not answer the simple request either."""
        try:
            await self._once(self._probe)
        except DrainingError:
            raise
        except (LineFault, TeneralError) as failure:
            self._check_host(error)
            raise ModelBrokenError(
                f"the model has stopped answering: {error.message}",
                hint="Finished parts are kept: run the job again, here or on another machine.",
            ) from failure
