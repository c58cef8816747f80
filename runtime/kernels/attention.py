"""Attention of a few rows over cached keys and values, compiled.

Each row sees the tokens of its own sequence, wherever their blocks lie: nothing is gathered, nothing is padded, and
rows of several sequences are one piece of work. Sums are float32, and so are the weights of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import numba
import numpy as np

from .rows import exp
from .vectors import narrowed, widened

_COMPILED = {
    "nogil": True,
    "fastmath": {"contract", "reassoc", "nsz", "arcp"},
    "error_model": "numpy",
    "cache": True,
}


@cache
def attention(head_dim: int) -> Callable[..., None]:
    """For heads of this size; a constant, so that loops over it are unrolled."""

    @numba.njit(parallel=True, **_COMPILED)
    def attend(
        queries: Any,
        keys_values: Any,
        tables: Any,
        firsts: Any,
        ends: Any,
        block_size: int,
        scale: float,
        out: Any,
    ) -> None:
        """Attention of rows (T, heads, head_dim) uint16 over the tokens [firsts[t], ends[t]) of their sequences, whose
        keys and values lie in the blocks `tables[t]` of `keys_values` (2, kv_heads, slots, head_dim) uint16; out is
        like queries.
        """
        num_rows, num_heads = queries.shape[0], queries.shape[1]
        num_kv_heads = keys_values.shape[1]
        for task in numba.prange(num_rows * num_heads):
            row, head = task // num_heads, task % num_heads
            kv_head = head // (num_heads // num_kv_heads)
            keys, values = keys_values[0, kv_head], keys_values[1, kv_head]
            first, end = firsts[row], ends[row]
            query = np.empty(head_dim, np.float32)
            for i in range(head_dim):
                query[i] = widened(queries[row, head, i]) * np.float32(scale)
            weights = np.empty(end - first, np.float32)
            for block in range(first // block_size, (end - 1) // block_size + 1):
                start = block * block_size
                away = tables[row, block] * block_size - start  # from a token's number to its slot
                for token in range(max(first, start), min(end, start + block_size)):
                    key = keys[token + away]
                    product = np.float32(0.0)
                    for i in range(head_dim):
                        product += query[i] * widened(key[i])
                    weights[token - first] = product
            largest = weights.max()
            total = np.float32(0.0)
            for i in range(weights.size):
                weights[i] = exp(weights[i] - largest)
                total += weights[i]
            mixed = np.zeros(head_dim, np.float32)
            for block in range(first // block_size, (end - 1) // block_size + 1):
                start = block * block_size
                away = tables[row, block] * block_size - start
                for token in range(max(first, start), min(end, start + block_size)):
                    value, weight = values[token + away], weights[token - first]
                    for i in range(head_dim):
                        mixed[i] += weight * widened(value[i])
            for i in range(head_dim):
                out[row, head, i] = narrowed(mixed[i] / total)

    return cast(Callable[..., None], attend)
