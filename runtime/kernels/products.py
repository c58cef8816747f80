"""Products of a few rows with a matrix of weights, at the speed at which memory gives the weights.

`weights` are what the loader has put into a slab, (N, K) row after row: nothing is repacked, so nothing is copied and
nothing is held twice. Each thread goes through its share of the rows from the first to the last, which is the one
order in which a processor's memory reads ahead well, and multiplies each with all inputs while it passes: eight rows of
them at a time, and the next eight with the same weights, which are near by then.

Inputs to quantised weights are quantised, too, in runs of 64 numbers with a scale each: then one instruction
multiplies 64 of them, in integers, without an error. Sums are float32.

With many rows of inputs a library's product wins.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from .records import (
    BF16,
    BIG_SCALES,
    FIRST,
    FIRST_PART,
    GROUP_SHIFT,
    INPUT,
    INT8,
    KIND,
    MAX_ROWS,
    NUM_IN,
    NUM_OUT,
    NUM_PARTS,
    NUM_WEIGHT_ROWS,
    NUMBERS,
    OUT,
    PART_FIELDS,
    RUN_SIZE,
    SCALE,
    SCALES,
    TOTALS,
    WEIGHT,
    ZERO,
)
from .rows import quantise
from .sizes import float32s, int8s, int32s, uint8s, uint16s, value_of
from .vectors import (
    RUN,
    add_bf16,
    add_counts,
    add_scaled,
    biased,
    count_bytes,
    counts_from,
    factor,
    fetch_ahead,
    load_bf16,
    load_bytes,
    load_nibbles,
    no_sums,
    store_totals,
    widened,
)

INPUT_GROUP = 2 * RUN  # inputs that share a scale
NIBBLE_ZERO = 8
BYTE_ZERO = 128  # of bytes that were biased
AHEAD_BYTES = (
    4096  # what is asked of memory before it is needed: a quarter more a second than it brings by itself
)
NEAR_BYTES = 128 << 10  # of weights, that are multiplied with all inputs before the next
_COMPILED = {"nogil": True, "fastmath": True, "error_model": "numpy", "cache": True}


@numba.njit(**_COMPILED)
def bf16_product(height: Any, weights: Any, inputs: Any, out: Any, begin: int, end: int, first: int) -> None:
    """Rows [begin, end) of weights (N, K) uint16 times inputs (T, K) uint16 → columns from `first` + begin on of `out`
    (T, …) float32: all bits of bf16, K % 32 == 0.

    As with all of these, T is a multiple of `height`, a `Size`: so many rows of inputs are multiplied at a time.
    """
    num_columns, step = weights.shape[1], value_of(height)
    flat, near = weights.reshape(weights.size), max(1, NEAR_BYTES // (2 * num_columns))
    for low in range(begin, end, near):
        for top in range(0, inputs.shape[0], step):
            some, products = inputs[top : top + step], out[top : top + step]
            for row in range(low, min(low + near, end)):
                sums = no_sums(height)
                for column in range(0, num_columns, 32):
                    place = row * num_columns + column
                    fetch_ahead(flat, place + AHEAD_BYTES // 2)
                    sums = add_bf16(sums, load_bf16(flat, place), some, column)
                store_totals(sums, np.float32(1.0), products, first + row)


@numba.njit(**_COMPILED)
def int8_product(
    height: Any,
    weights: Any,
    weight_scales: Any,
    inputs: Any,
    input_scales: Any,
    input_totals: Any,
    out: Any,
    begin: int,
    end: int,
    first: int,
) -> None:
    """Weights (N, K) int8 with scales (N,) float32 or the bits of bf16; numbers, scales and totals of quantised inputs,
    K % 128 == 0.
    """
    num_columns, step = weights.shape[1], value_of(height)
    flat, near = weights.reshape(weights.size), max(1, NEAR_BYTES // num_columns)
    zero = np.int32(BYTE_ZERO)
    for low in range(begin, end, near):
        for top in range(0, inputs.shape[0], step):
            some, scales = inputs[top : top + step], input_scales[top : top + step]
            totals, products = input_totals[top : top + step], out[top : top + step]
            for row in range(low, min(low + near, end)):
                sums = no_sums(height)
                for column in range(0, num_columns, INPUT_GROUP):
                    group = column // INPUT_GROUP
                    counts = counts_from(height, zero, totals, group)
                    for run in range(column, column + INPUT_GROUP, RUN):
                        place = row * num_columns + run
                        fetch_ahead(flat, place + AHEAD_BYTES)
                        counts = count_bytes(counts, biased(load_bytes(flat, place)), some, run)
                    sums = add_scaled(sums, counts, scales, group)
                store_totals(sums, widened(weight_scales[row]), products, first + row)


@numba.njit(**_COMPILED)
def int4_product(
    height: Any,
    weights: Any,
    weight_scales: Any,
    zeros: Any,
    group_shift: int,
    inputs: Any,
    input_scales: Any,
    input_totals: Any,
    out: Any,
    begin: int,
    end: int,
    first: int,
) -> None:
    """Weights (N, K / 2) uint8 with scales (N, groups) float32 or the bits of bf16, and zeros (N, groups) uint8, or
    None: then all are 8. Quantised inputs as above.

    Nibbles lie as docs/quantize.md has them; a group has 2^group_shift runs of 64 elements.
    """
    num_runs, step = weights.shape[1] * 2 // RUN, value_of(height)
    flat, near = weights.reshape(weights.size), max(1, NEAR_BYTES // weights.shape[1])
    for low in range(begin, end, near):
        for top in range(0, inputs.shape[0], step):
            some, scales = inputs[top : top + step], input_scales[top : top + step]
            totals, products = input_totals[top : top + step], out[top : top + step]
            for row in range(low, min(low + near, end)):
                sums, zero = no_sums(height), np.int32(NIBBLE_ZERO)
                for pair in range(num_runs // 2):
                    part = no_sums(height)
                    fetch_ahead(flat, (row * num_runs + pair * 2) * (RUN // 2) + AHEAD_BYTES)
                    for run in range(pair * 2, pair * 2 + 2):
                        group = run >> group_shift
                        if zeros is not None:
                            zero = np.int32(zeros[row, group])
                        counts = counts_from(height, zero, totals, run)
                        nibbles = load_nibbles(flat, (row * num_runs + run) * (RUN // 2))
                        counts = count_bytes(counts, nibbles, some, run * RUN)
                        part = add_counts(part, counts, factor(widened(weight_scales[row, group])))
                    sums = add_scaled(sums, part, scales, pair)
                store_totals(sums, np.float32(1.0), products, first + row)


@numba.njit(**_COMPILED)
def quantise_inputs(record: Any, num_rows: int, begin: int, end: int) -> None:
    """Groups [begin, end) of INPUT_GROUP inputs of a projection whose weights are quantised: see `records.py`."""
    num_in = record[NUM_IN]
    num_groups, num_totals = num_in // INPUT_GROUP, num_in // record[RUN_SIZE]
    quantise(
        uint16s(record[INPUT], (MAX_ROWS, num_in))[:num_rows],
        int8s(record[NUMBERS], (MAX_ROWS, num_in)),
        float32s(record[SCALES], (MAX_ROWS, num_groups)),
        int32s(record[TOTALS], (MAX_ROWS, num_totals)),
        begin,
        end,
    )


@numba.njit(**_COMPILED)
def project(height: Any, record: Any, num_rows: int, begin: int, end: int) -> None:
    """Columns [begin, end) of a projection's product, for `num_rows` rows of its inputs, a multiple of `height`."""
    num_in = record[NUM_IN]
    out = float32s(record[OUT], (MAX_ROWS, record[NUM_OUT]))[:num_rows]
    inputs = uint16s(record[INPUT], (MAX_ROWS, num_in))[:num_rows]
    for number in range(record[NUM_PARTS]):
        part = record[FIRST_PART + number * PART_FIELDS : FIRST_PART + (number + 1) * PART_FIELDS]
        first, size = part[FIRST], part[NUM_WEIGHT_ROWS]
        low, high = max(begin - first, 0), min(end - first, size)
        if part[KIND] == BF16:
            bf16_product(height, uint16s(part[WEIGHT], (size, num_in)), inputs, out, low, high, first)
        else:
            numbers = int8s(record[NUMBERS], (MAX_ROWS, num_in))[:num_rows]
            scales = float32s(record[SCALES], (MAX_ROWS, num_in // INPUT_GROUP))[:num_rows]
            totals = int32s(record[TOTALS], (MAX_ROWS, num_in // record[RUN_SIZE]))[:num_rows]
            if part[KIND] == INT8:
                weights = int8s(part[WEIGHT], (size, num_in))
                if part[BIG_SCALES]:
                    big = float32s(part[SCALE], (size,))
                    int8_product(height, weights, big, numbers, scales, totals, out, low, high, first)
                else:
                    small = uint16s(part[SCALE], (size,))
                    int8_product(height, weights, small, numbers, scales, totals, out, low, high, first)
            else:
                _project_int4(height, part, num_in, numbers, scales, totals, out, low, high)


@numba.njit(**_COMPILED)
def _project_int4(
    height: Any,
    part: Any,
    num_in: int,
    numbers: Any,
    scales: Any,
    totals: Any,
    out: Any,
    low: int,
    high: int,
) -> None:
    first, size, shift = part[FIRST], part[NUM_WEIGHT_ROWS], part[GROUP_SHIFT]
    weights, shape = uint8s(part[WEIGHT], (size, num_in // 2)), (size, (num_in // RUN) >> shift)
    big, small = float32s(part[SCALE], shape), uint16s(part[SCALE], shape)  # it is one of them
    zeros = uint8s(part[ZERO], shape)
    if part[ZERO] == 0 and part[BIG_SCALES]:
        int4_product(height, weights, big, None, shift, numbers, scales, totals, out, low, high, first)
    elif part[ZERO] == 0:
        int4_product(height, weights, small, None, shift, numbers, scales, totals, out, low, high, first)
    elif part[BIG_SCALES]:
        int4_product(height, weights, big, zeros, shift, numbers, scales, totals, out, low, high, first)
    else:
        int4_product(height, weights, small, zeros, shift, numbers, scales, totals, out, low, high, first)
