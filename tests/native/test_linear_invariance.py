"""An element of a product has the same bits whatever else is computed with it, and by however many threads."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.native.test_linear import (
    CODES,
    KINDS,
    Case,
    cases,
    inputs,
    make_codes,
    make_float,
    make_fp8,
    make_integers,
    make_mxfp4,
)
from tests.support.native import each_isa, product, threads

from teneral.runtime.backends.native import arrays

Array = NDArray[Any]


def same_bits(one: Array, other: Array) -> bool:
    return bool(np.array_equal(one.view(np.uint32), other.view(np.uint32)))


@each_isa
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rows_split_anywhere_give_the_same_bits(isa: str, data: st.DataObject) -> None:
    case = data.draw(cases())
    x = inputs(data.draw, case.weight.num_in, max_rows=30)
    whole = product(isa, x, case.weight)
    cuts = sorted({0, len(x), *data.draw(st.lists(st.integers(0, len(x)), max_size=4))})
    parts = [product(isa, x[begin:end], case.weight) for begin, end in itertools.pairwise(cuts)]
    assert same_bits(np.concatenate(parts), whole)


def large_case(kind: str) -> Case:
    rng = np.random.default_rng(7)
    if kind in ("int8", "int4"):
        return make_integers(
            rng, kind, (333, 1536), group_size=64, has_zero=True, scale_kind="fp16", bias=None
        )
    if kind in CODES:
        return make_codes(rng, kind, (333, 1536), None)
    if kind == "mxfp4":
        return make_mxfp4(rng, (333, 1536), None, step=2)
    if kind == "fp8":
        return make_fp8(rng, (333, 1536), (128, 128), None)
    return make_float(rng, kind, (333, 1536), None)


@each_isa
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("in_bf16", [True, False])
def test_any_number_of_threads_gives_the_same_bits(isa: str, kind: str, in_bf16: bool) -> None:
    case = large_case(kind)
    x = np.random.default_rng(1).standard_normal((11, 1536)).astype(np.float32)
    x = arrays.to_bf16(x) if in_bf16 else x
    alone = product(isa, x, case.weight)
    for number in range(2, 6):
        with threads(isa, number):
            assert same_bits(product(isa, x, case.weight), alone)


@each_isa
@pytest.mark.parametrize("kind", KINDS)
def test_one_row_among_hundreds_has_the_bits_that_it_has_alone(isa: str, kind: str) -> None:
    case = large_case(kind)
    x = arrays.to_bf16(np.random.default_rng(1).standard_normal((401, 1536)).astype(np.float32))
    together = product(isa, x, case.weight)
    for row in (0, 1, 191, 192, 400):
        assert same_bits(product(isa, x[row : row + 1], case.weight), together[row : row + 1])


@each_isa
@pytest.mark.parametrize("has_zero", [True, False])
def test_few_rows_have_the_bits_that_many_have_in_groups_of_32(isa: str, has_zero: bool) -> None:
    """Tiles widen such integers themselves for few rows, two groups at once, and a strip of them for many."""
    case = make_integers(
        np.random.default_rng(3),
        "int4",
        (37, 1984),
        group_size=32,
        has_zero=has_zero,
        scale_kind="bf16",
        bias=None,
    )
    x = arrays.to_bf16(np.random.default_rng(1).standard_normal((40, 1984)).astype(np.float32))
    together = product(isa, x, case.weight)
    for rows in range(1, 9):
        assert same_bits(product(isa, x[:rows], case.weight), together[:rows])
