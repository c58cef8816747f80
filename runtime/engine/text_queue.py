"""The texts that wait to be embedded, by length, and the choice of those that share the next pass.

Texts of a pass are padded to its longest, and padding is computed like everything else. So a pass
takes the oldest text, and the nearest other lengths, of any call, as long as the padding is cheaper
than a separate pass. Since it always takes the oldest text, no text waits forever.

Invariant: a length without texts has no entry. This module knows nothing of tokens, threads or
time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from msgspec import Struct

# The fixed cost of a pass, in tokens: reading all weights. With MiniLM's shape on a CPU it is 22.
PASS_TOKENS = 24

Owner = TypeVar("Owner", bound=Hashable)


class _Waiting(Struct):
    age: int  # lower is older
    num_texts: int


class TextQueue(Generic[Owner]):
    """The queue. An owner is a call; a text is identified by its owner and its index there. Not
    thread-safe.
    """

    def __init__(self) -> None:
        self._lengths: list[int] = []  # of texts that wait, ascending
        # By length: owners in the order of arrival, their indices.
        self._texts: dict[int, OrderedDict[Owner, list[int]]] = {}
        self._counts: dict[int, int] = {}  # of the texts, by length
        self._owners: dict[Owner, _Waiting] = {}  # that have texts here
        self._next_age = 0

    def __len__(self) -> int:
        return sum(self._counts.values())

    def add(self, owner: Owner, lengths: Sequence[int]) -> None:
        """Add texts by their lengths in tokens, above 0. Once for each owner."""
        self._owners[owner] = _Waiting(self._next_age, len(lengths))
        self._next_age += 1
        for index, length in enumerate(lengths):
            if length not in self._counts:
                insort(self._lengths, length)
                self._texts[length], self._counts[length] = OrderedDict(), 0
            self._texts[length].setdefault(owner, []).append(index)
            self._counts[length] += 1

    def discard(self, owner: Owner) -> None:
        """Remove the owner's remaining texts, if any."""
        if self._owners.pop(owner, None) is None:
            return
        for length in list(self._lengths):
            indices = self._texts[length].pop(owner, [])
            self._lower(length, len(indices))

    def take(self, max_tokens: int) -> list[tuple[Owner, int]]:
        """Remove and return the texts of the next pass: `max_tokens` at most, padding included, or
        a single text. Empty without texts.
        """
        return [
            text for length, count in self._choose(max_tokens).items() for text in self._take(length, count)
        ]

    def _choose(self, max_tokens: int) -> dict[int, int]:
        """The number of texts of each length."""
        if not self._lengths:
            return {}
        # The oldest owner's longest text: texts of one age have one owner.
        first = min(self._lengths, key=lambda length: (self._age(length), -length))
        chosen = {first: min(self._counts[first], max(1, max_tokens // first))}
        below = above = bisect_left(self._lengths, first)
        longest, num_chosen = first, chosen[first]
        while True:
            shorter = self._lengths[below - 1] if below > 0 else 0
            longer = self._lengths[above + 1] if above + 1 < len(self._lengths) else 0
            # (padding in tokens, length, count), for those that fit
            offers = []
            if shorter and (room := max_tokens // longest - num_chosen) > 0:
                count = min(self._counts[shorter], room)
                offers.append((count * (longest - shorter), shorter, count))
            if longer and (room := max_tokens // longer - num_chosen) > 0:
                count = min(self._counts[longer], room)
                offers.append((num_chosen * (longer - longest), longer, count))
            padding, length, count = min(offers, default=(PASS_TOKENS + 1, 0, 0))
            if padding > PASS_TOKENS:
                return chosen
            chosen[length] = count
            num_chosen += count
            longest = max(longest, length)
            below, above = (below - 1, above) if length == shorter else (below, above + 1)

    def _age(self, length: int) -> int:
        """The age of the oldest text of this length."""
        return self._owners[next(iter(self._texts[length]))].age

    def _take(self, length: int, count: int) -> list[tuple[Owner, int]]:
        """Remove and return the oldest texts of this length."""
        owners = self._texts[length]
        taken: list[tuple[Owner, int]] = []
        while len(taken) < count:
            owner, indices = next(iter(owners.items()))
            num = min(len(indices), count - len(taken))
            taken += [(owner, index) for index in indices[:num]]
            del indices[:num]
            if not indices:
                del owners[owner]
            self._owners[owner].num_texts -= num
            if not self._owners[owner].num_texts:
                del self._owners[owner]
        self._lower(length, count)
        return taken

    def _lower(self, length: int, count: int) -> None:
        self._counts[length] -= count
        if not self._counts[length]:
            del self._counts[length], self._texts[length], self._lengths[bisect_left(self._lengths, length)]
