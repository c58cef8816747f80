"""Attention on the device: right, and the same bits however its rows come."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.direct_kernels import Device
from tests.support.reference.operations import of_codes, to_codes

from teneral.runtime.backends.cuda.direct.arguments import Attention
from teneral.runtime.backends.cuda.direct.attention import attention_launches
from teneral.runtime.backends.cuda.direct.tables import (
    ALONE,
    FEW_PAIRS,
    MANY_PAIRS,
    MAX_MERGES,
    SLOTS,
    SPLIT_KEYS,
    AttentionPlan,
    ProgramKey,
    plan_attention,
)
from teneral.runtime.step.batch import SequenceSpan
from teneral.runtime.tensors import DType, from_float32, to_float32

KV_HEADS, BLOCK_SIZE = 2, 16


class Cache:
    """Keys and values of one long sequence, in blocks that lie anywhere, and queries for each of its places."""

    def __init__(
        self, device: Device, *, num_tokens: int, group: int, head_dim: int, rounds: bool = False
    ) -> None:
        """With `rounds`, keys and values are numbers that codes of 8 bits stand for."""
        random = np.random.default_rng(0)
        self.device, self.group, self.head_dim, self.num_tokens = device, group, head_dim, num_tokens
        self.num_heads = group * KV_HEADS
        self.num_blocks = -(-num_tokens // BLOCK_SIZE) + 3
        self.blocks = tuple(map(int, random.permutation(self.num_blocks)[: -(-num_tokens // BLOCK_SIZE)]))
        dtype = device.kernels.dtype

        def numbers(*shape: int) -> np.ndarray:
            return from_float32(random.standard_normal(shape).astype(np.float32), dtype)

        self.heads = numbers(num_tokens, self.num_heads + 2 * KV_HEADS, head_dim)
        # What nothing has written must not matter.
        nan = from_float32(np.full(1, np.nan, np.float32), dtype)
        # As codes and scales, and what these mean.
        codes, scales = to_codes(to_float32(self.heads[:, self.num_heads :], dtype), dtype)
        if rounds:
            self.heads[:, self.num_heads :] = from_float32(of_codes(codes, scales, dtype), dtype)
        own = np.full((2, self.num_blocks * BLOCK_SIZE, KV_HEADS, head_dim), 99, np.int8)
        of_own = np.full(own.shape[:3], nan[0])
        pool = np.full((2, self.num_blocks * BLOCK_SIZE, KV_HEADS, head_dim), nan[0])
        slots = [self.blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in range(num_tokens)]
        pool[0, slots] = self.heads[:, self.num_heads : -KV_HEADS]
        pool[1, slots] = self.heads[:, -KV_HEADS:]
        self.pool = device.put(pool, dtype)
        for part in range(2):
            of_part = slice(part * KV_HEADS, (part + 1) * KV_HEADS)
            own[part, slots] = codes[:, of_part]
            of_own[part, slots] = from_float32(scales[:, of_part, 0], dtype)
        self.codes, self.scales = device.put(own), device.put(of_own, dtype)
        self.scale = head_dim**-0.5

    def expected(self, places: Sequence[int], window: int) -> np.ndarray:
        """(len(places), num_heads, head_dim) in fp64."""
        wide = to_float32(self.heads, self.device.kernels.dtype).astype(np.float64)
        keys, values = wide[:, self.num_heads : -KV_HEADS], wide[:, -KV_HEADS:]
        out = np.empty((len(places), self.num_heads, self.head_dim))
        for row, at in enumerate(places):
            seen = slice(max(0, at + 1 - window), at + 1)
            for head in range(self.num_heads):
                scores = keys[seen, head // self.group] @ wide[at, head] * self.scale
                weights = np.exp(scores - scores.max())
                out[row, head] = weights @ values[seen, head // self.group] / weights.sum()
        return out

    def attend(
        self, runs: Sequence[tuple[int, int]], *, window: int = 1 << 30, num_processors: int = 1,
        plan: AttentionPlan | None = None, of_int8: bool = False,
    ) -> np.ndarray:  # fmt: skip
        """The rows of these runs [first, end) of places, each a sequence of its own: (T, num_heads, head_dim)."""
        device, dtype = self.device, self.device.kernels.dtype
        pool = self.codes if of_int8 else self.pool
        rows = [at for first, end in runs for at in range(first, end)]
        spans, start = [], 0
        for first, end in runs:
            spans.append(SequenceSpan(start, end - first, end, self.blocks[: -(-end // BLOCK_SIZE)]))
            start += end - first
        plan = plan or plan_attention(spans, self.group, num_kv_heads=KV_HEADS, num_processors=num_processors)
        out = device.put(np.zeros((len(rows), self.num_heads, self.head_dim), dtype.numpy), dtype)
        slots = max(1, plan.num_slots)

        def table(numbers: object) -> int:
            return device.put(np.array(numbers or [0], np.uint32).reshape(-1)).address

        lengths = np.cumsum([0, *[len(span.blocks) for span in spans]])[:-1].tolist()
        arguments = Attention(
            heads=device.put(self.heads[rows], dtype).address,
            keys=pool.row(0), values=pool.row(1), out=out.address,
            key_scales=self.scales.row(0) if of_int8 else 0,
            value_scales=self.scales.row(1) if of_int8 else 0,
            split_sums=device.put(np.full((slots, KV_HEADS, 16, self.head_dim), np.nan, np.float32)).address,
            split_scales=device.put(np.full((slots, KV_HEADS, 16, 2), np.nan, np.float32)).address,
            items=table(plan.items), merges=table(plan.merges),
            starts=table([span.start for span in spans]), lengths=table([span.length for span in spans]),
            contexts=table([span.context_len for span in spans]), table_starts=table(lengths),
            blocks=table([block for span in spans for block in span.blocks]),
            counts=table([len(rows), 0, len(plan.items), len(plan.merges)]),
            num_heads=self.num_heads, num_kv_heads=KV_HEADS, row_heads=self.num_heads + 2 * KV_HEADS,
            head_dim=self.head_dim, value_dim=self.head_dim, block_size=BLOCK_SIZE,
            window=window, scale=self.scale * 1.4426950408889634,
        )  # fmt: skip
        sizes = {"num_items": len(plan.items) + 2, "num_merges": len(plan.merges)}
        for launch in attention_launches(device.kernels, arguments, many=plan.many, **sizes):
            device.driver.launch(launch, device.stream)
        return device.get(out)


@pytest.mark.parametrize("window", [1 << 30, 100, 7])
@pytest.mark.parametrize(("group", "head_dim"), [(4, 64), (1, 16), (3, 128), (7, 32)])
def test_attention_is_right(device: Device, group: int, head_dim: int, window: int) -> None:
    cache = Cache(device, num_tokens=300, group=group, head_dim=head_dim)
    runs = [(0, 20), (290, 300), (255, 257), (65, 66)]
    found = to_float32(cache.attend(runs, window=window), device.kernels.dtype)
    expected = cache.expected([at for first, end in runs for at in range(first, end)], window)
    np.testing.assert_allclose(found, expected, atol=0.02 if device.kernels.dtype is DType.BF16 else 0.004)


def test_heads_of_256(device: Device) -> None:
    cache = Cache(device, num_tokens=70, group=2, head_dim=256)
    found = to_float32(cache.attend([(0, 40), (69, 70)]), device.kernels.dtype)
    expected = cache.expected([*range(40), 69], 1 << 30)
    np.testing.assert_allclose(found, expected, atol=0.02 if device.kernels.dtype is DType.BF16 else 0.004)


@pytest.mark.parametrize(("group", "head_dim"), [(4, 64), (1, 16), (3, 128), (2, 256)])
def test_pools_of_int8_give_the_bits_of_what_their_codes_mean(
    device: Device, group: int, head_dim: int
) -> None:
    """By items of 64 pairs and of 16, and by splits."""
    cache = Cache(device, num_tokens=300, group=group, head_dim=head_dim, rounds=True)
    for runs in ([(0, 20), (290, 300)], [(299, 300), (5, 6)]):
        for num_processors in (1, 99):
            found = cache.attend(runs, num_processors=num_processors, of_int8=True)
            np.testing.assert_array_equal(found, cache.attend(runs, num_processors=num_processors))


@pytest.mark.parametrize("window", [1 << 30, 300])
def test_a_row_has_the_same_bits_alone_in_chunks_and_split(device: Device, window: int) -> None:
    """Three splits of keys: by one block, by a block each, by items of 16 pairs and of 64, in any chunks."""
    cache = Cache(device, num_tokens=600, group=4, head_dim=32)
    places = [0, 63, 64, 255, 256, 511, 512, 599]
    alone = np.concatenate([cache.attend([(at, at + 1)], window=window) for at in places])
    split = np.concatenate([cache.attend([(at, at + 1)], window=window, num_processors=99) for at in places])
    together = cache.attend([(at, at + 1) for at in places], window=window)
    np.testing.assert_array_equal(split, alone)
    np.testing.assert_array_equal(together, alone)
    for cuts in ((0, 600), (0, 64, 130, 512, 600), (0, 1, 257, 599, 600)):
        runs = list(itertools.pairwise(cuts))
        whole = np.concatenate([cache.attend([run], window=window) for run in runs])
        np.testing.assert_array_equal(whole[places], alone, err_msg=str(cuts))


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_rows_do_not_depend_on_their_company(device: Device, data: st.DataObject) -> None:
    cache = Cache(device, num_tokens=400, group=data.draw(st.sampled_from([1, 3, 4])), head_dim=32)
    window = data.draw(st.sampled_from([1 << 30, 5, 90]))
    starts = data.draw(st.lists(st.integers(0, 390), min_size=1, max_size=4))
    runs = [(first, first + data.draw(st.integers(1, 10))) for first in starts]
    together = cache.attend(runs, window=window, num_processors=data.draw(st.sampled_from([1, 8, 40])))
    alone = np.concatenate(
        [cache.attend([(at, at + 1)], window=window) for first, end in runs for at in range(first, end)]
    )
    np.testing.assert_array_equal(together, alone)


class TestPlan:
    def spans(self, *lengths: tuple[int, int]) -> list[SequenceSpan]:
        made, start = [], 0
        for length, context in lengths:
            made.append(SequenceSpan(start, length, context, ()))
            start += length
        return made

    def test_short_contexts_are_items_of_their_own(self) -> None:
        plan = plan_attention(self.spans((1, 9), (1, 256)), 4, num_kv_heads=8, num_processors=132)
        assert plan == ([(0, 0, 0, 1, ALONE), (1, 0, 0, 1, ALONE)], [], 0, False)

    def test_a_long_context_is_split_where_processors_are_idle(self) -> None:
        plan = plan_attention(self.spans((1, 1000)), 4, num_kv_heads=8, num_processors=132)
        assert plan.items == [(0, 0, split, split + 1, split) for split in range(4)]
        assert plan.merges == [(0, 0, 0, 4)]
        busy = plan_attention(self.spans(*[(1, 1000)] * 128), 4, num_kv_heads=8, num_processors=132)
        assert busy.merges == []

    def test_prompts_are_items_of_64_pairs(self) -> None:
        plan = plan_attention(self.spans((40, 300), (1, 10)), 4, num_kv_heads=8, num_processors=1)
        assert plan.items == [
            (0, 0, 0, 2, ALONE), (0, 64, 0, 2, ALONE), (0, 128, 0, 2, ALONE), (1, 0, 0, 1, ALONE),
        ]  # fmt: skip

    @given(
        st.lists(st.tuples(st.integers(1, 300), st.integers(0, 20_000)), min_size=1, max_size=20),
        st.sampled_from([1, 4, 7, 16, 24]),
        st.sampled_from([1, 16, 132]),
        st.booleans(),
    )
    def test_every_pair_and_split_is_computed_once(
        self, sequences: list[tuple[int, int]], group: int, num_processors: int, takes_many: bool
    ) -> None:
        spans = self.spans(*[(length, length + cached) for length, cached in sequences])
        plan = plan_attention(
            spans, group, num_kv_heads=2, num_processors=num_processors, takes_many=takes_many
        )
        size = MANY_PAIRS if plan.many else FEW_PAIRS
        merges = {(span, pair): (slot, num) for span, pair, slot, num in plan.merges}
        taken: list[int] = []
        for number, span in enumerate(spans):
            for first in range(0, span.length * group, size):
                last = min(first + size, span.length * group) - 1
                num_splits = (span.context_len - span.length + last // group) // SPLIT_KEYS + 1
                own = [item[2:] for item in plan.items if item[:2] == (number, first)]
                splits = [split for begin, end, _ in own for split in range(begin, end)]
                assert splits == list(range(num_splits))
                if (number, first) in merges:
                    slot, num = merges[number, first]
                    assert num == num_splits
                    assert last - first < FEW_PAIRS
                    assert [begin + slot for begin, _, _ in own] == [place for _, _, place in own]
                    taken += range(slot, slot + num)
                else:
                    assert [place for _, _, place in own] == [ALONE]
        assert taken == list(range(plan.num_slots))
        assert plan.num_slots <= SLOTS[-1]
        rows = sum(span.length for span in spans)
        key = ProgramKey(rows, plan.many, SLOTS[-1])
        assert len(plan.items) <= key.num_items(group, len(spans))
        assert len(plan.merges) <= min(MAX_MERGES, key.num_merges(group))
