"""The waiting sequences of the engine, in the order of their turns.

Interactive work comes before all batch work; within each of the two, tenants take turns
(fair queueing), and a tenant's own requests keep their order of arrival. A preempted sequence is the
first of its tenant. Running sequences are known only as a count. This module knows nothing of
blocks, bounds or threads; the caller serialises access.

Fair queueing among waiting tenants: shares of tokens, not of requests.

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
first.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

from ..step.requests import Priority

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


class Account(Struct):
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


class Prioritised(Queued, Protocol):
    @property
    def priority(self) -> Priority: ...


SequenceT = TypeVar("SequenceT", bound=Prioritised)


class _Line(Generic[SequenceT]):
    """The sequences of one priority."""

    def __init__(self) -> None:
        self.queue: deque[SequenceT] = deque()
        self.accounts = Accounts()


class WaitingList(Generic[SequenceT]):
    """The waiting sequences. Iterates in the order of the last `arrange`, followed by later
    arrivals.
    """

    def __init__(self) -> None:
        self._lines: dict[Priority, _Line[SequenceT]] = {priority: _Line() for priority in Priority}

    def __len__(self) -> int:
        return sum(len(line.queue) for line in self._lines.values())

    def __iter__(self) -> Iterator[SequenceT]:
        return chain.from_iterable(line.queue for line in self._lines.values())

    def arrange(self) -> None:
        """Sort all sequences in the order of their turns."""
        for line in self._lines.values():
            if line.accounts.num_tenants_waiting > 1:
                line.queue = deque(fair_order(line.queue, line.accounts.by_tenant))

    def of(self, priority: Priority) -> Iterator[SequenceT]:
        return iter(self._lines[priority].queue)

    # -- changes
    # ---------------------------------------------------------------------------------------------

    def join(self, sequence: SequenceT) -> None:
        line = self._line(sequence)
        line.queue.append(sequence)
        line.accounts.wait(sequence.queue_name)

    def start(self, sequence: SequenceT) -> None:
        """Move a sequence from the queue to running. Raises ValueError if it is not waiting."""
        line = self._line(sequence)
        line.queue.remove(sequence)
        line.accounts.start(sequence.queue_name)

    def put_back(self, sequence: SequenceT) -> None:
        """Move a running sequence back, as the first of its tenant."""
        line = self._line(sequence)
        line.queue.appendleft(sequence)
        line.accounts.stop(sequence.queue_name)

    def withdraw(self, sequence: SequenceT) -> None:
        """Remove a waiting sequence for good. Raises ValueError if it is not waiting."""
        line = self._line(sequence)
        line.queue.remove(sequence)
        line.accounts.quit(sequence.queue_name)

    def end(self, sequence: SequenceT) -> None:
        """Record the end of a running sequence."""
        self._line(sequence).accounts.end(sequence.queue_name)

    def charge(self, sequence: SequenceT, *, num_prompt_tokens: int = 0, num_output_tokens: int = 0) -> None:
        """Charge a running sequence for that many computed tokens."""
        cost = num_prompt_tokens + OUTPUT_WEIGHT * num_output_tokens
        self._line(sequence).accounts.charge(sequence.queue_name, cost)

    # -- queries
    # ---------------------------------------------------------------------------------------------

    def num_by_priority(self) -> dict[Priority, int]:
        return {priority: len(line.queue) for priority, line in self._lines.items()}

    def num_of_tenant(self, queue_name: str) -> int:
        return sum(line.accounts.num_waiting(queue_name) for line in self._lines.values())

    def num_tenants(self) -> int:
        """The number of waiting tenants, for any kind of work."""
        return len({each.queue_name for each in self})

    def check_integrity(self) -> None:
        """Raise AssertionError if queues and accounts disagree. For tests."""
        for priority, line in self._lines.items():
            line.accounts.check_integrity()
            assert all(each.priority is priority for each in line.queue)
            for tenant in {each.queue_name for each in line.queue} | set(line.accounts.by_tenant):
                expected = sum(each.queue_name == tenant for each in line.queue)
                assert line.accounts.num_waiting(tenant) == expected, f"{tenant} is counted wrongly"

    def _line(self, sequence: SequenceT) -> _Line[SequenceT]:
        return self._lines[sequence.priority]
