"""Products by tiles: the bits that Intel's manual says, the same by hardware and by software.

Committed are hashes of results, so that a machine with tiles and one without, which has them in software, are held to
the same bits. The names of the tests say which ran.
"""

from __future__ import annotations

import hashlib
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.native.test_linear import (
    CODES,
    KINDS,
    Case,
    as_integers,
    make_codes,
    make_float,
    make_fp8,
    make_integers,
    make_mxfp4,
)
from tests.support.native import ISAS, SOFT_TILES, TILES, product, threads

from teneral.loader.native.library import usable_isas
from teneral.runtime.backends.native import arrays
from teneral.runtime.backends.native.products import Weight

Array = NDArray[Any]

_LACKS = "software tiles need AVX-512 with BF16, and a compiler"
_SOFT = (
    SOFT_TILES
    if "x86_64_v4_bf16" in usable_isas()
    else pytest.param(SOFT_TILES, marks=pytest.mark.skip(reason=_LACKS))
)
each_kind_of_tiles = pytest.mark.parametrize("isa", [*([TILES] if TILES in ISAS else []), _SOFT])

TILED = [kind for kind in KINDS if kind not in ("fp32", "fp16")]
# Of all results below, by the kind of weights: SHA-256, the first 16 digits.
HASHES = {
    "bf16": "0aef55df446c6a57",
    "int8": "9cf99bae89d237b0",
    "int4": "71aa49c9e0226dc3",
    "mxfp4": "1e6eddb6cbf12eff",
    "fp8": "353299239fedd4ff",
    "nf4": "cfacbb23ea6b61cb",
    "fp4": "5b8c5ef0c41edb5c",
}


def make_cases(kind: str) -> list[Case]:
    """Weights with tails of columns and of K, one group and several, zeros, biases, more than one block of K."""
    rng = np.random.default_rng(41)
    shapes = [(33, 64), (40, 1344), (96, 320), (7, 1024)]
    if kind == "bf16":
        shapes = [*shapes, (40, 1006), (17, 31)]
        return [
            make_float(rng, kind, shape, rng.standard_normal(shape[0]).astype(np.float32)) for shape in shapes
        ]
    if kind in CODES:
        return [
            make_codes(rng, kind, shape, None, group_size=size) for shape in shapes for size in (64, shape[1])
        ]
    if kind == "mxfp4":
        return [make_mxfp4(rng, shape, None, step=step) for step, shape in enumerate(shapes, start=1)]
    if kind == "fp8":
        blocks = [(1, 4096), (16, 128), (33, 64), (1, 32)]
        return [make_fp8(rng, shape, block, None) for shape in [*shapes, (40, 1006)] for block in blocks]
    return [
        make_integers(
            rng,
            kind,
            shape,
            group_size=group_size,
            has_zero=number % 2 == 1,
            scale_kind=("bf16", "fp16", "fp32")[number % 3],
            bias=None,
        )
        for number, shape in enumerate(shapes)
        for group_size in (32, 64, shape[1])
    ]


def make_inputs(num_rows: int, num_in: int) -> Array:
    """bf16 of many sizes, denormals and zeros of both signs among them."""
    rng = np.random.default_rng(num_rows * num_in)
    values = rng.standard_normal((num_rows, num_in)) * np.exp2(rng.integers(-40, 20, (num_rows, num_in)))
    values[rng.random(values.shape) < 0.05] *= 1e-38
    values[rng.random(values.shape) < 0.05] *= -0.0
    return arrays.to_bf16(values.astype(np.float32))


@each_kind_of_tiles
@pytest.mark.parametrize("kind", TILED)
def test_results_have_the_committed_bits(isa: str, kind: str) -> None:
    digest = hashlib.sha256()
    for case in make_cases(kind):
        for num_rows in (1, 5, 16, 17, 33, 70):
            x = make_inputs(num_rows, case.weight.num_in)
            digest.update(product(isa, x, case.weight).tobytes())
            digest.update(product(isa, x, case.weight, np.uint16).tobytes())
    assert digest.hexdigest()[:16] == HASHES[kind]


@each_kind_of_tiles
@pytest.mark.parametrize("kind", TILED)
def test_rows_and_threads_change_no_bit(isa: str, kind: str) -> None:
    for case in make_cases(kind):
        x = make_inputs(70, case.weight.num_in)
        together = product(isa, x, case.weight)
        for begin, end in ((0, 1), (1, 17), (17, 50), (69, 70)):
            apart = product(isa, x[begin:end], case.weight)
            assert np.array_equal(apart.view(np.uint32), together[begin:end].view(np.uint32))
        for number in (2, 3):
            with threads(isa, number):
                assert np.array_equal(product(isa, x, case.weight).view(np.uint32), together.view(np.uint32))


@each_kind_of_tiles
@pytest.mark.parametrize("odd", [0.0, -0.0, 1.5e-38, 1e-39, -3e37, 3.3e38, math.inf, math.nan])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_levels_from_the_table_are_those_that_are_computed(isa: str, group_size: int, odd: float) -> None:
    """Scales in bf16 have a table (native/strips.h), and the same ones in fp32 have none.

    One in the middle is odd: its own strip has none where it is beyond the table's exponents.
    """
    rng = np.random.default_rng(43)
    num_out, num_in = 100, 1408
    data = rng.integers(0, 256, (num_out, num_in // 2), np.uint8)
    scale = arrays.to_bf16(
        (rng.standard_normal((num_out, num_in // group_size)) * 2.0 ** -rng.integers(0, 90)).astype(
            np.float32
        )
    )
    scale[50, 3] = arrays.to_bf16(np.array([odd], np.float32))[0]
    for num_rows in (1, 3, 16, 40):
        x = make_inputs(num_rows, num_in)
        by_table = product(isa, x, Weight(data, scale=scale))
        computed = product(isa, x, Weight(data, scale=arrays.from_bf16(scale)))
        assert np.array_equal(by_table, computed, equal_nan=True)
        is_number = ~np.isnan(computed)
        assert np.array_equal(by_table.view(np.uint32)[is_number], computed.view(np.uint32)[is_number])


@each_kind_of_tiles
@pytest.mark.parametrize("odd", [0, 1, 2, 252, 253, 255])
@pytest.mark.parametrize("step", [1, 2])
def test_an_odd_scale_of_mxfp4_changes_no_other_column(isa: str, odd: int, step: int) -> None:
    """Levels are shifted to a scale's exponent, but for strips with a scale that has no normal ones."""
    rng = np.random.default_rng(44)
    num_out, num_in = 96 * step, 1408
    data = rng.integers(0, 256, (num_out, num_in // 2), np.uint8)
    scale = rng.integers(3, 130, (num_out, num_in // 32), np.uint8)
    others = np.arange(num_out // step) != 40
    for num_rows in (1, 5, 40):
        x = make_inputs(num_rows, num_in)
        shifted = product(isa, x, Weight(data[::step], scale=scale[::step]))
        with_odd = scale.copy()
        with_odd[40 * step, 3] = odd
        result = product(isa, x, Weight(data[::step], scale=with_odd[::step]))
        assert np.array_equal(result[:, others].view(np.uint32), shifted[:, others].view(np.uint32))


def rounded(value: Fraction) -> Fraction:
    """To the nearest float32, ties to even; for numbers that are neither denormal nor too large."""
    if value == 0:
        return value
    size, exponent = abs(value), 0
    while size >= 1 << 24:
        size, exponent = size / 2, exponent + 1
    while size < 1 << 23:
        size, exponent = size * 2, exponent - 1
    whole = Fraction(round(size)) * Fraction(2) ** exponent  # Python rounds halves to even
    return whole if value > 0 else -whole


def chain(row: Array, column: Array) -> float:
    """One element in the order that isa_amx.h states, in exact arithmetic."""
    total = Fraction(0)
    for begin in range(0, len(row), 32):
        sums = [Fraction(0), Fraction(0)]  # of even and of odd elements
        for k in range(begin, min(begin + 32, len(row))):
            product_ = Fraction(float(row[k])) * Fraction(float(column[k]))
            sums[k % 2] = rounded(sums[k % 2] + product_)
        total = rounded(total + rounded(sums[0] + sums[1]))
    return float(total)


@each_kind_of_tiles
def test_an_element_is_the_chain_that_the_manual_states(isa: str) -> None:
    rng = np.random.default_rng(5)
    for num_in in (1, 31, 64, 1310):
        case = make_float(rng, "bf16", (6, num_in), None)
        x = arrays.to_bf16(rng.standard_normal((3, num_in)).astype(np.float32))
        out = product(isa, x, case.weight)
        values = arrays.from_bf16(x)
        for row in range(3):
            for column in range(6):
                assert out[row, column] == chain(values[row], case.means[column])


def integer_sum(row: Array, levels: Array, scales: Array) -> float:
    """One element in the order that integer_tiles.c states, in exact arithmetic."""
    integers, exponent = (each[0] for each in as_integers(row[None].astype(np.float64)))
    low = (integers + 128) % 256 - 128
    high = (integers - low) // 256
    total, group = Fraction(0), len(row) // len(scales)
    parts = math.ceil(group / 1024)
    size = group if parts == 1 else math.ceil(math.ceil(group / parts) / 64) * 64
    for number, scale in enumerate(scales):
        for begin in range(number * group, (number + 1) * group, size):
            of = slice(begin, min(begin + size, (number + 1) * group))
            sums = [rounded(Fraction(int(levels[of].astype(np.int64) @ each[of]))) for each in (high, low)]
            segment = rounded(256 * sums[0] + sums[1])
            factor = Fraction(float(scale)) if len(scales) > 1 else 1
            total = rounded(total + segment * factor)
    total *= Fraction(2) ** (int(exponent) - 15)
    return float(total if len(scales) > 1 else rounded(total * Fraction(float(scales[0]))))


@each_kind_of_tiles
@pytest.mark.parametrize(("num_in", "groups"), [(96, 3), (256, 2), (70, 1), (1090, 1), (2624, 2), (2500, 1)])
def test_an_element_of_integers_is_the_sum_that_is_stated(isa: str, num_in: int, groups: int) -> None:
    rng = np.random.default_rng(num_in)
    levels = rng.integers(-128, 128, (6, num_in)).astype(np.int8)
    scale = rng.random((6, groups)).astype(np.float32) + np.float32(0.1)
    x = arrays.to_bf16(
        rng.standard_normal((9, num_in)).astype(np.float32) * np.exp2(rng.integers(-9, 9, num_in))
    )
    x[0] = arrays.to_bf16(np.full(num_in, 1.9921875, np.float32))  # whose fraction has all bits
    out = product(isa, x, Weight(levels, scale=scale))
    values = arrays.from_bf16(x)
    for row in range(len(x)):
        for column in range(len(levels)):
            assert out[row, column] == integer_sum(values[row], levels[column], scale[column])


@each_kind_of_tiles
def test_integers_times_a_row_that_is_not_finite_are_no_number_and_change_no_other_row(isa: str) -> None:
    rng = np.random.default_rng(7)
    weight = Weight(rng.integers(-127, 128, (40, 128)).astype(np.int8), scale=np.ones((40, 1), np.float32))
    values = rng.standard_normal((5, 128)).astype(np.float32)
    expected = product(isa, arrays.to_bf16(values), weight)
    values[1, 3], values[3, 100], values[4] = np.inf, np.nan, 1e-38
    out = product(isa, arrays.to_bf16(values), weight)
    assert np.isnan(out[[1, 3]]).all()
    assert np.array_equal(out[[0, 2]], expected[[0, 2]])
    assert not out[4].any()
