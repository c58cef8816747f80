"""The core's operations one by one, against numpy's and against fp64."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.native import each_isa, loaded, threads
from tests.support.native_decoder import pool_of_shape
from tests.support.reference import operations as reference

from teneral.runtime.backends.native import arrays, records
from teneral.runtime.backends.native.operations import ACTIVATIONS, NORMS, Operations
from teneral.runtime.backends.native.pools import Pool, Spans
from teneral.runtime.backends.native.weights import vector_of
from teneral.runtime.models.fields import Norm
from teneral.runtime.models.matrices import Tensor
from teneral.runtime.models.spec import Activation
from teneral.runtime.step.batch import SequenceSpan
from teneral.runtime.tensors import DType, from_float32, to_float32

each_dtype = pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
WITHOUT_BIAS = [each for each in Norm if each is not Norm.LAYER_PLUS_ONE]
some_cases = settings(max_examples=12, deadline=None)
ULP = 2.0**-23  # of numbers from 1 to 2


@functools.cache
def operations(isa: str) -> Operations:
    return Operations(loaded(isa))


def normals(seed: int, *shape: int, dtype: DType = DType.F32, scale: float = 1.0) -> Any:
    """Numbers that `dtype` holds, in fp32."""
    made = (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)
    return reference.rounded(made, dtype)


def fresh(dtype: DType, *shape: int) -> Any:
    """Memory that was poisoned before."""
    return np.full(shape, -1, np.int16 if dtype is DType.BF16 else np.int32).view(dtype.numpy)


def close(ours: Any, expected: Any, dtype: DType, *, atol: float = 2.0**-14) -> None:
    """Equal but for last bits: in bf16 for numbers between two, of which hardly any is rounded elsewhere."""
    if dtype is DType.F32:
        np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=1e-5)
        return
    wide = to_float32(ours, dtype)
    np.testing.assert_allclose(wide, expected, rtol=2.0**-7, atol=atol)
    assert (wide != expected).mean() <= 0.02 or (wide != expected).sum() <= 2


@each_isa
def test_tanh_is_at_most_2_ulp_off(isa):
    x = np.concatenate([np.linspace(-10, 10, 400_001), np.geomspace(1e-30, 1, 40_001)]).astype(np.float32)
    out = operations(isa).activate(x[None], None, np.empty_like(x[None]), ACTIVATIONS[Activation.TANH])[0]

    exact = np.tanh(x.astype(np.float64))
    assert (np.abs(out - exact) / np.spacing(np.abs(exact).astype(np.float32))).max() <= 2.0


@each_isa
@pytest.mark.parametrize("activation", [each for each in Activation if each is not Activation.TANH])
def test_activations_are_exact_to_some_ulp_of_what_they_are_made_of(isa, activation):
    x = np.linspace(-20, 20, 400_001).astype(np.float32)
    out = operations(isa).activate(x[None], None, np.empty_like(x[None]), ACTIVATIONS[activation])[0]

    wide = x.astype(np.float64)
    exact = {
        Activation.SILU: lambda: wide / (1 + np.exp(-wide)),
        Activation.GELU: lambda: wide * [0.5 * math.erfc(-each * math.sqrt(0.5)) for each in wide],
        Activation.GELU_TANH: lambda: (
            wide / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
        ),
        Activation.GELU_QUICK: lambda: wide / (1 + np.exp(-1.702 * wide)),
        Activation.RELU: lambda: np.maximum(wide, 0),
        Activation.RELU2: lambda: np.maximum(wide, 0) ** 2,
    }[activation]()
    scale = np.maximum(np.abs(wide), np.abs(exact))
    assert (np.abs(out - exact) <= 1.5 * ULP * scale).all()


@each_isa
def test_nan_and_infinities_pass_activations(isa):
    x = np.array([[np.nan, np.inf, -np.inf, 0.0] * 9], np.float32)
    for activation, number in ACTIVATIONS.items():
        out = operations(isa).activate(x, None, np.empty_like(x), number)[0]
        assert np.isnan(out[::4]).all(), activation
        assert (out[1::4] == (1.0 if activation is Activation.TANH else np.inf)).all(), activation
        assert (out[3::4] == 0.0).all(), activation


@each_isa
@each_dtype
@some_cases
@given(rows=st.integers(1, 40), columns=st.integers(1, 1100), seed=st.integers(0, 99), data=st.data())
def test_rows_are_activated_normalised_and_added_as_numpy_does(isa, dtype, rows, columns, seed, data):
    run = operations(isa)
    x, more = (normals(seed + each, rows, columns, dtype=dtype, scale=3.0) for each in range(2))
    held, held_more = from_float32(x, dtype), from_float32(more, dtype)
    activation = data.draw(st.sampled_from(list(Activation)))
    weights = [Tensor(DType.F32, normals(seed + 2 + each, columns)) for each in range(2)]
    kind = data.draw(st.sampled_from(WITHOUT_BIAS))
    layer_kind = data.draw(st.sampled_from([Norm.LAYER, Norm.LAYER_PLUS_ONE]))

    with threads(isa, data.draw(st.integers(1, 5))):
        activated = run.activate(held, held_more, fresh(dtype, rows, columns), ACTIVATIONS[activation])
        rms = run.norm(held, fresh(dtype, rows, columns), weights[0], None, 1e-5, kind)
        layer = run.norm(held, fresh(dtype, rows, columns), weights[0], weights[1], 1e-5, layer_kind)
        added = run.add(held.copy(), held_more)
        added_one = run.add(held.copy(), held_more[:1])

    close(activated, reference.activate(x, more, activation, dtype), dtype)
    close(rms, reference.norm(x, weights[0], 1e-5, dtype, kind), dtype)
    if columns > 2:  # of fewer numbers the variance may be next to nothing
        close(layer, reference.norm(x, weights[0], 1e-5, dtype, layer_kind, weights[1]), dtype)
    assert (to_float32(added, dtype) == reference.rounded(x + more, dtype)).all()
    assert (to_float32(added_one, dtype) == reference.rounded(x + more[:1], dtype)).all()


@each_isa
@each_dtype
@pytest.mark.parametrize("stored", [DType.F32, DType.BF16, DType.F16, DType.I8])
@pytest.mark.parametrize("scale_dtype", [DType.F32, DType.BF16, DType.F16])
@pytest.mark.parametrize(("columns", "groups"), [(45, 1), (96, 3)])
def test_embeddings_are_rounded_once(isa, dtype, stored, scale_dtype, columns, groups):
    tokens = np.array([3, 0, 6, 3], np.int64)
    scale = None
    if stored is DType.I8:
        table = np.random.default_rng(0).integers(-127, 128, (7, columns)).astype(np.int8)
        scale = from_float32(np.abs(normals(1, 7, groups)), scale_dtype)
    else:
        table = from_float32(normals(0, 7, columns), stored)

    scales = None if scale is None else Tensor(scale_dtype, scale)
    for factor in (1.0, 5.65625):
        out = operations(isa).embed(table, scale, tokens, fresh(dtype, 4, columns), factor)

        expected = reference.embed(Tensor(stored, table), scales, tokens, dtype, factor)
        assert (to_float32(out, dtype) == expected).all()


@each_isa
@pytest.mark.parametrize("cap", [None, 2.5])
@pytest.mark.parametrize("columns", [1, 7, 100])
def test_logits_are_scaled_and_capped(isa, cap, columns):
    x = normals(0, 3, columns, scale=10.0)

    ours = operations(isa).scale_and_cap(x.copy(), 0.7, cap)

    np.testing.assert_allclose(ours, reference.scale_and_cap(x, 0.7, cap), rtol=1e-6, atol=1e-7)


@each_isa
@each_dtype
@pytest.mark.parametrize("int8", [False, True])
@some_cases
@given(
    rows=st.integers(1, 30),
    group=st.integers(1, 3),
    num_kv_heads=st.integers(1, 3),
    half=st.integers(2, 64),
    extra=st.integers(0, 20),
    normed=st.booleans(),
    joint=st.booleans(),
    wide=st.booleans(),
    turned=st.booleans(),
    interleaved=st.booleans(),
    scaled=st.booleans(),
    kind=st.sampled_from(WITHOUT_BIAS),
)
def test_heads_are_normalised_turned_and_written(
    isa,
    dtype,
    int8,
    rows,
    group,
    num_kv_heads,
    half,
    extra,
    normed,
    joint,
    wide,
    turned,
    interleaved,
    scaled,
    kind,
):
    head_dim, num_heads = 2 * half + extra, group * num_kv_heads
    heads = normals(0, rows, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    heads[0, num_heads] = 0.0
    inner = DType.F32 if wide else dtype
    turns, positions = normals(1, 64, 2 * half, dtype=inner), np.arange(rows, dtype=np.int64) + 5
    slots = np.random.default_rng(2).permutation(32)[:rows].astype(np.int64)
    sizes = (num_heads * head_dim, num_kv_heads * head_dim) if joint else (head_dim, head_dim)
    scales = np.linspace(1.0, 1.5, rows, dtype=np.float32)
    norms = [Tensor(DType.F32, normals(3 + size, size)) if normed else None for size in sizes]
    pool = pool_of_shape((2, num_kv_heads, head_dim), 4, 8, dtype, int8=int8)
    held = from_float32(heads.copy(), dtype)
    args = records.HeadsArgs(
        kv=ctypes.pointer(pool.record),
        heads=arrays.address(held),
        turns=arrays.address(turns) if turned else None,
        turn=arrays.address(positions),
        slots=arrays.address(slots),
        query_scales=arrays.address_or_null(scales if scaled else None),
        query_norm=vector_of(norms[0]),
        key_norm=vector_of(norms[1]),
        layer=1,
        num_rows=rows,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=2 * half,
        norm_eps=1e-6,
        dtype=arrays.dtype_of(held),
        norm=NORMS[kind],
        joint_norms=joint,
        wide_turns=wide,
        interleaved=interleaved,
    )
    with threads(isa, 3):
        operations(isa).call("tn_write_heads", args)

    queries, keys, values = np.split(heads, (num_heads, num_heads + num_kv_heads), axis=1)
    if norms[0] is not None and norms[1] is not None:
        shape = (rows, 1, -1) if joint else (rows, -1, head_dim)
        normalised = [
            reference.norm(each.reshape(shape), norm, 1e-6, dtype, kind).reshape(each.shape)
            for each, norm in zip((queries, keys), norms, strict=True)
        ]
        queries, keys = normalised
    # A norm may round to the next bf16, and a turn adds two products of it, which may nearly cancel.
    largest = max(np.abs(queries).max(), np.abs(keys).max()) * np.abs(turns).max()
    atol = float(2.0**-8 * largest) if normed else 2.0**-14
    if turned:
        queries, keys = (
            reference.turn(each, turns[positions], dtype, inner, interleaved=interleaved)
            for each in (queries, keys)
        )
    if scaled:
        queries = reference.rounded(queries * scales[:, None, None], dtype)
    close(held[:, :num_heads], queries, dtype, atol=atol)
    written = pool.data[1][:, :, slots]
    expected = np.stack((keys, values)).transpose(0, 2, 1, 3)
    if not int8:
        close(np.ascontiguousarray(written), expected, dtype, atol=atol)
        return
    assert pool.scales is not None
    codes, scales = reference.to_codes(expected, dtype)
    close(np.ascontiguousarray(pool.scales[1][:, :, slots]), scales, dtype, atol=atol)
    if not normed:
        assert (written == codes).all()


@each_isa
def test_what_is_not_finite_comes_back_from_8_bits_as_nan(isa):
    head = np.zeros((3, 3, 8), np.float32)
    head[0, 1, 3], head[1, 2, 0], head[2, 1, 7] = np.nan, np.inf, -np.inf
    turns = np.ones((3, 4), np.float32)
    pool = pool_of_shape((1, 1, 8), 1, 4, DType.F32, int8=True)
    numbers = np.arange(3, dtype=np.int64)
    args = records.HeadsArgs(
        kv=ctypes.pointer(pool.record),
        heads=arrays.address(head),
        turns=arrays.address(turns),
        turn=arrays.address(numbers),
        slots=arrays.address(numbers),
        num_rows=3,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        rotary_dim=4,
    )
    operations(isa).call("tn_write_heads", args)

    assert pool.scales is not None
    back = reference.of_codes(pool.data, pool.scales, DType.F32)[0, :, 0, :3]
    assert [np.isnan(each).all() for each in (back[0, 0], back[1, 1], back[0, 2])] == [True] * 3
    assert (back[1, 0] == 0.0).all()


@each_isa
@each_dtype
@pytest.mark.parametrize("int8", [False, True])
@some_cases
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 600)), min_size=1, max_size=3),
    group=st.sampled_from([1, 2, 3, 7, 40]),
    num_kv_heads=st.integers(1, 2),
    head_dim=st.sampled_from([20, 32, 48, 64, 80, 96, 128, 200, 256]),
    block_size=st.sampled_from([1, 8, 16, 32]),
    window=st.sampled_from([0, 1, 5, 256, 300]),
    chunked=st.booleans(),
    cap=st.sampled_from([0.0, 0.0, 0.7]),
    sink=st.sampled_from([None, 0.3, -50.0, 50.0]),
    run=st.sampled_from([0, 0, 1, 3, 17, 33]),
)
def test_attention_is_that_of_fp64(
    isa, dtype, int8, lengths, group, num_kv_heads, head_dim, block_size, window, chunked, cap, sink, run
):
    """`run`: this many rows from the second one on see one another, as the tokens of an image do."""
    num_rows, num_heads = sum(length for length, _ in lengths), group * num_kv_heads
    num_blocks = sum(-(-(length + past) // block_size) for length, past in lengths)
    pool = pool_of_shape((1, num_kv_heads, head_dim), num_blocks, block_size, dtype, int8=int8)
    order = np.random.default_rng(0).permutation(num_blocks).tolist()
    queries = normals(1, num_rows, num_heads, head_dim, dtype=dtype)
    sinks = None if sink is None else normals(2, num_heads, dtype=dtype) + np.float32(sink)
    sinks = None if sinks is None else reference.rounded(sinks, dtype)
    expected = np.empty(queries.shape)
    spans, start = [], 0
    ends = np.empty(num_rows, np.int64)
    for length, past in lengths:
        own_ends = ends[start : start + length]
        own_ends[:] = np.arange(past + 1, past + length + 1)
        own_ends[1 : 1 + run] = past + min(length, 1 + run)
        blocks = [order.pop() for _ in range(-(-(length + past) // block_size))]
        span = SequenceSpan(start, length, length + past, tuple(blocks))
        keys_values = fill(pool, span, dtype)
        for row in range(length):
            first = max(0, past + row + 1 - window) if window else 0
            if window and chunked:
                first = (past + row) // window * window
            seen = slice(first, ends[start + row])
            own = queries[start + row]
            expected[start + row] = softmax_attention(own, keys_values[:, :, seen], 0.1, cap, sinks)
        spans.append(span)
        start += length
    held, out = from_float32(queries, dtype), fresh(dtype, *queries.shape)
    held_sinks = None if sinks is None else Tensor(dtype, from_float32(sinks, dtype))
    spans_record = Spans(spans, num_rows, pool)
    args = records.AttentionArgs(
        kv=ctypes.pointer(pool.record),
        spans=spans_record.address,
        queries=arrays.address(held),
        out=arrays.address(out),
        num_spans=len(spans),
        query_stride=num_heads * head_dim,
        out_stride=num_heads * head_dim,
        layer=0,
        window=window,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=0.1,
        dtype=arrays.dtype_of(out),
        cap=cap,
        sinks=vector_of(held_sinks),
        ends=arrays.address_or_null(ends if run else None),
        chunked=chunked,
    )
    with threads(isa, 2):
        operations(isa).call("tn_attention", args)

    close(out, reference.rounded(expected.astype(np.float32), dtype), dtype)


def attend(isa: str, queries: Any, pool: Pool, span: SequenceSpan) -> Any:
    """One sequence's attention: queries (rows, num_heads, head_dim) in bf16 → the same shape."""
    num_rows, num_heads, head_dim = queries.shape
    out = fresh(DType.BF16, *queries.shape)
    spans = Spans([span], num_rows, pool)
    args = records.AttentionArgs(
        kv=ctypes.pointer(pool.record),
        spans=spans.address,
        queries=arrays.address(queries),
        out=arrays.address(out),
        num_spans=1,
        query_stride=num_heads * head_dim,
        out_stride=num_heads * head_dim,
        layer=0,
        window=0,
        num_heads=num_heads,
        num_kv_heads=pool.num_kv_heads,
        head_dim=head_dim,
        scale=0.1,
        dtype=arrays.dtype_of(out),
        cap=0.0,
        sinks=vector_of(None),
    )
    operations(isa).call("tn_attention", args)
    return out


@each_isa
@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan])
def test_what_is_no_number_in_a_later_token_changes_no_row_before_it(isa, odd):
    """Tiles multiply values of keys that a row does not see with 0, and 0 times infinity is not 0."""
    num_rows, num_heads, head_dim, block_size = 40, 4, 64, 16
    pool = pool_of_shape((1, 2, head_dim), 3, block_size, DType.BF16, int8=False)
    span = SequenceSpan(0, num_rows, num_rows, (2, 0, 1))
    fill(pool, span, DType.BF16)
    queries = from_float32(normals(1, num_rows, num_heads, head_dim, dtype=DType.BF16), DType.BF16)
    expected = attend(isa, queries, pool, span)
    last = 25  # the token with the value: block 0 of the pool holds tokens 16 to 31
    pool.data[0][1, :, last - 16, 3] = from_float32(np.float32([odd]), DType.BF16)[0]
    out = attend(isa, queries, pool, span)
    assert np.array_equal(out[:last], expected[:last])
    assert np.isfinite(to_float32(out[last:], DType.BF16)[..., 4]).all()
    assert not np.isfinite(to_float32(out[last:], DType.BF16)[..., 3]).any()


def fill(pool: Pool, span: SequenceSpan, dtype: DType) -> Any:
    """Random keys and values for a span's tokens, as the pool holds them: (2, kv_heads, context_len, head_dim)."""
    tokens = np.arange(span.context_len)
    slots = np.array(span.blocks)[tokens // pool.block_size] * pool.block_size + tokens % pool.block_size
    made = normals(span.start, 2, pool.num_kv_heads, span.context_len, pool.head_dim, dtype=dtype)
    if pool.scales is None:
        pool.data[0][:, :, slots] = from_float32(made, dtype)
        return made
    codes, scales = reference.to_codes(made, dtype)
    pool.data[0][:, :, slots] = codes
    pool.scales[0][:, :, slots] = from_float32(scales, dtype)
    return reference.of_codes(codes, scales, dtype)


def softmax_attention(
    queries: Any, keys_values: Any, scale: float, cap: float = 0.0, sinks: Any = None
) -> Any:
    keys, values = keys_values.astype(np.float64)
    grouped = queries.astype(np.float64).reshape(len(keys), -1, queries.shape[-1])
    scores = grouped @ keys.transpose(0, 2, 1) * scale
    if cap:
        scores = cap * np.tanh(scores / cap)
    more = (
        np.full((*scores.shape[:-1], 1), -np.inf) if sinks is None else sinks.reshape(*scores.shape[:-1], 1)
    )
    most = np.maximum(scores.max(-1, keepdims=True), more)
    powers = np.exp(scores - most)
    total = powers.sum(-1, keepdims=True) + np.exp(more - most)
    return (powers @ values / total).reshape(queries.shape)


@each_isa
@each_dtype
@some_cases
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    num_heads=st.integers(1, 3),
    head_dim=st.sampled_from([4, 12, 32, 64, 96, 256]),
)
def test_texts_attend_to_themselves_and_are_averaged(isa, dtype, lengths, num_heads, head_dim):
    starts = np.cumsum([0, *lengths], dtype=np.int64)
    qkv = normals(0, int(starts[-1]), 3, num_heads, head_dim, dtype=dtype)
    expected = np.empty(qkv[:, 0].shape)
    for begin, end in itertools.pairwise(starts):
        keys_values = qkv[begin:end, 1:].transpose(1, 2, 0, 3)
        for row in range(begin, end):
            expected[row] = softmax_attention(qkv[row, 0], keys_values, 0.3)
    held = from_float32(qkv, dtype)

    with threads(isa, 3):
        out = operations(isa).text_attention(held, starts, fresh(dtype, *expected.shape), 0.3)
        means = operations(isa).mean(held.reshape(len(held), -1), starts)

    close(out, reference.rounded(expected.astype(np.float32), dtype), dtype)
    right = [qkv[begin:end].astype(np.float64).mean(0).ravel() for begin, end in itertools.pairwise(starts)]
    np.testing.assert_allclose(means, right, rtol=1e-5, atol=1e-5)


@each_isa
def test_functions_refuse_structs_of_another_size_and_dtypes_that_they_lack(isa):
    functions = loaded(isa).functions
    for name, struct in {
        "tn_embed": records.EmbedArgs,
        "tn_add": records.AddArgs,
        "tn_norm": records.NormArgs,
        "tn_activate": records.ActivateArgs,
        "tn_write_heads": records.HeadsArgs,
        "tn_attention": records.AttentionArgs,
        "tn_text_attention": records.TextAttentionArgs,
        "tn_decoder_step": records.DecoderStepArgs,
        "tn_encoder_step": records.EncoderStepArgs,
        "tn_mean": records.MeanArgs,
    }.items():
        model = (records.EncoderRecord if "encoder" in name else records.DecoderRecord)(dtype=2)
        args = struct(size=ctypes.sizeof(struct) + 8)
        if hasattr(args, "model"):
            args.model = ctypes.cast(ctypes.pointer(model), type(args.model))
        assert getattr(functions, name)(ctypes.byref(args)) == 1, name
        args.size -= 8
        if hasattr(args, "dtype"):
            args.dtype = 2
        assert getattr(functions, name)(ctypes.byref(args)) == 1, name
