"""One served version of a model: its instances, its queue, and its record of starts and failures.

Holds state and counts; the supervisor decides. Used on the event loop only.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...loader.errors import TeneralError
from ...runtime.config import ServeConfig
from ..http.keys import ApiKeys, parse_keys
from .policy import Candidate, Demand, IdleGaps, InstanceLoad, Quiet, Window, route
from .process import DEFAULT_KV_BYTES, OVERHEAD_BYTES, ServerProcess
from .repository import Release
from .values import DeviceShare, Model

# The longest that a start waits for the snapshot of an instance that ends; an idle one has saved it after 0.2 s.
SAVE_WAIT_S = 5.0
MAX_AFFINITIES = 20_000  # sessions and beginnings of prompts whose instance is remembered
FAILING_AFTER = 3  # failures in a row: then requests are refused until the next start succeeds
MAX_RETRY_S = 300.0
ROLLBACK_MIN_ANSWERS = 20
ROLLBACK_SHARE = 0.05  # of answers that are errors
Affinity = str | bytes


@dataclass(eq=False, slots=True)
class Server:
    """A ready instance. Times are of the event loop's clock."""

    key: str
    deployment: Deployment
    process: ServerProcess
    start_s: float  # time that its start took
    idle_since_s: float
    clock: float  # of the greedy-dual cache when it was last used
    in_work: int = 0
    served: int = 0
    closing: bool = False  # gets no more requests, and ends when it has none

    def candidate(self, memory_bytes: int) -> Candidate:
        """The deployment's weight in an eviction. `memory_bytes` is what its end would free."""
        return Candidate(
            self.key,
            frequency=float(self.served),
            return_s=self.deployment.mean_start_s,
            memory_bytes=memory_bytes,
            priority=self.deployment.model.priority,
            clock=self.clock,
        )


@dataclass(eq=False, slots=True)
class Waiter:
    """A request without an instance."""

    future: asyncio.Future[Server]
    affinities: Sequence[Affinity]


class FailingError(TeneralError):
    """The model's instances end as soon as they are started. `retry_after_s` is until the next attempt."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(eq=False, slots=True)
class Lease:
    """A request's place at an instance. `start` says what it waited for: warm, standby or cold."""

    server: Server
    start: str


@dataclass(eq=False)
class Deployment:
    """`scaled` is the model with the numbers of instances that apply to this version."""

    model: Model
    release: Release
    config: ServeConfig
    is_target: bool = True  # requests that name no version may come here
    # Gets no requests without a version until its first instance is ready, and is started for that.
    pending: bool = False
    was_ready: bool = False  # an instance of it was, once
    retired: bool = False  # gets no more requests
    starting: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    servers: dict[str, Server] = field(default_factory=dict)
    # Of instances; done when a process has ended.
    ending: set[asyncio.Task[None]] = field(default_factory=set)
    waiting: deque[Waiter] = field(default_factory=deque)
    failures: int = 0  # in a row
    retry_at_s: float = 0.0
    reason: str = ""  # of the last failure
    mean_start_s: float = 1.0
    answers: int = 0
    errors: int = 0
    affinity: OrderedDict[Affinity, str] = field(default_factory=OrderedDict)
    gaps: IdleGaps = field(default_factory=IdleGaps)
    # When its last request ended; None while it has one, or before the first.
    quiet_since_s: float | None = None
    window: Window | None = None  # when the next one is expected, by the gaps until then

    def __post_init__(self) -> None:
        # Those of a file are the instance's to check: it reads them when it starts.
        key = self.config.api_key
        self.keys = None if key is None or key.startswith("@") else ApiKeys(parse_keys(key))

    @property
    def name(self) -> str:
        """The name by which clients ask for it: `model`, or `model@version`."""
        version = self.release.version
        return self.model.name if version is None else f"{self.model.name}@{version}"

    @property
    def scaled(self) -> Model:
        if self.is_target:
            return self.model
        return dataclasses.replace(self.model, min_warm=0, buffer=0)

    @property
    def need_bytes(self) -> int:
        """Memory of one instance: weights, KV pool and the server itself."""
        kv_bytes = (self.config.kv_bytes or DEFAULT_KV_BYTES) if self.release.has_kv else 0
        weight_bytes = min(self.release.weight_bytes, self.config.weights_bytes or self.release.weight_bytes)
        return weight_bytes + kv_bytes + OVERHEAD_BYTES

    @property
    def device_share(self) -> DeviceShare | None:
        """Of one instance; None for one without."""
        return self.model.device_share

    @property
    def demand(self) -> Demand:
        return Demand(sum(server.in_work for server in self.servers.values()), len(self.waiting))

    def request_began(self, now_s: float) -> None:
        """Call it when one arrives; counts the gap that it ends."""
        if self.quiet_since_s is not None:
            self.gaps.observe(now_s - self.quiet_since_s)
            self.quiet_since_s = None

    def request_ended(self, now_s: float) -> None:
        """Call it when one is over. Begins a gap where it was the last."""
        if self.quiet_since_s is None and not any(self.demand):
            self.quiet_since_s = now_s
            self.window = self.gaps.window()

    def quiet(self, now_s: float) -> Quiet | None:
        """For the policy; None when it has requests, or its own `idle_timeout_s` applies."""
        if self.model.policy != "hybrid" or self.window is None or self.quiet_since_s is None:
            return None
        return Quiet(now_s - self.quiet_since_s, self.window)

    @property
    def ready(self) -> list[Server]:
        """Instances that take requests."""
        return [server for server in self.servers.values() if not server.closing]

    def becomes_ready(self) -> None:
        """Call it when an instance is."""
        self.was_ready, self.pending = True, False

    def ends(self, ending: asyncio.Task[None]) -> None:
        """Call it when an instance begins to end."""
        self.ending.add(ending)
        ending.add_done_callback(self.ending.discard)

    async def saved(self) -> None:
        """Wait until the next instance finds what the last ones have computed: those that end save it
        before. Returns at once while others are ready.
        """
        if self.ending and not self.ready:
            await asyncio.wait(self.ending, timeout=SAVE_WAIT_S)

    @property
    def is_failing(self) -> bool:
        return self.failures >= FAILING_AFTER and not self.servers

    def pick(self, affinities: Sequence[Affinity]) -> Server | None:
        """A ready instance for a request; None when all are full. Takes a place there."""
        ready = self.ready
        if not ready:
            return None
        if len(ready) == 1:
            chosen = ready[0] if ready[0].in_work < self.model.max_concurrency else None
        else:
            known = next((self.affinity[each] for each in affinities if each in self.affinity), None)
            loads = [InstanceLoad(server.key, server.in_work, server.key == known) for server in ready]
            key = route(self.model, loads)
            chosen = None if key is None else self.servers[key]
        if chosen is not None:
            chosen.in_work += 1
            if self.model.max_instances > 1:
                self._remember(affinities, chosen.key)
        return chosen

    def dispatch(self) -> None:
        """Give instances to requests that wait, first come first served."""
        while self.waiting:
            if self.waiting[0].future.done():  # given up
                self.waiting.popleft()
                continue
            server = self.pick(self.waiting[0].affinities)
            if server is None:
                return
            self.waiting.popleft().future.set_result(server)

    def refuse_waiting(self, error: TeneralError) -> None:
        while self.waiting:
            future = self.waiting.popleft().future
            if not future.done():
                future.set_exception(error)

    def start_failed(self, reason: str, now_s: float) -> None:
        self.failures += 1
        self.reason = reason
        self.retry_at_s = now_s + min(MAX_RETRY_S, 2.0 ** (self.failures - 1))

    def answered(self, *, is_error: bool) -> None:
        self.answers += 1
        if is_error:
            self.errors += 1
        else:
            self.failures, self.reason = 0, ""

    @property
    def fails_too_often(self) -> bool:
        return self.answers >= ROLLBACK_MIN_ANSWERS and self.errors > ROLLBACK_SHARE * self.answers

    def state(self) -> str:
        """For people: ready, starting, failing, draining or asleep."""
        if self.retired:
            return "draining"
        if self.ready:
            return "ready"
        if self.failures:
            return "failing"
        return "starting" if self.starting else "asleep"

    def _remember(self, affinities: Sequence[Affinity], key: str) -> None:
        for each in affinities:
            self.affinity[each] = key
            self.affinity.move_to_end(each)
        while len(self.affinity) > MAX_AFFINITIES:
            self.affinity.popitem(last=False)
