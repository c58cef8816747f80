"""How often an instance is asked for one line, and whose fault it is when it does not answer.

Who is told that there is too much to do comes back, later and later. Where an answer fails on the instance's side, the
line is asked for again without other such lines beside it: one that breaks the model breaks the step that others share.
What then still fails is the line's own fault, if the model answers a simple question at that moment; if not, the
instance is broken, and no line may be blamed for that. It does not know what is asked.
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
SUSPECT_PAUSE_S = 0.05  # in which an instance that has failed says so
MAX_TRIES_ALONE = 20  # of what finds no room although no other request of the job wants any
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 5.0

T = TypeVar("T")


class LineFault(Exception):
    """A line has no answer, for a reason of its own: `error`."""

    def __init__(self, error: TeneralError) -> None:
        super().__init__(error.message)
        self.error = error


class Patience:
    """Lives on one event loop. `probe` asks the model something that it can answer."""

    def __init__(self, host: Instance, probe: Callable[[], Awaitable[object]]) -> None:
        self._host = host
        self._probe = probe
        self._suspects = asyncio.Lock()
        self._num_asking = 0

    async def until_answered(self, ask: Callable[[], Awaitable[T]]) -> T:
        """What `ask` gives. Raises `LineFault`, or what keeps this instance from answering anybody: `DrainingError`,
        its failure, or `ModelBrokenError`.
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
        """Asks until there is room. `CapacityError` is a line's fault only where nobody else of this job is there to
        wait for, again and again: then it asks for more than there ever is.
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
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - not all of them at once
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
        finally:
            self._num_asking -= 1

    def _is_refused(self, error: ModelError) -> bool:
        """Whether this kind of model cannot do it, however often it is asked."""
        parts: tuple[Future[Any], ...] = (self._host.engine, self._host.embedder)
        return error is not self._host.failure and any(
            part.done() and part.exception() is error for part in parts
        )

    def _check_host(self, error: TeneralError) -> None:
        """Raises where the instance itself says that it cannot answer."""
        if self._host.failure is not None:
            raise self._host.failure
        if isinstance(error, WEIGHTS_LOST):
            raise error
        if self._host.state is State.DRAINING:
            raise DrainingError("the instance is shutting down")

    async def _check_model(self, error: TeneralError) -> None:
        """Raises `ModelBrokenError` when the model does not answer the simple question either."""
        try:
            await self._once(self._probe)
        except DrainingError:
            raise
        except (LineFault, TeneralError) as failure:
            self._check_host(error)
            raise ModelBrokenError(
                f"the model answers nothing any more: {error.message}",
                hint="What was finished is kept: run the job again, here or on another machine.",
            ) from failure
