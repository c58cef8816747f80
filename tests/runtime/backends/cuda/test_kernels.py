"""Each kernel, run as it is written by Triton's interpreter, does what its reference in torch does."""

from __future__ import annotations

import pytest
import torch
from tests.support.kernel_cases import (
    NAMES,
    TOLERANCE,
    attention,
    both,
    integer_case,
    pool_and_tables,
    shape,
    spans_of,
)
from tests.support.reference_kernels import ReferenceKernels, device_exponentials, philox

pytest.importorskip("triton", reason="kernels are written in Triton, which is for Linux on x86_64")

import numpy as np
from tests.support.interpreted import Interpreter

from teneral.runtime.backends.cuda import variants as v
from teneral.runtime.backends.cuda.compile import compile_variant
from teneral.runtime.backends.cuda.tables import StepTables, split_keys


def decode(
    contexts, *, head_dim=16, kv_heads=2, group=2, splits=1, window=1 << 30, block_size=4, dtype=torch.float32
):
    spans = spans_of([(context - 1, 1) for context in contexts], block_size)
    heads, keys, values, tables = pool_and_tables(
        spans, kv_heads=kv_heads, head_dim=head_dim, group=group, block_size=block_size, dtype=dtype
    )
    own = shape(head_dim=head_dim, group=group, block_size=block_size, dtype=dtype)
    num_heads = kv_heads * group
    expected = attention(ReferenceKernels(), own, heads, keys, values, tables, num_heads, kv_heads, window, 1)
    ours = attention(Interpreter(), own, heads, keys, values, tables, num_heads, kv_heads, window, splits)
    torch.testing.assert_close(ours, expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 112, 128, 256])
def test_one_token_attends_whatever_the_size_of_its_heads(head_dim):
    decode([1, 37], head_dim=head_dim, kv_heads=1)


@pytest.mark.parametrize("group", [1, 3, 7, 17])
def test_query_heads_share_a_key_head(group):
    decode([5, 66], group=group)


@pytest.mark.parametrize("splits", [2, 3, 64])
@pytest.mark.parametrize("window", [1, 33, 1 << 30])
def test_splits_of_the_keys_give_what_all_of_them_give(splits, window):
    decode([1, 70, 200], splits=splits, window=window, kv_heads=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_token_attends_in_half_precision(dtype):
    decode([1, 130], dtype=dtype, splits=2)
    decode([1, 130], dtype=dtype)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_blocks_may_have_any_size(block_size):
    decode([1, 20, 40], block_size=block_size, kv_heads=1)


def test_a_row_that_only_fills_up_a_recorded_step_gives_zeros_and_reads_nothing():
    own = shape()
    heads = torch.randn(2, 4, 16)
    keys = torch.full((1, 4, 1, 16), float("nan"))
    nothing, rows = torch.zeros(2, dtype=torch.int64), torch.arange(2)
    tables = StepTables(rows, nothing + 1, nothing, nothing, rows, rows[:0].view(0, 2), nothing - 1)
    for splits in (1, 4):
        out = attention(Interpreter(), own, heads, keys, keys, tables, 2, 1, 1 << 30, splits)
        assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("window", [1, 5, 70, 1 << 30])
@pytest.mark.parametrize("group", [1, 3])
def test_chunks_attend_to_what_was_before_them_and_to_themselves(window, group):
    shares = [(0, 70), (37, 5), (64, 1), (3, 2)]
    own = shape(group=group)
    heads, keys, values, tables = pool_and_tables(
        spans_of(shares, 4), kv_heads=1, head_dim=16, group=group, block_size=4, dtype=torch.float32
    )
    results = [
        attention(launch, own, heads, keys, values, tables, group, 1, window, 1)
        for launch in (Interpreter(), ReferenceKernels())
    ]
    torch.testing.assert_close(*results, **TOLERANCE[torch.float32])


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(80, torch.bfloat16), (256, torch.float16), (112, torch.float32)]
)
def test_chunks_attend_whatever_the_size_of_their_heads(head_dim, dtype):
    own = shape(head_dim=head_dim, dtype=dtype, group=2)
    heads, keys, values, tables = pool_and_tables(
        spans_of([(9, 40)], 4), kv_heads=1, head_dim=head_dim, group=2, block_size=4, dtype=dtype
    )
    results = [
        attention(launch, own, heads, keys, values, tables, 2, 1, 1 << 30, 1)
        for launch in (Interpreter(), ReferenceKernels())
    ]
    torch.testing.assert_close(*results, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adds", [False, True])
def test_rows_are_normed(dtype, adds):
    torch.manual_seed(0)
    x, added, out = (torch.randn(3, 48).to(dtype) for _ in range(3))
    weight = torch.rand(48).to(dtype)
    both(
        Interpreter(),
        v.norm_variant(shape(dtype=dtype), adds=adds),
        (3,),
        [x, added, weight, out, 1e-6],
        [0, 3],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("num_in", [900, 1300])
def test_one_row_is_multiplied(dtype, adds, num_in):
    torch.manual_seed(0)
    x, matrix, added = torch.randn(1, num_in), torch.randn(9, num_in) / 36, torch.randn(1, 9)
    arguments = [each.to(dtype) for each in (x, matrix, added, torch.full((1, 9), float("nan")))]
    variant = v.product_variant(NAMES[dtype], num_in, adds=adds)
    both(Interpreter(), variant, (-(-9 // v.product_rows(num_in)),), [*arguments, 9], [3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_in", "group_size"), [(192, 192), (192, 64), (192, 32), (256, 128)])
@pytest.mark.parametrize(("bits", "has_zero"), [(4, False), (4, True), (8, False)])
@pytest.mark.parametrize("num_rows", [1, 5, 20])
def test_few_rows_are_multiplied_with_integers(dtype, num_in, group_size, bits, has_zero, num_rows):
    both(Interpreter(), *integer_case(dtype, num_in, group_size, bits, has_zero, num_rows))


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu"])
def test_gates_are_those_of_torch(name):
    torch.manual_seed(0)
    product = torch.randn(2, 2 * 1100) * 30
    product[0, :4] = torch.tensor([0.0, 100.0, -100.0, -0.0])
    both(
        Interpreter(),
        v.gate_variant(shape(activation=name)),
        (2, 2),
        [product, torch.empty(2, 1100)],
        [1],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary"), [(16, 16), (80, 80), (24, 8)])
def test_heads_are_turned_and_put_where_they_belong(dtype, has_norms, head_dim, rotary):
    torch.manual_seed(0)
    num_heads, kv_heads, num_rows = 5, 2, 3
    own = shape(head_dim=head_dim, rotary_dim=rotary, has_head_norms=has_norms, dtype=dtype)
    heads = torch.randn(num_rows, num_heads + 2 * kv_heads, head_dim).to(dtype)
    cos, sin = (torch.randn(num_rows, rotary).to(dtype) for _ in range(2))
    norms = [torch.rand(head_dim).to(dtype) for _ in range(2)]
    keys, values = (torch.full((4, 4, kv_heads, head_dim), float("nan"), dtype=dtype) for _ in range(2))
    slots = torch.tensor([5, -1, 14])
    grid = (num_rows, -(-heads.shape[1] // v.PLACED_HEADS))
    arguments = [heads, cos, sin, *norms, keys, values, slots, num_heads, kv_heads, 1e-6]
    _, keys, values = both(Interpreter(), v.place_variant(own), grid, arguments, [0, 5, 6])
    for pool in (keys, values):
        written = ~pool.view(16, -1).isnan().any(-1)
        assert written.nonzero().flatten().tolist() == [5, 14]


@pytest.mark.parametrize("has_tokens", [False, True])
def test_races_are_run_as_on_paper(has_tokens):
    torch.manual_seed(0)
    scores = torch.randn(3, 2500) * 3
    scores -= scores.amax(-1, keepdim=True)
    scores[0, 5:] = float("-inf")
    tokens = torch.stack([torch.randperm(200_000)[:2500] for _ in range(3)])
    seeds, indexes = torch.tensor([0, -1, (1 << 63) - 5]), torch.tensor([0, 7, 1 << 20])
    quotients, places = torch.zeros(3, 3, dtype=torch.float64), torch.zeros(3, 3, dtype=torch.int64)
    ran = []
    for launch in (Interpreter(), ReferenceKernels()):
        arguments = [scores, tokens, seeds, indexes, quotients.clone(), places.clone(), 2500]
        launch(v.race_variant(has_tokens=has_tokens), (3, 3), *arguments)
        ran.append(arguments[4:6])
    torch.testing.assert_close(ran[0][0], ran[1][0], rtol=1e-12, atol=0)
    assert torch.equal(ran[0][1], ran[1][1])


def test_the_generator_is_that_of_its_paper():
    """Known answers of Random123 1.14, `philox4x32 10`."""
    ones = 0xFFFFFFFF
    cases = [
        ([0, 0, 0, 0], 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([ones] * 4, ones | ones << 32, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            0xA4093822 | 0x299F31D0 << 32,
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ]
    for counter, key, words in cases:
        assert philox(key, np.array(counter)[:, None])[:, 0].tolist() == words


def test_the_numbers_of_a_race_are_exponential():
    numbers = device_exponentials(12345, 6, np.arange(200_000))
    assert numbers.min() > 0
    assert abs(numbers.mean() - 1) < 0.01
    assert abs((numbers > 1).mean() - np.exp(-1)) < 0.005
    assert not np.array_equal(numbers, device_exponentials(12345, 7, np.arange(200_000)))


@pytest.mark.parametrize(
    ("spans", "processors", "context", "expected"),
    [
        (1, 132, 8_192, 256),  # as few as are worth a program
        (1, 132, 131_072, 2_048),  # as few as the splits that there may be
        (8, 132, 8_192, 256),
        (128, 132, 8_192, 4_096),  # two programs a sequence and key head, however long it is
        (1_024, 132, 8_192, 8_192),
        (1, 1, 300, 256),
    ],
)
def test_splits_keep_a_device_busy_and_no_longer(spans, processors, context, expected):
    assert split_keys(spans, 8, processors, context, 64) == expected
    assert -(-context // expected) <= v.MAX_SPLITS


def test_splits_depend_on_no_length_and_not_on_whether_a_step_is_recorded():
    """A fixed number of splits cut a short context into slivers, and others than a launched step has."""
    for num in (3, 5, 6, 7, 8):
        recorded_size = 1 << (num - 1).bit_length()
        assert split_keys(num, 8, 132, 8_192, 64) == split_keys(recorded_size, 8, 132, 8_192, 64)


def test_splits_of_one_size_give_what_all_keys_give_where_most_find_nothing():
    decode([1, 20, 700], splits=11, kv_heads=1)


def test_kernels_compile_in_a_process_that_has_interpreted_some():
    """The interpreter replaces the language's functions, those that kernels call among them."""
    decode([1, 40], splits=2, kv_heads=1)
    own = shape(head_dim=64, group=4, block_size=16, dtype=torch.bfloat16)
    _, content = compile_variant(v.decode_variant(own, is_split=True), 90)
    assert content.startswith(b"\x7fELF")
