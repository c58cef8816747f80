"""Fair queueing among waiting tenants: shares of tokens, not of requests.

Each tenant has an account of its served tokens, and the lowest goes next. That is start-time fair
queueing (Goyal, Vin and Cheng, SIGCOMM 1996) with the costs of "Fairness in Serving Large Language
Models" (Sheng et al., OSDI 2024): a prompt is charged when it is admitted, an answer as it is
generated, because its length is not known before. A tenant that returns after a pause starts at the
last admitted tenant's level, so turns cannot be saved up; one above that level still owes the
difference, until the queue is empty.

Bounds. However many requests a tenant has in the queue, at most one of them goes before the first
one of another that owes nothing. And the first request of a tenant, even a large one, is passed
over at most `MAX_PASSED_OVER` times for each waiting tenant; then only tenants that were passed
over more often go before it, with one request each.

A tenant's own requests keep their order here; the scheduler gives its turns to the shortest prompts
first. This module knows nothing of priorities, blocks or threads.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

# A token of an answer takes a step of its own, prompt tokens share one.
OUTPUT_WEIGHT = 2
MAX_PASSED_OVER = 32
MAX_DEBTORS = 1_024  # tenants without requests that still owe


class Queued(Protocol):
    """The fields of a request that determine its order."""

    @property
    def queue_name(self) -> str:
        """The tenant."""

    @property
    def num_tokens(self) -> int:
        """The minimum cost of serving it."""


QueuedT = TypeVar("QueuedT", bound=Queued)


@dataclass(slots=True)
class Account:
    """The account of one tenant."""

    served: float  # tokens, those of answers `OUTPUT_WEIGHT` times
    num_waiting: int = 0
    num_running: int = 0
    # Admissions of other tenants since it began to wait, or since its last turn.
    num_passed_over: int = 0

    @property
    def is_open(self) -> bool:
        return self.num_waiting + self.num_running > 0


def fair_order(waiting: Iterable[QueuedT], accounts: Mapping[str, Account]) -> list[QueuedT]:
    """The requests in the order of their turns, as currently known. Ties go to the tenant of the
    earliest request.
    """
    queues: dict[str, deque[QueuedT]] = {}
    for each in waiting:
        queues.setdefault(each.queue_name, deque()).append(each)
    if len(queues) <= 1:
        return [each for queue in queues.values() for each in queue]
    served = {tenant: accounts[tenant].served for tenant in queues}
    order: list[QueuedT] = []

    def take_first(tenant: str) -> None:
        first = queues[tenant].popleft()
        served[tenant] += first.num_tokens
        order.append(first)

    for tenant in _overdue(queues, accounts):
        take_first(tenant)
    turns = [(served[tenant], number, tenant) for number, tenant in enumerate(queues) if queues[tenant]]
    heapq.heapify(turns)
    while turns:
        _, number, tenant = turns[0]
        take_first(tenant)
        if queues[tenant]:
            heapq.heapreplace(turns, (served[tenant], number, tenant))
        else:
            heapq.heappop(turns)
    return order


def _overdue(tenants: Iterable[str], accounts: Mapping[str, Account]) -> list[str]:
    """The tenants that were passed over too often, the most often first."""
    passed_over = {tenant: accounts[tenant].num_passed_over for tenant in tenants}
    bound = MAX_PASSED_OVER * len(passed_over)
    return sorted((each for each in passed_over if passed_over[each] >= bound), key=lambda t: -passed_over[t])


class Accounts:
    """The accounts that `fair_order` reads. A tenant without requests is forgotten once it owes
    nothing.

    Invariant: no waiting tenant was served less than `_turn`.
    """

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._num_open = 0
        self._turn = 0.0  # level of the last admitted tenant

    @property
    def by_tenant(self) -> Mapping[str, Account]:
        return self._accounts

    @property
    def num_tenants_waiting(self) -> int:
        return sum(account.num_waiting > 0 for account in self._accounts.values())

    def num_waiting(self, tenant: str) -> int:
        account = self._accounts.get(tenant)
        return 0 if account is None else account.num_waiting

    def wait(self, tenant: str) -> None:
        """Record a new request of the tenant."""
        account = self._accounts.setdefault(tenant, Account(self._turn))
        self._num_open += not account.is_open
        self._queue(account)

    def start(self, tenant: str) -> None:
        """Record the admission of a waiting request."""
        account = self._accounts[tenant]
        waiting = [each for each in self._accounts.values() if each.num_waiting]
        self._turn = min(each.served for each in waiting)
        for each in waiting:
            each.num_passed_over += 1
        account.num_passed_over = 0
        account.num_waiting -= 1
        account.num_running += 1

    def charge(self, tenant: str, cost: float) -> None:
        """Charge a tenant with a running request for that many tokens."""
        self._accounts[tenant].served += cost

    def stop(self, tenant: str) -> None:
        """Record that a running request has to wait again."""
        account = self._accounts[tenant]
        account.num_running -= 1
        self._queue(account)

    def quit(self, tenant: str) -> None:
        """Record the withdrawal of a waiting request."""
        self._accounts[tenant].num_waiting -= 1
        self._close(tenant)

    def end(self, tenant: str) -> None:
        """Record the end of a running request."""
        self._accounts[tenant].num_running -= 1
        self._close(tenant)

    def check_integrity(self) -> None:
        """Raise AssertionError if the accounts are inconsistent. For tests."""
        accounts = self._accounts.values()
        assert self._num_open == sum(account.is_open for account in accounts)
        assert len(accounts) - self._num_open <= MAX_DEBTORS
        assert all(account.served >= self._turn for account in accounts if account.num_waiting)
        assert all(account.num_waiting >= 0 and account.num_running >= 0 for account in accounts)
        assert self._num_open or not accounts

    def _queue(self, account: Account) -> None:
        if not account.num_waiting:
            account.served = max(account.served, self._turn)
            account.num_passed_over = 0
        account.num_waiting += 1

    def _close(self, tenant: str) -> None:
        account = self._accounts[tenant]
        if account.is_open:
            return
        self._num_open -= 1
        if not self._num_open:
            self._accounts.clear()
            self._turn = 0.0
        elif account.served <= self._turn:
            del self._accounts[tenant]
        elif len(self._accounts) - self._num_open > MAX_DEBTORS:
            debtors = (name for name, each in self._accounts.items() if not each.is_open)
            del self._accounts[min(debtors, key=lambda name: self._accounts[name].served)]
