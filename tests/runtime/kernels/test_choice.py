"""From figures to who computes, and for how many rows."""

from __future__ import annotations

import pytest

from teneral.runtime.kernels.choice import (
    PRODUCT_SIZES,
    SIZES,
    CopyChoice,
    LinearBackend,
    choose_copies,
    choose_copy,
    copy_gain,
    copy_sizes,
    covers,
    kernel_sizes,
    rows_of,
    size_of,
    table_of,
)

TORCH, ONEDNN, KERNELS = LinearBackend.TORCH, LinearBackend.ONEDNN, LinearBackend.KERNELS
ONNX, OPENVINO = LinearBackend.ONNX_RUNTIME, LinearBackend.OPENVINO
BOTH = (ONNX, OPENVINO)


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


def test_a_copy_must_gain_clearly_and_be_measured():
    figures = {"m": {1: {TORCH: 100, ONEDNN: 99}, 8: {TORCH: 100, ONEDNN: 90}, 64: {TORCH: 100}}}
    assert copy_sizes(figures, "m", ONEDNN) == {8}
    assert copy_sizes(figures, "m", ONNX) == frozenset()
    assert copy_sizes(figures, "another", ONEDNN) == frozenset()


def test_what_a_copy_gains_is_the_share_of_torchs_time_that_it_saves_where_it_would_be_used():
    figures = {
        "m": {
            1: {TORCH: 100, ONNX: 50},
            8: {TORCH: 1000, ONNX: 990},  # it would not be used there
            64: {TORCH: 8000, ONNX: 6000},
            128: {TORCH: 100, ONNX: 300},
        }
    }
    assert copy_gain(figures, "m", ONNX, PRODUCT_SIZES) == pytest.approx(0.5 + 0.25)
    assert copy_gain(figures, "m", ONNX, [64, 128]) == pytest.approx(0.25)
    assert copy_gain(figures, "m", OPENVINO, PRODUCT_SIZES) == 0


def test_the_copy_that_gains_most_is_chosen_and_used_at_all_sizes_at_which_it_gains():
    figures = {
        "m": {
            1: {TORCH: 10, ONNX: 3, OPENVINO: 9},
            64: {TORCH: 1000, ONNX: 1200, OPENVINO: 800},
            128: {TORCH: 2000, ONNX: 2000, OPENVINO: 1500},
        }
    }
    assert choose_copy(figures, "m", BOTH) == CopyChoice(ONNX, frozenset([1]))
    # where compiled kernels compute single rows it is the other one, which is then there for single rows as well
    assert choose_copy(figures, "m", BOTH, [64, 128]) == CopyChoice(OPENVINO, frozenset([1, 64, 128]))
    assert choose_copy(figures, "m", [ONNX], [64, 128]) is None
    assert choose_copy(figures, "m", []) is None


def test_among_copies_that_gain_the_same_the_first_is_chosen():
    figures = {"m": {1: {TORCH: 10, OPENVINO: 5, ONNX: 5}}}
    assert choose_copy(figures, "m", [ONNX, OPENVINO]) == CopyChoice(ONNX, frozenset([1]))
    assert choose_copy(figures, "m", [OPENVINO, ONNX]) == CopyChoice(OPENVINO, frozenset([1]))


def test_many_rows_do_not_outweigh_few_because_they_take_longer():
    figures = {
        "m": {
            **{size: {TORCH: 10 * size, ONNX: 5 * size, OPENVINO: 10 * size} for size in (1, 2, 4)},
            128: {TORCH: 100_000, ONNX: 100_000, OPENVINO: 50_000},
        }
    }
    choice = choose_copy(figures, "m", BOTH)
    assert choice is not None
    assert choice.backend is ONNX


def layer_and_products(kernels_ns: int) -> dict[str, dict[int, dict[LinearBackend, int]]]:
    """A layer of one product, which makes up most of it."""
    return {
        "layer": {size: {TORCH: 100, KERNELS: kernels_ns} for size in SIZES},
        "m": {
            **{size: {TORCH: 80, ONNX: 20, OPENVINO: 70} for size in SIZES},
            **{size: {TORCH: 800, ONNX: 780, OPENVINO: 400} for size in (64, 128)},
        },
    }


def test_only_those_sizes_count_that_compiled_kernels_leave():
    candidates = {"m": BOTH}
    with_kernels = choose_copies(layer_and_products(30), "layer", ["m"], candidates)
    assert with_kernels["m"].backend is OPENVINO
    assert kernel_sizes(layer_and_products(30), "layer", ["m"], with_kernels) == set(SIZES)

    # slower than torch with the copy that is fastest there: it gets them
    step_back = choose_copies(layer_and_products(50), "layer", ["m"], candidates)
    assert step_back["m"].backend is ONNX
    assert kernel_sizes(layer_and_products(50), "layer", ["m"], step_back) == frozenset()

    without_kernels = choose_copies({"m": layer_and_products(0)["m"]}, "layer", ["m"], candidates)
    assert without_kernels["m"].backend is ONNX


def test_a_copy_that_gains_only_where_kernels_are_faster_still_is_not_made():
    figures = layer_and_products(10)
    figures["m"] = {size: {TORCH: 80, ONNX: 40} for size in SIZES}
    assert choose_copies(figures, "layer", ["m"], {"m": [ONNX]}) == {}


def test_each_kind_of_product_has_a_copy_of_its_own():
    figures = {
        "m": {128: {TORCH: 10, ONNX: 5, OPENVINO: 6}},
        "head m": {8: {TORCH: 10, ONNX: 6, OPENVINO: 5}},
        "f": {128: {TORCH: 10, ONEDNN: 9}},
        "g": {128: {TORCH: 10, ONEDNN: 10}},
    }
    candidates = {"m": BOTH, "head m": BOTH, "f": [ONEDNN], "g": [ONEDNN]}
    assert choose_copies(figures, "layer", ["m", "f"], candidates) == {
        "m": CopyChoice(ONNX, frozenset([128])),
        "head m": CopyChoice(OPENVINO, frozenset([8])),
        "f": CopyChoice(ONEDNN, frozenset([128])),
    }


def test_kernels_are_compared_with_torch_as_it_is_with_its_copies():
    figures = {
        "layer": {1: {TORCH: 100, KERNELS: 50}, 8: {TORCH: 100, KERNELS: 85}, 32: {TORCH: 100, KERNELS: 120}},
        "m": {1: {TORCH: 60, ONNX: 40, OPENVINO: 5}, 8: {TORCH: 60, ONNX: 40}},
    }
    copies = {"m": CopyChoice(ONNX, frozenset([1, 8]))}
    assert kernel_sizes(figures, "layer") == {1, 8}
    assert kernel_sizes(figures, "layer", ["m"]) == {1, 8}
    assert kernel_sizes(figures, "layer", ["m"], copies) == {1}
    assert kernel_sizes(figures, "layer", ["m"], copies, copied_share=0.5) == {1, 8}
    assert kernel_sizes(figures, "layer", ["m", "m", "m"], copies) == frozenset()
    assert kernel_sizes(figures, "layer", ["m"], {"m": CopyChoice(ONNX, frozenset([1]))}) == {1, 8}
    assert kernel_sizes(figures, "another") == frozenset()


def test_figures_cover_what_all_backends_and_sizes_are_there_for():
    figures = {"m": {size: {TORCH: 1, ONEDNN: 1} for size in PRODUCT_SIZES}}
    assert covers(figures, "m", PRODUCT_SIZES, (TORCH, ONEDNN))
    assert not covers(figures, "m", PRODUCT_SIZES, (TORCH, KERNELS))
    assert not covers(figures, "m", (1, 256), (TORCH,))
    assert not covers(figures, "another", (1,), (TORCH,))
