"""Quantised weights as the bf16 that they mean, for products with many rows: with these a library's product of whole
matrices is faster than one that reads integers, and making them is a small part of the time.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from .products import NIBBLE_ZERO
from .vectors import RUN, load_nibbles, narrowed, store_meant, widened

_COMPILED = {"nogil": True, "error_model": "numpy", "cache": True}


@numba.njit(parallel=True, **_COMPILED)
def expand_int8(weights: Any, scales: Any, out: Any) -> None:
    """(weights (N, K) int8, scales (N, groups) float32 or the bits of bf16, out (N, K) uint16: bits of bf16)."""
    group_size = weights.shape[1] // scales.shape[1]
    for row in numba.prange(weights.shape[0]):
        for group in range(scales.shape[1]):
            scale = widened(scales[row, group])
            # Slices, here and below: of an index into one the compiler knows that it is not negative.
            some = weights[row, group * group_size : (group + 1) * group_size]
            meant = out[row, group * group_size : (group + 1) * group_size]
            for i in range(group_size):
                meant[i] = narrowed(np.float32(some[i]) * scale)


@numba.njit(parallel=True, **_COMPILED)
def expand_int4(weights: Any, scales: Any, zeros: Any, out: Any) -> None:
    """(weights (N, K / 2) uint8, scales (N, groups), zeros (N, groups) uint8, or without elements, out (N, K) uint16).

    A group is a multiple of 64 elements.
    """
    num_runs = weights.shape[1] * 2 // RUN
    runs_a_group = num_runs // scales.shape[1]
    for row in numba.prange(weights.shape[0]):
        for group in range(scales.shape[1]):
            scale = widened(scales[row, group])
            zero = np.float32(zeros[row, group]) if zeros.size else np.float32(NIBBLE_ZERO)
            for run in range(group * runs_a_group, (group + 1) * runs_a_group):
                place = row * num_runs + run
                nibbles = load_nibbles(weights, place * (RUN // 2))
                store_meant(nibbles, zero, scale, out, place * RUN)
