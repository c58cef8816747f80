"""The waiting sequences of the engine, in the order of their turns.

Interactive work comes before all batch work; within each of the two, tenants take turns
(`fairness`), and a tenant's own requests keep their order of arrival. A preempted sequence is the
first of its tenant. Running sequences are known only as a count. This module knows nothing of
blocks, bounds or threads; the caller serialises access.
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
