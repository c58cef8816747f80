"""Out of memory in a step: its detection, and the choice of the sequences to end. Pure decisions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def largest_first(members: Sequence[tuple[T, int]]) -> list[T]:
    """The members of a step by the memory that they take of it, in descending order; ties by latest
    admission.

    `members` are in the order of admission. Memory for a step grows with its rows: the first ones
    made it too large.
    """
    order = sorted(range(len(members)), key=lambda number: (members[number][1], number), reverse=True)
    return [members[number][0] for number in order]


def is_out_of_memory(error: BaseException) -> bool:
    """True if memory ran out, here or on a device. torch's error is detected by its name, to not
    import it here.
    """
    return isinstance(error, MemoryError) or any(
        kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__
    )
