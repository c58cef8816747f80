"""The places of recurrent states: one for each running sequence, and copies at the ends of blocks, for reuse.

A model with gated delta nets or Mamba-2 layers has, besides keys and values, a state of each sequence. It is of fixed
size, as large as the keys and values of thousands of tokens, changes with each token, and cannot be computed from
blocks. So a cached prefix is worth as much as the longest of its beginnings whose state was kept. Copies are made
within steps, by the executor, where a block ends and others are likely to branch off:

- at the last end of a block before a prompt's last token,
- where a prompt left the cached blocks of another one, whose states end before that,
- at the last end of a block that an answer has reached; the copy before that is dropped.

They are found by the hashes of blocks (`prefixes.py`), and the least recently used ones make room for others. Places
are at least twice as many as sequences that may run: a sequence always gets one, and the copy that it begins with is
kept until it has begun. States are made in order, one token at a time, so their bits depend on no chunks and no
company.

This module knows nothing of tensors, sequences or threads; the caller serialises access.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence


class StatePlaces:
    """The places [0, num_places) of one pool: each is free, a sequence's, or has a copy that is found by a hash."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self._free = list(range(num_places - 1, -1, -1))
        self._copies: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._holds: Counter[int] = Counter()  # of copies that sequences are about to begin with

    @staticmethod
    def ends_to_save(
        first: int, end: int, *, num_prompt_tokens: int, branch: int, block_size: int
    ) -> list[int]:
        """The numbers of tokens in (first, end] after which a sequence's state is copied, ascending. `branch` is
        where it left another's cached blocks, or 0.
        """
        of_prompt = (num_prompt_tokens - 1) // block_size * block_size
        latest = end // block_size * block_size
        ends = {branch, of_prompt, latest if latest > of_prompt else 0}
        return sorted(each for each in ends if first < each <= end)

    def take(self) -> int | None:
        """A place for a sequence: a free one, or that of the least recently used copy. None: all are in use."""
        if self._free:
            return self._free.pop()
        for block_hash, place in self._copies.items():
            if not self._holds[place]:
                del self._copies[block_hash]
                return place
        return None

    def release(self, place: int) -> None:
        """Give back a sequence's place."""
        self._free.append(place)

    def keep(self, block_hash: bytes, place: int) -> None:
        """Make a sequence's place the copy at the end of this block, unless there is one."""
        if block_hash in self._copies:
            self._copies.move_to_end(block_hash)
            self.release(place)
        else:
            self._copies[block_hash] = place

    def drop(self, block_hash: bytes) -> None:
        """Free the copy at the end of this block, if there is one that nothing holds."""
        place = self._copies.get(block_hash)
        if place is not None and not self._holds[place]:
            del self._copies[block_hash]
            self.release(place)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._copies

    def num_usable(self, hashes: Sequence[bytes]) -> int:
        """The number of a chain's blocks, from the first one on, that end with a copy."""
        return next((number for number in range(len(hashes), 0, -1) if hashes[number - 1] in self._copies), 0)

    def hold(self, block_hash: bytes) -> int:
        """Keep the copy at the end of this block, which must be there, until it is let go. Returns its place."""
        place = self._copies[block_hash]
        self._copies.move_to_end(block_hash)
        self._holds[place] += 1
        return place

    def let_go(self, place: int) -> None:
        self._holds[place] -= 1
        if not self._holds[place]:
            del self._holds[place]

    def check_integrity(self, taken: Collection[int], held: Collection[int]) -> None:
        """Raise AssertionError unless sequences have taken and hold these places, and all others are free or copies'.
        For tests.
        """
        places = [*self._free, *self._copies.values(), *taken]
        assert sorted(places) == list(range(self.num_places)), "a place of a state leaked, or has two users"
        assert self._holds == Counter(held), "a copy is held by nothing"
        assert set(held) <= set(self._copies.values())
