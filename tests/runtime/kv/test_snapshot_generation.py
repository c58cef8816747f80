"""The content of a snapshot's next generation, by the prefixes that are there and their use."""

from __future__ import annotations

from tests.support.kv_snapshots import Pool, tokens_of, write
from tests.support.memory_store import MemoryStore

from teneral.runtime.kv.snapshots.writer import MAX_RECENT, plan_generation

POOL = Pool()


def chain(number, num_blocks=2):
    return POOL.pool.chain(tokens_of(number, num_blocks), salt="")


def base(**chains):
    return write(
        MemoryStore(), POOL.identity, {name.replace("_", "-"): each for name, each in chains.items()}
    )


def planned(*args, **options):
    return [(each.name, each.hashes) for each in plan_generation(*args, **options)]


def test_what_was_of_use_is_numbered_in_its_order():
    assert planned(None, wanted=[chain(2), chain(1)]) == [("recent-1", chain(2)), ("recent-2", chain(1))]


def test_what_was_exported_stays_first_whatever_the_limit():
    there = base(system=chain(1, 4))
    assert planned(there, wanted=[chain(2)], max_blocks=3) == [("system", chain(1, 4))]
    assert planned(there, wanted=[chain(2)], max_blocks=6) == [
        ("system", chain(1, 4)),
        ("recent-1", chain(2)),
    ]


def test_what_earlier_servers_left_comes_last():
    there = base(recent_1=chain(1), recent_2=chain(2))
    assert planned(there, wanted=[chain(3)], max_blocks=4) == [("recent-1", chain(3)), ("recent-2", chain(1))]


def test_the_beginning_of_another_prefix_is_no_prefix_of_its_own():
    there = base(system=chain(1, 4), recent_1=chain(2, 1))
    wanted = [chain(1, 3), chain(2, 3)]
    assert planned(there, wanted=wanted) == [("system", chain(1, 4)), ("recent-1", chain(2, 3))]
    assert planned(None, wanted=[chain(2, 1), chain(2, 3)]) == [("recent-1", chain(2, 3))]


def test_shared_blocks_count_once():
    one, other = (POOL.pool.chain(tokens_of(1, 3) + tokens_of(number, 1), salt="") for number in (2, 3))
    assert len(planned(None, wanted=[one, other], max_blocks=5)) == 2
    assert len(planned(None, wanted=[one, other], max_blocks=4)) == 1


def test_an_export_replaces_what_has_its_name():
    there = base(system=chain(1), other=chain(2), recent_1=chain(3))
    assert planned(there, exported={"system": chain(4)}) == [
        ("system", chain(4)),
        ("other", chain(2)),
        ("recent-1", chain(3)),
    ]


def test_servers_keep_a_bounded_number():
    wanted = [chain(number, 1) for number in range(MAX_RECENT + 5)]
    assert len(planned(None, wanted=wanted)) == MAX_RECENT


def test_a_limit_of_bytes_chooses_the_first_prefixes_that_fit():
    there = base(a=chain(1, 4), b=chain(2, 3), c=chain(3, 1))
    block_bytes = POOL.identity.block_bytes

    def within(num_blocks):
        return [prefix.name for prefix in there.within(num_blocks * block_bytes)]

    assert within(8) == ["a", "b", "c"]
    assert within(5) == ["a", "c"]
    assert within(0) == []
    assert len(there.parts_for(there.within(5 * block_bytes))) == 2
