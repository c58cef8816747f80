"""Buckets of the distance of two tokens, for attention scores that depend on it.

Both tables are by the distance key - query, from -reach to reach. Logarithms are fp32, and rounded as in transformers.
"""

from __future__ import annotations

import math

import numpy as np

from ..step.batch import Int64s
from .encoder_config import Disentangled, PositionBias


def bias_buckets(bias: PositionBias, reach: int) -> Int64s:
    """(2 · reach + 1,): the bucket of each distance, in [0, num_buckets)."""
    distances = np.arange(-reach, reach + 1)
    half = bias.num_buckets // 2
    exact = half // 2
    sizes = np.abs(distances)
    powers = np.log(np.maximum(sizes, 1).astype(np.float32) / np.float32(exact))
    powers = powers / np.float32(math.log(bias.max_distance / exact)) * np.float32(half - exact)
    grown = np.minimum(exact + powers.astype(np.int64), half - 1)
    buckets = np.where(sizes < exact, sizes, grown) + np.where(distances > 0, half, 0)
    return buckets.astype(np.int64)


def disentangled_buckets(positions: Disentangled, reach: int) -> Int64s:
    """(2 · reach + 1,): the row of the table of positions for each distance, in [0, 2 · span)."""
    distances = np.arange(reach, -reach - 1, -1)  # query - key
    if positions.max_distance is not None:
        middle = positions.span // 2
        sizes = np.where(np.abs(distances) < middle, middle - 1, np.abs(distances))
        powers = np.log((sizes / middle).astype(np.float32))
        largest = np.log(np.float32((positions.max_distance - 1) / middle))
        grown = np.ceil(powers / largest * np.float32(middle - 1)) + middle
        distances = np.where(sizes <= middle, distances, grown * np.sign(distances)).astype(np.int64)
    return np.clip(distances + positions.span, 0, 2 * positions.span - 1).astype(np.int64)
