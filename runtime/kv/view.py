"""The content of a KV pool for people: a bounded value without tokens, salts, or names of sessions
and tenants.

A chain is the cached part of a request's tokens from their beginning on; chains with the same
beginning share its blocks. This module knows nothing of sequences or threads; the caller serialises
access.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from .blocks import BlockAllocator
from .prefixes import PrefixCache, PrefixLedger
from .sessions import SessionStatistics

MAX_CHAINS = 64


class ChainView(Struct, frozen=True):
    """One cached chain. Its counts of requests, sequences and sessions are those of its first
    block.
    """

    num_blocks: int
    num_tokens: int
    num_hits: int  # requests that found some of it
    unused_s: float  # since the whole chain was added, or last found
    num_sequences: int  # that use it now
    num_sessions: int  # that pin it
    num_pinned_blocks: int


class PrefixView(Struct, frozen=True):
    """A stretch of blocks that the shown chains run through without branching: a node of their tree."""

    parent: int | None  # index of the node before it; None: a beginning
    num_blocks: int
    num_tokens: int
    num_hits: int  # requests that have found its first block
    unused_s: float  # since its last block was made, or found last
    num_sequences: int  # that use its first block now
    num_sessions: int  # that pin it


class PoolView(Struct, frozen=True):
    """A snapshot of the pool. Each block is free, idle, pinned or in use."""

    num_blocks: int
    block_size: int  # tokens
    num_free: int
    num_idle: int  # cached and evictable
    num_pinned: int  # cached, and evicted after all others
    num_in_use: int  # by sequences, or being copied
    num_shared: int  # of those in use: by more than one
    num_sessions: int
    num_session_owners: int  # different tenants, or salts, of these sessions
    max_pinned_blocks: int
    num_chains: int
    # At most `MAX_CHAINS`, the most recently used ones first.
    chains: tuple[ChainView, ...]
    prefixes: tuple[PrefixView, ...]  # the tree of these chains, parents before children


def view_pool(
    allocator: BlockAllocator,
    prefixes: PrefixCache,
    ledger: PrefixLedger,
    sessions: SessionStatistics,
    *,
    block_size: int,
    now_s: float,
) -> PoolView:
    """Take a view of the pool, in O(blocks of the pool)."""
    pins = prefixes.pins()
    users = [prefixes.num_users(block) for block in range(allocator.num_blocks)]
    num_idle_pinned = sum(users[block] == 0 for block in pins)
    cached = prefixes.by_hash()
    inner = {entry.parent for each in cached if (entry := ledger.entry(each)) is not None}
    last_ones = [each for each in cached if each not in inner]
    shown = heapq.nlargest(MAX_CHAINS, last_ones, key=lambda each: _used_s(ledger, each))
    return PoolView(
        num_blocks=allocator.num_blocks,
        block_size=block_size,
        num_free=allocator.free_count,
        num_idle=prefixes.num_idle - num_idle_pinned,
        num_pinned=num_idle_pinned,
        num_in_use=sum(count > 0 for count in users),
        num_shared=sum(count > 1 for count in users),
        num_sessions=sessions.num_sessions,
        num_session_owners=sessions.num_owners,
        max_pinned_blocks=sessions.max_pinned_blocks,
        num_chains=len(last_ones),
        chains=tuple(_view_chain(each, prefixes, ledger, pins, block_size, now_s) for each in shown),
        prefixes=tuple(_view_tree(shown, prefixes, ledger, pins, block_size, now_s)),
    )


def _view_chain(
    last: bytes,
    prefixes: PrefixCache,
    ledger: PrefixLedger,
    pins: Mapping[int, int],
    block_size: int,
    now_s: float,
) -> ChainView:
    cached = prefixes.by_hash()
    hashes = _chain_to(last, cached, ledger)
    blocks = [cached[each] for each in hashes]
    beginning = ledger.entry(hashes[0])
    num_hits = 0 if beginning is None else beginning.num_hits
    first = blocks[0]
    return ChainView(
        num_blocks=len(blocks),
        num_tokens=len(blocks) * block_size,
        num_hits=num_hits,
        unused_s=round(max(0.0, now_s - _used_s(ledger, last)), 3),
        num_sequences=prefixes.num_users(first),
        num_sessions=pins.get(first, 0),
        num_pinned_blocks=sum(block in pins for block in blocks),
    )


def _chain_to(last: bytes, cached: Mapping[bytes, int], ledger: PrefixLedger) -> list[bytes]:
    """The blocks' hashes, from the first that can be found to `last`."""
    hashes: list[bytes] = []
    each: bytes | None = last
    while each is not None and each in cached:
        hashes.append(each)
        entry = ledger.entry(each)
        each = None if entry is None else entry.parent
    return hashes[::-1]


def _view_tree(
    shown: Sequence[bytes],
    prefixes: PrefixCache,
    ledger: PrefixLedger,
    pins: Mapping[int, int],
    block_size: int,
    now_s: float,
) -> Iterator[PrefixView]:
    """At most two nodes a chain."""
    cached = prefixes.by_hash()
    after: dict[bytes | None, dict[bytes, None]] = {}  # an ordered set of the blocks behind each
    for last in shown:
        before: bytes | None = None
        for each in _chain_to(last, cached, ledger):
            after.setdefault(before, {})[each] = None
            before = each
    waiting: list[tuple[int | None, bytes]] = [(None, each) for each in reversed(after.get(None, {}))]
    num_nodes = 0
    while waiting:
        parent, first = waiting.pop()
        end, num_blocks = first, 1
        while len(after.get(end, {})) == 1:
            end, num_blocks = next(iter(after[end])), num_blocks + 1
        entry = ledger.entry(first)
        yield PrefixView(
            parent=parent,
            num_blocks=num_blocks,
            num_tokens=num_blocks * block_size,
            num_hits=0 if entry is None else entry.num_hits,
            unused_s=round(max(0.0, now_s - _used_s(ledger, end)), 3),
            num_sequences=prefixes.num_users(cached[first]),
            num_sessions=pins.get(cached[first], 0),
        )
        waiting += [(num_nodes, each) for each in reversed(after.get(end, {}))]
        num_nodes += 1


def _used_s(ledger: PrefixLedger, block_hash: bytes) -> float:
    entry = ledger.entry(block_hash)
    return 0.0 if entry is None else entry.used_s


def render(view: PoolView) -> str:
    """The view as text: what the blocks are used for, then a line for each chain."""
    lines = [
        f"{view.num_blocks} blocks of {view.block_size} tokens: {view.num_in_use} in use "
        f"({view.num_shared} shared), {view.num_idle} idle, {view.num_pinned} pinned, {view.num_free} free",
        f"{view.num_sessions} sessions of {view.num_session_owners} owners may pin "
        f"{view.max_pinned_blocks} blocks",
    ]
    if view.chains:
        lines += ["", f"{'tokens':>8} {'hits':>6} {'unused':>9} {'in use':>7} {'sessions':>9} {'pinned':>7}"]
    for chain in view.chains:
        lines.append(
            f"{chain.num_tokens:>8} {chain.num_hits:>6} {chain.unused_s:>7.1f} s {chain.num_sequences:>7} "
            f"{chain.num_sessions:>9} {chain.num_pinned_blocks:>7}"
        )
    if view.num_chains > len(view.chains):
        lines.append(f"… and {view.num_chains - len(view.chains)} chains more")
    return "\n".join(lines)
