"""An index of cached blocks by their predecessor and tokens.

Where a prompt leaves a chain in the middle of a block, one of these blocks may begin with its next
tokens. A block is listed under the hash of its predecessor, or under the seed of its chain, so it
cannot be found without that, just like whole blocks. There is at most one entry for each block, and
a search looks at `MAX_SEEN` successors of one predecessor: its time is bounded, however many of
them a client makes. This module knows nothing of the owners of blocks.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import islice

# Successors of one predecessor to look at, the most recently used ones.
MAX_SEEN = 16


class Followers:
    """The index of one pool. `tokens` are all tokens of a block."""

    def __init__(self) -> None:
        # By predecessor; each with its tokens, least recently used first.
        self._tokens: dict[bytes, OrderedDict[int, array[int]]] = {}
        self._previous: dict[int, bytes] = {}  # by block

    def __contains__(self, block: int) -> bool:
        return block in self._previous

    def add(self, block: int, previous: bytes, tokens: Sequence[int]) -> None:
        """List this new block, with these tokens, under `previous`."""
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
        """Mark this block as the most recently used of its siblings."""
        previous = self._previous.get(block)
        if previous is not None:
            self._tokens[previous].move_to_end(block)

    def find(self, previous: bytes, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Find the block after `previous` that shares the longest beginning with these tokens.

        Returns the block and the number of shared tokens; ties go to the most recently used one.
        None: no block begins with the first token.
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
        """Each block's predecessor and tokens. O(blocks); for tests."""
        return {block: (each, self._tokens[each][block]) for block, each in self._previous.items()}

    def check_integrity(self) -> None:
        """Raise AssertionError if the two maps disagree. For tests."""
        listed = {block: each for each, siblings in self._tokens.items() for block in siblings}
        assert listed == self._previous
        assert all(self._tokens.values()), "a predecessor has no successors"


def _num_equal(some: Sequence[int], others: Sequence[int]) -> int:
    """The length of their common beginning."""
    number = 0
    for one, other in zip(some, others, strict=False):
        if one != other:
            break
        number += 1
    return number
