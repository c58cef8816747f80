"""Sessions: conversations whose cached blocks are pinned for their next turn.

A session pins the full blocks of its last finished sequence, so that other traffic does not evict
them. The number of pinned blocks, the number of sessions and the idle time of a session are
bounded; beyond a bound, the least recently used session loses its pins, and its blocks become
ordinary cached ones. The same happens when nothing else can be evicted: pins never keep a sequence
from running.

Invariant: the blocks of every session are cached, in the order of their chain, and at most
`max_blocks` different ones are pinned. This module knows nothing of tokens, tenants or threads; the
caller serialises access.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping

from msgspec import Struct

from .prefixes import PrefixCache

SessionKey = tuple[str, str, str]
"""Tenant, salt and name: the same name under another tenant or salt is a different session."""


class Unpinned(enum.StrEnum):
    """The reason why a session lost its pins."""

    # A newer session needed the budget.
    BUDGET = "budget"
    # The session was not continued in time.
    IDLE = "idle"
    PRESSURE = "pressure"  # sequences needed the memory


class SessionStatistics(Struct, frozen=True):
    """A snapshot of the counts; totals count from the start."""

    num_sessions: int
    num_owners: int  # different tenants, or salts, of these sessions
    num_pinned_blocks: int
    max_pinned_blocks: int
    unpinned_total: Mapping[Unpinned, int]


class _Session(Struct):
    blocks: tuple[int, ...]
    used_s: float


class SessionPins:
    """The sessions of one pool."""

    def __init__(
        self, prefixes: PrefixCache, *, max_blocks: int, max_sessions: int, max_idle_s: float
    ) -> None:
        self._prefixes = prefixes
        self._max_blocks = max_blocks
        self._max_sessions = max_sessions
        self._max_idle_s = max_idle_s
        self._sessions: OrderedDict[SessionKey, _Session] = OrderedDict()  # least recently used first
        self._num_unpinned: Counter[Unpinned] = Counter()
        prefixes.on_shortage(self._make_way)

    def keep(self, key: SessionKey, hashes: Iterable[bytes], now_s: float) -> None:
        """Pin the cached blocks of this chain instead of the session's earlier ones, as much of its
        beginning as the budget allows.
        """
        blocks = tuple(self._prefixes.find(hashes))[: self._max_blocks]
        if not blocks or not self._max_sessions:
            return
        self._prefixes.pin(blocks)
        before = self._sessions.pop(key, None)
        if before is not None:
            self._prefixes.unpin(before.blocks)
        self._sessions[key] = _Session(blocks, now_s)
        while self._prefixes.num_pinned > self._max_blocks or len(self._sessions) > self._max_sessions:
            self._unpin_oldest(Unpinned.BUDGET)

    def touch(self, key: SessionKey, now_s: float) -> None:
        """Mark the session, if it exists, as just used."""
        if key in self._sessions:
            self._sessions[key].used_s = now_s
            self._sessions.move_to_end(key)

    def expire(self, now_s: float) -> None:
        """Release the sessions that were idle for too long."""
        while self._sessions:
            oldest = next(iter(self._sessions.values()))
            if now_s - oldest.used_s <= self._max_idle_s:
                return
            self._unpin_oldest(Unpinned.IDLE)

    def num_of_blocks(self) -> Counter[int]:
        """The number of sessions that pin each pinned block."""
        return Counter(block for session in self._sessions.values() for block in session.blocks)

    def statistics(self) -> SessionStatistics:
        return SessionStatistics(
            num_sessions=len(self._sessions),
            num_owners=len({key[:2] for key in self._sessions}),
            num_pinned_blocks=self._prefixes.num_pinned,
            max_pinned_blocks=self._max_blocks,
            unpinned_total=dict(self._num_unpinned),
        )

    def check_integrity(self) -> None:
        """Raise AssertionError if the pins disagree with the cache's. For tests."""
        pins = self.num_of_blocks()
        cached = set(self._prefixes.blocks())
        assert len(pins) == self._prefixes.num_pinned <= self._max_blocks
        assert len(self._sessions) <= self._max_sessions
        assert set(pins) <= cached, "a session pins a block that cannot be found"
        assert pins == self._prefixes.pins(), "the cache has different pins"
        used_s = [session.used_s for session in self._sessions.values()]
        assert used_s == sorted(used_s), "the sessions are not in the order of their use"

    def _make_way(self) -> None:
        assert self._sessions, "blocks are pinned, but not by a session"
        self._unpin_oldest(Unpinned.PRESSURE)

    def _unpin_oldest(self, reason: Unpinned) -> None:
        _, session = self._sessions.popitem(last=False)
        self._prefixes.unpin(session.blocks)
        self._num_unpinned[reason] += 1
