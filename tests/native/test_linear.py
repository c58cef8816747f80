"""Products mean what numpy computes in fp64, for every dtype of weights, shape, tail, stride and grouping."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.support.native import ISAS, each_isa, multiplies_bf16, pack_nibbles, product, products, widened
from tests.support.quantized import CODE_TABLES as CODES

from teneral.runtime.backends.native import arrays
from teneral.runtime.backends.native.products import Weight

Array = NDArray[Any]

KINDS = ("fp32", "bf16", "fp16", "int8", "int4", "mxfp4", "fp8", "nf4", "fp4")


class Case(NamedTuple):
    """A weight, and what its rows mean: (N, K) fp64."""

    weight: Weight
    means: Array
    is_scaled_first: bool = False

    def means_for(self, isa: str, x: Array) -> Array:
        """The rows as they are multiplied with x: 4 bits times their scales are rounded to bf16 where
        the processor multiplies pairs of bf16.
        """
        if self.is_scaled_first and x.dtype == np.uint16 and multiplies_bf16(isa):
            return widened(arrays.to_bf16(self.means.astype(np.float32)))
        return self.means

    def inputs_for(self, isa: str, x: Array) -> Array:
        """The rows as they are multiplied: where tiles of integers do so, they are integers of 16 bits."""
        is_i8 = self.weight.record.dtype == arrays.NativeDType.I8 and not self.weight.record.zero
        if not is_i8 or x.dtype != np.uint16 or "amx" not in isa:
            return x
        values = widened(x)
        integers, exponents = as_integers(values)
        return integers * np.exp2(exponents - 15.0)[:, None]


def as_integers(rows: Array) -> tuple[Array, Array]:
    """Rows of inputs as integer_tiles.c packs them, and each one's exponent e: rows = integers * 2^(e - 15)."""
    largest = np.abs(rows).max(axis=1)
    exponents = np.maximum(np.frexp(largest)[1], -99)
    exponents += np.ldexp(largest, 15 - exponents) > 32639
    return np.rint(np.ldexp(rows, 15 - exponents[:, None])).astype(np.int64), exponents


def floats(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


def make_float(rng: np.random.Generator, kind: str, shape: tuple[int, int], bias: Array | None) -> Case:
    values = floats(rng, shape)
    if kind == "bf16":
        values = arrays.to_bf16(values)
    elif kind == "fp16":
        values = values.astype(np.float16)
    return Case(Weight(values, bias=bias), widened(values))


def make_integers(
    rng: np.random.Generator,
    kind: str,
    shape: tuple[int, int],
    *,
    group_size: int,
    has_zero: bool,
    scale_kind: str,
    bias: Array | None,
    most_zero: int = 15,
) -> Case:
    groups = (shape[0], shape[1] // group_size)
    scale = floats(rng, groups)
    scale = (
        arrays.to_bf16(scale)
        if scale_kind == "bf16"
        else scale.astype("f2" if scale_kind == "fp16" else "f4")
    )
    least, most, middle = (-128, 127, 0) if kind == "int8" else (0, 15, 8)
    levels = rng.integers(least, most + 1, shape)
    zero = None
    if has_zero:
        zero = rng.integers(-129, 129, groups).astype(np.int16)
        zero = zero if kind == "int8" else rng.integers(0, most_zero + 1, groups).astype(np.uint8)
    data = levels.astype(np.int8) if kind == "int8" else pack_nibbles(levels)
    offsets = np.full(groups, middle) if zero is None else zero.astype(np.int64)
    means = (levels - np.repeat(offsets, group_size, axis=1)) * np.repeat(widened(scale), group_size, axis=1)
    return Case(Weight(data, scale=scale, zero=zero, bias=bias), means, is_scaled_first=kind == "int4")


def make_mxfp4(
    rng: np.random.Generator, shape: tuple[int, int], bias: Array | None, *, step: int = 1
) -> Case:
    """Rows of data and scales `step` rows apart."""
    num_out, num_in = shape
    data = rng.integers(0, 256, (num_out * step, num_in // 2), dtype=np.uint8)
    scale = rng.integers(110, 140, (num_out * step, num_in // 32), dtype=np.uint8)
    apart = None
    if bias is not None:
        apart = np.repeat(bias, step)[::step]
    weight = Weight(data[::step], scale=scale[::step], bias=apart)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    means = np.empty(shape)
    for column in range(num_in):
        level = data[::step, column // 2] >> 4 * (column % 2) & 15
        power = 2.0 ** (scale[::step, column // 32].astype(np.float64) - 127)
        means[:, column] = values[level & 7] * np.where(level & 8, -1.0, 1.0) * power
    return Case(weight, means)


def make_codes(
    rng: np.random.Generator, kind: str, shape: tuple[int, int], bias: Array | None, *, group_size: int = 64
) -> Case:
    data = rng.integers(0, 256, (shape[0], shape[1] // 2), dtype=np.uint8)
    scale = floats(rng, (shape[0], shape[1] // group_size))
    codes = np.stack([data >> 4, data & 15], axis=2).reshape(shape)
    means = np.float32(CODES[kind])[codes].astype(np.float64) * np.repeat(scale, group_size, axis=1)
    return Case(Weight(data, scale=scale, bias=bias, codes=kind), means, is_scaled_first=True)


def make_fp8(
    rng: np.random.Generator, shape: tuple[int, int], block: tuple[int, int], bias: Array | None
) -> Case:
    data = rng.integers(0, 256, shape, dtype=np.uint8)
    data[data % 128 == 127] = 0  # NaN
    exponent, mantissa = data >> 3 & 15, (data & 7) / 8
    values = np.where(exponent, 1 + mantissa, mantissa) * 2.0 ** (
        np.maximum(exponent, 1).astype(np.float64) - 7
    )
    scale = floats(rng, (-(-shape[0] // block[0]), -(-shape[1] // block[1])))
    each = np.arange(shape[0])[:, None] // block[0], np.arange(shape[1]) // block[1]
    means = np.where(data & 128, -values, values) * scale[each]
    return Case(Weight(data, scale=scale, bias=bias, float8_block=block), means)


@st.composite
def cases(draw: st.DrawFn, with_bias: bool = False) -> Case:
    kind = draw(st.sampled_from(KINDS))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_out = draw(st.integers(1, 70))
    bias = floats(rng, (num_out,)) if with_bias else None
    if kind in ("fp32", "bf16", "fp16"):
        return make_float(rng, kind, (num_out, draw(st.integers(1, 2200))), bias)
    if kind == "mxfp4":
        return make_mxfp4(rng, (num_out, 32 * draw(st.integers(1, 68))), bias, step=draw(st.integers(1, 3)))
    if kind in CODES:
        group_size = 64 * draw(st.sampled_from([1, 1, 2, 4, 32]))
        num_in = group_size * draw(st.integers(1, max(1, 2200 // group_size)))
        return make_codes(rng, kind, (num_out, num_in), bias, group_size=group_size)
    if kind == "fp8":
        shape = num_out, draw(st.integers(1, 2200))
        rows, columns = draw(st.sampled_from([1, 3, 32, num_out])), draw(st.sampled_from([32, 128, 1056]))
        return make_fp8(rng, shape, (rows, columns if draw(st.booleans()) else shape[1]), bias)
    if kind == "int8" and draw(st.booleans()):  # one scale a row, of any length
        num_in = group_size = draw(st.integers(1, 2200))
    else:
        group_size = 32 * draw(st.integers(1, 40))
        num_in = group_size * draw(st.integers(1, max(1, 2200 // group_size)))
        num_in *= 2 if kind == "int4" and num_in % 64 else 1
    return make_integers(
        rng,
        kind,
        (num_out, num_in),
        group_size=group_size,
        has_zero=draw(st.booleans()),
        scale_kind=draw(st.sampled_from(["bf16", "fp16"] if kind == "int4" else ["bf16", "fp16", "fp32"])),
        bias=bias,
    )


def inputs(draw: st.DrawFn, num_in: int, max_rows: int = 20) -> Array:
    """(T, K) fp32 or bf16, whose rows may be apart."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    apart = draw(st.sampled_from([0, 1, 5, 64]))
    x = floats(rng, (draw(st.integers(1, max_rows)), num_in + apart))
    return (arrays.to_bf16(x) if draw(st.booleans()) else x)[:, :num_in]


def assert_close(out: Array, x: Array, means: Array) -> None:
    """The bound on the error of fp32 sums of that number of products."""
    expected = widened(x) @ means.T
    allowed = np.abs(widened(x)) @ np.abs(means).T * 4e-7 * np.log2(2 + means.shape[1]) + 1e-36
    assert (np.abs(out - expected) <= allowed).all()


@each_isa
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_product_is_what_numpy_computes(isa: str, data: st.DataObject) -> None:
    case = data.draw(cases())
    x = inputs(data.draw, case.weight.num_in)
    assert_close(product(isa, x, case.weight), case.inputs_for(isa, x), case.means_for(isa, x))


@each_isa
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", [6, 193, 400])
def test_prompts_of_any_length_are_what_numpy_computes(isa: str, kind: str, num_rows: int) -> None:
    rng = np.random.default_rng(num_rows)
    shape = (37, 1152)
    if kind in ("int8", "int4"):
        has_zero = kind == "int4" or num_rows == 6
        case = make_integers(rng, kind, shape, group_size=96, has_zero=has_zero, scale_kind="bf16", bias=None)
    elif kind == "mxfp4":
        case = make_mxfp4(rng, shape, None, step=2)
    elif kind in CODES:
        case = make_codes(rng, kind, shape, None)
    elif kind == "fp8":
        case = make_fp8(rng, shape, (16, 128), None)
    else:
        case = make_float(rng, kind, shape, None)
    for x in (floats(rng, (num_rows, 1152)), arrays.to_bf16(floats(rng, (num_rows, 1152)))):
        assert_close(product(isa, x, case.weight), case.inputs_for(isa, x), case.means_for(isa, x))


@pytest.mark.parametrize("isa", [isa for isa in ISAS if multiplies_bf16(str(isa))])
@pytest.mark.parametrize("scale_kind", ["bf16", "fp16"])
@pytest.mark.parametrize("group_size", [32, 64, 96, 128, 1152])
@pytest.mark.parametrize("has_zero", [False, True])
@pytest.mark.parametrize("num_rows", [1, 5, 8, 9, 40])
def test_four_bits_have_the_bits_of_the_matrix_in_bf16(
    isa: str, scale_kind: str, group_size: int, has_zero: bool, num_rows: int
) -> None:
    """Zeros up to 16, as GPTQ has them."""
    rng = np.random.default_rng(group_size)
    case = make_integers(
        rng,
        "int4",
        (37, 1152),
        group_size=group_size,
        has_zero=has_zero,
        scale_kind=scale_kind,
        bias=None,
        most_zero=16,
    )
    x = arrays.to_bf16(floats(rng, (num_rows, 1152)))
    in_bf16 = Weight(arrays.to_bf16(case.means.astype(np.float32)))
    assert np.array_equal(product(isa, x, case.weight), product(isa, x, in_bf16))


@pytest.mark.parametrize("isa", [isa for isa in ISAS if multiplies_bf16(str(isa))])
@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("group_size", [64, 128, 1152])
@pytest.mark.parametrize("num_rows", [1, 5, 9, 40])
def test_codes_have_the_bits_of_the_matrix_in_bf16(
    isa: str, kind: str, group_size: int, num_rows: int
) -> None:
    rng = np.random.default_rng(group_size)
    case = make_codes(rng, kind, (37, 1152), None, group_size=group_size)
    x = arrays.to_bf16(floats(rng, (num_rows, 1152)))
    in_bf16 = Weight(arrays.to_bf16(case.means.astype(np.float32)))
    assert np.array_equal(product(isa, x, case.weight), product(isa, x, in_bf16))


@each_isa
def test_four_bits_may_have_scales_in_fp32(isa: str) -> None:
    """Their products with levels have more bits than fp32 holds, so that a few are rounded to the other
    neighbour in bf16.
    """
    rng = np.random.default_rng(7)
    case = make_integers(rng, "int4", (37, 1152), group_size=32, has_zero=True, scale_kind="fp32", bias=None)
    for x in (floats(rng, (9, 1152)), arrays.to_bf16(floats(rng, (9, 1152)))):
        means = case.means_for(isa, x)
        expected = widened(x) @ means.T
        allowed = np.abs(widened(x)) @ np.abs(means).T * 2e-5
        assert (np.abs(product(isa, x, case.weight) - expected) <= allowed).all()


@each_isa
def test_rows_of_fp8_that_begin_within_a_block_have_its_scales(isa: str) -> None:
    """Strips of a head are multiplied as they arrive."""
    case = make_fp8(np.random.default_rng(5), (100, 160), (32, 128), None)
    x = floats(np.random.default_rng(6), (3, 160))
    whole = product(isa, x, case.weight)
    for first, end in ((0, 7), (7, 64), (64, 100)):
        assert np.array_equal(product(isa, x, case.weight.rows(first, end)), whole[:, first:end])


@each_isa
@pytest.mark.parametrize("num_rows", [1, 20])
@pytest.mark.parametrize("in_bf16", [True, False])
def test_every_number_of_8_bits_is_exact_and_two_are_nan(isa: str, num_rows: int, in_bf16: bool) -> None:
    codes = np.arange(256, dtype=np.uint8)
    data = np.zeros((256, 64), np.uint8)
    data[codes, codes % 64] = codes
    x = np.ones((num_rows, 64), np.uint16 if in_bf16 else np.float32)
    x[:] = arrays.to_bf16(np.ones((1, 64), np.float32)) if in_bf16 else 1
    weight = Weight(data, scale=np.ones((2, 1), np.float32), float8_block=(128, 64))
    out = product(isa, x, weight)
    assert (np.isnan(out) == (codes % 128 == 127)).all()
    assert (out[:, :8] == np.arange(8) * 2.0**-9).all()
    assert (out[:, 8:127] == np.exp2(codes[8:127] // 8 - 7.0) * (1 + codes[8:127] % 8 / 8)).all()
    assert (out[:, 129:255] == -out[:, 1:127]).all()


@each_isa
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_bf16_result_is_the_fp32_sum_with_its_bias_rounded_once(isa: str, data: st.DataObject) -> None:
    case = data.draw(cases(with_bias=True))
    x = inputs(data.draw, case.weight.num_in)
    in_fp32 = product(isa, x, case.weight)
    assert np.array_equal(product(isa, x, case.weight, np.uint16), arrays.to_bf16(in_fp32))


@each_isa
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_bias_of_any_float_is_added_in_fp32(isa: str, dtype: str) -> None:
    rng = np.random.default_rng(5)
    values, x = floats(rng, (21, 100)), floats(rng, (3, 100))
    bias = floats(rng, (21,))
    stored = {"fp32": bias, "bf16": arrays.to_bf16(bias), "fp16": bias.astype(np.float16)}[dtype]
    with_bias = product(isa, x, Weight(values, bias=stored))
    meant = widened(stored).astype(np.float32)
    assert np.array_equal(with_bias, product(isa, x, Weight(values)) + meant)


@each_isa
@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16"])
def test_what_is_no_number_stays_in_its_own_sums(isa: str, kind: str) -> None:
    rng = np.random.default_rng(3)
    values, x = floats(rng, (9, 77)), floats(rng, (5, 77))
    values[2, 3], values[4, 76], values[6, 0] = np.nan, np.inf, -np.inf
    x[1, 5], x[3, 76] = np.nan, np.inf
    stored = {"fp32": values, "bf16": arrays.to_bf16(values), "fp16": values.astype(np.float16)}[kind]
    for given_x in (x, arrays.to_bf16(x)):
        out = product(isa, given_x, Weight(stored))
        with np.errstate(invalid="ignore"):
            expected = widened(given_x) @ widened(stored).T
        assert np.array_equal(np.isnan(out), np.isnan(expected))
        assert np.array_equal(np.isposinf(out), np.isposinf(expected))
        assert np.array_equal(np.isneginf(out), np.isneginf(expected))
        finite = np.isfinite(expected)
        assert np.allclose(out[finite], expected[finite], rtol=1e-4, atol=1e-4)


@each_isa
def test_scales_of_mxfp4_are_powers_of_two_to_the_smallest_and_nan(isa: str) -> None:
    data = np.full((3, 16), 0x22, np.uint8)  # ones
    scale = np.array([[0], [254], [255]], np.uint8)
    x = np.zeros((1, 32), np.float32)
    x[0, 7] = 2.0
    for held in (x, arrays.to_bf16(x)):
        out = product(isa, held, Weight(data, scale=scale))[0]
        in_tiles = "amx" in isa and held.dtype == np.uint16  # which scale first, and take denormals as 0
        assert out[0] == (0 if in_tiles else np.ldexp(np.float32(1), -126))
        assert out[1] == np.inf
        assert np.isnan(out[2])
    assert product(isa, x / 2, Weight(data, scale=scale))[0, 1] == np.ldexp(np.float32(1), 127)


@each_isa
def test_denormals_and_negative_zeros_lose_at_most_what_is_denormal(isa: str) -> None:
    x = np.array([[1.0, -0.0, 1e-39, 2.0] * 16], np.float32)
    values = np.array([[1e-40, 5.0, 1.0, -0.0] * 16, [1.0, -0.0, 3.0, 1e-38] * 16], np.float32)
    out = product(isa, arrays.to_bf16(x), Weight(arrays.to_bf16(values)))
    expected = widened(arrays.to_bf16(x)) @ widened(arrays.to_bf16(values)).T
    assert (np.abs(out - expected) <= 64 * 2 * 2.0**-126).all()


@each_isa
def test_results_stay_within_their_rows(isa: str) -> None:
    rng = np.random.default_rng(1)
    memory = np.full((7, 50), 7, np.float32)
    products(isa).linear(floats(rng, (7, 33)), Weight(floats(rng, (30, 33))), memory[:, 10:40])
    assert (memory[:, :10] == 7).all()
    assert (memory[:, 40:] == 7).all()
    assert (memory[:, 10:40] != 7).all()


@each_isa
def test_no_rows_are_no_work(isa: str) -> None:
    weight = Weight(np.ones((3, 4), np.float32))
    assert product(isa, np.empty((0, 4), np.float32), weight).shape == (0, 3)
