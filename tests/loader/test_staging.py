"""The staging allocator, alone and under arbitrary sequences of loans."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from teneral.loader.memory.arena import as_array
from teneral.loader.memory.staging import ALIGNMENT_BYTES, Buffer, Staging, discard, staging_bytes

PAGE = ALIGNMENT_BYTES


class Loans(RuleBasedStateMachine):
    """Whatever is lent and returned in whatever order, loans keep their content and the books agree."""

    def __init__(self) -> None:
        super().__init__()
        self.staging = Staging(16 * PAGE)
        self.loans: list[tuple[Buffer, int]] = []
        self.stamp = 0

    @rule(size_bytes=st.integers(1, 17 * PAGE))
    def acquire(self, size_bytes: int) -> None:
        if size_bytes > self.staging.capacity_bytes:
            with pytest.raises(ValueError, match="never fit"):
                self.staging.acquire(size_bytes)
            return
        loan = self.staging.acquire(size_bytes)
        if loan is None:
            assert self.loans, "an empty staging fits everything up to its capacity"
            return
        self.stamp = self.stamp % 255 + 1
        as_array(loan.data)[:] = self.stamp
        assert len(loan.data) == size_bytes
        self.loans.append((loan, self.stamp))

    @precondition(lambda self: self.loans)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        loan, stamp = self.loans.pop(data.draw(st.integers(0, len(self.loans) - 1)))
        assert np.all(as_array(loan.data) == stamp)
        self.staging.release(loan)

    @invariant()
    def books_agree(self) -> None:
        self.staging.check_integrity()
        held = sum(-(-len(loan.data) // PAGE) * PAGE for loan, _ in self.loans)
        assert self.staging.used_bytes == held
        assert held <= self.staging.peak_bytes <= self.staging.capacity_bytes


TestLoans = Loans.TestCase
TestLoans.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_the_lowest_hole_is_lent_again_first() -> None:
    staging = Staging(8 * PAGE)
    first, second = staging.acquire(2 * PAGE), staging.acquire(PAGE)
    assert first is not None
    assert second is not None
    staging.release(first)
    third = staging.acquire(PAGE)
    assert third is not None
    assert third.offset_bytes == 0
    assert staging.touched_bytes == 3 * PAGE


def test_returning_a_loan_twice_is_refused() -> None:
    staging = Staging(PAGE)
    loan = staging.acquire(10)
    assert loan is not None
    staging.release(loan)
    with pytest.raises(ValueError, match="not in list"):
        staging.release(loan)


def test_an_unmapped_staging_lends_nothing_but_loans_stay_readable() -> None:
    staging = Staging(2 * PAGE)
    loan = staging.acquire(PAGE)
    assert loan is not None
    as_array(loan.data)[:] = 9
    staging.unmap()
    assert np.all(as_array(loan.data) == 9)
    with pytest.raises(ValueError, match="never fit"):
        staging.acquire(1)


def test_what_was_lent_can_be_discarded_after_the_last_loan() -> None:
    staging = Staging(4 * PAGE)
    loan = staging.acquire(2 * PAGE)
    assert loan is not None
    as_array(loan.data)[:] = 9
    staging.release(loan)
    memory = staging.unmap()
    assert len(memory) == 2 * PAGE
    discard(memory)
    assert not as_array(memory).any()


def test_of_a_staging_that_lent_nothing_nothing_is_left() -> None:
    assert len(Staging(4 * PAGE).unmap()) == 0


MIB = 1024 * 1024


def test_staging_is_what_is_wanted_but_holds_the_largest_part_and_no_more_than_all() -> None:
    parts = [13 * MIB, 8 * MIB] * 20
    assert staging_bytes(parts, None, None) == 96 * MIB
    assert staging_bytes(parts, 64 * MIB, None) == 64 * MIB
    assert staging_bytes(parts, 0, None) == 13 * MIB
    assert staging_bytes([13 * MIB], None, None) == 13 * MIB
    assert staging_bytes([], None, None) == 0
    assert staging_bytes(parts, None, None, num_decoders=4) == 96 * MIB
    assert staging_bytes(parts, None, None, num_decoders=16) == 256 * MIB
    assert staging_bytes(parts, 64 * MIB, None, num_decoders=16) == 64 * MIB


def test_staging_shrinks_with_the_memory_that_is_left_down_to_one_part() -> None:
    parts = [13 * MIB, 8 * MIB] * 20
    assert staging_bytes(parts, None, 10_000 * MIB) == 96 * MIB
    assert staging_bytes(parts, None, 200 * MIB) == 50 * MIB
    assert staging_bytes(parts, 128 * MIB, 100 * MIB) == 100 * MIB
    assert staging_bytes(parts, None, 1) == 13 * MIB
    assert staging_bytes(parts, None, -5) == 13 * MIB
