"""The running exact passes, one after another through the layers as these become exact.

Invariant: a pass never reaches or overtakes an earlier one, so that the keys and values that its
rows attend to have been written; passes that meet are joined. This module does not know the purpose
of rows or logits.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

from ..step.rows import Rows
from .sequence import Sequence


class PassLike(Protocol):
    """A `ForwardPass`, or a test double."""

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
    """A pass and its sequences, in the order of its batch's spans."""

    under_way: PassLike
    parts: list[tuple[Sequence, Rows]]

    @property
    def num_rows(self) -> int:
        return sum(rows.end - rows.first for _, rows in self.parts)


class ExactPasses:
    """The running passes, in the order of their start."""

    def __init__(self, max_rows: int) -> None:
        """Passes that meet are joined if they have at most `max_rows` together."""
        self._max_rows = max_rows
        self._passes: list[Sent] = []

    def __bool__(self) -> bool:
        return bool(self._passes)

    def send(self, under_way: PassLike, parts: list[tuple[Sequence, Rows]]) -> None:
        """Add a pass after all others."""
        self._passes.append(Sent(under_way, parts))

    def can_advance(self) -> bool:
        """Whether some pass can compute its next layer now. Raises the load's error."""
        return any(self._may_advance(number) for number in range(len(self._passes)))

    def wait(self, timeout_s: float) -> None:
        """Wait until the first pass can compute its next layer, at most `timeout_s`. Raises the
        load's error.
        """
        self._passes[0].under_way.can_advance(timeout_s)

    def advance(self) -> Sent | None:
        """Compute one layer of the first pass that can. Returns that pass when it is finished."""
        number = next(number for number in range(len(self._passes)) if self._may_advance(number))
        sent = self._passes[number]
        sent.under_way.advance()
        if sent.under_way.is_done:
            return self._passes.pop(number)
        self._join(number)
        return None

    def drop(self, sequences: Collection[Sequence]) -> None:
        """Remove the rows of these sequences."""
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
        """Whether that pass can compute its next layer: it is exact, and the previous pass has
        computed it.
        """
        under_way = self._passes[number].under_way
        is_behind = number == 0 or under_way.stage < self._passes[number - 1].under_way.stage
        return is_behind and under_way.can_advance()

    def _join(self, number: int) -> None:
        """Join this pass and the one that it has caught up with, so that they read the weights
        once.
        """
        if number == 0:
            return
        ahead, behind = self._passes[number - 1], self._passes[number]
        fits = ahead.num_rows + behind.num_rows <= self._max_rows
        if ahead.under_way.stage == behind.under_way.stage and fits:
            ahead.under_way = ahead.under_way.joined(behind.under_way)
            ahead.parts += behind.parts
            del self._passes[number]
