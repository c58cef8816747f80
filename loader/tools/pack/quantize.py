"""Weights → integers of 8 or 4 bits and their scales: pure functions.

`docs/quantize.md` is the norm of what comes out. A row's columns are cut into groups that share a
scale. Scales are rounded to bf16 first, and the integers are chosen against the rounded ones, so
nothing else is lost by storing them so. With 8 bits the largest number of a group decides its
scale. With 4 bits that wastes levels: there a few scales are tried, each is fitted to the integers
that it leads to by least squares, and the one that leaves the smallest error is kept.

What counts in the end is the error of products with the inputs of a matrix. Where these inputs'
second moments are known, 4 bits are chosen to make that error small (`InputMoments`).

Everything is worked out for a few rows at a time, on the caller's thread; it does not know files,
tensors or names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...format.nibbles import pack_nibbles

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Bytes = NDArray[np.uint8]
    Bits = NDArray[np.uint16]  # of bf16 numbers

SOURCE_DTYPES = ("BF16", "F16", "F32")
MAX_WEIGHT = 1e30  # what is larger is no weight, and sums of it might be infinite
CHUNK_ELEMENTS = 1 << 16  # to work on at a time: with what comes of them they fit in a core's cache

_MAX_LEVEL_8 = 127
_LEVELS_4 = 15
_MIDDLE_4 = 8
# Scales to try, as the level (of -8 to 7) that the number farthest from 0 gets: beyond -8 it is cut
# off, and with -7 the others are what plain rounding makes of them.
_EXTREME_LEVELS = (7.0, 7.4, 7.8, 8.1, 8.6, 9.3)
# The same, as shares of the range between the least and the largest number that keep levels of
# their own.
_RANGES = (1.05, 1.0, 0.94, 0.88, 0.8)
_DAMPING = 0.01  # of the mean square of a matrix' inputs
_LEAST_SCALE = 2.0**-120  # below it the scale is 0, for its inverse may be infinite


class Quantized(NamedTuple):
    """Some rows of a matrix (R, K), with G groups a row. `zero` is None where it is the middle of
    all levels.
    """

    weight: NDArray[Any]  # (R, K) int8, or (R, K / 2) uint8
    scale: Bits  # (R, G)
    zero: Bytes | None  # (R, G)


class InputMoments(NamedTuple):
    """Second moments of the inputs x (K,) of a matrix, in the form that rounding its columns needs."""

    importance: Floats  # (K,): the mean square of each input
    # (K, K), upper triangular: Uᵀ U is the inverse of the moments. Row k over its diagonal says what
    # the columns behind k are to take over of the error of column k.
    factor: Floats

    @classmethod
    def of(cls, moments: Floats) -> InputMoments:
        """Of the mean of x xᵀ, (K, K). Inputs that are always 0, or nearly tied to others, are kept
        apart by a share of the mean square that is added to all. Memory besides: four times the
        moments in fp64.
        """
        damped = moments.astype(np.float64)
        diagonal = np.einsum("kk->k", damped)  # a view
        mean = float(diagonal.mean()) or 1.0
        damping = _DAMPING
        while True:
            diagonal += damping * mean
            try:
                factor = np.linalg.cholesky(np.linalg.inv(damped)).T
                break
            except np.linalg.LinAlgError:  # fp64 does not tell them from singular ones
                damping *= 10
        return cls(diagonal.astype(np.float32), np.ascontiguousarray(factor, np.float32))


def to_float32(data: Bytes, dtype: str) -> Floats:
    """The numbers of a tensor's bytes, in one dimension; a copy unless they are fp32."""
    if dtype == "BF16":
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype == "F16":
        return data.view("<f2").astype(np.float32)
    return data.view("<f4")


def to_bf16(values: Floats) -> Bits:
    """The nearest bf16 numbers' bits, ties to even. Of finite numbers up to `MAX_WEIGHT`."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def from_bf16(bits: Bits) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def first_unusable(weights: Floats) -> int | None:
    """The index of the first row (R, K) with a NaN, an infinity, or a number beyond `MAX_WEIGHT`;
    None without.
    """
    largest = np.abs(weights).max(axis=1)
    rows = np.flatnonzero(~(largest <= MAX_WEIGHT))  # NaN compares as false
    return int(rows[0]) if rows.size else None


def quantize_int8(weights: Floats, group_size: int) -> Quantized:
    """(R, K) with w ≈ q · scale, q from -127 to 127. `group_size` divides K. Memory besides: twice
    the weights.
    """
    grouped = weights.reshape(len(weights), -1, group_size)
    scale = _storable(np.abs(grouped).max(axis=2) / np.float32(_MAX_LEVEL_8))
    levels = grouped * _inverse(scale)[:, :, None]
    np.rint(levels, out=levels)
    np.clip(levels, -_MAX_LEVEL_8, _MAX_LEVEL_8, out=levels)
    return Quantized(levels.astype(np.int8).reshape(weights.shape), to_bf16(scale), None)


def quantize_int4(
    weights: Floats, group_size: int, *, asymmetric: bool = False, moments: InputMoments | None = None
) -> Quantized:
    """(R, K) with w ≈ (q - 8) · scale, or (q - zero) · scale when `asymmetric`; q and zero from 0
    to 15. With `moments`, those of its inputs, the error of products is made small instead of that
    of weights.

    `group_size` divides K, and 64 does. A scale may be below 0: of the 16 levels one more lies on
    the side of 0 on which they are needed. Memory besides: three times the weights.
    """
    if moments is not None:
        return _compensated(weights, group_size, asymmetric, moments)
    grouped = weights.reshape(len(weights), -1, group_size)
    zero, inverses = _asymmetric(grouped) if asymmetric else _symmetric(grouped)
    scale = _storable(_fit(grouped, zero, inverses))
    levels = _levels(grouped, _inverse(scale), zero, np.empty_like(grouped))
    levels += zero[:, :, None]
    return Quantized(
        pack_nibbles(levels.astype(np.uint8).reshape(weights.shape)),
        to_bf16(scale),
        zero.astype(np.uint8) if asymmetric else None,
    )


def _compensated(weights: Floats, group_size: int, asymmetric: bool, moments: InputMoments) -> Quantized:
    """Column by column: the columns behind one take over what its rounding does to products, as far
    as inputs go together (E. Frantar et al., GPTQ, 2022, arXiv:2210.17323). Groups get their scales
    when the columns before them are done, by errors that count as their inputs do.
    """
    num_rows, num_columns = weights.shape
    rest = np.ascontiguousarray(weights.T)  # a column's numbers lie together
    integers = np.empty((num_columns, num_rows), np.uint8)
    scales, zeros = [], []
    for begin in range(0, num_columns, group_size):
        end = begin + group_size
        block = rest[begin:end]
        grouped = np.ascontiguousarray(block.T)[:, None]
        zero, inverses = _asymmetric(grouped) if asymmetric else _symmetric(grouped)
        scale = _storable(_fit(grouped, zero, inverses, moments.importance[begin:end]))
        scales.append(scale)
        zeros.append(zero)
        inverse, scale, zero = _inverse(scale)[:, 0], scale[:, 0], zero[:, 0]
        errors = np.empty_like(block)
        for column in range(group_size):
            row = moments.factor[begin + column]
            levels = np.clip(np.rint(block[column] * inverse), -zero, _LEVELS_4 - zero)
            integers[begin + column] = levels + zero
            errors[column] = (block[column] - levels * scale) / row[begin + column]
            block[column + 1 :] -= row[begin + column + 1 : end, None] * errors[column]
        rest[end:] -= moments.factor[begin:end, end:].T @ errors
    zero = np.concatenate(zeros, axis=1)
    return Quantized(
        pack_nibbles(np.ascontiguousarray(integers.T)),
        to_bf16(np.concatenate(scales, axis=1)),
        zero.astype(np.uint8) if asymmetric else None,
    )


def _symmetric(grouped: Floats) -> tuple[Floats, list[Floats]]:
    """The level that means 0, (R, G), and the inverses of scales to try: some put the farthest
    number at -8.
    """
    least, largest = grouped.min(axis=2), grouped.max(axis=2)
    farthest = np.where(-least > largest, least, largest)
    per_level = _inverse(np.negative(farthest))
    return np.full_like(farthest, _MIDDLE_4), [per_level * np.float32(level) for level in _EXTREME_LEVELS]


def _asymmetric(grouped: Floats) -> tuple[Floats, list[Floats]]:
    """The same, with a zero of each group's own. 0 itself stays within the range."""
    least = np.minimum(grouped.min(axis=2), 0)
    largest = np.maximum(grouped.max(axis=2), 0)
    inverse = _inverse((largest - least) / np.float32(_LEVELS_4))
    zero = np.clip(np.rint(-least * inverse), 0, _LEVELS_4)
    return zero, [inverse * np.float32(1 / share) for share in _RANGES]


def _fit(grouped: Floats, zero: Floats, inverses: list[Floats], importance: Floats | None = None) -> Floats:
    """The scale (R, G) that leaves the least squared error, of those that least squares finds for
    each try.

    With integers l the best scale is Σwl / Σl², and it takes (Σwl)² / Σl² off the error of Σw².
    `importance` (group size,) is a factor of all these squares and products.
    """
    weighted = grouped if importance is None else grouped * importance
    best = np.zeros(zero.shape, np.float32)
    best_gain = np.zeros(zero.shape)  # float64: the squares of very small weights are none in fp32
    room = np.empty_like(grouped)
    for inverse in inverses:
        levels = _levels(grouped, inverse, zero, room)
        products = np.einsum("rgk,rgk->rg", weighted, levels)
        if importance is None:
            squares = np.einsum("rgk,rgk->rg", levels, levels)
        else:
            squares = np.einsum("rgk,rgk,k->rg", levels, levels, importance)
        squares[squares == 0] = 1  # where all levels are 0: so are the products
        gain = np.square(products.astype(np.float64)) / squares
        is_better = gain > best_gain
        np.copyto(best, products / squares, where=is_better)
        np.copyto(best_gain, gain, where=is_better)
    return best


def _levels(grouped: Floats, inverse: Floats, zero: Floats, out: Floats) -> Floats:
    """The nearest integers, counted from `zero`, among the 16 that there are; into `out`."""
    np.multiply(grouped, inverse[:, :, None], out=out)
    np.rint(out, out=out)
    np.maximum(out, -zero[:, :, None], out=out)
    return np.minimum(out, (_LEVELS_4 - zero)[:, :, None], out=out)


def _storable(scale: Floats) -> Floats:
    """The value rounded to bf16; 0 where it is too small to divide by."""
    return np.where(np.abs(scale) < _LEAST_SCALE, np.float32(0), from_bf16(to_bf16(scale)))


def _inverse(scale: Floats) -> Floats:
    """1 / scale, and 0 of what is too small."""
    is_usable = np.abs(scale) >= _LEAST_SCALE
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=is_usable)
