"""Attention of a few rows over cached keys and values, compiled.

Each row sees the tokens of its own sequence, wherever their blocks lie: nothing is gathered, nothing is padded, and
rows of several sequences are one piece of work. Sums are float32, and so are the weights of the tokens.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from .rows import exp
from .sizes import value_of
from .vectors import narrowed, widened

_COMPILED = {
    "nogil": True,
    "fastmath": {"contract", "reassoc", "nsz", "arcp"},
    "error_model": "numpy",
    "cache": True,
}


@numba.njit(**_COMPILED)
def attend(
    head_size: Any,
    queries: Any,
    keys_values: Any,
    tables: Any,
    firsts: Any,
    ends: Any,
    block_size: int,
    scale: float,
    out: Any,
    begin: int,
    end: int,
) -> None:
    """Heads [begin, end), counted through all rows, of attention of rows (T, heads, head_dim) uint16 over the tokens
    [firsts[t], ends[t]) of their sequences, whose keys and values lie in the blocks `tables[t]` of `keys_values` (2,
    kv_heads, slots, head_dim) uint16; out is like queries. `head_size` is head_dim as a `Size`.
    """
    num_heads, num_kv_heads, head_dim = queries.shape[1], keys_values.shape[1], value_of(head_size)
    query, mixed = np.empty(head_dim, np.float32), np.empty(head_dim, np.float32)
    for task in range(begin, end):
        row, head = task // num_heads, task % num_heads
        kv_head = head // (num_heads // num_kv_heads)
        keys, values = keys_values[0, kv_head], keys_values[1, kv_head]
        first, last = firsts[row], ends[row]
        for i in range(head_dim):
            query[i] = widened(queries[row, head, i]) * np.float32(scale)
            mixed[i] = np.float32(0.0)
        weights = np.empty(last - first, np.float32)
        for block in range(first // block_size, (last - 1) // block_size + 1):
            start = block * block_size
            away = tables[row, block] * block_size - start  # from a token's number to its slot
            for token in range(max(first, start), min(last, start + block_size)):
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
        for block in range(first // block_size, (last - 1) // block_size + 1):
            start = block * block_size
            away = tables[row, block] * block_size - start
            for token in range(max(first, start), min(last, start + block_size)):
                value, weight = values[token + away], weights[token - first]
                for i in range(head_dim):
                    mixed[i] += weight * widened(value[i])
        for i in range(head_dim):
            out[row, head, i] = narrowed(mixed[i] / total)
