"""The block allocator: runs, references, refusals."""

import pytest

from teneral.runtime.kv.blocks import BlockAllocator


def is_run(blocks):
    return blocks == list(range(blocks[0], blocks[0] + len(blocks)))


def test_all_blocks_are_free_at_first():
    allocator = BlockAllocator(10)
    statistics = allocator.statistics()
    assert (statistics.num_free, statistics.num_free_runs, statistics.largest_free_run) == (10, 1, 10)
    allocator.check_integrity()


def test_blocks_come_as_one_run_when_there_is_one_that_is_long_enough():
    allocator = BlockAllocator(100)
    first, second = allocator.allocate(10), allocator.allocate(20)
    assert is_run(first)
    assert is_run(second)
    assert not set(first) & set(second)


def test_a_sequence_that_grows_goes_on_where_it_ended():
    allocator = BlockAllocator(100)
    blocks = allocator.allocate(3)
    others = allocator.allocate(5)
    for _ in range(20):
        blocks += allocator.allocate(1, after=blocks[-1])
        others += allocator.allocate(1, after=others[-1])
    assert is_run(blocks)
    assert is_run(others)


def test_blocks_that_sequences_leave_in_the_cache_lie_together():
    """Blocks whose parts of a head are smaller than a page share its pages."""
    allocator = BlockAllocator(1000)
    kept = []
    for _ in range(50):
        blocks = allocator.allocate(3)
        blocks += allocator.allocate(1, after=blocks[-1])
        allocator.release(blocks[2:])
        allocator.share(blocks[:2])  # the cache's references
        allocator.release(blocks[:2])  # the sequence's
        kept += blocks[:2]
    assert sorted(kept) == list(range(100))


def test_sequences_that_run_at_once_leave_few_gaps_behind():
    allocator = BlockAllocator(1 << 17)
    kept, running = [], []
    for number in range(400):
        running.append(allocator.allocate(2 + number % 3))
        if len(running) == 8:
            for blocks in running:
                for _ in range(4):
                    blocks += allocator.allocate(1, after=blocks[-1])
                assert is_run(blocks)
            for blocks in running:
                allocator.share(blocks[:2])
                allocator.release(blocks)
                kept += blocks[:2]
            running = []
    groups = {block // 4 for block in kept}  # of blocks that share pages, at 1 KiB a head
    assert len(groups) < 1.3 * len(kept) / 4


def test_a_sequence_whose_next_block_is_taken_goes_on_elsewhere():
    allocator = BlockAllocator(4)
    blocks = allocator.allocate(1)
    other = allocator.allocate(3)
    allocator.release(other[1:])
    assert allocator.allocate(2, after=blocks[-1]) == [2, 3]
    allocator.check_integrity()


def test_scattered_blocks_are_given_when_there_is_no_long_run():
    allocator = BlockAllocator(9)
    blocks = allocator.allocate(9)
    allocator.release(blocks[::2])
    assert sorted(allocator.allocate(5)) == blocks[::2]
    assert allocator.free_count == 0


def test_the_pool_is_one_run_again_when_all_is_released():
    allocator = BlockAllocator(64)
    holders = [allocator.allocate(count) for count in (5, 1, 9, 3)]
    for blocks in (holders[2], holders[0], holders[3], holders[1]):
        allocator.release(blocks)
    assert allocator.statistics().num_free_runs == 1
    assert allocator.statistics().largest_free_run == 64


def test_a_shared_block_is_free_when_its_last_holder_releases_it():
    allocator = BlockAllocator(8)
    blocks = allocator.allocate(3)
    allocator.share(blocks[:2])
    assert allocator.statistics().num_shared == 2
    allocator.release(blocks)
    assert allocator.free_count == 6
    allocator.release(blocks[:2])
    assert allocator.free_count == 8


@pytest.mark.parametrize(
    "misuse",
    [
        lambda allocator: allocator.allocate(9),
        lambda allocator: allocator.allocate(-1),
        lambda allocator: allocator.release([0, 0]),
        lambda allocator: allocator.release([0, 7]),
        lambda allocator: allocator.release([0, 8]),
        lambda allocator: allocator.share([0, -1]),
    ],
    ids=["too many", "negative", "twice", "one that is free", "one that is not there", "a negative one"],
)
def test_misuse_is_refused_and_changes_nothing(misuse):
    allocator = BlockAllocator(8)
    allocator.allocate(2)
    before = allocator.statistics()
    with pytest.raises(ValueError, match="block"):
        misuse(allocator)
    assert allocator.statistics() == before
    allocator.check_integrity()


def test_no_blocks_are_allocated_when_none_are_asked_for():
    allocator = BlockAllocator(2)
    assert allocator.allocate(0, after=0) == []
    assert allocator.free_count == 2


def test_a_pool_without_blocks_is_refused():
    with pytest.raises(ValueError, match="at least one block"):
        BlockAllocator(0)
