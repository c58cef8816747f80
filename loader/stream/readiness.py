"""Which groups hold which tier's values: a gate for each, that opens once and stays open.

Invariant: a gate opens only when every part that it stands for was settled, and a load that failed opens none
of the others but wakes everybody who waits at them with its error. An exact gate stands for the group's draft
parts too. It does not know what settles a part, nor what a group is for.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Sequence

from ..errors import LoadCancelledError, TeneralError
from ..format.manifest import Tier

Gate = tuple[int, Tier]  # a group's index, and the tier whose values it must hold


class Readiness:
    """The gates of `num_groups` groups. Thread-safe. A gate that stands for no parts is open at once."""

    def __init__(self, num_groups: int, parts: Iterable[Gate]) -> None:
        """`parts` are the group and tier of every part that is going to be settled."""
        self._unsettled = [[0, 0] for _ in range(num_groups)]  # by group and tier
        for group, tier in parts:
            self._unsettled[group][tier] += 1
        self._num_unsettled = sum(map(sum, self._unsettled))
        self._open: tuple[list[bool], list[bool]] = ([False] * num_groups, [False] * num_groups)
        self._events = tuple([threading.Event() for _ in range(num_groups)] for _ in Tier)
        self._error: TeneralError | None = None
        self._lock = threading.Lock()
        for group in range(num_groups):
            self.open(self._completed(group, Tier.DRAFT))

    def wait(self, group: int, tier: Tier, timeout_s: float | None) -> None:
        """Return when the gate is open, at once when it is. Raises the load's error, or `TimeoutError`."""
        if self._open[tier][group]:
            return
        if not self._events[tier][group].wait(timeout_s):
            raise TimeoutError(f"group {group} did not hold its {tier.name.lower()} values in {timeout_s} s")
        if not self._open[tier][group]:
            # A copy, because every thread that raises an exception adds its own traceback to it.
            error = self._error or LoadCancelledError("the load ended without filling this group")
            raise copy.copy(error) from error.__cause__

    def is_open(self, group: int, tier: Tier) -> bool:
        return self._open[tier][group]

    def settle(self, group: int, tier: Tier) -> tuple[list[Gate], bool]:
        """Count one part as done. Returns the gates this completes, and whether this completes the load.

        The caller opens those gates, once it has written down what may be read by those who waited.
        """
        with self._lock:
            self._unsettled[group][tier] -= 1
            self._num_unsettled -= 1
            return self._completed(group, tier), self._num_unsettled == 0 and self._error is None

    def open(self, gates: Sequence[Gate]) -> None:
        for group, tier in gates:
            for reached in range(tier + 1):  # exact values satisfy who waits for the draft's
                self._open[reached][group] = True
                self._events[reached][group].set()

    def fail(self, error: TeneralError) -> bool:
        """Wake all who wait at closed gates with this error. False when all is settled or has failed."""
        with self._lock:
            if self._error is not None or self._num_unsettled == 0:
                return False
            self._error = error
        for events in self._events:
            for event in events:
                event.set()
        return True

    @property
    def error(self) -> TeneralError | None:
        return self._error

    def num_open(self, tier: Tier) -> int:
        return sum(self._open[tier])

    def _completed(self, group: int, tier: Tier) -> list[Gate]:
        """The gates that have no unsettled part left now that the group's last part of `tier` is settled."""
        draft, refine = self._unsettled[group]
        gates = [(group, Tier.DRAFT)] if tier is Tier.DRAFT and draft == 0 else []
        return [*gates, (group, Tier.REFINE)] if draft == refine == 0 else gates
