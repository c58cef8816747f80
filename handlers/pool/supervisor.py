"""The supervisor of one machine's pool: starts and ends instances as the policy says, within one budget of memory.

Everything runs on one event loop, so decisions are atomic; only measuring memory and handing over to a standby process
happen in threads. It knows no HTTP: the front asks it for an instance and gives it back.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from ...loader.errors import InsufficientMemoryError, TeneralError
from ...runtime.errors import CapacityError
from .admission import STANDBY_KEY, StartAdmission
from .deployment import Affinity, Deployment, FailingError, Lease, Server, Waiter
from .memory import Budget
from .metrics import PoolMetrics
from .policy import Idle, desired, max_starts, to_end
from .process import HUNG_S, Machine, ServerProcess, StartError
from .values import Pool
from .versions import ModelState

TICK_S = 0.25
MEASURE_S = 1.0
DEFAULT_DRAIN_S = 8.0
MAX_WAITING = 10_000  # requests without an instance, of all models
logger = logging.getLogger("teneral.pool")


class Supervisor:
    """`run` it in a task; `acquire` and `release` places; `close` it."""

    def __init__(
        self,
        pool: Pool,
        models: Mapping[str, ModelState],
        budget: Budget,
        metrics: PoolMetrics,
        machine: Machine,
    ) -> None:
        self.pool = pool
        self.models = dict(models)
        self.budget = budget
        self.metrics = metrics
        self.standby = machine.standby
        self.draining = False
        # Looks for the model's versions, after one was rolled back or promoted.
        self.look_again: Callable[[ModelState], asyncio.Task[None] | None] = lambda state: None
        self._machine = machine
        self._admission = StartAdmission(budget, metrics, self.deployments, self.wants, self._end)
        self._numbers = itertools.count(1)
        self._starts: set[asyncio.Task[None]] = set()
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._launched: dict[str, ServerProcess] = {}
        self._removed: list[ModelState] = []  # models whose instances have still something to do
        self._start_slots = asyncio.Semaphore(max_starts(machine.num_cores))
        self._loop = asyncio.get_running_loop()

    # what the front asks

    async def acquire(
        self, deployment: Deployment, affinities: Sequence[Affinity] = (), *, may_wait: bool = True
    ) -> Lease | None:
        """A place at an instance. Waits up to the model's `queue_timeout_s`, if it may; else None at once.

        Raises `CapacityError` after that, `FailingError` while the model cannot be started, and
        `InsufficientMemoryError` when it can never fit.
        """
        server = None if deployment.waiting else deployment.pick(affinities)
        if server is not None:
            deployment.request_began(self._now_s)
            self._used(server)
            self._scale(deployment)
            return Lease(server, "warm")
        if not may_wait:
            return None
        if self.draining:
            raise CapacityError("the pool is shutting down")
        if deployment.is_failing and self._now_s < deployment.retry_at_s:
            raise self._failing(deployment)
        if self.num_waiting >= MAX_WAITING:
            raise CapacityError(f"{MAX_WAITING} requests are waiting for instances, which is the limit")
        return await self._wait(deployment, affinities)

    def release(self, lease: Lease, *, is_error: bool = False, is_hung: bool = False) -> None:
        """The request is over. `is_error`: the instance was at fault; `is_hung`: it does nothing more, and is ended."""
        server, deployment = lease.server, lease.server.deployment
        server.served += not is_error
        deployment.answered(is_error=is_error)
        if is_hung:
            logger.warning("%s hangs, with %d requests in work, and is ended", server.key, server.in_work)
            self._end(server)
        if is_error and deployment.fails_too_often:
            self._roll_back(deployment)
        self.hand_back(lease)

    def hand_back(self, lease: Lease) -> None:
        """A place that is free again; by itself for one that was taken to have the instance there."""
        server, deployment = lease.server, lease.server.deployment
        server.in_work -= 1
        server.idle_since_s = self._now_s
        deployment.dispatch()
        deployment.request_ended(self._now_s)
        if server.in_work == 0:
            if server.closing or deployment.retired:
                self._end(server)
            self.budget.notify()
        self._scale(deployment)

    @property
    def num_waiting(self) -> int:
        return sum(len(deployment.waiting) for deployment in self.deployments())

    def deployments(self) -> Iterator[Deployment]:
        for state in (*self.models.values(), *self._removed):
            yield from state.deployments()

    @property
    def is_warm(self) -> bool:
        """True if every model has its `min_warm` instances, be it of the version that a new one is to replace."""
        return all(
            len(deployment.ready) >= deployment.scaled.min_warm
            for state in self.models.values()
            for deployment in state.serving()
        )

    def wants(self, deployment: Deployment) -> int:
        """Instances that it should have now."""
        state = self.models.get(deployment.model.name)
        if deployment.retired or self.draining or state is None or state.paused:
            return 0
        wanted = desired(deployment.scaled, deployment.demand, deployment.quiet(self._now_s))
        if state.asleep and not any(deployment.demand):
            return 0
        if self._gives_way(state, deployment):
            return min(wanted, len(deployment.ready))
        return max(wanted, 1) if deployment.pending else wanted

    def _gives_way(self, state: ModelState, deployment: Deployment) -> bool:
        """True if a new version that is to take its place waits for memory."""
        successors = [d for d in state.targets() if d.pending and d is not deployment]
        return any(self._admission.waits(key) for successor in successors for key in successor.starting)

    def sleep(self, state: ModelState) -> None:
        """End what is idle, and start nothing until a request comes or `wake`."""
        state.asleep = True
        for deployment in state.deployments():
            for server in deployment.ready:
                server.closing = True
                if server.in_work == 0:
                    self._end(server)

    def wake_for_shadow(self, deployment: Deployment) -> None:
        """Start an instance for copies of requests, if it has none and nothing must give way to it."""
        fits = self._admission.fits(deployment)
        may = not (deployment.servers or deployment.starting or deployment.retired or self.draining)
        if fits and may and self._now_s >= deployment.retry_at_s:
            self._begin(deployment)

    def remove(self, name: str) -> None:
        """Take a model out of the pool. Its instances end when what they do is done."""
        state = self.models.pop(name)
        state.end(CapacityError(f"the model {name!r} was taken out of the pool"))
        self._removed = [
            each for each in (*self._removed, state) if any(d.servers for d in each.deployments())
        ]
        for deployment in state.deployments():
            self._end_idle(deployment)

    # its life

    async def run(self) -> None:
        """Until cancelled."""
        measured_at_s = 0.0
        while True:
            self.tick()
            if self._now_s - measured_at_s >= MEASURE_S:
                await self._measure()
                measured_at_s = self._now_s
            await asyncio.sleep(TICK_S)

    def tick(self) -> None:
        """Act on the policy for all models."""
        if self.standby is not None and not self.standby.runs and not self.draining:
            self.standby.start()
        for deployment in list(self.deployments()):
            self._scale(deployment)

    async def close(self) -> None:
        """End all instances, each within its time to drain. Requests that wait are refused."""
        self.draining = True
        for task in self._starts:
            task.cancel()
        for deployment in list(self.deployments()):
            deployment.refuse_waiting(CapacityError("the pool is shutting down"))
            for server in list(deployment.servers.values()):
                self._end(server)
        await asyncio.gather(*self._starts, return_exceptions=True)
        await asyncio.gather(*self._ending.values(), return_exceptions=True)
        if self.standby is not None:
            await self.standby.end()
        await self._machine.close()

    def processes(self) -> dict[str, int]:
        """Process ids by key."""
        found = {key: process.pid for key, process in self._launched.items()}
        if self.standby is not None and self.standby.process is not None and self.standby.runs:
            found[STANDBY_KEY] = self.standby.process.pid
        return found

    # deciding

    def _roll_back(self, deployment: Deployment) -> None:
        state = self.models.get(deployment.model.name)
        reason = f"rolled back: {deployment.errors} of {deployment.answers} answers were errors"
        if state is not None and state.reject(deployment, reason):
            self.look_again(state)

    @property
    def _now_s(self) -> float:
        return self._loop.time()

    def _scale(self, deployment: Deployment) -> None:
        deployment.dispatch()
        if self.draining:
            return
        self._start_missing(deployment)
        self._end_idle(deployment)
        self._settle(deployment)

    def _settle(self, deployment: Deployment) -> None:
        """Old versions make way when the new one is ready."""
        state = self.models.get(deployment.model.name)
        if state is not None and state.settle():
            for old in list(state.deployments()):
                if old.retired:
                    self._end_idle(old)

    def _start_missing(self, deployment: Deployment) -> None:
        wanted = self.wants(deployment)
        present = len(deployment.starting) + len(deployment.ready)
        closing = len(deployment.servers) - len(deployment.ready)
        missing = min(wanted - present, deployment.model.max_instances - present - closing)
        if missing <= 0 or self._now_s < deployment.retry_at_s:
            return
        base = desired(dataclasses.replace(deployment.scaled, buffer=0), deployment.demand)
        must = max(base, int(deployment.pending)) - present
        for number in range(missing):
            # A spare instance, or one for a request that is only expected, is not worth another model's.
            if number >= must and not self._admission.fits(deployment):
                return
            self._begin(deployment)

    def _begin(self, deployment: Deployment) -> None:
        key = f"{deployment.name}#{next(self._numbers)}"
        start = deployment.starting[key] = asyncio.create_task(self._start(deployment, key))
        self._starts.add(start)
        start.add_done_callback(self._starts.discard)

    def _end_idle(self, deployment: Deployment) -> None:
        now_s = self._now_s
        idle = [server for server in deployment.ready if server.in_work == 0]
        if not idle:
            return
        if deployment.retired:
            keys = [server.key for server in idle]
        else:
            ages = [Idle(server.key, now_s - server.idle_since_s) for server in idle]
            keys = to_end(
                deployment.scaled,
                deployment.demand,
                ready=len(deployment.ready),
                idle=ages,
                quiet=deployment.quiet(now_s),
            )
        for key in keys:
            self._end(deployment.servers[key])

    def _used(self, server: Server) -> None:
        server.clock = self._admission.clock

    # starting

    async def _start(self, deployment: Deployment, key: str) -> None:
        """One start, from waiting for memory to the first request. Never raises but for cancellation."""
        process: ServerProcess | None = None
        began_s = self._now_s
        try:
            if not await self._admission.reserve(deployment, key):
                return
            await deployment.saved()
            async with self._start_slots:
                began_s = self._now_s
                process = await self._machine.start(deployment.config)
                self._launched[key] = process
                # A version that takes another's place shows that all of it can be read before it does.
                path = "/readyz?when=exact" if deployment.pending else deployment.model.ready_path
                await process.wait_ready(self._machine.session, path)
            self._ready(deployment, key, process, self._now_s - began_s)
            process = None
        except InsufficientMemoryError as error:
            self._give_way_to_proven(deployment)
            deployment.reason = error.message
            deployment.retry_at_s = self._now_s + 1.0
            deployment.refuse_waiting(error)
        except TeneralError as error:
            self._start_failed(deployment, error, "cold" if process is None else process.kind)
        finally:
            deployment.starting.pop(key, None)
            if process is not None:
                ending = self._ending[key] = asyncio.create_task(self._give_up(key, process, deployment))
                self._admission.ends(key)
                await asyncio.shield(ending)
            elif key not in deployment.servers:
                self.budget.release(key)

    def _ready(self, deployment: Deployment, key: str, process: ServerProcess, start_s: float) -> None:
        if process.ended.is_set():
            raise StartError("the process ended when it was ready")
        self.metrics.started(deployment.model.name, process.kind, "ok", start_s)
        deployment.mean_start_s += 0.3 * (start_s - deployment.mean_start_s)
        server = Server(key, deployment, process, start_s, self._now_s, self._admission.clock)
        deployment.starting.pop(key, None)
        deployment.servers[key] = server
        deployment.becomes_ready()
        process.when_ended(lambda: self._died(server))
        process.when_ended(asyncio.create_task(self._watch(server)).cancel)
        logger.info("%s is ready after %.2f s (%s)", key, start_s, process.kind)
        self._scale(deployment)

    def _start_failed(self, deployment: Deployment, error: TeneralError, kind: str) -> None:
        self.metrics.started(deployment.model.name, kind, "failed", 0.0)
        deployment.start_failed(error.message, self._now_s)
        self._give_way_to_proven(deployment)
        logger.warning(
            "%s did not start (%d in a row): %s", deployment.name, deployment.failures, error.message
        )
        if deployment.is_failing:
            deployment.refuse_waiting(self._failing(deployment))

    def _give_way_to_proven(self, deployment: Deployment) -> None:
        if (state := self.models.get(deployment.model.name)) is not None:
            state.start_failed(deployment)

    def _failing(self, deployment: Deployment) -> FailingError:
        return FailingError(
            f"the model {deployment.name!r} cannot be started: {deployment.reason}",
            retry_after_s=max(1.0, deployment.retry_at_s - self._now_s),
        )

    async def _wait(self, deployment: Deployment, affinities: Sequence[Affinity]) -> Lease:
        self.metrics.cold_request(deployment.model.name)
        if (state := self.models.get(deployment.model.name)) is not None:
            state.asleep = False
        waiter = Waiter(self._loop.create_future(), affinities)
        deployment.request_began(self._now_s)
        deployment.waiting.append(waiter)
        began_s = self._now_s
        had = {server.key for server in deployment.servers.values()}
        self._scale(deployment)
        try:
            async with asyncio.timeout(deployment.model.queue_timeout_s):
                server = await waiter.future
        except TimeoutError:
            if waiter.future.cancelled():
                raise CapacityError(
                    f"no instance of {deployment.name!r} was free within {deployment.model.queue_timeout_s:g} s"
                    + (f": {deployment.reason}" if deployment.reason else ""),
                    retry_after_s=deployment.mean_start_s,
                ) from None
            server = waiter.future.result()  # it came in the last moment, and its place is taken
        except asyncio.CancelledError:
            if waiter.future.done() and not waiter.future.cancelled() and waiter.future.exception() is None:
                self.hand_back(Lease(waiter.future.result(), ""))
            raise
        finally:
            with suppress(ValueError):
                deployment.waiting.remove(waiter)
            deployment.request_ended(self._now_s)
        self._used(server)
        self.metrics.waited(self._now_s - began_s)
        return Lease(server, "warm" if server.key in had else server.process.kind)

    # ending

    def _end(self, server: Server) -> None:
        """Begin to end it. Idempotent."""
        server.closing = True
        if server.key in self._ending or server.process.ended.is_set():
            return
        server.deployment.servers.pop(server.key, None)
        self._admission.ends(server.key)
        task = asyncio.create_task(self._give_up(server.key, server.process, server.deployment))
        self._ending[server.key] = task
        server.deployment.ends(task)

    async def _give_up(self, key: str, process: ServerProcess, deployment: Deployment) -> None:
        drain_s = deployment.config.drain_timeout_s
        try:
            await process.end(DEFAULT_DRAIN_S if drain_s is None else drain_s)
        finally:
            self._forget(key)

    def _forget(self, key: str) -> None:
        self._ending.pop(key, None)
        self._admission.ended(key)
        self._launched.pop(key, None)
        self.budget.release(key)

    async def _watch(self, server: Server) -> None:
        """Kill it when it hangs: it can end nothing by itself, and requests in work there are asked again elsewhere."""
        await server.process.wait_hung(self._machine.session)
        logger.warning(
            "%s hangs, with %d requests in work, and is killed: it answered no probe for %g s",
            server.key,
            server.in_work,
            HUNG_S,
        )
        server.process.signal(signal.SIGKILL)

    def _died(self, server: Server) -> None:
        """Its process has ended, also where that was wanted."""
        deployment = server.deployment
        if deployment.servers.pop(server.key, None) is None:
            return
        self._forget(server.key)
        logger.warning("%s has ended, with %d requests in work", server.key, server.in_work)
        self.metrics.died(deployment.model.name)
        if server.served == 0:
            deployment.start_failed("the process ended before it answered anything", self._now_s)
        self._scale(deployment)

    async def _measure(self) -> None:
        for key, size in (await self._machine.measure(self.processes())).items():
            self.budget.measure(key, size)
