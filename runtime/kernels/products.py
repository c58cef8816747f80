"""Products of a few rows with a matrix of weights, at the speed at which memory gives the weights.

`weights` are what the loader has put into a slab, (N, K) row after row: nothing is repacked, so nothing is copied and
nothing is held twice. Each thread goes through its share of the rows from the first to the last, which is the one
order in which a processor's memory reads ahead well, and multiplies each with all inputs while it passes.

Inputs to quantised weights are quantised, too, in runs of 64 numbers with a scale each: then one instruction
multiplies 64 of them, in integers, without an error. Sums are float32.

With many rows of inputs a library's product wins.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import numba
import numpy as np

from .vectors import (
    RUN,
    add_bf16,
    add_counts,
    add_scaled,
    biased,
    count_bytes,
    counts_from,
    factor,
    load_bf16,
    load_bytes,
    load_nibbles,
    no_sums,
    store_totals,
    widened,
)

HEIGHTS = (1, 2, 4, 8)  # numbers of rows that there are products for; others take the next one
MAX_HEIGHT = HEIGHTS[-1]
INPUT_GROUP = 2 * RUN  # inputs that share a scale
NIBBLE_ZERO = 8
BYTE_ZERO = 128  # of bytes that were biased
_COMPILED = {"nogil": True, "fastmath": True, "error_model": "numpy", "cache": True}

Kernel = Callable[..., None]


@cache
def bf16_product(num_rows: int) -> Kernel:
    """(weights (N, K) uint16, inputs (num_rows, K) uint16, out (num_rows, N) float32, first): bits of bf16, and
    K % 32 == 0.

    As with all of these: the product with row 0 of the weights goes into column `first` of `out`, and so on.
    """

    @numba.njit(parallel=True, **_COMPILED)
    def product(weights: Any, inputs: Any, out: Any, first: int) -> None:
        num_columns = weights.shape[1]
        for row in numba.prange(weights.shape[0]):
            sums = no_sums(num_rows)
            for column in range(0, num_columns, 32):
                sums = add_bf16(sums, load_bf16(weights, row * num_columns + column), inputs, column)
            store_totals(sums, np.float32(1.0), out, first + row)

    return cast(Kernel, product)


@cache
def int8_product(num_rows: int) -> Kernel:
    """(weights (N, K) int8, scales (N, 1) float32 or the bits of bf16, numbers, scales and totals of quantised
    inputs, out (num_rows, N) float32), K % 128 == 0.
    """

    @numba.njit(parallel=True, **_COMPILED)
    def product(
        weights: Any,
        weight_scales: Any,
        inputs: Any,
        input_scales: Any,
        input_totals: Any,
        out: Any,
        first: int,
    ) -> None:
        num_columns = weights.shape[1]
        zero = np.int32(BYTE_ZERO)
        for row in numba.prange(weights.shape[0]):
            start = row * num_columns
            sums = no_sums(num_rows)
            for column in range(0, num_columns, INPUT_GROUP):
                group = column // INPUT_GROUP
                counts = counts_from(num_rows, zero, input_totals, group)
                for run in range(column, column + INPUT_GROUP, RUN):
                    counts = count_bytes(counts, biased(load_bytes(weights, start + run)), inputs, run)
                sums = add_scaled(sums, counts, input_scales, group)
            store_totals(sums, widened(weight_scales[row, 0]), out, first + row)

    return cast(Kernel, product)


@cache
def int4_product(num_rows: int, runs_a_group: int, *, has_zeros: bool) -> Kernel:
    """(weights (N, K / 2) uint8, scales (N, groups) float32 or the bits of bf16, zeros (N, groups) uint8, numbers,
    scales and totals of quantised inputs, out (num_rows, N) float32), K % 128 == 0.

    Nibbles lie as docs/quantize.md has them; a group has `runs_a_group` runs of 64 elements. Unless groups have zeros
    of their own, `zeros` is not read, and all zeros are 8.
    """

    @numba.njit(parallel=True, **_COMPILED)
    def product(
        weights: Any,
        weight_scales: Any,
        zeros: Any,
        inputs: Any,
        input_scales: Any,
        input_totals: Any,
        out: Any,
        first: int,
    ) -> None:
        num_runs = weights.shape[1] * 2 // RUN
        for row in numba.prange(weights.shape[0]):
            sums = no_sums(num_rows)
            zero = np.int32(NIBBLE_ZERO)
            for pair in range(num_runs // 2):
                part = no_sums(num_rows)
                for run in range(pair * 2, pair * 2 + 2):
                    group = run // runs_a_group
                    if has_zeros:
                        zero = np.int32(zeros[row, group])
                    counts = counts_from(num_rows, zero, input_totals, run)
                    nibbles = load_nibbles(weights, (row * num_runs + run) * (RUN // 2))
                    counts = count_bytes(counts, nibbles, inputs, run * RUN)
                    part = add_counts(part, counts, factor(widened(weight_scales[row, group])))
                sums = add_scaled(sums, part, input_scales, pair)
            store_totals(sums, np.float32(1.0), out, first + row)

    return cast(Kernel, product)
