"""Which cached blocks follow which, by their tokens: where a prompt leaves a chain in the middle of a block, one of
these may hold what comes next.

A block is listed under the hash of the block before it, or under the seed of its chain, so who does not know that finds
nothing here, as with whole blocks. There is at most one entry for each block, and a search looks at `MAX_SEEN` of those
that follow the same: it does not become slower however many somebody makes. Nothing is known here of who owns which
block.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import islice

MAX_SEEN = 16  # of those that follow the same block, the ones used last


class Followers:
    """Of one pool. `tokens` are those of a block, all of them."""

    def __init__(self) -> None:
        # By what they follow; each with its tokens, least recently used first.
        self._tokens: dict[bytes, OrderedDict[int, array[int]]] = {}
        self._previous: dict[int, bytes] = {}  # by block

    def __contains__(self, block: int) -> bool:
        return block in self._previous

    def add(self, block: int, previous: bytes, tokens: Sequence[int]) -> None:
        """This block, which is not listed, has these tokens, after what `previous` stands for."""
        self._previous[block] = previous
        self._tokens.setdefault(previous, OrderedDict())[block] = array("q", tokens)

    def discard(self, block: int) -> None:
        previous = self._previous.pop(block, None)
        if previous is None:
            return
        siblings = self._tokens[previous]
        del siblings[block]
        if not siblings:
            del self._tokens[previous]

    def clear(self) -> None:
        self._tokens.clear()
        self._previous.clear()

    def note_use(self, block: int) -> None:
        """Of those that follow the same it was used last."""
        previous = self._previous.get(block)
        if previous is not None:
            self._tokens[previous].move_to_end(block)

    def find(self, previous: bytes, tokens: Sequence[int]) -> tuple[int, int] | None:
        """The block after `previous` that begins with most of these tokens, and with how many of them; of several such
        the one used last. None when there is none that begins with the first.
        """
        best: tuple[int, int] | None = None
        siblings = self._tokens.get(previous)
        if siblings is None:
            return None
        for block, own in islice(reversed(siblings.items()), MAX_SEEN):
            num_equal = _num_equal(own, tokens)
            if num_equal > (best[1] if best is not None else 0):
                best = block, num_equal
        return best

    def entries(self) -> Mapping[int, tuple[bytes, Sequence[int]]]:
        """What each block follows, and its tokens. O(blocks); for tests."""
        return {block: (each, self._tokens[each][block]) for block, each in self._previous.items()}

    def check_integrity(self) -> None:
        """Raises AssertionError unless the books agree. For tests."""
        listed = {block: each for each, siblings in self._tokens.items() for block in siblings}
        assert listed == self._previous
        assert all(self._tokens.values()), "something is followed by nothing"


def _num_equal(some: Sequence[int], others: Sequence[int]) -> int:
    """How long their common beginning is."""
    number = 0
    for one, other in zip(some, others, strict=False):
        if one != other:
            break
        number += 1
    return number
