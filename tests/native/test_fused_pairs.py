"""Pairs of bf16 multiplied by two fused products have the bits that the processor's instruction for
them gives, of any numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.support.native import ISAS, fused_pairs, product, threads

from teneral.runtime.backends.native import arrays
from teneral.runtime.backends.native.products import Weight

Array = NDArray[Any]

# Other libraries have no instruction for pairs, or nothing that is faster.
each_isa_with_pairs = pytest.mark.parametrize(
    "isa",
    [isa for isa in ISAS if str(isa) == "x86_64_v4_bf16"]
    or [pytest.param("", marks=pytest.mark.skip(reason="the processor has no AVX512-BF16"))],
)
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 33, 128, 133)
SIGN_AND_MANTISSA = 0x807F
NUMBERS = {  # of which exponents
    "any bits, of them NaN and infinities": (0, 256),
    "denormals and small numbers": (0, 80),
    "numbers whose products are near the smallest": (56, 72),
    "usual numbers": (100, 140),
    "denormals alone": (0, 1),
    "large numbers": (200, 250),  # which make other numbers of denormals
}


def numbers(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> Array:
    """bf16 of a kind, with zeros of both signs among them."""
    first, end = NUMBERS[kind]
    bits = rng.integers(0, 1 << 16, shape) & SIGN_AND_MANTISSA | rng.integers(first, end, shape) << 7
    return np.where(rng.random(shape) < 0.02, bits & 0x8000, bits).astype(np.uint16)


@st.composite
def weights(draw: st.DrawFn, rng: np.random.Generator) -> Weight:
    kind = draw(st.sampled_from(["bf16", "int8", "int8 in groups", "int4", "mxfp4", "fp8", "nf4", "fp4"]))
    num_out = draw(st.integers(1, 70))
    values = draw(st.sampled_from(sorted(NUMBERS)))
    has_zero = draw(st.booleans())
    if kind == "bf16":
        return Weight(numbers(rng, (num_out, draw(st.integers(1, 2200))), values))
    if kind in ("nf4", "fp4"):
        data = rng.integers(0, 256, (num_out, 32 * draw(st.integers(1, 34)))).astype(np.uint8)
        return Weight(data, scale=numbers(rng, (num_out, data.shape[1] // 32), values), codes=kind)
    if kind == "mxfp4":
        groups = (num_out, draw(st.integers(1, 68)))
        nibbles = rng.integers(0, 256, (num_out, groups[1] * 16)).astype(np.uint8)
        return Weight(nibbles, scale=rng.integers(*NUMBERS[values], groups).astype(np.uint8))
    if kind == "fp8":
        data = rng.integers(0, 256, (num_out, draw(st.integers(1, 2200))), dtype=np.uint8)
        scale = numbers(rng, (-(-num_out // 16), -(-data.shape[1] // 128)), values)
        return Weight(data, scale=scale, float8_block=(16, 128))
    if kind == "int8":
        groups, num_in = (num_out, 1), draw(st.integers(1, 2200))
    else:
        groups = (num_out, 2 * draw(st.integers(1, 12)))
        num_in = groups[1] * 32 * draw(st.integers(1, 5))
    scale = numbers(rng, groups, values)
    if kind == "int4":
        zero = rng.integers(0, 16, groups).astype(np.uint8) if has_zero else None
        return Weight(rng.integers(0, 256, (num_out, num_in // 2)).astype(np.uint8), scale=scale, zero=zero)
    zero = rng.integers(-129, 129, groups).astype(np.int16) if has_zero else None
    return Weight(rng.integers(-128, 128, (num_out, num_in)).astype(np.int8), scale=scale, zero=zero)


def assert_same(one: Array, other: Array) -> None:
    """Equal bits; of a NaN, a NaN."""
    differ = (one.view(np.uint32) != other.view(np.uint32)) & ~(np.isnan(one) & np.isnan(other))
    assert not differ.any(), (np.argwhere(differ)[:5], one[differ][:5], other[differ][:5])


@each_isa_with_pairs
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_fused_pairs_have_the_bits_of_the_instruction(isa: str, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    weight = data.draw(weights(rng))
    shape = data.draw(st.sampled_from(ROWS)), weight.num_in
    x = numbers(rng, shape, data.draw(st.sampled_from(sorted(NUMBERS))))
    expected = product(isa, x, weight)
    with fused_pairs(isa):
        assert_same(product(isa, x, weight), expected)


@each_isa_with_pairs
def test_sums_just_below_the_smallest_number_become_0_as_the_instruction_has_it(isa: str) -> None:
    """They would round up to that number if they were rounded as denormals first."""
    first, second = arrays.to_bf16(np.array([2.0**-63, -1.5 * 2.0**-75], np.float32))
    factor, small = arrays.to_bf16(np.array([2.0**-63, 2.0**-76], np.float32))
    x = np.zeros((8, 64), np.uint16)
    x[:, [0, 32]] = first, second
    values = np.zeros((5, 64), np.uint16)
    values[:, [0, 32]] = factor, small
    assert not product(isa, x, Weight(values)).any()
    with fused_pairs(isa):
        assert not product(isa, x, Weight(values)).any()


@each_isa_with_pairs
def test_denormal_inputs_are_0_as_the_instruction_has_it(isa: str) -> None:
    x = np.full((8, 64), 0x0010, np.uint16)  # 2^-129
    weight = Weight(np.full((5, 64), 0x6000, np.uint16))  # 2^65
    assert not product(isa, x, weight).any()
    with fused_pairs(isa):
        assert not product(isa, x, weight).any()


@each_isa_with_pairs
def test_denormals_are_kept_outside_the_products(isa: str) -> None:
    """A scale makes a denormal of a sum, in groups and of a whole row, and a bias is added to it."""
    rng = np.random.default_rng(0)
    x = arrays.to_bf16(rng.standard_normal((9, 128)).astype(np.float32))
    levels = rng.integers(-128, 128, (37, 128)).astype(np.int8)
    for groups in (1, 4):
        scale = np.full((37, groups), 2.0**-133, np.float32)
        expected = product(isa, x, Weight(levels, scale=scale))
        assert ((expected != 0) & (np.abs(expected) < 2.0**-126)).any()
        with fused_pairs(isa):
            assert_same(product(isa, x, Weight(levels, scale=scale)), expected)


@each_isa_with_pairs
def test_threads_and_other_rows_change_no_bit_of_fused_pairs(isa: str) -> None:
    rng = np.random.default_rng(1)
    weight = Weight(numbers(rng, (333, 1536), "usual numbers"))
    x = numbers(rng, (150, 1536), "usual numbers")
    with fused_pairs(isa):
        whole = product(isa, x, weight)
        for number in (2, 5):
            with threads(isa, number):
                assert_same(product(isa, x, weight), whole)
        for rows in (1, 5, 7, 12):
            assert_same(product(isa, x[:rows], weight), whole[:rows])
