"""From figures to who computes, and for how many rows."""

from __future__ import annotations

import pytest

from teneral.runtime.kernels.choice import (
    PRODUCT_SIZES,
    LinearBackend,
    covers,
    kernel_sizes,
    packed_sizes,
    rows_of,
    size_of,
    table_of,
)

TORCH, ONEDNN, KERNELS = LinearBackend.TORCH, LinearBackend.ONEDNN, LinearBackend.KERNELS


@pytest.mark.parametrize(
    ("num_rows", "size"), [(1, 1), (2, 2), (3, 4), (9, 16), (33, 64), (65, 128), (129, 128), (4096, 128)]
)
def test_a_size_stands_for_the_numbers_from_the_next_smaller_one_on(num_rows, size):
    assert size_of(num_rows) == size


def test_a_table_says_the_same_as_the_sizes_and_nothing_of_no_rows():
    table = table_of([1, 64, 128])
    assert [rows for rows in range(len(table)) if table[rows]] == [1, *range(33, 129)]
    assert table[-1] == 1
    assert table_of([64])[-1] == 0
    assert rows_of([4, 64]) == {3, 4}


def test_packed_weights_must_gain_clearly_and_be_measured():
    figures = {"m": {1: {TORCH: 100, ONEDNN: 99}, 8: {TORCH: 100, ONEDNN: 90}, 64: {TORCH: 100}}}
    assert packed_sizes(figures, "m") == {8}
    assert packed_sizes(figures, "another") == frozenset()


def test_kernels_are_compared_with_torch_as_it_is_when_weights_are_packed():
    figures = {
        "layer": {1: {TORCH: 100, KERNELS: 50}, 8: {TORCH: 100, KERNELS: 85}, 32: {TORCH: 100, KERNELS: 120}},
        "m": {1: {TORCH: 60, ONEDNN: 40}, 8: {TORCH: 60, ONEDNN: 40}},
    }
    assert kernel_sizes(figures, "layer") == {1, 8}
    assert kernel_sizes(figures, "layer", ["m"], packed_share=1.0) == {1}
    assert kernel_sizes(figures, "layer", ["m"], packed_share=0.5) == {1, 8}
    assert kernel_sizes(figures, "another") == frozenset()


def test_figures_cover_what_all_backends_and_sizes_are_there_for():
    figures = {"m": {size: {TORCH: 1, ONEDNN: 1} for size in PRODUCT_SIZES}}
    assert covers(figures, "m", PRODUCT_SIZES, (TORCH, ONEDNN))
    assert not covers(figures, "m", PRODUCT_SIZES, (TORCH, KERNELS))
    assert not covers(figures, "m", (1, 256), (TORCH,))
    assert not covers(figures, "another", (1,), (TORCH,))
