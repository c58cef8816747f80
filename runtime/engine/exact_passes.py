"""Exact passes under way, one behind another through the layers as these become exact.

Invariant: a pass is never beside or before the one that was sent before it, so that what its rows attend to has been
written; those that meet become one. It does not know why rows are sent, nor what their logits are for.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

from ..step.rows import Rows
from .sequence import Sequence


class PassLike(Protocol):
    """As `ForwardPass`."""

    stage: int

    @property
    def is_done(self) -> bool: ...

    @property
    def logits(self) -> Any: ...

    def can_advance(self, timeout_s: float = 0.0) -> bool: ...

    def advance(self) -> None: ...

    def joined(self, behind: Any) -> Any: ...

    def without(self, numbers: Collection[int]) -> Any: ...


@dataclass(slots=True)
class Sent:
    """A pass, and whose rows it has: in the order of its batch's spans."""

    under_way: PassLike
    parts: list[tuple[Sequence, Rows]]

    @property
    def num_rows(self) -> int:
        return sum(rows.end - rows.first for _, rows in self.parts)


class ExactPasses:
    """The passes that are not through yet, first the one that was sent first."""

    def __init__(self, max_rows: int) -> None:
        """Passes that meet are joined as long as they have no more than `max_rows` together."""
        self._max_rows = max_rows
        self._passes: list[Sent] = []

    def __bool__(self) -> bool:
        return bool(self._passes)

    def send(self, under_way: PassLike, parts: list[tuple[Sequence, Rows]]) -> None:
        """One more, behind all others."""
        self._passes.append(Sent(under_way, parts))

    def can_advance(self) -> bool:
        """Whether some pass can take its next layer now. Raises the load's error."""
        return any(self._may_advance(number) for number in range(len(self._passes)))

    def wait(self, timeout_s: float) -> None:
        """Until the first pass can take its next layer, or for so long. Raises the load's error."""
        self._passes[0].under_way.can_advance(timeout_s)

    def advance(self) -> Sent | None:
        """One layer, of the first pass that can take one. Returns that pass when it is through."""
        number = next(number for number in range(len(self._passes)) if self._may_advance(number))
        sent = self._passes[number]
        sent.under_way.advance()
        if sent.under_way.is_done:
            return self._passes.pop(number)
        self._join(number)
        return None

    def drop(self, sequences: Collection[Sequence]) -> None:
        """Nothing of these is computed any more."""
        remaining: list[Sent] = []
        for sent in self._passes:
            gone = {number for number, (sequence, _) in enumerate(sent.parts) if sequence in sequences}
            if len(gone) == len(sent.parts):
                continue
            if gone:
                sent.under_way = sent.under_way.without(gone)
                sent.parts = [part for number, part in enumerate(sent.parts) if number not in gone]
            remaining.append(sent)
        self._passes = remaining

    def clear(self) -> None:
        self._passes = []

    def _may_advance(self, number: int) -> bool:
        """Whether that pass can take its next layer: it is exact, and the pass before has been there."""
        under_way = self._passes[number].under_way
        is_behind = number == 0 or under_way.stage < self._passes[number - 1].under_way.stage
        return is_behind and under_way.can_advance()

    def _join(self, number: int) -> None:
        """Make one pass of this one and the one that it has caught up with, so that they read the weights once."""
        if number == 0:
            return
        ahead, behind = self._passes[number - 1], self._passes[number]
        fits = ahead.num_rows + behind.num_rows <= self._max_rows
        if ahead.under_way.stage == behind.under_way.stage and fits:
            ahead.under_way = ahead.under_way.joined(behind.under_way)
            ahead.parts += behind.parts
            del self._passes[number]
