"""Matrices as GPTQ and AWQ store them → as `QuantizedLinear` has them: the same integers, zeros and scales.

Both pack numbers of 4 or 8 bits into int32. GPTQ packs neighbours along the columns K of a matrix (N, K) and stores it
transposed; AWQ packs along its rows N, in an order of its own. Pure functions on tensors that are there; shapes were
checked before (`take_foreign` in `converted.py`), content is checked here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import ModelError
from .quantized import RUN, pack_nibbles

# Of eight neighbours, the nibble (from the lowest on) that AWQ's fast unpacking puts each in.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_MAX_ELEMENTS = 1 << 22  # unpacked at a time
_GROUP_SIZES = (128, 64, 32)  # that fast kernels have


@dataclass(frozen=True, slots=True)
class ForeignMatrix:
    """The tensors of one matrix (num_out, num_in), called `name`, and how to read them."""

    name: str
    qweight: torch.Tensor  # int32; gptq: (num_in / per word, num_out), awq: (num_in, num_out / 8)
    qzeros: torch.Tensor  # int32 (groups, num_out / per word)
    scales: torch.Tensor  # (groups, num_out)
    order: torch.Tensor | None  # int32 (num_in,): the group of each column; None: one group after another
    bits: int
    is_awq: bool
    stores_zero_minus_one: bool

    @property
    def num_out(self) -> int:
        return self.scales.shape[1]

    @property
    def num_in(self) -> int:
        return self.qweight.shape[0] if self.is_awq else self.qweight.shape[0] * 32 // self.bits


@dataclass(frozen=True, slots=True)
class Converted:
    """`weight`, `scale` and `zero` as `QuantizedLinear` has them, for columns in the order `columns`, (num_in,) int64;
    None is the order in which they come.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    columns: torch.Tensor | None


def convert(matrix: ForeignMatrix) -> Converted:
    """The same matrix in new memory: as much as `matrix` takes, and some MiB meanwhile.

    Raises `ModelError` when its columns are in groups of different sizes, or in none that there is.
    """
    columns = _columns(matrix)
    zero = _zeros(matrix)  # (num_out, groups) int16
    scale = matrix.scales.t().to(torch.float32).contiguous()
    weight = _weights(matrix, columns, zero)
    if matrix.bits == 4 and weight.dtype == torch.int8:
        own_zero = None  # it is in the integers
    elif bool((zero == 1 << (matrix.bits - 1)).all()):
        own_zero = None  # the middle, as everywhere
    else:
        own_zero = zero.to(torch.uint8) if matrix.bits == 4 else zero - 128
    share = matrix.num_in // scale.shape[1]
    size = next((size for size in _GROUP_SIZES if share % size == 0), share)
    if size != share:  # kernels know small groups only: the same scale for several of them
        scale = scale.repeat_interleave(share // size, dim=1)
        own_zero = own_zero.repeat_interleave(share // size, dim=1) if own_zero is not None else None
    return Converted(weight, scale, own_zero, columns)


def _columns(matrix: ForeignMatrix) -> torch.Tensor | None:
    """The columns, group by group."""
    if matrix.order is None:
        return None
    groups = matrix.scales.shape[0]
    wanted = torch.arange(matrix.num_in) // (matrix.num_in // groups)
    own = matrix.order.to(torch.int64)
    columns = own.argsort(stable=True)
    if not torch.equal(own[columns], wanted):
        raise ModelError(
            f"tensor {matrix.name}.g_idx does not put the {matrix.num_in} columns into {groups} groups of one size"
        )
    return None if torch.equal(own, wanted) else columns


def _zeros(matrix: ForeignMatrix) -> torch.Tensor:
    """(num_out, groups) int16, from 0 to 2^bits - 1."""
    words = matrix.qzeros
    if matrix.stores_zero_minus_one:
        # 1 was taken off each number while they stood packed, so it is added so: a 0 among them borrowed from its
        # neighbour, which gets it back.
        words = words + (0x11111111 if matrix.bits == 4 else 0x01010101)
    return _unpack(words.unsqueeze(2), matrix).flatten(1).t().to(torch.int16).contiguous()


def _weights(matrix: ForeignMatrix, columns: torch.Tensor | None, zero: torch.Tensor) -> torch.Tensor:
    """The integers as `QuantizedLinear` has them, made for some rows at a time."""
    is_packed = matrix.bits == 4 and matrix.num_in % RUN == 0
    width = matrix.num_in // 2 if is_packed else matrix.num_in
    out = torch.empty((matrix.num_out, width), dtype=torch.uint8 if is_packed else torch.int8)
    step = max(8, _MAX_ELEMENTS // matrix.num_in // 8 * 8)
    for begin in range(0, matrix.num_out, step):
        end = min(begin + step, matrix.num_out)
        if matrix.is_awq:
            words = matrix.qweight[:, begin // 8 : end // 8].unsqueeze(2)
            levels = _unpack(words, matrix).flatten(1)  # (num_in, rows)
        else:
            words = matrix.qweight[:, begin:end].unsqueeze(1)
            levels = _unpack(words, matrix, dim=1).flatten(0, 1)
        rows = levels.t().contiguous()
        if columns is not None:
            rows = rows[:, columns]
        if is_packed:
            out[begin:end] = pack_nibbles(rows)
        elif matrix.bits == 4:
            grouped = rows.view(end - begin, zero.shape[1], -1).to(torch.int8)
            out[begin:end] = (grouped - zero[begin:end].to(torch.int8).unsqueeze(2)).flatten(1)
        else:
            out[begin:end] = (rows ^ 128).view(torch.int8)  # what is 128 there is 0 here
    return out


def _unpack(words: torch.Tensor, matrix: ForeignMatrix, *, dim: int = 2) -> torch.Tensor:
    """int32 words with a dimension of size 1 at `dim` → uint8, with the numbers of each word there."""
    places = _AWQ_PLACES if matrix.is_awq else range(32 // matrix.bits)
    shape = [1, 1, 1]
    shape[dim] = -1
    shifts = torch.tensor([place * matrix.bits for place in places], dtype=torch.int32).view(shape)
    return (words >> shifts & ((1 << matrix.bits) - 1)).to(torch.uint8)
