"""Blocks that are put into a pool are found and read as they were, and take nothing from other blocks."""

from __future__ import annotations

import hashlib
import struct

import pytest
from tests.support.kv_snapshots import BLOCK_SIZE, SEED, Pool, contents_of, tokens_of

from teneral.runtime.kv import prefix_pool
from teneral.runtime.kv.prefixes import PrefixLedger


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Two blocks of the pools here at a time."""
    monkeypatch.setattr(prefix_pool, "PIECE_BYTES", 2 * Pool(1).pool.block_bytes)


def test_what_is_put_is_found_and_read_and_idle():
    pool = Pool()
    chain = pool.compute(tokens_of(1, 5))
    pool.check(chain)
    assert pool.prefixes.num_idle == 5
    assert pool.allocator.free_count == 11


def test_a_chain_in_pieces_lies_in_one_run():
    pool = Pool()
    chain = pool.compute(tokens_of(1, 7))
    blocks = pool.prefixes.find(chain)
    assert blocks == list(range(blocks[0], blocks[0] + 7))


def test_nothing_that_is_cached_is_given_up_for_what_is_put():
    pool = Pool(6)
    cached = pool.compute(tokens_of(1, 4))
    more = pool.pool.chain(tokens_of(2, 4), salt="")
    assert pool.pool.put(more, contents_of(more, pool.pool.block_bytes)) == 2
    pool.check(cached)
    pool.check(more[:2])
    assert pool.prefixes.find(more) == pool.prefixes.find(more[:2])


def test_what_is_there_stays_what_it_is():
    pool = Pool()
    chain = pool.compute(tokens_of(1, 3))
    blocks = pool.prefixes.find(chain)
    longer = pool.pool.chain(tokens_of(1, 3) + tokens_of(2, 2), salt="")
    assert pool.pool.put(longer, contents_of(longer, pool.pool.block_bytes)) == 5
    assert pool.prefixes.find(longer)[:3] == blocks
    pool.check(longer)


def test_the_end_of_what_is_held_is_given_up_before_its_beginning():
    pool = Pool(8)
    chain = pool.compute(tokens_of(1, 6))
    pool.prefixes.make_room(5)
    assert len(pool.prefixes.find(chain)) == 3
    pool.check(chain[:3])


def test_as_much_of_a_chain_is_read_as_is_there():
    pool = Pool(8)
    chain = pool.compute(tokens_of(1, 5))
    pool.prefixes.make_room(6)
    content = pool.pool.get(chain)
    assert len(content) == 2
    assert (content == contents_of(chain, pool.pool.block_bytes)[:2]).all()


def test_a_chain_is_what_the_format_says():
    def hashed(*parts):
        return hashlib.sha256(b"".join(struct.pack("<Q", len(part)) + part for part in parts)).digest()

    tokens = tokens_of(1, 2)
    expected, last = [], hashed(SEED, "ä".encode())
    for block in (tokens[:BLOCK_SIZE], tokens[BLOCK_SIZE:]):
        last = hashlib.sha256(last + struct.pack(f"<{BLOCK_SIZE}q", *block)).digest()
        expected.append(last)
    assert Pool().pool.chain(tokens, salt="ä") == tuple(expected)


def test_who_has_another_salt_has_another_chain():
    pool = Pool()
    chains = {pool.pool.chain(tokens_of(1, 2), salt=salt) for salt in ("", "a", "b")}
    assert len(chains) == 3
    assert len(pool.pool.chain(tokens_of(1, 2)[:-1], salt="")) == 1  # full blocks only


# What was of use


def ledger_of(*chains, there=lambda each: True, max_entries=100):
    ledger = PrefixLedger(max_entries, there)
    for chain in chains:
        ledger.add(chain)
    return ledger


A, B, C, D, E, F = (bytes([each]) * 32 for each in b"abcdef")


def test_what_was_found_most_often_comes_first():
    ledger = ledger_of((A, B), (C, D))
    ledger.count_hits((A,))
    for _ in range(3):
        ledger.count_hits((C, D))
    assert ledger.most_wanted(10) == [(C, D), (A,)]


def test_unused_prefixes_are_not_saved():
    ledger = ledger_of((A, B))
    assert ledger.most_wanted(10) == []


def test_a_common_beginning_is_in_both_chains_and_counted_once():
    ledger = ledger_of((A, B, C), (A, B, D))
    ledger.count_hits((A, B, C))
    ledger.count_hits((A, B, D))
    assert sorted(ledger.most_wanted(4)) == [(A, B, C), (A, B, D)]
    assert ledger.most_wanted(2) == [(A, B)]
    assert len(ledger.most_wanted(3)) == 1


def test_what_is_gone_and_all_behind_it_is_left_out():
    gone = {B}
    ledger = ledger_of((A, B, C), there=lambda each: each not in gone)
    ledger.count_hits((A, B, C))
    assert ledger.most_wanted(10) == [(A,)]


def test_a_beginning_that_was_forgotten_and_came_back_is_not_left_out():
    gone: set[bytes] = set()
    ledger = ledger_of((A, B), there=lambda each: each not in gone, max_entries=2)
    for _ in range(3):
        ledger.count_hits((A, B))
    gone.add(A)
    ledger.add((C,))  # too many: those that are gone are forgotten
    gone.clear()
    ledger.add((A,))
    ledger.count_hits((A,))
    assert ledger.most_wanted(2) == [(A, B)]
    assert ledger.most_wanted(1) == [(A,)]


def test_what_is_pinned_counts_as_found() -> None:
    ledger = PrefixLedger(10, lambda _: True)
    ledger.add((A, B))
    ledger.add((C,))
    assert ledger.most_wanted(10) == []
    assert ledger.most_wanted(10, pinned={A, B}) == [(A, B)]


def test_its_size_is_bounded():
    ledger = ledger_of(there=lambda each: each[0] < 8, max_entries=16)
    for number in range(200):
        ledger.add((bytes([number]) * 32,))
        assert len(ledger) <= 16
    assert len(ledger_of(*((bytes([number]) * 32,) for number in range(200)), max_entries=16)) <= 16


def test_blocks_of_the_pool_are_wanted_as_they_are_found():
    pool = Pool()
    system = pool.compute(tokens_of(1, 3), hits=2)
    once = pool.compute(tokens_of(2, 3), hits=1)
    pool.compute(tokens_of(3, 3))
    limit_bytes = 6 * pool.pool.block_bytes
    assert pool.pool.most_wanted(limit_bytes) == [system, once]
    assert pool.pool.most_wanted(limit_bytes // 2) == [system]
    assert len(system) == 12 // BLOCK_SIZE
