"""Matrices as GPTQ and AWQ store them → as `IntegerMatrix` has them: the same integers, zeros and scales.

Both pack numbers of 4 or 8 bits into int32. GPTQ packs neighbours along the columns K of a matrix (N, K) and stores it
transposed; AWQ packs along its rows N, in an order of its own. Pure functions on arrays that are there; shapes were
checked before (`gptq_awq_linear.py`), content is checked here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...loader.format.nibbles import RUN, pack_nibbles
from ..dtypes import to_float32
from ..errors import ModelError
from ..tensors import Tensor, aligned_empty

# Of eight neighbours, the nibble (from the lowest on) that AWQ's fast unpacking puts each in.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_MAX_ELEMENTS = 1 << 22  # unpacked at a time
_GROUP_SIZES = (128, 64, 32)  # that products are fastest with

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GptqAwqMatrix:
    """The tensors of one matrix (num_out, num_in), called `name`, and how to read them."""

    name: str
    qweight: Tensor  # int32; gptq: (num_in / per word, num_out), awq: (num_in, num_out / 8)
    qzeros: Tensor  # int32 (groups, num_out / per word)
    scales: Tensor  # (groups, num_out)
    order: Tensor | None  # int32 (num_in,): the group of each column; None: one group after another
    bits: int
    is_awq: bool
    stores_zero_minus_one: bool
    reorders_columns: bool = False  # what config.json says of `order`

    @property
    def may_reorder_columns(self) -> bool:
        return self.order is not None and self.reorders_columns

    @property
    def num_out(self) -> int:
        return self.scales.shape[1]

    @property
    def num_in(self) -> int:
        return self.qweight.shape[0] if self.is_awq else self.qweight.shape[0] * 32 // self.bits


@dataclass(frozen=True, slots=True)
class ConvertedMatrix:
    """`weight`, `scale` (fp32) and `zero` as `IntegerMatrix` has them, for columns in the order `columns`, (num_in,);
    None is the order in which they come.
    """

    weight: npt.NDArray[Any]
    scale: npt.NDArray[np.float32]
    zero: npt.NDArray[Any] | None
    columns: Int64s | None


def convert(matrix: GptqAwqMatrix) -> ConvertedMatrix:
    """The same matrix in new memory: as much as `matrix` takes, and some MiB meanwhile.

    Raises `ModelError` when its columns are in groups of different sizes, or in none that there is.
    """
    columns = _columns(matrix)
    zero = _zeros(matrix)  # (num_out, groups) int16
    scale = np.ascontiguousarray(to_float32(matrix.scales.on_host(), matrix.scales.dtype).T)
    weight = _weights(matrix, columns, zero)
    own_zero: npt.NDArray[Any] | None
    if (matrix.bits == 4 and weight.dtype == np.int8) or bool((zero == 1 << (matrix.bits - 1)).all()):
        own_zero = None  # it is in the integers, or the middle, as everywhere
    else:
        own_zero = zero.astype(np.uint8) if matrix.bits == 4 else (zero - 128).astype(np.int16)
    share = matrix.num_in // scale.shape[1]
    size = next((size for size in _GROUP_SIZES if share % size == 0), share)
    if size != share:  # small groups are fastest: the same scale for several of them
        scale = scale.repeat(share // size, axis=1)
        own_zero = own_zero.repeat(share // size, axis=1) if own_zero is not None else None
    return ConvertedMatrix(weight, scale, own_zero, columns)


def _columns(matrix: GptqAwqMatrix) -> Int64s | None:
    """The columns, group by group."""
    if matrix.order is None:
        return None
    groups = matrix.scales.shape[0]
    wanted = np.arange(matrix.num_in) // (matrix.num_in // groups)
    own = matrix.order.on_host().astype(np.int64)
    columns = own.argsort(kind="stable")
    if not np.array_equal(own[columns], wanted):
        raise ModelError(
            f"tensor {matrix.name}.g_idx does not put the {matrix.num_in} columns into {groups} groups of one size"
        )
    return None if np.array_equal(own, wanted) else columns


def _zeros(matrix: GptqAwqMatrix) -> npt.NDArray[np.int16]:
    """(num_out, groups), from 0 to 2^bits - 1."""
    words = matrix.qzeros.on_host().view(np.uint32)
    if matrix.stores_zero_minus_one:
        # 1 was taken off each number while they stood packed, so it is added so: a 0 among them borrowed from its
        # neighbour, which gets it back.
        words = words + np.uint32(0x11111111 if matrix.bits == 4 else 0x01010101)
    levels = _unpacked(words[:, :, None], matrix, axis=2)
    return np.ascontiguousarray(levels.reshape(len(words), -1).T).astype(np.int16)


def _weights(matrix: GptqAwqMatrix, columns: Int64s | None, zero: npt.NDArray[np.int16]) -> npt.NDArray[Any]:
    """The integers as `IntegerMatrix` has them, made for some rows at a time."""
    is_packed = matrix.bits == 4 and matrix.num_in % RUN == 0
    width = matrix.num_in // 2 if is_packed else matrix.num_in
    out = aligned_empty((matrix.num_out, width), np.uint8 if is_packed else np.int8)
    stored = matrix.qweight.on_host().view(np.uint32)
    step = max(8, _MAX_ELEMENTS // matrix.num_in // 8 * 8)
    for begin in range(0, matrix.num_out, step):
        end = min(begin + step, matrix.num_out)
        if matrix.is_awq:
            words = stored[:, begin // 8 : end // 8, None]
            levels = _unpacked(words, matrix, axis=2).reshape(matrix.num_in, -1)  # (num_in, rows)
        else:
            words = stored[:, None, begin:end]
            levels = _unpacked(words, matrix, axis=1).reshape(matrix.num_in, -1)
        rows = np.ascontiguousarray(levels.T)
        if columns is not None:
            rows = rows[:, columns]
        if is_packed:
            out[begin:end] = pack_nibbles(rows)
        elif matrix.bits == 4:
            grouped = rows.reshape(end - begin, zero.shape[1], -1).astype(np.int8)
            out[begin:end] = (grouped - zero[begin:end].astype(np.int8)[:, :, None]).reshape(end - begin, -1)
        else:
            out[begin:end] = (rows ^ np.uint8(128)).view(np.int8)  # what is 128 there is 0 here
    return out


def _unpacked(words: npt.NDArray[np.uint32], matrix: GptqAwqMatrix, *, axis: int) -> npt.NDArray[np.uint8]:
    """Words with a dimension of size 1 at `axis` → uint8, with the numbers of each word there."""
    places = _AWQ_PLACES if matrix.is_awq else range(32 // matrix.bits)
    shape = [1, 1, 1]
    shape[axis] = -1
    shifts = np.array([place * matrix.bits for place in places], dtype=np.uint32).reshape(shape)
    levels: npt.NDArray[np.uint8] = (words >> shifts & np.uint32((1 << matrix.bits) - 1)).astype(np.uint8)
    return levels
