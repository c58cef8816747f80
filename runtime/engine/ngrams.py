"""The proposer of look-ahead: the tokens that followed the latest occurrence of a sequence's last
few tokens.

An index from the last `NGRAM` tokens to the position after them is kept up to date token by token:
a table of bounded size, in which later tokens take the slots of earlier ones. Every match is
compared with the tokens themselves, so a collision only hides one. Nothing here knows the model,
the grammar or the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

NGRAM = 3  # tokens that must match
# Of a match's length: beyond, more tokens say nothing more.
MAX_MATCH = 16
MIN_SLOTS, MAX_SLOTS = 1 << 8, 1 << 16  # of a table, 4 bytes each
FEW_TOKENS = 8  # are put into the table one by one: arrays would take longer
# Odd numbers without a pattern, one for each token of an n-gram.
FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
SHIFT = 15  # all bits of the tokens change the bits above


class Proposal(NamedTuple):
    """Tokens that may come next."""

    tokens: list[int]
    # The number of last tokens that the earlier place has, too, from `NGRAM` to `MAX_MATCH`.
    num_matched: int


class NgramProposer:
    """The proposer of one sequence. Not thread-safe."""

    __slots__ = ("_end", "_table", "_tokens")

    def __init__(self, tokens: Sequence[int]) -> None:
        """`tokens`, prompt and answer, are not copied; they may grow at their end, and change in no
        other way.
        """
        self._tokens = tokens
        self._end = NGRAM  # the position after the first n-gram that is not in the table
        # (slots,), a power of 2: positions after an n-gram; 0: none.
        self._table = np.zeros(0, np.int32)

    def propose(self, max_tokens: int) -> Proposal | None:
        """The tokens that followed the last `NGRAM` ones most recently, `max_tokens` of them; None
        without a match. Takes time for the tokens since the last call, and for those proposed.
        """
        tokens = self._tokens
        if max_tokens < 1 or len(tokens) <= NGRAM:
            return None
        self._index()
        last = tokens[-NGRAM:]
        place = int(self._table[_hash(*last) & (len(self._table) - 1)])
        if not place or tokens[place - NGRAM : place] != last:
            return None
        proposed: list[int] = []
        for source in range(place, place + max_tokens):
            ahead = source - len(tokens)  # a text that repeats itself at once goes on doing so
            proposed.append(tokens[source] if ahead < 0 else proposed[ahead])
        return Proposal(proposed, self._num_matched(place))

    def _num_matched(self, place: int) -> int:
        tokens, end, num = self._tokens, len(self._tokens), NGRAM
        while num < min(MAX_MATCH, place) and tokens[place - num - 1] == tokens[end - num - 1]:
            num += 1
        return num

    def _index(self) -> None:
        """Put all n-grams but the last one into the table."""
        tokens, end = self._tokens, len(self._tokens)
        if 2 * end > len(self._table) and len(self._table) < MAX_SLOTS:
            num_slots = max(MIN_SLOTS, 1 << (4 * end).bit_length())
            self._table = np.zeros(min(MAX_SLOTS, num_slots), np.int32)
            self._end = NGRAM
        mask = len(self._table) - 1
        if end - self._end <= FEW_TOKENS:  # as in most steps
            for place in range(self._end, end):
                self._table[_hash(*tokens[place - NGRAM : place]) & mask] = place
        else:
            first = max(self._end, end - MAX_SLOTS)
            own = np.array(tokens[first - NGRAM : end - 1], np.int64)
            hashes = _hash(*(own[number : number + end - first] for number in range(NGRAM)))
            # Of equal slots the last one stays.
            self._table[hashes & mask] = np.arange(first, end, dtype=np.int32)
        self._end = end


def _hash(first: Any, second: Any, third: Any) -> Any:
    """The hash of three tokens, or of as many from (N,) int64 arrays; tokens are below 2**24."""
    return (first * FACTORS[0] + second * FACTORS[1] + third * FACTORS[2]) >> SHIFT
