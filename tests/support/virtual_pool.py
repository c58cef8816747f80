"""A pool in virtual time: the real supervisor, versions, admission, attempts and reloads. Only the clock, the processes
and the store are this module's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import selectors
import signal
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from teneral.handlers.pool.attempts import LostError, Verdict, ask_instances
from teneral.handlers.pool.deployment import Deployment, Lease
from teneral.handlers.pool.front import UPSTREAM_GRACE_S
from teneral.handlers.pool.memory import Budget
from teneral.handlers.pool.metrics import PoolMetrics
from teneral.handlers.pool.process import READY_POLL_S, Machine, ServerProcess
from teneral.handlers.pool.reload import Reloader
from teneral.handlers.pool.repository import Release, choose_releases
from teneral.handlers.pool.routing import Chooser
from teneral.handlers.pool.supervisor import Supervisor
from teneral.handlers.pool.values import Model, Pool, PoolNode
from teneral.handlers.pool.versions import ModelState
from teneral.loader.errors import FormatError, NotFoundError, TeneralError, UnavailableError
from teneral.runtime.config import ServeConfig

# How a version's instances fare.
GOOD, SLOW, DAMAGED, CRASHES, NEVER, UNREADABLE = (
    "good",
    "slow",
    "damaged",
    "crashes",
    "never ready",
    "unreadable",
)
START_S = {GOOD: 3.0, SLOW: 45.0, DAMAGED: 1.0, CRASHES: 0.5, NEVER: 1e9}
END_S = 0.1  # from SIGTERM to the end
SEEN_S = 0.004  # from the end of its connections, when a process ends, to its own
WEIGHT_BYTES = 100 << 20


class _Selector(selectors.SelectSelector):
    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0)
        if not found:
            assert timeout is not None, "nothing will ever happen again"
            self.loop.now_s += max(0.0, timeout)
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its clock moves when there is nothing to do; what threads should do is done at once."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except TeneralError as error:
            future.set_exception(error)
        return future


@dataclasses.dataclass
class StoredVersion:
    """One version in the store."""

    revision: int
    health: str
    changed_s: float


class VirtualStore:
    """The versions of the model m. The model n has none, and always starts."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.versions: dict[int, StoredVersion] = {1: StoredVersion(0, GOOD, now_s())}
        self.away_until_s = 0.0
        self._now_s = now_s

    @property
    def is_away(self) -> bool:
        return self._now_s() < self.away_until_s

    def releases(
        self, model: Model, *, without: Mapping[tuple[int | None, str], str] = MappingProxyType({})
    ) -> tuple[tuple[Release, ...], str]:
        if self.is_away:
            raise UnavailableError("the store does not answer")
        if not model.is_versioned:
            return (Release(None, model.source, "0", WEIGHT_BYTES),), ""
        return choose_releases(model, set(self.versions), self._open, without=without)

    def standby_base(self, node: PoolNode) -> Release | None:
        return None

    def health(self, address: str) -> str:
        number = address.rpartition("/")[2]
        if not number.isdigit():
            return GOOD
        entry = self.versions.get(int(number))
        is_lost = entry is None or self.is_away or entry.health == UNREADABLE
        return DAMAGED if entry is None or is_lost else entry.health

    def _open(self, number: int) -> Release:
        entry = self.versions.get(number)
        if entry is None:
            raise NotFoundError("it is gone")
        if entry.health == UNREADABLE:
            raise FormatError("the manifest cannot be read")
        return Release(number, f"/m/{number}", str(entry.revision), WEIGHT_BYTES)


class VirtualProcess(ServerProcess):
    """An instance: what it answers, and when, is decided here; how it is asked and ended is the product's."""

    def __init__(self, pid: int, config: ServeConfig, health: str, loop: VirtualLoop) -> None:
        self.pid = self.port = pid
        self.url = f"http://127.0.0.1:{pid}"
        self.kind = "cold"
        self.model = str(config.model)
        self.health = health
        self.loop = loop
        self.began_s = loop.now_s
        self.has_crashed = False  # its connections have ended, and it will be seen to have ended
        self.ended = asyncio.Event()
        self.hung_s: float | None = None  # since when it does nothing
        self.latency_s = 0.001
        self.progress: dict[str, float] = {}  # of its load
        self.was_ready = False
        self.was_asked_to_end = False
        self.asks: dict[asyncio.Future[None], float] = {}  # requests in work, and when they came
        self.wrongly_killed = False
        self._callbacks: list[Callable[[], object]] = []
        if health == CRASHES:
            loop.call_later(START_S[CRASHES], self.crash)

    @property
    def is_ready(self) -> bool:
        return self.loop.now_s - self.began_s >= START_S[self.health] and self.health in (GOOD, SLOW)

    def when_ended(self, callback: Callable[[], object]) -> None:
        if self.ended.is_set():
            callback()
        else:
            self._callbacks.append(callback)

    def signal(self, number: int) -> None:
        if number == signal.SIGKILL:
            self.wrongly_killed |= self.hung_s is None and not self.was_asked_to_end
            self.crash()
        elif self.hung_s is None:
            self.was_asked_to_end = True
            self.loop.call_later(END_S, self.crash)

    def hang(self) -> None:
        self.hung_s = self.loop.now_s if self.hung_s is None else self.hung_s

    def crash(self) -> None:
        """End, with all that it does: first its connections, then the process."""
        if self.has_crashed:
            return
        self.has_crashed = True
        for future in list(self.asks):
            if not future.done():
                future.set_exception(LostError())
        self.loop.call_later(SEEN_S, self._end)

    def _end(self) -> None:
        self.ended.set()
        for callback in self._callbacks:
            callback()

    async def get(self, session: Any, path: str, *, limit_s: float) -> tuple[int, bytes]:
        end_s = self.loop.now_s + limit_s
        hold_s = self.loop.now_s + READY_POLL_S  # as wait_s asks
        await asyncio.sleep(self.latency_s)
        while True:
            if self.has_crashed:
                raise ConnectionError("it has ended")
            if self.loop.now_s >= end_s:
                raise TimeoutError
            if self.hung_s is None:
                if path == "/livez":
                    return 200, b"{}"
                if self.is_ready:
                    self.was_ready = True
                    return 200, b"{}"
                if self.health == DAMAGED and self.loop.now_s - self.began_s >= START_S[DAMAGED]:
                    return 503, json.dumps({"state": "failed", "error": "a part is damaged"}).encode()
                if self.loop.now_s >= hold_s:
                    return 503, json.dumps({"state": "loading", "progress": self.progress}).encode()
            await asyncio.sleep(min(0.5, max(1e-3, end_s - self.loop.now_s)))

    async def answer(self, work_s: float) -> None:
        """One request. Raises `LostError` when it ends before."""
        if self.has_crashed:
            raise LostError
        future: asyncio.Future[None] = self.loop.create_future()
        self.asks[future] = self.loop.now_s

        def complete() -> None:
            if self.hung_s is None and not future.done():
                future.set_result(None)

        self.loop.call_later(work_s, complete)
        try:
            await future
        finally:
            del self.asks[future]


class VirtualMachine(Machine):
    def __init__(self, store: VirtualStore, loop: VirtualLoop) -> None:
        super().__init__(None, {})
        self.processes: list[VirtualProcess] = []  # all that ever ran
        self._store = store
        self._loop = loop
        self._pids = itertools.count(1)

    @property
    def session(self) -> Any:
        return None

    @property
    def running(self) -> list[VirtualProcess]:
        return [process for process in self.processes if not process.ended.is_set()]

    @property
    def num_cores(self) -> int:
        return 1

    async def start(self, config: ServeConfig) -> ServerProcess:
        health = self._store.health(str(config.model))
        process = VirtualProcess(next(self._pids), config, health, self._loop)
        self.processes.append(process)
        return process

    async def measure(self, processes: Mapping[str, int]) -> dict[str, int]:
        return dict.fromkeys(processes, WEIGHT_BYTES)

    async def close(self) -> None:
        return


@dataclasses.dataclass(eq=False)
class Request:
    """One request of a client, until it is over and after."""

    began_s: float
    version: int | None
    model: str
    task: asyncio.Task[None] | None = None
    ended_s: float = 0.0
    failure: Exception | None = None
    answered_by: str = ""
    losses: int = 0
    gave_up: bool = False

    @property
    def is_over(self) -> bool:
        return self.task is not None and self.task.done()


class VirtualPool:
    """`run` lets virtual time pass; `close` ends it."""

    def __init__(self, models: Sequence[Model], *, memory_bytes: int) -> None:
        self.loop = VirtualLoop()
        self.store = VirtualStore(self.loop.time)
        self.machine = VirtualMachine(self.store, self.loop)
        self.budget = Budget(memory_bytes)
        self.requests: list[Request] = []
        self.file = _pool(models)
        self.mistake: TeneralError | None = None  # in the file
        self._chooser = Chooser()
        self.call(self._begin())

    async def _begin(self) -> None:
        states = {name: ModelState(model) for name, model in self.file.models.items()}
        self.supervisor = Supervisor(self.file, states, self.budget, PoolMetrics(), self.machine)
        self.reloader = Reloader(
            self.supervisor,
            self.store,
            read=self._read,
            configure=lambda pool, model, release: ServeConfig(
                model=release.address, platform="http", kv_bytes=1 << 20
            ),
        )
        await self.reloader.refresh_all()
        self._run = asyncio.create_task(self.supervisor.run())

    def _read(self) -> Pool:
        if self.mistake is not None:
            raise self.mistake
        return self.file

    def call(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def run(self, seconds: float) -> None:
        self.call(asyncio.sleep(seconds))
        assert not self._run.done(), self._run.exception()

    def act(self, action: Callable[[], object]) -> None:
        """Call it on the loop, and let what it causes begin."""
        self.loop.call_soon(action)
        self.run(0.01)

    def reload(self, models: Sequence[Model] | None = None) -> None:
        if models is not None:
            self.file = _pool(models)
        self.call(self.reloader.reload())

    def deployments(self) -> list[Deployment]:
        return list(self.supervisor.deployments())

    def ask(self, model: str, version: int | None, work_s: float, patience_s: float) -> Request:
        """Begin a request whose answer takes `work_s` at a good instance. Its client leaves after `patience_s`."""
        request = Request(self.loop.now_s, version, model)

        async def client() -> None:
            try:
                async with asyncio.timeout(patience_s):
                    await self._front(request, work_s)
            except TimeoutError:
                request.gave_up = True
            except (TeneralError, LostError, LookupError) as error:
                request.failure = error
            request.ended_s = self.loop.now_s

        request.task = self.loop.create_task(client())
        self.requests.append(request)
        self.run(1e-3)
        return request

    async def _front(self, request: Request, work_s: float) -> None:
        """Route one request to an instance, with the decisions of `Front` and without HTTP."""
        state = self.supervisor.models.get(request.model)
        deployment = None if state is None else state.choose(request.version, None, self._chooser)
        if deployment is None:
            raise LookupError("no such model, or nothing of it is served")
        model = deployment.model
        limit_s = 2 * model.queue_timeout_s + model.request_timeout_s + UPSTREAM_GRACE_S

        async def ask(lease: Lease, verdict: Verdict) -> None:
            assert isinstance(lease.server.process, VirtualProcess)
            began_s = self.loop.now_s
            try:
                await lease.server.process.answer(work_s)
            except LostError:
                verdict.is_error = True
                request.losses += 1
                raise
            except asyncio.CancelledError:
                is_late = limit.expired() and self.loop.now_s - began_s > model.request_timeout_s
                verdict.is_error = verdict.is_hung = is_late
                raise
            request.answered_by = lease.server.deployment.name

        try:
            async with asyncio.timeout(limit_s) as limit:
                await ask_instances(self.supervisor, self._chooser, deployment, request.version, ask)
        except TimeoutError as error:
            raise UnavailableError("the instance did not answer in time") from error

    def close(self) -> None:
        """End it. Raises `AssertionError` where a task is left."""
        self.call(self._close())
        self.call(asyncio.sleep(0))
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        self.call(asyncio.sleep(0))
        self.loop.close()
        assert not left, "a task is left"

    async def _close(self) -> None:
        self._run.cancel()
        await asyncio.gather(self._run, return_exceptions=True)
        await self.supervisor.close()
        tasks = [request.task for request in self.requests if request.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _pool(models: Sequence[Model]) -> Pool:
    return Pool("pool.toml", {model.name: model for model in models})
