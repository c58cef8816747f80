"""Who waits for a place in the engine, in the order of their turns.

All that is interactive stands before all that is batch work; within each of the two, tenants take turns (`fairness`),
and a tenant's own requests keep the order in which they came. Who was preempted is the first of its tenant. Who has
left the queue to run is known only as a count. Nothing is known here of blocks, bounds or threads; the caller
serialises access.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Generic, Protocol, TypeVar

from ..step.requests import Priority
from .fairness import OUTPUT_WEIGHT, Accounts, Queued, fair_order


class Prioritised(Queued, Protocol):
    @property
    def priority(self) -> Priority: ...


SequenceT = TypeVar("SequenceT", bound=Prioritised)


class _Line(Generic[SequenceT]):
    """Those of one priority."""

    def __init__(self) -> None:
        self.queue: deque[SequenceT] = deque()
        self.accounts = Accounts()


class WaitingList(Generic[SequenceT]):
    """Iterates in the order that `arrange` found last, behind which stands who came since."""

    def __init__(self) -> None:
        self._lines: dict[Priority, _Line[SequenceT]] = {priority: _Line() for priority in Priority}

    def __len__(self) -> int:
        return sum(len(line.queue) for line in self._lines.values())

    def __iter__(self) -> Iterator[SequenceT]:
        return chain.from_iterable(line.queue for line in self._lines.values())

    def arrange(self) -> None:
        """Bring everybody into the order of their turns."""
        for line in self._lines.values():
            if line.accounts.num_tenants_waiting > 1:
                line.queue = deque(fair_order(line.queue, line.accounts.by_tenant))

    def of(self, priority: Priority) -> Iterator[SequenceT]:
        return iter(self._lines[priority].queue)

    # -- coming and going ------------------------------------------------------------------------------------

    def join(self, sequence: SequenceT) -> None:
        line = self._line(sequence)
        line.queue.append(sequence)
        line.accounts.wait(sequence.queue_name)

    def start(self, sequence: SequenceT) -> None:
        """It leaves the queue to run. ValueError when it is not there."""
        line = self._line(sequence)
        line.queue.remove(sequence)
        line.accounts.start(sequence.queue_name)

    def put_back(self, sequence: SequenceT) -> None:
        """It does not run any more, and is the first of its tenant again."""
        line = self._line(sequence)
        line.queue.appendleft(sequence)
        line.accounts.stop(sequence.queue_name)

    def withdraw(self, sequence: SequenceT) -> None:
        """It leaves the queue for good. ValueError when it is not there."""
        line = self._line(sequence)
        line.queue.remove(sequence)
        line.accounts.quit(sequence.queue_name)

    def end(self, sequence: SequenceT) -> None:
        """It ran, and has ended."""
        self._line(sequence).accounts.end(sequence.queue_name)

    def charge(self, sequence: SequenceT, *, num_prompt_tokens: int = 0, num_output_tokens: int = 0) -> None:
        """So many tokens were computed for it, which runs."""
        cost = num_prompt_tokens + OUTPUT_WEIGHT * num_output_tokens
        self._line(sequence).accounts.charge(sequence.queue_name, cost)

    # -- what can be seen ------------------------------------------------------------------------------------

    def num_by_priority(self) -> dict[Priority, int]:
        return {priority: len(line.queue) for priority, line in self._lines.items()}

    def num_of_tenant(self, queue_name: str) -> int:
        return sum(line.accounts.num_waiting(queue_name) for line in self._lines.values())

    def num_tenants(self) -> int:
        """Tenants that wait, for whatever kind of work."""
        return len({each.queue_name for each in self})

    def check_integrity(self) -> None:
        """Raises AssertionError unless queues and accounts agree. For tests."""
        for priority, line in self._lines.items():
            line.accounts.check_integrity()
            assert all(each.priority is priority for each in line.queue)
            for tenant in {each.queue_name for each in line.queue} | set(line.accounts.by_tenant):
                expected = sum(each.queue_name == tenant for each in line.queue)
                assert line.accounts.num_waiting(tenant) == expected, f"{tenant} is counted wrongly"

    def _line(self, sequence: SequenceT) -> _Line[SequenceT]:
        return self._lines[sequence.priority]
