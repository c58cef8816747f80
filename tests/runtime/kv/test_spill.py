"""Blocks that the pool has given up come back from where they were saved, or are computed again."""

from __future__ import annotations

import pytest
from tests.support.inspection import prefill_times_of, tiers_of
from tests.support.spill_rig import (
    BLOCK_SIZE,
    HASH_BYTES,
    KINDS,
    SEED,
    A,
    B,
    C,
    SpillRig,
    chain,
    fetched,
    small_rig,
    total,
)

from teneral.runtime.kv.prefixes import seed_hash
from teneral.runtime.kv.spill.spill import MAX_FETCHES, TRY_EVERY


@pytest.fixture(params=KINDS)
def rig(request, tmp_path):
    with small_rig(request.param, tmp_path) as rig:
        yield rig


def test_what_was_given_up_comes_back(rig):
    rig.compute(A)
    rig.compute(B)
    rig.save()
    rig.give_up_all()
    assert rig.found(A) == rig.found(B) == 0
    assert fetched(rig, A) == 6
    assert fetched(rig, B) == 6
    statistics = rig.spill.statistics()
    assert total(statistics.restored_tokens_total) == 12 * BLOCK_SIZE
    assert total(statistics.blocks) == 12  # they stay where they were, too
    assert total(statistics.bytes) == 12 * HASH_BYTES
    assert statistics.fetches_total == 2


def test_what_is_found_in_the_pool_is_not_read_again(rig):
    rig.compute(A)
    rig.save()
    rig.give_up_all()
    rig.compute(A[:4])
    assert fetched(rig, A) == 6
    assert total(rig.spill.statistics().restored_tokens_total) == 2 * BLOCK_SIZE


def test_a_hole_in_what_was_saved_ends_what_comes_back(rig):
    rig.compute(A)
    rig.save()
    rig.give_up_all()
    hole = tiers_of(rig.spill).find(A[3])
    hole.tier.remove(A[3])
    assert fetched(rig, A) == 3


def test_a_block_in_the_pool_behind_a_hole_is_used(rig):
    rig.compute(A)
    rig.save()
    rig.give_up_all()
    (orphan,) = rig.allocator.allocate(1)
    rig.kv.write(orphan, A[2])
    rig.prefixes.add(orphan, A[2])
    rig.prefixes.release([orphan])
    assert fetched(rig, A) == 6
    assert rig.prefixes.find(A)[2] == orphan


def test_what_is_used_is_not_saved_and_what_is_saved_is_not_saved_twice(rig):
    blocks = rig.compute(A)
    rig.prefixes.take(blocks)
    rig.save()
    assert total(rig.spill.statistics().blocks) == 0
    rig.prefixes.release(blocks)
    rig.save()
    rig.compute(B[:1])
    rig.save()
    assert total(rig.spill.statistics().written_blocks_total) - rig_moves(rig) == 7


def rig_moves(rig: SpillRig) -> int:
    """Blocks that went from memory on to the disk."""
    return rig.spill.statistics().written_blocks_total["disk"] if len(rig.media) == 2 else 0


def test_what_a_session_pins_is_saved_as_well(rig):
    blocks = rig.compute(A)
    rig.prefixes.pin(blocks)
    rig.save()
    rig.prefixes.unpin(blocks)
    rig.give_up_all()
    assert fetched(rig, A) == 6


def test_saving_more_than_there_is_room_for_drops_the_oldest(tmp_path):
    rig = SpillRig(12, host=5, disk=7, folder=tmp_path)
    for hashes in (A, B, C):
        rig.compute(hashes)
        rig.save()
        rig.give_up_all()
    statistics = rig.spill.statistics()
    assert statistics.blocks == {"host": 5, "disk": 7}
    assert statistics.dropped_blocks_total == {"host": 0, "disk": 6}
    assert fetched(rig, A) == 0
    assert fetched(rig, B) == 6
    assert fetched(rig, C) == 6
    rig.spill.stop()


def test_half_of_the_room_is_left_to_what_the_pool_no_longer_has():
    rig = SpillRig(12, host=6)
    rig.compute(A[:3])
    rig.save()
    rig.give_up_all()
    rig.compute(B)
    rig.compute(C)
    rig.save()
    assert rig.spill.statistics().written_blocks_total == {"host": 6}
    rig.give_up_all()
    assert fetched(rig, A) == 3
    rig.spill.stop()


def test_ends_are_dropped_before_beginnings(tmp_path):
    rig = SpillRig(12, disk=12, folder=tmp_path)
    for hashes in (A, B):
        rig.compute(hashes)
        rig.save()
        rig.give_up_all()
    for hashes in (A, B):
        assert fetched(rig, hashes) == 6
    rig.give_up_all()
    rig.compute(C[:2])
    rig.save()
    rig.give_up_all()
    assert fetched(rig, A) == 4
    rig.spill.stop()


def test_who_has_another_seed_gets_nothing_back(rig):
    rig.compute(A)
    rig.save()
    rig.give_up_all()
    assert fetched(rig, chain([1] * 24, seed_hash(b"model", b"tenant b"))) == 0
    assert rig.spill.statistics().fetches_total == 0


def test_what_comes_back_takes_the_place_of_something_else(rig):
    """The pool is full, and the found beginning is what was used least recently."""
    rig.compute(A)
    rig.save()
    rig.give_up_all()
    rig.compute(A[:3])
    rig.compute(B)
    rig.compute(C[:3])
    assert rig.allocator.free_count == 0
    assert fetched(rig, A) == 6


def test_what_comes_back_never_takes_the_place_of_what_it_follows(rig):
    rig.compute(A)
    rig.save()
    rig.give_up_all()
    rig.compute(A[:3])
    rig.prefixes.take(rig.compute(B))
    rig.prefixes.take(rig.compute(C[:2]))
    assert fetched(rig, A) == 4  # there is one unused block
    assert rig.allocator.free_count == 0


def test_what_others_count_on_is_left_to_them(rig):
    rig.compute(A)
    rig.save()
    rig.give_up_all()
    rig.num_promised = 8
    assert fetched(rig, A) == 4
    assert rig.allocator.free_count + rig.prefixes.num_idle == 12
    rig.num_promised = 12
    assert fetched(rig, A) == 4


def test_what_is_given_up_while_it_is_copied_is_not_saved(rig):
    rig.compute(A)

    def give_up():
        rig.kv.meanwhile = lambda: None
        rig.give_up_all()
        rig.compute(B)  # in the same blocks

    rig.kv.meanwhile = give_up
    rig.save()
    assert rig.spill.statistics().overtaken_blocks_total == 6
    rig.give_up_all()
    assert fetched(rig, A) == 0
    assert fetched(rig, B) == 6


def test_a_beginning_that_is_given_up_meanwhile_ends_the_fetch(rig):
    rig.compute(A)
    rig.save()
    rig.give_up_all()
    rig.compute(A[:2])
    rig.media[-1].meanwhile = rig.give_up_all
    rig.media[0].meanwhile = rig.give_up_all
    assert fetched(rig, A) == 0
    assert rig.allocator.free_count == 12


def test_what_somebody_computes_meanwhile_stays(rig):
    rig.compute(A)
    rig.save()
    rig.give_up_all()
    rig.kv.meanwhile = lambda: rig.compute(A[:6])
    assert fetched(rig, A) == 6
    assert rig.prefixes.statistics().num_cached == 6
    assert rig.allocator.free_count == 6


def test_what_is_late_is_given_up_on(rig):
    rig.compute(A)
    rig.save()
    rig.give_up_all()
    fetch = rig.fetch(A)
    assert not fetch.is_done
    assert 0 < rig.spill.wait_s() <= fetch.deadline_s - rig.clock.now_s
    rig.clock.now_s += 6 * BLOCK_SIZE / 100
    with rig.lock:
        rig.spill.end_late()
    assert fetch.is_done
    assert rig.spill.wait_s() is None
    rig.pump()
    assert rig.found(A) == 0
    assert rig.spill.statistics().late_fetches_total == 1


def test_a_medium_that_has_become_slow_is_not_waited_for_again(tmp_path):
    rig = SpillRig(12, disk=24, folder=tmp_path)
    rig.compute(A)
    rig.save()
    rig.give_up_all()

    def crawl():
        rig.clock.now_s += 1.0

    rig.media[0].meanwhile = crawl
    assert fetched(rig, A) == 1  # the first one took longer than computing all of them
    assert rig.spill.statistics().late_fetches_total == 1
    assert rig.fetch(A, 1).is_done
    written = rig.spill.statistics().written_blocks_total
    rig.compute(B)
    rig.save()
    assert rig.spill.statistics().written_blocks_total == written  # nor written to, until …
    rig.media[0].meanwhile = lambda: None
    for number in range(20 * TRY_EVERY):
        rig.compute(chain([number, 0, 0, 0], SEED))
        rig.save()
    rig.compute(B)
    rig.save()
    rig.give_up_all()
    assert fetched(rig, B) == 6  # … a try has shown that it has recovered
    rig.spill.stop()


def test_who_does_not_want_it_any_more_is_not_served(rig):
    rig.compute(A)
    rig.save()
    rig.give_up_all()
    fetch = rig.fetch(A, is_wanted=lambda: False)
    rig.pump()
    assert fetch.is_done
    assert rig.found(A) == 0


def test_two_that_want_the_same_are_served_by_one_reading(rig):
    rig.compute(A)
    rig.save()
    rig.give_up_all()
    fetches = [rig.fetch(A) for _ in range(2)]
    assert not any(fetch.is_done for fetch in fetches)
    rig.pump()
    assert all(fetch.is_done for fetch in fetches)
    assert rig.found(A) == 6
    assert total(rig.spill.statistics().restored_tokens_total) == 6 * BLOCK_SIZE


def test_a_bounded_number_waits(rig):
    rig.compute(A)
    rig.save()
    rig.give_up_all()
    fetches = [rig.fetch(A) for _ in range(MAX_FETCHES + 3)]
    assert sum(not fetch.is_done for fetch in fetches) == MAX_FETCHES
    rig.pump()
    assert rig.found(A) == 6


def test_before_anything_was_measured_nothing_is_fetched(tmp_path):
    rig = SpillRig(12, host=12)
    prefill_times_of(rig.spill).clear()
    rig.compute(A)
    rig.save()
    rig.give_up_all()
    assert fetched(rig, A) == 0
    rig.spill.note_step(100, 1.0)
    assert fetched(rig, A) == 6
    rig.spill.stop()
