"""A step's arrays on a device equal those on a CPU, and for recorded steps are always in the same place."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("hypothesis", reason="machines that only check a device need not have it")

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.inspection import record_sends

from teneral.runtime.backends.cuda.tables import NUM_PARTS, StepPacker, tables_of
from teneral.runtime.backends.cuda.variants import TILE_ROWS
from teneral.runtime.engine.sequence import Lane
from teneral.runtime.step.batch import Epoch, Rows, build_batch
from teneral.runtime.step.requests import GenerationRequest
from teneral.runtime.step.state import SamplingState

BLOCK_SIZE = 4
CPU = torch.device("cpu")


def rows(first: int, end: int, blocks: list[int], num_logits: int) -> Rows:
    tokens = [(7 * number + end) % 300 for number in range(end)]
    lane = Lane(Epoch.EXACT, tokens, SamplingState(GenerationRequest("r", (1,))))
    lane.blocks = tuple(blocks)
    return Rows(lane, tokens, first, end, num_logits)


@st.composite
def parts(draw, *, decoding: bool = False):
    free = draw(st.permutations(range(60)))
    made = []
    for _ in range(draw(st.integers(1, 6))):
        first = draw(st.integers(0, 20))
        end = first + (1 if decoding else draw(st.integers(1, 15)))
        num_blocks = -(-end // BLOCK_SIZE) + draw(st.integers(0, 1))
        blocks, free = free[:num_blocks], free[num_blocks:]
        made.append(rows(first, end, list(blocks), 1 if decoding else draw(st.integers(0, end - first))))
    return made


@settings(deadline=None)
@given(parts=parts(), group=st.integers(1, 8))
def test_a_batch_is_that_of_a_cpu_with_its_tables(parts, group):
    packer = StepPacker(CPU, block_size=BLOCK_SIZE, group=group)
    for _ in range(2):  # the second time from what was kept of the tables
        batch = packer.batch(parts)
        expected = build_batch(parts, BLOCK_SIZE)
        assert batch.spans == expected.spans
        for name in ("tokens", "positions", "slots", "logit_rows"):
            assert np.array_equal(getattr(batch, name), getattr(expected, name)), name
            assert np.array_equal(getattr(batch.on_device, name).numpy(), getattr(expected, name)), name
        tables = tables_of(expected.spans, group, CPU)
        for name in tables.__slots__:
            assert torch.equal(getattr(batch.on_device.tables, name), getattr(tables, name)), name


@settings(deadline=None)
@given(parts=parts(), group=st.integers(1, 8))
def test_every_row_is_computed_once(parts, group):
    spans = build_batch(parts, BLOCK_SIZE).spans
    tables = tables_of(spans, group, CPU)
    covered = {number: [] for number, span in enumerate(spans) if span.length > 1}
    for span, first in tables.tiles.tolist():
        covered[span] += range(first, min(first + TILE_ROWS, spans[span].length * group))
    assert all(each == list(range(spans[number].length * group)) for number, each in covered.items())
    assert sorted([*covered, *tables.decoding.tolist()]) == list(range(len(spans)))
    for span, start in zip(spans, tables.table_starts.tolist(), strict=True):
        assert tuple(tables.blocks[start : start + len(span.blocks)].tolist()) == span.blocks


@settings(deadline=None)
@given(parts=parts(decoding=True), missing=st.integers(0, 3))
def test_rows_that_fill_up_a_recorded_step_write_and_read_nothing(parts, missing):
    size = len(parts) + missing
    room = torch.full((NUM_PARTS * size + 100,), 12345, dtype=torch.int64)
    batch = StepPacker(CPU, block_size=BLOCK_SIZE, group=2).decode_batch(parts, size, room)
    expected = build_batch(parts, BLOCK_SIZE)
    num = len(parts)
    assert batch.spans == expected.spans
    copies, tables = batch.on_device, batch.on_device.tables
    assert copies.tokens[:num].tolist() == batch.tokens.tolist() == expected.tokens.tolist()
    assert copies.positions[:num].tolist() == expected.positions.tolist()
    assert copies.slots.tolist() == [*expected.slots.tolist(), *[-1] * missing]
    assert tables.contexts.tolist() == [*(span.context_len for span in expected.spans), *[0] * missing]
    for each in (copies.logit_rows, tables.starts, tables.decoding):
        assert each.tolist() == list(range(size))
    for span, start in zip(expected.spans, tables.table_starts.tolist(), strict=False):
        assert tuple(tables.blocks[start : start + len(span.blocks)].tolist()) == span.blocks


@settings(deadline=None)
@given(some=parts(decoding=True), others=parts(decoding=True))
def test_a_recorded_step_has_its_arrays_in_the_same_place_as_before(some, others):
    size = 6
    packer = StepPacker(CPU, block_size=BLOCK_SIZE, group=2)
    room = torch.zeros(NUM_PARTS * size + 100, dtype=torch.int64)
    first = packer.decode_batch([], size, room)
    addresses = []
    for batch in (first, packer.decode_batch(some, size, room), packer.decode_batch(others, size, room)):
        copies = batch.on_device
        tensors = [copies.tokens, copies.positions, copies.slots, copies.logit_rows]
        tensors += [getattr(copies.tables, name) for name in copies.tables.__slots__ if name != "tiles"]
        addresses.append([(each.data_ptr(), each.shape) for each in tensors])
    assert addresses[0] == addresses[1] == addresses[2]
    assert all(address for address, _ in addresses[0])


def arrays_of(batch) -> list[list[int]]:
    """The arrays that a recorded step reads, on the host."""
    copies, tables = batch.on_device, batch.on_device.tables
    found = [copies.tokens, copies.positions, copies.slots, copies.logit_rows]
    found += [tables.starts, tables.lengths, tables.contexts, tables.table_starts, tables.decoding]
    return [each.tolist() for each in found]


def next_token(lane: Lane) -> Rows:
    return Rows(lane, lane.tokens, lane.num_computed, lane.num_computed + 1, 1)


# Of each step: the sequences that leave, those that join, and the padded size's surplus.
CHANGES = st.tuples(st.sets(st.integers(0, 5), max_size=2), st.integers(0, 2), st.integers(0, 1))


@settings(deadline=None)
@given(changes=st.lists(st.none() | CHANGES, min_size=1, max_size=20))
def test_a_recorded_step_follows_the_sequences_of_the_step_before(changes):
    packer = StepPacker(CPU, block_size=BLOCK_SIZE, group=2)
    room = torch.zeros(NUM_PARTS * 12 + 300, dtype=torch.int64)
    lanes: list[Lane] = []
    free = iter(range(10_000))
    size = 6
    for change in changes:
        if change is not None:
            leaving, num_joining, surplus = change
            lanes = [lane for number, lane in enumerate(lanes) if number not in leaving]
            joining = range(min(num_joining, 6 - len(lanes)))
            lanes += [rows(3, 4, [next(free)], 1).lane for _ in joining]
            size = 6 + surplus
        for lane in lanes:
            lane.tokens.append(next(free))
            lane.num_computed = len(lane.tokens) - 1
            if len(lane.tokens) > len(lane.blocks) * BLOCK_SIZE:
                lane.blocks = (*lane.blocks, next(free))
        parts = [next_token(lane) for lane in lanes]
        batch = packer.decode_batch(parts, size, room)
        fresh_room = torch.zeros_like(room)
        fresh = StepPacker(CPU, block_size=BLOCK_SIZE, group=2).decode_batch(parts, size, fresh_room)
        assert batch.spans == fresh.spans
        assert arrays_of(batch) == arrays_of(fresh)
        num_blocks = sum(len(lane.blocks) for lane in lanes)
        assert torch.equal(
            batch.on_device.tables.blocks[:num_blocks], fresh.on_device.tables.blocks[:num_blocks]
        )


def test_a_table_that_is_in_the_buffer_is_not_sent_again_unless_it_may_be_lost():
    packer = StepPacker(CPU, block_size=BLOCK_SIZE, group=2)
    sent: list[int] = []
    record_sends(packer, sent)
    room = torch.zeros(NUM_PARTS * 2 + 100, dtype=torch.int64)
    lane = rows(3, 4, [8, 9], 1).lane
    lane.tokens += range(4)
    for lane.num_computed in (3, 4, 5):
        packer.decode_batch([next_token(lane)], 2, room)
    assert sent == [NUM_PARTS * 2 + 2, NUM_PARTS * 2, NUM_PARTS * 2]
    with pytest.raises(IndexError):
        packer.decode_batch([Rows(lane, [], 6, 7, 1)], 2, room)
    packer.decode_batch([next_token(lane)], 2, room)
    assert sent[-1] == NUM_PARTS * 2 + 2
