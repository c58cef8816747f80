"""The proposals of look-ahead: their tokens, and their number for each sequence of a step.

The tokens are those that followed the latest occurrence of a sequence's last few tokens. An index
from the last `NGRAM` tokens to the position after them is kept up to date token by token: a table
of bounded size, in which later tokens take the slots of earlier ones. Every match is compared with
the tokens themselves, so a collision only hides one.

Their number is a pure decision over what was accepted before, and over measured times. A proposal
is one more row of a step. If it is accepted it saves a step of its sequence; the row makes this
step longer, for all of its sequences. So a step gets those proposals with which it gives the most
tokens in its time, as far as can be foreseen: the likeliest first, as many as pay. With few rows a
step's time is that of reading the weights, and rows are cheap; with many it is that of computing,
and only likely proposals pay. `MatchAcceptance` estimates how likely a sequence's proposals are,
`RowCosts` measures what rows cost.

Nothing here knows the model, the grammar or the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .speculation import ROW_SHARE

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


MAX_PROPOSALS = 32  # of one sequence in a step
# A step with proposals must promise that much more than one without, or it gets none.
MIN_GAIN = 1.02
# Of a step in which some sequence has no proposals, and so no gain.
MAX_SLOWDOWN = 1.25

# The least length of a match, and the share of accepted proposals to begin with.
MATCHES = ((9, 0.95), (5, 0.8), (0, 0.5))
PRIOR_WEIGHT = 4.0  # proposals that it counts for
MEMORY = 0.95  # of earlier proposals' weight, with each one that is judged
MAX_RATE = 0.98
# Matches without a proposal before the next trial.
MIN_PAUSE, MAX_PAUSE = 8, 128


class MatchAcceptance:
    """The accepted proposals of one sequence."""

    __slots__ = ("_counts", "_num_skipped", "_pause")

    def __init__(self) -> None:
        self._counts = [[0.0, 0.0] for _ in MATCHES]  # judged, accepted; of each length of a match
        self._pause = MIN_PAUSE
        self._num_skipped = 0

    def rate(self, num_matched: int) -> float:
        """The share of proposals after such a match that are accepted, of those whose predecessors were."""
        number = _class_of(num_matched)
        judged, accepted = self._counts[number]
        share = (accepted + MATCHES[number][1] * PRIOR_WEIGHT) / (judged + PRIOR_WEIGHT)
        return min(share, MAX_RATE)

    def add(self, num_matched: int, num_proposed: int, num_accepted: int) -> None:
        """Count proposals that were verified. After the first wrong one, none is judged."""
        counts = self._counts[_class_of(num_matched)]
        num_judged = min(num_accepted + 1, num_proposed)
        counts[0] = counts[0] * MEMORY**num_judged + num_judged
        counts[1] = counts[1] * MEMORY**num_judged + num_accepted
        self._pause = MIN_PAUSE if num_accepted else min(2 * self._pause, MAX_PAUSE)

    def skip(self) -> bool:
        """Count a match whose proposals do not pay. True if it is to be tried all the same."""
        self._num_skipped += 1
        is_due = self._num_skipped >= self._pause
        if is_due:
            self._num_skipped = 0
        return is_due


def _class_of(num_matched: int) -> int:
    return next(number for number, (least, _) in enumerate(MATCHES) if num_matched >= least)


class RowCosts:
    """The time that added rows cost, as a share of a step without them."""

    RATE = 0.2  # of a new measurement
    MAX_RATIO = 2.0  # of a step's time to the expected one; more is another program's doing
    MIN_RATIO = 0.2  # of a row's share to the assumed one: one slow step makes rows look free

    def __init__(self) -> None:
        # Of steps without proposals, by the number of their sequences.
        self._alone_s: dict[int, float] = {}
        # A row's share, by the magnitudes of the numbers of sequences and of added rows.
        self._shares: dict[int, dict[int, float]] = {}

    def add(self, num_sequences: int, num_added: int, took_s: float) -> None:
        """Record a step in which each sequence decodes, with `num_added` rows of proposals."""
        alone_s = self._alone_s.get(num_sequences)
        if not num_added:
            change = 0.0 if alone_s is None else min(took_s, self.MAX_RATIO * alone_s) - alone_s
            self._alone_s[num_sequences] = took_s if alone_s is None else alone_s + self.RATE * change
        elif alone_s is not None:
            expected = self.added(num_sequences, num_added)
            found = min(took_s / alone_s, self.MAX_RATIO * (1 + expected)) - 1
            share = expected / num_added + self.RATE * (found - expected) / num_added
            share = max(share, self.MIN_RATIO * _assumed_share(num_sequences))
            self._shares.setdefault(num_sequences.bit_length(), {})[num_added.bit_length()] = share

    def added(self, num_sequences: int, num_added: int) -> float:
        """The time that `num_added` rows add to a step, as a share of its time without them."""
        shares = self._shares.get(num_sequences.bit_length())
        if not shares:
            return num_added * _assumed_share(num_sequences)
        size = num_added.bit_length()
        # Of as many rows; else of fewer, else of more.
        nearest = min(shares, key=lambda other: (abs(size - other), other > size))
        return num_added * shares[nearest]


def _assumed_share(num_sequences: int) -> float:
    return ROW_SHARE / (1 + ROW_SHARE * (num_sequences - 1))


class Chance(NamedTuple):
    """The proposals that a sequence may have."""

    rate: float  # as `MatchAcceptance` has it
    num: int


def proposal_lengths(
    chances: Sequence[Chance], num_sequences: int, max_added: int, added: Callable[[int], float]
) -> list[int]:
    """The number of proposals for each chance, `max_added` at most of all together.

    The step has `num_sequences` that get a token; `added` is `RowCosts.added` for them.
    """
    likeliest = sorted(
        (
            (chance.rate**place, number)
            for number, chance in enumerate(chances)
            for place in range(1, chance.num + 1)
        ),
        reverse=True,
    )[:max_added]
    is_shared = len(chances) < num_sequences
    num_tokens, most, num_worth = float(num_sequences), num_sequences * MIN_GAIN, 0
    for num_added, (chance, _) in enumerate(likeliest, 1):
        time = 1 + added(num_added)
        if is_shared and time > MAX_SLOWDOWN:
            break
        num_tokens += chance
        if num_tokens / time > most:
            most, num_worth = num_tokens / time, num_added
    lengths = [0] * len(chances)
    for _, number in likeliest[:num_worth]:
        lengths[number] += 1
    return lengths
