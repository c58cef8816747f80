"""The block allocator against a model of it, in random orders of use."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from teneral.runtime.kv.blocks import BlockAllocator

NUM_BLOCKS = 24


class Allocations(RuleBasedStateMachine):
    """`tables` are the block tables of sequences, which may share blocks."""

    def __init__(self):
        super().__init__()
        self.allocator = BlockAllocator(NUM_BLOCKS)
        self.tables: list[list[int]] = []

    @property
    def references(self):
        return Counter(block for table in self.tables for block in table)

    @rule(data=st.data())
    def begin(self, data):
        count = data.draw(st.integers(0, self.allocator.free_count))
        longest = self.allocator.statistics().largest_free_run
        blocks = self.allocator.allocate(count)
        assert not set(blocks) & set(self.references), "a block that is in use was given out"
        assert len(set(blocks)) == count
        if 0 < count <= longest:
            assert blocks == list(range(blocks[0], blocks[0] + count)), "a run was there, and was not used"
        self.tables.append(blocks)

    @precondition(lambda self: any(self.tables) and self.allocator.free_count)
    @rule(data=st.data())
    def grow(self, data):
        table = data.draw(st.sampled_from([table for table in self.tables if table]))
        count = data.draw(st.integers(1, self.allocator.free_count))
        next_is_free = table[-1] + 1 < NUM_BLOCKS and not self.references[table[-1] + 1]
        blocks = self.allocator.allocate(count, after=table[-1])
        assert not set(blocks) & set(self.references)
        if next_is_free:
            assert blocks[0] == table[-1] + 1, "the sequence could have gone on where it ended"
        table += blocks

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data):
        table = data.draw(st.sampled_from(self.tables))
        prefix = table[: data.draw(st.integers(0, len(table)))]
        self.allocator.share(prefix)
        self.tables.append(list(prefix))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data):
        index = data.draw(st.integers(0, len(self.tables) - 1))
        self.allocator.release(self.tables.pop(index))

    @invariant()
    def counts_are_those_of_the_tables(self):
        references = self.references
        assert [self.allocator.reference_count(block) for block in range(NUM_BLOCKS)] == [
            references[block] for block in range(NUM_BLOCKS)
        ]
        assert self.allocator.free_count == NUM_BLOCKS - len(references)
        self.allocator.check_integrity()

    def teardown(self):
        for table in self.tables:
            self.allocator.release(table)
        assert self.allocator.statistics().num_free_runs == 1
        assert self.allocator.free_count == NUM_BLOCKS


TestAllocations = Allocations.TestCase
TestAllocations.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
