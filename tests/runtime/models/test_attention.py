"""Attention over blocks is the attention of a textbook over each sequence by itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teneral.runtime.backends.torch.attention import MAX_FOLDED_ROWS, paged_attention, plan_attention
from teneral.runtime.backends.torch.storage import TorchKVStorage
from teneral.runtime.kv.storage import PoolShape
from teneral.runtime.step.batch import SequenceSpan
from teneral.runtime.tensors import DType

DIM, BLOCK_SIZE, SCALE = 8, 4, 0.4


def textbook(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, num_past: int, window: int | None
) -> torch.Tensor:
    """queries (L, heads, d), keys and values (kv_heads, context, d) → (L, heads * d), one by one."""
    length, num_heads, _ = queries.shape
    group = num_heads // len(keys)
    rows = []
    for row in range(length):
        position = num_past + row
        begin = 0 if window is None else max(0, position + 1 - window)
        for head in range(num_heads):
            seen_keys = keys[head // group, begin : position + 1]
            weights = torch.softmax(seen_keys @ queries[row, head] * SCALE, dim=0)
            rows.append(weights @ values[head // group, begin : position + 1])
    return torch.stack(rows).view(length, -1)


def check(
    shares: list[tuple[int, int]], *, kv_heads: int, group: int, window: int | None, scattered: bool
) -> None:
    """One batch of sequences, each (tokens cached before, tokens of this step)."""
    num_blocks = sum(-(-(past + new) // BLOCK_SIZE) for past, new in shares)
    kv = TorchKVStorage(PoolShape(2, kv_heads, DIM, num_blocks, BLOCK_SIZE, DType.F32))
    kv.data.fill_(float("nan"))
    free = list(range(num_blocks))
    if scattered:
        free = free[::2] + free[1::2]
    spans, expected, queries = [], [], []
    start = 0
    for past, new in shares:
        context = past + new
        blocks = tuple(free.pop(0) for _ in range(-(-context // BLOCK_SIZE)))
        slots = torch.tensor([blocks[t // BLOCK_SIZE] * BLOCK_SIZE + t % BLOCK_SIZE for t in range(context)])
        tokens = torch.randn(context, 2, kv_heads, DIM)
        kv.write(1, slots, tokens.view(context, -1, DIM))
        rows = torch.randn(new, kv_heads * group, DIM)
        keys, values = tokens.permute(1, 2, 0, 3)
        expected.append(textbook(rows, keys, values, past, window))
        queries.append(rows)
        spans.append(SequenceSpan(start, new, context, blocks))
        start += new

    plans = plan_attention(spans, kv, num_heads=kv_heads * group, window=window)
    ours = paged_attention(torch.cat(queries), kv, 1, plans, SCALE)

    torch.testing.assert_close(ours, torch.cat(expected), atol=1e-5, rtol=1e-4)


@settings(deadline=None, max_examples=80)
@given(
    shares=st.lists(
        st.tuples(st.integers(0, 24), st.integers(1, MAX_FOLDED_ROWS + 8)), min_size=1, max_size=4
    ),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    window=st.none() | st.integers(1, 40),
    scattered=st.booleans(),
)
def test_any_batch_gives_what_each_sequence_gives_alone(shares, kv_heads, group, window, scattered):
    check(shares, kv_heads=kv_heads, group=group, window=window, scattered=scattered)


@pytest.mark.parametrize("length", [1, 2, MAX_FOLDED_ROWS, MAX_FOLDED_ROWS + 1, 3 * MAX_FOLDED_ROWS])
@pytest.mark.parametrize("past", [0, 1, 30])
@pytest.mark.parametrize("window", [None, 1, 5, 17, 1000])
def test_folded_and_unfolded_rows_attend_alike(length, past, window):
    check([(past, length)], kv_heads=2, group=3, window=window, scattered=False)


def test_keys_that_no_row_can_see_are_not_read():
    kv = TorchKVStorage(PoolShape(1, 1, DIM, 16, BLOCK_SIZE, DType.F32))
    span = SequenceSpan(0, 2, 60, tuple(range(15)))

    [plan] = plan_attention([span], kv, num_heads=1, window=10)

    assert (plan.extent.start, plan.extent.count) == (60 - 11, 11)


def test_one_row_and_a_whole_prompt_need_no_mask():
    kv = TorchKVStorage(PoolShape(1, 1, DIM, 16, BLOCK_SIZE, DType.F32))
    spans = [SequenceSpan(0, 1, 60, tuple(range(15))), SequenceSpan(1, 40, 40, tuple(range(10)))]

    decode, prefill = plan_attention(spans, kv, num_heads=1, window=None)

    assert decode.mask is None
    assert prefill.mask is None
    assert prefill.is_causal
