"""Conversations whose keys and values are kept for their next turn: pins on blocks that can be found again.

A session pins the full blocks of the sequence that it ended with last, so that the traffic of others does not have
them given up. There are bounds to how many blocks are pinned, to how many sessions there are, and to how long one may
be idle; beyond them the session that was used least recently loses its pins, and its blocks are cached ones like any
others. So it goes when nothing else can be given up: pins keep nobody from running.

Invariant: the blocks of every session are cached, in the order of their chain, and at most `max_blocks` different ones
are pinned. Nothing is known here of tokens, tenants or threads; the caller serialises access.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .prefixes import PrefixCache

SessionKey = tuple[str, str, str]
"""Tenant, salt and name: the same name of another tenant, or under another salt, is another session."""


class Unpinned(enum.StrEnum):
    """Why a session lost its pins."""

    BUDGET = "budget"  # another one took its place
    IDLE = "idle"  # nobody came back in time
    PRESSURE = "pressure"  # sequences needed the memory


@dataclass(frozen=True, slots=True)
class SessionStatistics:
    """A moment's view; totals count from the start."""

    num_sessions: int
    num_owners: int  # tenants, or salts, that these belong to
    num_pinned_blocks: int
    max_pinned_blocks: int
    unpinned_total: Mapping[Unpinned, int]


@dataclass(slots=True)
class _Session:
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
        """Pin what is there of this chain, instead of what the session had; as much of its beginning as it may have."""
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
        """The session is wanted again, if it is one."""
        if key in self._sessions:
            self._sessions[key].used_s = now_s
            self._sessions.move_to_end(key)

    def expire(self, now_s: float) -> None:
        """Let go those that nobody has come back to."""
        while self._sessions:
            oldest = next(iter(self._sessions.values()))
            if now_s - oldest.used_s <= self._max_idle_s:
                return
            self._unpin_oldest(Unpinned.IDLE)

    def num_of_blocks(self) -> Counter[int]:
        """How many sessions pin each block that is pinned."""
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
        """Raises AssertionError unless the books agree with the cache's. For tests."""
        pins = self.num_of_blocks()
        cached = set(self._prefixes.blocks())
        assert len(pins) == self._prefixes.num_pinned <= self._max_blocks
        assert len(self._sessions) <= self._max_sessions
        assert set(pins) <= cached, "a session pins a block that cannot be found"
        assert pins == self._prefixes.pins(), "the cache knows of other pins"
        used_s = [session.used_s for session in self._sessions.values()]
        assert used_s == sorted(used_s), "the sessions are not in the order of their use"

    def _make_way(self) -> None:
        assert self._sessions, "blocks are pinned, but not by a session"
        self._unpin_oldest(Unpinned.PRESSURE)

    def _unpin_oldest(self, reason: Unpinned) -> None:
        _, session = self._sessions.popitem(last=False)
        self._prefixes.unpin(session.blocks)
        self._num_unpinned[reason] += 1
