"""Products with bf16, int8 and int4 weights are what their definition says, for any shape that they take."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba", reason="kernels need the extra [cpu]")

from numba import njit

from teneral.runtime.kernels.expand import expand_int4, expand_int8
from teneral.runtime.kernels.products import INPUT_GROUP, bf16_product, int4_product, int8_product
from teneral.runtime.kernels.rows import quantise
from teneral.runtime.kernels.sizes import size_of
from teneral.runtime.kernels.vectors import RUN
from teneral.runtime.models.quantized import dequantize, pack_nibbles

GROUPS = st.integers(1, 3)
PASSES = st.integers(1, 3)  # of two rows each


@njit
def bf16_products(weights: Any, inputs: Any, out: Any, begin: int, end: int, first: int) -> None:
    bf16_product(size_of(2), weights, inputs, out, begin, end, first)


@njit
def int8_products(weights: Any, scales: Any, inputs: Any, out: Any) -> None:
    int8_product(size_of(2), weights, scales, inputs[0], inputs[1], inputs[2], out, 0, len(weights), 0)


@njit
def int4_products(weights: Any, scales: Any, zeros: Any, shift: int, inputs: Any, out: Any) -> None:
    numbers, input_scales, totals = inputs
    int4_product(
        size_of(2), weights, scales, zeros, shift, numbers, input_scales, totals, out, 0, len(weights), 0
    )


def bf16(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)).bfloat16()


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint16).numpy()


def quantised(x: torch.Tensor, run: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    height, size = x.shape
    numbers, scales = np.empty((height, size), np.int8), np.empty((height, size // INPUT_GROUP), np.float32)
    totals = np.empty((height, size // run), np.int32)
    for group in range(scales.shape[1]):  # any share of them by itself
        quantise(bits(x), numbers, scales, totals, group, group + 1)
    return numbers, scales, totals


def meant(numbers: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return numbers * np.repeat(scales.astype(np.float64), INPUT_GROUP, axis=1)


@settings(deadline=None, max_examples=25)
@given(passes=PASSES, width=st.integers(1, 9), runs=st.integers(1, 9), seed=st.integers(0, 2**32))
def test_a_product_with_bf16_weights_is_summed_in_float32(passes, width, runs, seed):
    rng = np.random.default_rng(seed)
    weights, x = bf16(rng, width + 2, 32 * runs), bf16(rng, 2 * passes, 32 * runs)
    out = np.full((2 * passes, width + 4), np.nan, np.float32)

    bf16_products(bits(weights), bits(x), out, 1, width + 1, 1)

    expected = x.double() @ weights[1:-1].double().T
    np.testing.assert_allclose(out[:, 2:-2], expected, atol=1e-5 * 32 * runs)
    assert np.isnan(out[:, [0, 1, -2, -1]]).all()


@settings(deadline=None, max_examples=25)
@given(passes=PASSES, width=st.integers(1, 9), groups=GROUPS, seed=st.integers(0, 2**32))
def test_a_product_with_int8_weights_is_that_of_the_quantised_inputs(passes, width, groups, seed):
    rng = np.random.default_rng(seed)
    weights = rng.integers(-128, 128, (width, groups * INPUT_GROUP), dtype=np.int8)
    scales = rng.random((width, 1), dtype=np.float32)
    inputs = quantised(bf16(rng, 2 * passes, groups * INPUT_GROUP), INPUT_GROUP)
    out = np.empty((2 * passes, width), np.float32)

    int8_products(weights, scales.reshape(-1), inputs, out)

    expected = meant(*inputs[:2]) @ (weights * scales.astype(np.float64)).T
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-3)


@settings(deadline=None, max_examples=40)
@given(
    passes=PASSES,
    width=st.integers(1, 9),
    groups=GROUPS,
    runs_a_group=st.sampled_from([1, 2]),
    has_zeros=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_a_product_with_int4_weights_is_that_of_what_the_nibbles_mean(
    passes, width, groups, runs_a_group, has_zeros, seed
):
    rng = np.random.default_rng(seed)
    size = groups * INPUT_GROUP
    weights = pack_nibbles(torch.from_numpy(rng.integers(0, 16, (width, size), dtype=np.uint8)))
    scales = bf16(rng, width, size // (RUN * runs_a_group)).abs()
    zeros = torch.from_numpy(rng.integers(0, 16, scales.shape, dtype=np.uint8)) if has_zeros else None
    inputs = quantised(bf16(rng, 2 * passes, size), RUN)
    out = np.empty((2 * passes, width), np.float32)

    given_zeros = None if zeros is None else zeros.numpy()
    int4_products(weights.numpy(), bits(scales), given_zeros, runs_a_group // 2, inputs, out)

    expected = meant(*inputs[:2]) @ dequantize(weights, scales, zeros).double().numpy().T
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-3)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**32), magnitude=st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e4, 1e30]))
def test_quantised_inputs_are_within_half_a_step_of_what_they_were(seed, magnitude):
    x = bf16(np.random.default_rng(seed), 2, 3 * INPUT_GROUP) * magnitude

    numbers, scales, totals = quantised(x, RUN)

    step = np.repeat(scales.astype(np.float64), INPUT_GROUP, axis=1)
    assert (np.abs(numbers * step - x.double().numpy()) <= 0.51 * step).all()
    assert (totals == numbers.reshape(2, -1, RUN).astype(np.int64).sum(-1)).all()


def test_weights_of_minus_128_and_the_largest_inputs_overflow_nothing():
    weights = np.full((3, 8 * INPUT_GROUP), -128, np.int8)
    x = torch.full((2, 8 * INPUT_GROUP), 2.0, dtype=torch.bfloat16)
    inputs = quantised(x, INPUT_GROUP)
    out = np.empty((2, 3), np.float32)

    int8_products(weights, np.ones(3, np.float32), inputs, out)

    np.testing.assert_allclose(out, -128 * 2.0 * 8 * INPUT_GROUP, rtol=1e-6)


@pytest.mark.parametrize("runs_a_group", [1, 2])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_nibbles_are_expanded_to_the_bf16_that_they_mean(runs_a_group, has_zeros):
    rng = np.random.default_rng(1)
    weights = pack_nibbles(torch.from_numpy(rng.integers(0, 16, (5, 256), dtype=np.uint8)))
    scales = bf16(rng, 5, 256 // (RUN * runs_a_group)).abs()
    zeros = torch.from_numpy(rng.integers(0, 16, scales.shape, dtype=np.uint8)) if has_zeros else None
    out = torch.empty(5, 256, dtype=torch.bfloat16)

    given_zeros = zeros.numpy() if zeros is not None else np.empty((0, 0), np.uint8)
    expand_int4(weights.numpy(), bits(scales), given_zeros, bits(out))

    assert torch.equal(out, dequantize(weights, scales, zeros).bfloat16())


def test_bytes_are_expanded_to_the_bf16_that_they_mean():
    rng = np.random.default_rng(1)
    weights = torch.from_numpy(rng.integers(-128, 128, (5, 256), dtype=np.int8))
    scales = torch.from_numpy(rng.random((5, 2), dtype=np.float32))
    out = torch.empty(5, 256, dtype=torch.bfloat16)

    expand_int8(weights.numpy(), scales.numpy(), bits(out))

    assert torch.equal(out, dequantize(weights, scales).bfloat16())
