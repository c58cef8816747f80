"""The reloads of a running pool: its file, its models' versions, and the base of its standby processes.

What cannot be used changes nothing and is logged. Knows no signals and no HTTP. Used on the event loop; files and
stores are read in threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from ...loader.errors import TeneralError
from ...runtime.config import ServeConfig
from .admission import STANDBY_KEY
from .process import standby_bytes
from .repository import Release, RolledBackError
from .supervisor import Supervisor
from .values import Model, Pool, PoolNode
from .versions import ModelState

logger = logging.getLogger("teneral.pool")


class Releases(Protocol):
    """The store of the models' versions; `Repository`, or a test's. Both functions block and raise `TeneralError`."""

    def releases(
        self, model: Model, *, without: Mapping[tuple[int | None, str], str] = ...
    ) -> tuple[tuple[Release, ...], str]: ...

    def standby_base(self, node: PoolNode) -> Release | None: ...


class Reloader:
    """One per supervisor."""

    def __init__(
        self,
        supervisor: Supervisor,
        repository: Releases,
        *,
        read: Callable[[], Pool],
        configure: Callable[[Pool, Model, Release], ServeConfig],
        base: Release | None = None,
    ) -> None:
        """`read` reads the pool's file and blocks; `configure` makes the settings of a release's instances; `base` is
        that of the standby processes. Both functions raise `TeneralError`.
        """
        self._supervisor = supervisor
        self._repository = repository
        self._read = read
        self._configure = configure
        self._base = base
        self._node = supervisor.pool.node  # as it is until the end
        self._lock = asyncio.Lock()
        self._mistake = ""  # of the file, as it was read last
        self._tasks: set[asyncio.Task[None]] = set()
        supervisor.look_again = self._look_again

    async def refresh_all(self) -> None:
        """Look for the versions of all models. Never raises."""
        states = self._supervisor.models.values()
        await asyncio.gather(*(self.refresh(state, state.file_model) for state in states))

    async def refresh(self, state: ModelState, model: Model) -> None:
        """Look for the model's versions, and serve them. What cannot be read changes nothing."""
        known_trouble = state.trouble
        try:
            releases, state.trouble = await asyncio.to_thread(
                self._repository.releases, model, without=state.rejections
            )
            pool = self._supervisor.pool
            state.update(model, [(release, self._configure(pool, model, release)) for release in releases])
            if state.trouble and state.trouble != known_trouble:
                logger.warning("%s: %s", model.name, state.trouble)
        except RolledBackError:
            state.forgive()
        except TeneralError as error:
            state.trouble = error.message
            if state.trouble != known_trouble:
                logger.warning("%s: %s", model.name, error)

    async def reload(self, *, is_asked: bool = False) -> None:
        """Read the file and the repository again. Never raises. Says so where something has changed, or it `is_asked`.
        What was wrong before and still is, is logged once.
        """
        async with self._lock:
            supervisor = self._supervisor
            try:
                pool = await asyncio.to_thread(self._read)
                if is_asked or self._mistake or pool != supervisor.pool:
                    logger.info("%s was read again: %d models", pool.file, len(pool.models))
                self._mistake = ""
            except TeneralError as error:
                if is_asked or self._mistake != str(error):
                    logger.warning("the pool goes on with the file that it read before: %s", error)
                self._mistake = str(error)
                pool = supervisor.pool
            if pool.node != supervisor.pool.node:
                logger.warning("[node] is read at the start only: restart the pool to change it")
            supervisor.pool = pool
            await self._refresh_base()
            for name in [name for name in supervisor.models if name not in pool.models]:
                supervisor.remove(name)
            for name, model in pool.models.items():
                state = supervisor.models.get(name) or ModelState(model)
                await self.refresh(state, model)
                supervisor.models[name] = state
            supervisor.tick()

    async def watch(self, every_s: float) -> None:
        """Reload every few seconds, until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            await self.reload()

    def _look_again(self, state: ModelState) -> asyncio.Task[None]:
        """Look for the versions of a model of which one was rolled back or promoted."""

        async def refresh() -> None:
            async with self._lock:
                if self._supervisor.models.get(state.model.name) is not state:
                    return  # the model was taken out of the pool meanwhile
                await self.refresh(state, state.file_model)
                self._supervisor.tick()

        task = asyncio.create_task(refresh())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _refresh_base(self) -> None:
        """Have the standby processes hold what lies at their base's address now. Never raises."""
        try:
            found = await asyncio.to_thread(self._repository.standby_base, self._node)
        except TeneralError as error:
            logger.warning("the standby processes keep the base that they have: %s", error)
            return
        if found is None or self._base is None or found.revision == self._base.revision:
            return
        self._base = found
        supervisor = self._supervisor
        supervisor.budget.keep(STANDBY_KEY, standby_bytes(self._node, found))
        if supervisor.standby is not None:
            supervisor.standby.reload()
