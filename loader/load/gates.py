"""The gates of a load, one for each group and tier, and a flag for each part: they open once and
stay open.

Invariant: a gate opens only when every part that it stands for was settled, and a load that failed
opens none of the others but wakes all threads that wait at them with its error. A gate stands for the
parts of its tier and of all tiers below; the exact gate, REFINE's, so for all parts of the group.
Where a group has no parts of a tier, nor of one below, that gate opens with the next one: there is
no sketch before a draft that begins with nothing. It does not know what settles a part, nor what a
group is for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence

from ..errors import TeneralError
from ..format.manifest import Tier

Gate = tuple[int, Tier]  # a group's index, and the tier whose values it must hold


class Readiness:
    """The gates of `num_groups` groups. Thread-safe. A gate that stands for no parts is open at
    once.
    """

    def __init__(
        self,
        num_groups: int,
        parts: Sequence[Gate],
        *,
        absent: Collection[int] = frozenset(),
        is_full: bool = False,
        num_checks: int = 0,
    ) -> None:
        """`parts` are the group and tier of every part, by its number. All are going to be settled but
        the `absent` ones, whose groups' gates never open. If it `is_full`, all are settled already.
        Gates do not wait for the `num_checks` of whole files, but the end of the load does.
        """
        self._parts = parts
        self._unsettled = [[0] * len(Tier) for _ in range(num_groups)]  # by group and tier
        for group, tier in parts:
            self._unsettled[group][tier] += 1
        self._num_unsettled = len(parts) - len(absent) + num_checks
        self.num_checks = num_checks  # that are not settled
        self._open = [[False] * num_groups for _ in Tier]
        self._is_there = [False] * len(parts)
        self._watched: set[int] = set()  # parts that are waited for by their numbers
        self._error: TeneralError | None = None
        self._changed = threading.Condition()
        self._num_changes = 0
        without_parts = [group for group in range(num_groups) if not any(self._unsettled[group])]
        self.open([(group, Tier.REFINE) for group in without_parts])
        if is_full:
            self._unsettled, self._num_unsettled = [[0] * len(Tier) for _ in range(num_groups)], 0
            self.open([(group, Tier.REFINE) for group in range(num_groups)], range(len(parts)))

    def wait(self, group: int, tier: Tier, timeout_s: float | None) -> None:
        """Return when the gate is open, at once when it is. Raises the load's error, or
        `TimeoutError`.
        """
        if not self._open[tier][group]:
            what = f"group {group} did not hold its {tier.name.lower()} values"
            self._wait_until(lambda: self._open[tier][group], timeout_s, what)

    def wait_parts(self, numbers: Collection[int], timeout_s: float | None) -> None:
        """Return when all these parts are settled, at once when they are. Raises as `wait` does."""
        if not self.are_there(numbers):
            what = f"{len(numbers)} parts were not there"
            self.watch(numbers)
            self._wait_until(lambda: self.are_there(numbers), timeout_s, what)

    def is_open(self, group: int, tier: Tier) -> bool:
        return self._open[tier][group]

    def are_there(self, numbers: Iterable[int]) -> bool:
        is_there = self._is_there
        return all(is_there[number] for number in numbers)

    def settle(self, number: int) -> tuple[list[Gate], bool]:
        """Count one part as done. Returns the gates this completes, and whether this completes the
        load.

        The caller opens those gates, once it has written down what the waiting threads may read.
        """
        group, tier = self._parts[number]
        with self._changed:
            self._unsettled[group][tier] -= 1
            self._num_unsettled -= 1
            return self._completed(group, tier), self._num_unsettled == 0 and self._error is None

    def settle_check(self) -> bool:
        """Count a whole file as compared. Returns whether this completes the load."""
        with self._changed:
            self.num_checks -= 1
            self._num_unsettled -= 1
            self._announce()
            return self._num_unsettled == 0 and self._error is None

    def wait_checks(self, timeout_s: float | None) -> None:
        """Return when all whole files were compared. Raises as `wait` does."""
        self._wait_until(
            lambda: self.num_checks == 0, timeout_s, "files were not compared with their digests"
        )

    def open(self, gates: Sequence[Gate] = (), parts: Collection[int] = ()) -> None:
        """Let those pass who wait at the gates, or for the parts, which are settled."""
        with self._changed:
            for number in parts:
                self._is_there[number] = True
            # Exact values satisfy a wait for coarser ones. The exact gate first: waiters look without the lock, and who
            # finds the coarser one open may ask for it next.
            for group, tier in reversed(gates):
                for reached in range(tier, -1, -1):
                    self._open[reached][group] = True
            if gates or not self._watched.isdisjoint(parts):
                self._announce()

    def watch(self, numbers: Iterable[int]) -> None:
        """Count it as a change when one of these parts is settled, and that they are watched, too."""
        with self._changed:
            self._watched.update(numbers)
            self._announce()

    def watched(self) -> frozenset[int]:
        """The parts that are watched and there."""
        with self._changed:
            return frozenset(number for number in self._watched if self._is_there[number])

    def fail(self, error: TeneralError) -> bool:
        """Wake all threads that wait at closed gates with this error. False when all is settled or has
        failed.
        """
        with self._changed:
            if self._error is not None or self._num_unsettled == 0:
                return False
            self._error = error
            self._announce()
        return True

    def wait_for_change(self, seen: int, timeout_s: float) -> int:
        """Return once the number of changes is another than `seen`, or after `timeout_s`; what it
        is then.

        A change is that a gate opened, that a watched part is there, or that the load failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._num_changes != seen, timeout_s)
            return self._num_changes

    @property
    def error(self) -> TeneralError | None:
        return self._error

    def num_open(self, tier: Tier) -> int:
        return sum(self._open[tier])

    def _announce(self) -> None:
        self._num_changes += 1
        self._changed.notify_all()

    def _wait_until(self, is_done: Callable[[], bool], timeout_s: float | None, what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: is_done() or self._error is not None, timeout_s):
                raise TimeoutError(f"{what} in {timeout_s} s")
            if not is_done():
                assert self._error is not None
                # A copy, because every thread that raises an exception adds its own traceback to
                # it.
                import copy  # only on the way to an error

                raise copy.copy(self._error) from self._error.__cause__

    def _completed(self, group: int, tier: Tier) -> list[Gate]:
        """The gates that have no unsettled part left now that a part of `tier` is settled, coarser
        ones first.
        """
        unsettled = self._unsettled[group]
        return [(group, reached) for reached in Tier if reached >= tier and not any(unsettled[: reached + 1])]
