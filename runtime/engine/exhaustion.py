"""When memory does not suffice for a step: how that is seen, and who has to go. Pure decisions."""

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


def is_exhaustion(error: BaseException) -> bool:
    """Whether memory ran out, here or on a device. torch's own error is known by its name: it is not imported here."""
    return isinstance(error, MemoryError) or any(
        kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__
    )
