"""The admission of starts to the machine's memory: which idle instances give way, and for whom.

The ledger is `memory.Budget`, the order in which instances give way is `policy.victim`. It ends instances through the
function that it is given, and knows no processes. Used on the event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator

from ...loader.errors import InsufficientMemoryError
from .deployment import Deployment, Server
from .memory import Budget
from .metrics import PoolMetrics
from .policy import Candidate, value_of, victim

CHECK_S = 0.25  # between two looks at what a start that waits for memory may have
# A start that waits longer for memory has a busy instance of another model take no more requests.
FAIR_WAIT_S = 1.0
STANDBY_KEY = "standby"  # of the standby processes in the ledger


class StartAdmission:
    """The starts that wait for memory. One per supervisor."""

    def __init__(
        self,
        budget: Budget,
        metrics: PoolMetrics,
        deployments: Callable[[], Iterable[Deployment]],
        wants: Callable[[Deployment], int],
        end: Callable[[Server], None],
    ) -> None:
        """`wants` is the number of instances that a deployment should have; `end` begins to end one."""
        self.clock = 0.0  # of the greedy-dual cache
        self._budget = budget
        self._metrics = metrics
        self._deployments = deployments
        self._wants = wants
        self._end = end
        self._claims: dict[str, Deployment] = {}  # of starts that wait for memory, by key
        self._ending: dict[str, int] = {}  # bytes of instances that are about to be gone

    def fits(self, deployment: Deployment) -> bool:
        """True if an instance fits in free memory that no start waits for."""
        share = deployment.device_share
        if share is not None and share.percent + self._claimed(share.device) > (
            self._budget.free_percent(share.device)
        ):
            return False
        return deployment.need_bytes + self._claimed_bytes <= self._budget.free_bytes

    @property
    def _claimed_bytes(self) -> int:
        return sum(each.need_bytes for each in self._claims.values())

    def _claimed(self, device: str) -> int:
        """Thousandths of a device that starts wait for."""
        shares = (each.device_share for each in self._claims.values())
        return sum(each.percent for each in shares if each is not None and each.device == device)

    def waits(self, key: str) -> bool:
        """True while this start waits for memory."""
        return key in self._claims

    def ends(self, key: str) -> None:
        """Call it when an instance begins to end."""
        self._ending[key] = self._budget.charge_of(key)

    def ended(self, key: str) -> None:
        """Call it when an instance has ended. Idempotent."""
        self._ending.pop(key, None)

    async def reserve(self, deployment: Deployment, key: str) -> bool:
        """Wait until the instance's memory is reserved, having others give way. False when it is not wanted any more.

        Raises `InsufficientMemoryError` when it could not fit in an empty machine.
        """
        loop = asyncio.get_running_loop()
        need = deployment.need_bytes
        left = self._budget.limit_bytes - self._budget.charge_of(STANDBY_KEY)
        if need > left:
            raise InsufficientMemoryError(
                f"an instance of {deployment.name} needs {need >> 20:,} MiB, "
                f"but the pool has {left >> 20:,} MiB for instances",
                needed_bytes=need,
                available_bytes=left,
                hint="Give [node] more memory, or the model a smaller kv_bytes.",
            )
        began_s = loop.time()
        self._claims[key] = deployment
        try:
            while not self._budget.reserve(key, need, deployment.device_share):
                if len(deployment.starting) + len(deployment.ready) > self._wants(deployment):
                    return False
                self._make_room(deployment, waited_s=loop.time() - began_s)
                await self._budget.changed(CHECK_S)
        finally:
            del self._claims[key]
        return True

    def _make_room(self, deployment: Deployment, *, waited_s: float) -> None:
        """End idle instances until what is free, or about to be, is enough for all starts that wait."""
        budget, share = self._budget, deployment.device_share
        leaving = {*self._ending, *(server.key for server in self._closing())}
        short = self._claimed_bytes - budget.free_bytes - sum(self._ending.values())
        short -= sum(budget.charge_of(key) for key in leaving - self._ending.keys())
        device, short_share = "", 0  # percent of the device
        if share is not None:
            device = share.device
            short_share = self._claimed(device) - budget.free_percent(device)
            short_share -= sum(budget.share_of(key, device) for key in leaving)
        while short > 0 or short_share > 0:
            chosen = victim(
                self._candidates(deployment, busy=False, device=device if short_share > 0 else "")
            )
            if chosen is None:
                break
            self.clock = max(self.clock, value_of(chosen))
            short -= chosen.memory_bytes
            short_share -= budget.share_of(chosen.key, device)
            self._metrics.evicted("idle")
            self._end(self._server(chosen.key))
        is_short = short > 0 or short_share > 0
        if is_short and waited_s > FAIR_WAIT_S and (deployment.waiting or deployment.pending):
            chosen = victim(self._candidates(deployment, busy=True, device=device if short_share > 0 else ""))
            if chosen is not None:
                self._metrics.evicted("fairness")
                self._server(chosen.key).closing = True

    def _closing(self) -> Iterator[Server]:
        for deployment in self._deployments():
            yield from (server for server in deployment.servers.values() if server.closing)

    def _server(self, key: str) -> Server:
        return next(d.servers[key] for d in self._deployments() if key in d.servers)

    def _candidates(self, starting: Deployment, *, busy: bool, device: str) -> list[Candidate]:
        """Instances that may give way to a start: idle ones, or those at work; with a device, those on it."""
        found = []
        for deployment in self._deployments():
            share = deployment.device_share
            if deployment is starting or (device and (share is None or share.device != device)):
                continue
            is_replaced = deployment.model.name == starting.model.name and starting.pending
            spare = len(deployment.ready) - (0 if is_replaced else deployment.scaled.min_warm)
            servers = [server for server in deployment.ready if bool(server.in_work) == busy]
            if spare > 0:
                found += [server.candidate(self._budget.charge_of(server.key)) for server in servers]
        return found
