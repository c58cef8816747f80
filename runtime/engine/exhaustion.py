"""Who has to go when memory does not suffice for a step: a pure decision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def largest_first(members: Sequence[tuple[T, int]]) -> list[T]:
    """Those in a step, with what each takes of it, in the order of admission: who takes most comes first, and of those
    that take as much whoever was admitted last. Memory for a step grows with its rows: this is who made it too large.
    """
    order = sorted(range(len(members)), key=lambda number: (members[number][1], number), reverse=True)
    return [members[number][0] for number in order]
