"""Rotary position embedding: frequencies by type, and tables of cosines and sines.

Dynamic NTK stretches its base with the context. Keys that are already in a cache cannot be turned again,
so the base is set once, for the longest context that is admitted: up to `max_position_embeddings` that is
transformers' own result, and beyond it one consistent model, where re-stretching at each step would leave
old and new keys on different bases. Likewise longrope has its short factors up to the pretraining's context, and the
long ones for all positions where longer contexts are admitted.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from ..tensors import DType, from_float32, to_float32
from .rope_config import RopeConfig, RopeType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..step.batch import Int64s
    from .decoder_config import QueryScaling

Floats = npt.NDArray[np.float32]

_ROWS_AT_A_TIME = 4_096
_SMALLEST_TABLE = 512  # positions


class Rotary(Struct, frozen=True):
    """The first `dim` numbers of each query and key head turn by position · frequency.

    Number i pairs with number i + dim / 2, or `interleaved` number 2 i with number 2 i + 1. What turns them is
    cos · factor and sin · factor.
    """

    dim: int  # even
    frequencies: tuple[float, ...]  # (dim / 2,) radians a position, each of them an fp32 number
    factor: float = 1.0
    interleaved: bool = False

    @classmethod
    def of(cls, rope: RopeConfig, max_context: int, *, interleaved: bool = False) -> Rotary:
        """`max_context` is that of the longest sequence that will be admitted."""
        frequencies = frequencies_of(rope, max_context)
        return cls(rope.rotary_dim, tuple(frequencies.tolist()), rope.attention_factor, interleaved)

    @classmethod
    def whole(cls, theta: float | None, head_dim: int) -> Rotary | None:
        """Of a whole head of `head_dim`, which is even, whose frequencies are not stretched; None without `theta`."""
        if theta is None:
            return None
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        return cls(head_dim, tuple(_inverse_powers(theta, exponents).tolist()))

    def tables(self, begin: int, end: int) -> tuple[Floats, Floats]:
        """(cos, sin) of the positions [begin, end), (end - begin, dim / 2) fp32 each, times the factor. Angles are
        fp32 products, as in transformers; cosines are computed in fp64 and rounded once.
        """
        frequencies = np.array(self.frequencies, dtype=np.float32)
        cos = np.empty((end - begin, len(frequencies)), dtype=np.float32)
        sin = np.empty_like(cos)
        for start in range(begin, end, _ROWS_AT_A_TIME):
            stop = min(start + _ROWS_AT_A_TIME, end)
            positions = np.arange(start, stop, dtype=np.float32)
            angles = (positions[:, None] * frequencies).astype(np.float64)
            rows = slice(start - begin, stop - begin)
            cos[rows] = np.cos(angles) * self.factor
            sin[rows] = np.sin(angles) * self.factor
        return cos, sin


class TurnTable:
    """Cosines and sines of all positions so far, (positions, rotary_dim) fp32: cosines, then sines, rounded to `dtype`.
    Replaced, not changed, when it grows."""

    def __init__(self, rotary: Rotary, dtype: DType) -> None:
        self._rotary = rotary
        self._dtype = dtype
        self._table: Floats = np.empty((0, rotary.dim), np.float32)

    def up_to(self, end: int) -> Floats:
        """The table with at least `end` positions."""
        if end > len(self._table):
            length = 1 << (max(end, _SMALLEST_TABLE) - 1).bit_length()
            more = np.concatenate(self._rotary.tables(len(self._table), length), axis=1)
            rounded = to_float32(from_float32(more, self._dtype), self._dtype)
            self._table = np.concatenate((self._table, rounded))
        return self._table

    def at(self, axes: Int64s, of: Sequence[int], end: int) -> Floats:
        """(T, rotary_dim): the rows of tokens whose positions are `axes` (3, T), below `end`; number i turns by its
        position on the axis of[i].
        """
        table, half = self.up_to(end), len(of)
        rows = np.empty((axes.shape[1], 2 * half), np.float32)
        for axis, positions in enumerate(axes):
            columns = np.flatnonzero(np.equal(of, axis))
            columns = np.concatenate((columns, columns + half))
            rows[:, columns] = table[positions[:, None], columns]
        return rows


def frequencies_of(rope: RopeConfig, max_context: int) -> Floats:
    """(rotary_dim / 2,) fp32, radians a position."""
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim)
    match rope.rope_type:
        case RopeType.LINEAR:
            frequencies = _inverse_powers(rope.theta, exponents) / np.float32(rope.factor)
        case RopeType.DYNAMIC:
            frequencies = _inverse_powers(_ntk_theta(rope, max_context), exponents)
        case RopeType.LLAMA3:
            frequencies = _llama3(rope, _inverse_powers(rope.theta, exponents))
        case RopeType.LONGROPE:
            factors = rope.long_factors if max_context > rope.original_max_positions else rope.short_factors
            frequencies = _inverse_powers(rope.theta, exponents, np.array(factors, np.float32))
        case RopeType.YARN:
            frequencies = _yarn(rope, _inverse_powers(rope.theta, exponents))
        case RopeType.PROPORTIONAL:
            frequencies = _inverse_powers(rope.theta, exponents) / np.float32(rope.factor)
            frequencies[rope.num_turning :] = 0.0
        case RopeType.DEFAULT:
            frequencies = _inverse_powers(rope.theta, exponents)
    return frequencies.astype(np.float32)


def _inverse_powers(theta: float, exponents: Floats, factors: Floats | None = None) -> Floats:
    # A power by way of fp64 is the same with every version of numpy.
    powers = np.power(np.float64(theta), exponents.astype(np.float64)).astype(np.float32)
    inverse: Floats = np.float32(1.0) / (powers if factors is None else factors * powers)
    return inverse


def _ntk_theta(rope: RopeConfig, max_context: int) -> float:
    stretch = rope.factor * max(max_context, rope.max_positions) / rope.max_positions - (rope.factor - 1.0)
    return float(rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2)))


def _llama3(rope: RopeConfig, frequencies: Floats) -> Floats:
    """Keeps what turns often within the pretraining's context, slows down what turns seldom."""
    turns = frequencies * np.float32(rope.original_max_positions / (2.0 * math.pi))
    width = rope.high_freq_factor - rope.low_freq_factor
    if not width:  # as Llama 4 has it: nothing lies between
        slowed: Floats = frequencies / np.float32(rope.factor)
        return np.where(turns < np.float32(rope.low_freq_factor), slowed, frequencies)
    blend = np.clip((turns - np.float32(rope.low_freq_factor)) / np.float32(width), 0.0, 1.0)
    mixed: Floats = (1.0 - blend) * frequencies / np.float32(rope.factor) + blend * frequencies
    return mixed


def _yarn(rope: RopeConfig, frequencies: Floats) -> Floats:
    """YaRN's "NTK by parts" (arXiv 2309.00071, section 3.2)."""
    low, high = _yarn_dimension(rope, rope.beta_fast), _yarn_dimension(rope, rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    places = np.arange(len(frequencies), dtype=np.float32)
    slowed = np.clip((places - np.float32(low)) / np.float32(high - low), 0.0, 1.0)
    mixed: Floats = frequencies / np.float32(rope.factor) * slowed + frequencies * (1.0 - slowed)
    return mixed


def _yarn_dimension(rope: RopeConfig, turns: float) -> float:
    """The dimension whose frequency makes this many turns within the pretraining's context."""
    positions_a_radian = rope.original_max_positions / (turns * 2 * math.pi)
    return rope.rotary_dim * math.log(positions_a_radian) / (2 * math.log(rope.theta))


def query_factors(scaling: QueryScaling, positions: npt.NDArray[np.int64]) -> Floats:
    """Factors of the queries at these positions, in layers that scale them: fp32, of logarithms in fp64."""
    steps = (positions + 1) // scaling.interval
    logarithms = np.log1p(steps.astype(np.float64)).astype(np.float32)
    return logarithms * np.float32(scaling.strength) + np.float32(1.0)
