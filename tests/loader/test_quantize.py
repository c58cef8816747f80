"""Weights become integers that mean nearly the same: how nearly, for any weights that there may be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.quantized import slow_dequantize

from teneral.loader.tools.pack.quantize import (
    MAX_WEIGHT,
    InputMoments,
    Quantized,
    first_unusable,
    from_bf16,
    pack_nibbles,
    quantize_int4,
    quantize_int8,
    to_bf16,
    to_float32,
)

LEAST = np.float32(2.0**-110)  # a group of smaller numbers may become 0


def meant(quantized: Quantized) -> np.ndarray:
    return slow_dequantize(quantized.weight, from_bf16(quantized.scale), quantized.zero)


@st.composite
def matrices(draw: st.DrawFn) -> np.ndarray:
    """(R, K) of any size of numbers, with rows and columns that stand out, and zeros."""
    rows, runs = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    weights = rng.standard_normal((rows, runs * 64)) * 10.0 ** draw(st.integers(-40, 28))
    if draw(st.booleans()):
        weights *= rng.lognormal(0, 2, (rows, 1))
    if draw(st.booleans()):
        weights[:, rng.integers(0, runs * 64)] *= 50
    if draw(st.booleans()):
        weights[rng.random(weights.shape) < 0.4] = 0
    if draw(st.booleans()):
        weights = np.abs(weights)
    return np.clip(weights, -MAX_WEIGHT, MAX_WEIGHT).astype(np.float32)


@given(matrices(), st.sampled_from([32, 64, None]))
@settings(deadline=None)
def test_eight_bits_are_off_by_half_a_step_at_most(weights: np.ndarray, group_size: int | None) -> None:
    group_size = group_size or weights.shape[1]
    quantized = quantize_int8(weights, group_size)
    step = np.repeat(from_bf16(quantized.scale), group_size, axis=1)
    assert quantized.weight.min() >= -127
    # The largest number may be cut by what rounding to bf16 takes off the scale: a quarter of a step.
    assert (np.abs(meant(quantized) - weights) <= 0.51 * step + LEAST).all()


@given(matrices(), st.sampled_from([32, 64]), st.booleans())
@settings(deadline=None)
def test_four_bits_are_never_worse_than_plain_rounding(
    weights: np.ndarray, group_size: int, asymmetric: bool
) -> None:
    quantized = quantize_int4(weights, group_size, asymmetric=asymmetric)
    grouped = weights.reshape(len(weights), -1, group_size).astype(np.float64)
    error = np.square(meant(quantized).reshape(grouped.shape) - grouped).sum(axis=2)
    if asymmetric:
        least, most = np.minimum(grouped.min(axis=2), 0), np.maximum(grouped.max(axis=2), 0)
        step = (most - least) / 15
        # Half a step for rounding the number, half a one for rounding the zero, the rest for rounding the scale.
        bound = group_size * np.square(1.1 * step)
    else:
        step = np.abs(grouped).max(axis=2) / 7
        plain = np.rint(grouped / np.where(step > 0, step, 1)[:, :, None]) * step[:, :, None]
        bound = 1.05 * np.square(plain - grouped).sum(axis=2) + group_size * np.square(step / 100)
    assert (error <= bound + group_size * float(LEAST) ** 2).all()


@given(st.integers(0, 2**32))
@settings(deadline=None, max_examples=20)
def test_the_search_for_a_scale_takes_a_quarter_off_the_error_of_plain_rounding(seed: int) -> None:
    weights = np.random.default_rng(seed).standard_normal((16, 1024)).astype(np.float32)
    step = np.abs(weights.reshape(16, -1, 64)).max(axis=2, keepdims=True) / 7
    plain = (np.rint(weights.reshape(16, -1, 64) / step) * step).reshape(weights.shape)
    error = np.square(meant(quantize_int4(weights, 64)) - weights).sum()
    assert error < 0.75 * np.square(plain - weights).sum()


@given(matrices())
@settings(deadline=None)
def test_zeros_of_groups_lie_among_the_levels(weights: np.ndarray) -> None:
    quantized = quantize_int4(weights, 64, asymmetric=True)
    assert quantized.zero is not None
    assert quantized.zero.max() <= 15


@pytest.mark.parametrize("value", [0.0, -0.0, 0.75, -0.75, 1e-30, -3e20])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_rows_of_one_number_come_back_as_precise_as_bf16(value: float, asymmetric: bool) -> None:
    weights = np.full((2, 128), value, np.float32)
    for quantized in (quantize_int8(weights, 128), quantize_int4(weights, 64, asymmetric=asymmetric)):
        assert np.allclose(meant(quantized), weights, rtol=2**-8, atol=0)


def test_what_is_too_small_to_have_a_scale_becomes_0() -> None:
    weights = np.full((1, 64), 1e-45, np.float32)  # the smallest that there is
    weights[0, ::2] = -3e-39
    for quantized in (
        quantize_int8(weights, 64),
        quantize_int4(weights, 32),
        quantize_int4(weights, 32, asymmetric=True),
    ):
        assert np.array_equal(np.abs(meant(quantized)), np.zeros_like(weights))


def test_a_zero_among_large_numbers_stays_0() -> None:
    weights = np.linspace(0.5, 1.0, 64, dtype=np.float32).reshape(1, 64)
    weights[0, 7] = 0
    for quantized in (
        quantize_int8(weights, 64),
        quantize_int4(weights, 64),
        quantize_int4(weights, 64, asymmetric=True),
    ):
        assert meant(quantized)[0, 7] == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2e30])
def test_a_row_with_a_number_that_is_none_is_found(bad: float) -> None:
    weights = np.ones((5, 64), np.float32)
    assert first_unusable(weights) is None
    weights[3, 40] = bad
    weights[4, 0] = bad
    assert first_unusable(weights) == 3


@given(st.binary(min_size=64, max_size=64))
def test_nibbles_are_packed_half_a_run_apart(data: bytes) -> None:
    levels = np.frombuffer(data, np.uint8).reshape(1, 64) & 15
    packed = pack_nibbles(levels)
    assert packed.shape == (1, 32)
    for place in range(32):
        assert packed[0, place] == levels[0, place] | levels[0, place + 32] << 4


@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=50))
def test_bf16_is_the_nearest_with_ties_to_even(numbers: list[float]) -> None:
    torch = pytest.importorskip("torch")
    values = np.array(numbers, np.float32)
    expected = torch.from_numpy(values).to(torch.bfloat16)
    assert np.array_equal(to_bf16(values), expected.view(torch.uint16).numpy())
    assert np.array_equal(from_bf16(to_bf16(values)), expected.float().numpy())


@pytest.mark.parametrize(("dtype", "name"), [("<f2", "F16"), ("<f4", "F32")])
def test_every_dtype_is_read_as_the_numbers_that_it_holds(dtype: str, name: str) -> None:
    values = np.array([1.5, -0.25, 6e-5], dtype)
    assert np.array_equal(to_float32(values.view(np.uint8), name), values.astype(np.float32))
    bits = np.array([0x3FC0, 0xBE80], "<u2")
    assert to_float32(bits.view(np.uint8), "BF16").tolist() == [1.5, -0.25]


def inputs(num_rows: int, num_columns: int, seed: int) -> np.ndarray:
    """(num_rows, num_columns): some columns are large, and many follow others."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((num_rows, num_columns // 4)) @ rng.standard_normal(
        (num_columns // 4, num_columns)
    )
    scales = rng.lognormal(0, 1, num_columns)
    return ((mixed + 0.3 * rng.standard_normal(mixed.shape)) * scales).astype(np.float32)


def moments_of(x: np.ndarray) -> InputMoments:
    return InputMoments.of(x.T @ x / len(x))


def product_error(weights: np.ndarray, quantized: Quantized, x: np.ndarray) -> float:
    return float(np.square(x @ (weights - meant(quantized)).T).mean())


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_moments_of_inputs_halve_the_error_of_products(group_size: int, asymmetric: bool) -> None:
    weights = np.random.default_rng(5).standard_normal((48, 256)).astype(np.float32)
    seen, new = inputs(4_000, 256, 1)[:2_000], inputs(4_000, 256, 1)[2_000:]
    plain = quantize_int4(weights, group_size, asymmetric=asymmetric)
    chosen = quantize_int4(weights, group_size, asymmetric=asymmetric, moments=moments_of(seen))
    assert chosen.weight.shape == plain.weight.shape
    assert chosen.scale.shape == plain.scale.shape
    assert (chosen.zero is None) is (plain.zero is None)
    assert product_error(weights, chosen, new) < 0.5 * product_error(weights, plain, new)


def test_rows_are_quantised_alike_in_any_company() -> None:
    weights = np.random.default_rng(6).standard_normal((9, 128)).astype(np.float32)
    moments = moments_of(inputs(600, 128, 2))
    whole = quantize_int4(weights, 64, moments=moments)
    for begin, end in ((0, 4), (4, 9)):
        part = quantize_int4(weights[begin:end], 64, moments=moments)
        np.testing.assert_allclose(meant(part), meant(whole)[begin:end], atol=1e-3)


@pytest.mark.parametrize("num_rows", [1, 40])
def test_moments_of_few_inputs_or_of_silent_ones_leave_numbers(num_rows: int) -> None:
    """Fewer inputs than columns: the moments are singular."""
    weights = np.random.default_rng(7).standard_normal((5, 128)).astype(np.float32)
    x = inputs(num_rows, 128, 3)
    x[:, :40] = 0
    quantized = quantize_int4(weights, 64, moments=moments_of(x))
    assert np.isfinite(meant(quantized)).all()
    assert np.abs(weights - meant(quantized))[:, :40].max() < 1  # no input says anything of them


def test_inputs_that_are_all_0_say_nothing() -> None:
    weights = np.random.default_rng(8).standard_normal((5, 64)).astype(np.float32)
    moments = InputMoments.of(np.zeros((64, 64), np.float32))
    np.testing.assert_array_equal(
        meant(quantize_int4(weights, 64, moments=moments)), meant(quantize_int4(weights, 64))
    )
