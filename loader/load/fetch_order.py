"""The order in which the steps of a plan are read: the plan's, except that steps which a caller waits for come first.

Not thread-safe: the work queue's lock guards it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

from ..format.manifest import Tier
from .options import Order
from .plan import Plan, follows

MAX_RUN_STEPS = 64


class _Awaited:
    """Bytes that a caller waits for: `total_bytes`, until none of it is unread."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self._unread_bytes = 0

    def add(self, size_bytes: int) -> None:
        """Positive: bytes that must be read, too. Negative: bytes that are being read now."""
        self._unread_bytes += size_bytes
        self.total_bytes = self.total_bytes + max(0, size_bytes) if self._unread_bytes else 0


class FetchOrder:
    """The steps of a plan that no range has been requested for, in order; and the rank of all others.

    A step is *taken* when its first range is requested.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._steps = plan.steps
        self._upcoming = deque(range(len(plan.steps)))
        self._sooner: deque[int] = deque()
        # The rank of taken steps, by number. Steps without bytes need not be read.
        self._ranks: dict[int, int] = {
            number: rank
            for rank, number in enumerate(step.number for step in plan.steps if not step.part.size_bytes)
        }
        self._promoted: set[int] = set()  # taken steps that were promoted
        self._unread_bytes = [0] * len(Tier)  # by tier, not requested yet
        for step in plan.steps:
            self._unread_bytes[step.part.tier] += step.part.size_bytes
        tiers = [step.part.tier for step in plan.steps]
        self._ends_by_tier = tiers == sorted(tiers)
        self._wanted = _Awaited()  # promoted steps
        self._first = _Awaited()  # the first group
        self._num_first = 0
        for step in plan.steps:
            if step.part.group != plan.steps[0].part.group:
                break
            self._num_first += 1
            self._first.add(step.part.size_bytes)

    def __getitem__(self, number: int) -> int:
        """The rank of a taken step, counted from 0. Raises `KeyError` for others."""
        return self._ranks[number]

    @property
    def awaited_bytes(self) -> int | None:
        """The bytes of promoted steps, else of the first group; None where all of them are being
        read.
        """
        return self._wanted.total_bytes or self._first.total_bytes or None

    @property
    def unread_bytes(self) -> int:
        """The bytes of all steps that are not being read."""
        return sum(self._unread_bytes)

    def bytes_to_end(self, number: int) -> int:
        """Of these, the bytes up to the end of the step's tier, where all of a tier comes before the next one; else
        all of them.
        """
        tier = self._steps[number].part.tier
        return sum(self._unread_bytes[: tier + 1]) if self._ends_by_tier else self.unread_bytes

    def next_run(self, most_bytes: int) -> list[int]:
        """The next step, and those behind it that one range of `most_bytes` can read with it; empty
        at the end.
        """
        queue = self._next_queue()
        if not queue:
            return []
        run = [queue[0]]
        begin = self._steps[queue[0]].part.offset_bytes
        for number in islice(queue, 1, MAX_RUN_STEPS):
            part = self._steps[number].part
            if number in self._ranks or part.offset_bytes + part.size_bytes - begin > most_bytes:
                break
            if not follows(self._steps[run[-1]], self._steps[number]):
                break
            run.append(number)
        return run

    def peek(self) -> int | None:
        """The next step; None at the end."""
        queue = self._next_queue()
        return queue[0] if queue else None

    def take(self, run: Iterable[int]) -> None:
        """Take these steps, the next ones."""
        if self._sooner:
            self._promoted.update(run)
        for number in run:
            self._ranks[number] = len(self._ranks)

    def handed_out(self, number: int, size_bytes: int) -> None:
        """`size_bytes` of a taken step are being read; negative: they must be read again."""
        self._unread_bytes[self._steps[number].part.tier] -= size_bytes
        if number in self._promoted:
            self._wanted.add(-size_bytes)
        if number < self._num_first:
            self._first.add(-size_bytes)

    @property
    def is_asked(self) -> bool:
        """True if the next step was promoted."""
        return self._next_queue() is self._sooner

    def promote(self, numbers: Iterable[int]) -> None:
        """Put these steps, and those that they need, before all others."""
        wanted = set(numbers)
        wanted.update(needed for number in list(wanted) for needed in self._steps[number].needs)
        wanted.difference_update(self._ranks, self._sooner)
        self._sooner.extend(sorted(wanted))
        self._wanted.add(sum(self._steps[number].part.size_bytes for number in wanted))

    def reorder(self, order: Order) -> None:
        """Read the steps that are not taken in another order of the plan, after promoted ones."""
        self._upcoming = deque(self._plan.numbers(order))
        self._ends_by_tier = order is not Order.EXACT

    def _next_queue(self) -> deque[int]:
        """The queue whose first step is next; empty at the end."""
        for queue in (self._sooner, self._upcoming):
            while queue and queue[0] in self._ranks:
                queue.popleft()
            if queue:
                return queue
        return self._upcoming
