"""Matrices as GPTQ, AWQ and compressed-tensors store them → as `IntegerMatrix` has them: the same integers, zeros
and scales; and projections of them, converted when they are first needed, and then kept.

All pack numbers of 4 or 8 bits into int32. GPTQ packs neighbours along the columns K of a matrix
(N, K) and stores it transposed; AWQ packs along its rows N, in an order of its own; compressed-tensors packs along
the columns, and zeros along the rows. Conversions are
pure functions on arrays that are there; a projection checks shapes when it is made, and content is
checked by the conversion.

The loaded tensors stay in place, in addition to one converted copy. No copy is kept before the
tensors are exact, since it would not become exact with them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from ...loader.format.nibbles import RUN, pack_nibbles
from ..errors import ModelError
from ..tensors import DType, Tensor, aligned_empty, from_float32, to_float32
from .converted import ConvertedProjection
from .matrices import IntegerMatrix
from .parameters import Parameters
from .quantization_config import QuantizationConfig

# Of eight neighbours, the nibble (from the lowest on) that AWQ's fast unpacking puts each in.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_MAX_ELEMENTS = 1 << 22  # unpacked at a time
GROUP_SIZES = (128, 64, 32)  # that products are fastest with

_KINDS = (  # of a matrix's tensors
    *("qweight", "qzeros", "scales", "g_idx"),
    *("weight_packed", "weight_zero_point", "weight_scale", "weight_g_idx"),
)
Int64s = npt.NDArray[np.int64]
Packing = Literal["gptq", "awq", "rows"]
_ZEROS = {np.dtype(np.uint8): DType.U8, np.dtype(np.int16): DType.I16}


class GptqAwqMatrix(Struct, frozen=True, eq=False):
    """The tensors of one matrix (num_out, num_in), called `name`, and how to read them: a `Matrix` for executors that
    multiply with it as it lies.
    """

    name: str
    # int32; gptq: (num_in / per word, num_out), awq: (num_in, num_out / 8), rows: (num_out, num_in / per word)
    qweight: Tensor
    qzeros: (
        Tensor | None
    )  # int32 (groups, num_out / per word), rows: (num_out / per word, groups); None: the middle
    scales: Tensor  # (groups, num_out), rows: (num_out, groups)
    order: Tensor | None  # int32 (num_in,): the group of each column; None: one group after another
    bits: int
    packing: Packing
    stores_zero_minus_one: bool
    reorders_columns: bool = False  # what config.json says of `order`
    bias: Tensor | None = None  # (num_out,) BF16, F16 or F32

    @property
    def may_reorder_columns(self) -> bool:
        return self.order is not None and self.reorders_columns

    @property
    def weight(self) -> Tensor:
        return self.qweight

    @property
    def columns(self) -> None:
        return None

    @property
    def kind(self) -> Hashable:
        return GptqAwqMatrix, self.packing, self.bits

    def joined(self, others: Sequence[Any]) -> None:
        return None

    def check_order(self) -> None:
        """Raise `ModelError` if columns are not in one group after another, which the content of `order` tells."""
        if _columns(self) is not None:
            raise ModelError(
                f"tensor {self.name}.g_idx puts columns in groups by an order, of which config.json says nothing",
                hint="Choose another --backend.",
            )

    @property
    def num_out(self) -> int:
        return self.scales.shape[0 if self.packing == "rows" else 1]

    @property
    def num_groups(self) -> int:
        return self.scales.shape[1 if self.packing == "rows" else 0]

    @property
    def num_in(self) -> int:
        if self.packing == "awq":
            return self.qweight.shape[0]
        return self.qweight.shape[1 if self.packing == "rows" else 0] * 32 // self.bits


class ConvertedMatrix(Struct, frozen=True):
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
    stored = to_float32(matrix.scales.on_host(), matrix.scales.dtype)
    scale = np.array(stored) if matrix.packing == "rows" else np.ascontiguousarray(stored.T)
    weight = _weights(matrix, columns, zero)
    own_zero: npt.NDArray[Any] | None
    if (matrix.bits == 4 and weight.dtype == np.int8) or bool((zero == 1 << (matrix.bits - 1)).all()):
        own_zero = None  # it is in the integers, or the middle, as everywhere
    else:
        own_zero = zero.astype(np.uint8) if matrix.bits == 4 else (zero - 128).astype(np.int16)
    share = matrix.num_in // scale.shape[1]
    size = next((size for size in GROUP_SIZES if share % size == 0), share)
    if size != share:  # small groups are fastest: the same scale for several of them
        scale = scale.repeat(share // size, axis=1)
        own_zero = own_zero.repeat(share // size, axis=1) if own_zero is not None else None
    return ConvertedMatrix(weight, scale, own_zero, columns)


def _columns(matrix: GptqAwqMatrix) -> Int64s | None:
    """The columns, group by group."""
    if matrix.order is None:
        return None
    groups = matrix.num_groups
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
    if matrix.qzeros is None:
        return np.full((matrix.num_out, matrix.num_groups), 1 << (matrix.bits - 1), np.int16)
    words = matrix.qzeros.on_host().view(np.uint32)
    if matrix.packing == "rows":
        levels = _unpacked(words[:, None, :], matrix, axis=1).reshape(-1, matrix.num_groups)
        return levels[: matrix.num_out].astype(np.int16)
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
        if matrix.packing == "rows":
            rows = _unpacked(stored[begin:end, :, None], matrix, axis=2).reshape(end - begin, -1)
        elif matrix.packing == "awq":
            words = stored[:, begin // 8 : end // 8, None]
            rows = np.ascontiguousarray(_unpacked(words, matrix, axis=2).reshape(matrix.num_in, -1).T)
        else:
            words = stored[:, None, begin:end]
            rows = np.ascontiguousarray(_unpacked(words, matrix, axis=1).reshape(matrix.num_in, -1).T)
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
    places = _AWQ_PLACES if matrix.packing == "awq" else range(32 // matrix.bits)
    shape = [1, 1, 1]
    shape[axis] = -1
    shifts = np.array([place * matrix.bits for place in places], dtype=np.uint32).reshape(shape)
    levels: npt.NDArray[np.uint8] = (words >> shifts & np.uint32((1 << matrix.bits) - 1)).astype(np.uint8)
    return levels


def _converted(
    matrices: Sequence[GptqAwqMatrix], biases: Sequence[Tensor | None]
) -> tuple[IntegerMatrix, ...]:
    """Of one input, one below the other."""
    found = [convert(matrix) for matrix in matrices]
    if len(found) > 1 and _can_join(found):
        found, biases = [_joined(found)], [_joined_biases(matrices, biases)]
    return tuple(map(_as_matrix, found, biases))


def _as_matrix(converted: ConvertedMatrix, bias: Tensor | None) -> IntegerMatrix:
    weight, zero = converted.weight, converted.zero
    return IntegerMatrix(
        Tensor(DType.U8 if weight.dtype == np.uint8 else DType.I8, weight),
        Tensor(DType.F32, converted.scale),
        None if zero is None else Tensor(_ZEROS[zero.dtype], zero),
        bias,
        converted.columns,
    )


def _can_join(found: Sequence[ConvertedMatrix]) -> bool:
    """True if they are of one kind, with their columns in one order, as q, k and v have them."""
    first = found[0]

    def is_alike(other: ConvertedMatrix) -> bool:
        if first.columns is None or other.columns is None:
            is_ordered_alike = first.columns is other.columns
        else:
            is_ordered_alike = np.array_equal(first.columns, other.columns)
        return (
            is_ordered_alike
            and (first.zero is None) == (other.zero is None)
            and first.weight.dtype == other.weight.dtype
            and first.scale.shape[1] == other.scale.shape[1]
        )

    return all(map(is_alike, found[1:]))


def _joined(found: Sequence[ConvertedMatrix]) -> ConvertedMatrix:
    zeros = [one.zero for one in found if one.zero is not None]
    num_out = sum(len(one.weight) for one in found)
    weight = aligned_empty((num_out, found[0].weight.shape[1]), found[0].weight.dtype)
    return ConvertedMatrix(
        np.concatenate([one.weight for one in found], out=weight),
        np.concatenate([one.scale for one in found]),
        np.concatenate(zeros) if zeros else None,
        found[0].columns,
    )


def _joined_biases(matrices: Sequence[GptqAwqMatrix], biases: Sequence[Tensor | None]) -> Tensor | None:
    there = [bias for bias in biases if bias is not None]
    if not there:
        return None
    dtype = there[0].dtype if len({bias.dtype for bias in there}) == 1 else DType.F32
    parts = [
        np.zeros(matrix.num_out, np.float32) if bias is None else to_float32(bias.on_host(), bias.dtype)
        for matrix, bias in zip(matrices, biases, strict=True)
    ]
    return Tensor(dtype, from_float32(np.concatenate(parts), dtype))


def take_gptq_awq(
    parameters: Parameters, names_and_sizes: Sequence[tuple[str, int]], num_in: int, *, bias: bool
) -> ConvertedProjection:
    """One projection to all the (name, num_out), whose tensors are `name`.qweight or `name`.weight_packed, and so on.
    A bias that is there counts even if the model has none without being quantised: some tools write it. Raises
    `ModelError`.
    """
    matrices = [_take_matrix(parameters, name, num_in, num_out) for name, num_out in names_and_sizes]
    biases = [
        parameters.take(f"{name}.bias", num_out) if bias or f"{name}.bias" in parameters else None
        for name, num_out in names_and_sizes
    ]
    gate = parameters.gate_of([f"{name}.{kind}" for name, _ in names_and_sizes for kind in _KINDS])
    return ConvertedProjection(
        num_in,
        sum(size for _, size in names_and_sizes),
        gate,
        lambda: _converted(matrices, biases),
        may_reorder_columns=any(matrix.may_reorder_columns for matrix in matrices),
        stored=[replace(matrix, bias=own) for matrix, own in zip(matrices, biases, strict=True)],
    )


def _take_matrix(parameters: Parameters, name: str, num_in: int, num_out: int) -> GptqAwqMatrix:
    config = parameters.quantization
    full_name = parameters.full_name(name)
    if f"{name}.weight_packed" in parameters:
        return _take_rows(parameters, name, num_in, num_out)
    if config is None or config.method not in ("gptq", "awq"):
        raise ModelError(
            f"tensor {full_name}.qweight is there, but config.json does not say that the model is of GPTQ or AWQ",
            hint="Do the config.json and the weights belong to the same model?",
        )
    is_awq = config.method == "awq"
    per_word = 32 // config.bits
    num_groups = _num_groups(config, full_name, num_in)
    packed = num_out if is_awq else num_in
    if packed % per_word or num_out % per_word:
        raise ModelError(f"{full_name} of shape ({num_out}, {num_in}) does not fill whole words of 32 bits")
    shape = (num_in, num_out // per_word) if is_awq else (num_in // per_word, num_out)
    order_name = f"{name}.g_idx"
    return GptqAwqMatrix(
        full_name,
        parameters.take_as(f"{name}.qweight", shape, DType.I32),
        parameters.take_as(f"{name}.qzeros", (num_groups, num_out // per_word), DType.I32),
        parameters.take_as(f"{name}.scales", (num_groups, num_out), DType.F16, DType.BF16, DType.F32),
        parameters.take_as(order_name, (num_in,), DType.I32)
        if not is_awq and order_name in parameters
        else None,
        config.bits,
        "awq" if is_awq else "gptq",
        config.stores_zero_minus_one,
        config.reorders_columns,
    )


def _take_rows(parameters: Parameters, name: str, num_in: int, num_out: int) -> GptqAwqMatrix:
    """A matrix in compressed-tensors' packing; the tensors' shapes give its bits and its groups."""
    config = parameters.quantization
    full_name = parameters.full_name(name)
    if config is None or config.method != "compressed-tensors":
        raise ModelError(
            f"tensor {full_name}.weight_packed is there, but config.json does not say that the model is of "
            "compressed-tensors",
            hint="Do the config.json and the weights belong to the same model?",
        )
    stored, scales = (parameters.peek(f"{name}.{kind}").shape for kind in ("weight_packed", "weight_scale"))
    bits = next((bits for bits in (4, 8) if stored == (num_out, num_in * bits // 32)), None)
    groups = scales[1] if len(scales) == 2 else 0
    if bits is None or num_in * bits % 32:
        raise ModelError(
            f"tensor {full_name}.weight_packed has shape {stored}, which is not ({num_out}, {num_in}) of 4 or 8 bits"
        )
    if groups < 1 or num_in % groups:
        raise ModelError(
            f"tensor {full_name}.weight_scale has shape {scales}, which does not fit ({num_out}, {num_in})"
        )
    zeros, order, size = (f"{name}.weight_{kind}" for kind in ("zero_point", "g_idx", "shape"))
    if size in parameters:
        parameters.take_as(size, (2,), DType.I64, DType.I32)
    needs_zeros = zeros in parameters or not config.symmetric
    packed_zeros = (-(-num_out * bits // 32), groups)
    return GptqAwqMatrix(
        full_name,
        parameters.take_as(f"{name}.weight_packed", stored, DType.I32),
        parameters.take_as(zeros, packed_zeros, DType.I32) if needs_zeros else None,
        parameters.take_as(f"{name}.weight_scale", (num_out, groups), DType.F16, DType.BF16, DType.F32),
        parameters.take_as(order, (num_in,), DType.I32) if order in parameters else None,
        bits,
        "rows",
        False,
        config.reorders_columns,
    )


def _num_groups(config: QuantizationConfig, name: str, num_in: int) -> int:
    group_size = config.group_size or num_in
    if num_in % group_size:
        raise ModelError(
            f"{name} has {num_in} columns, which are no multiple of the group_size {group_size} of config.json"
        )
    return num_in // group_size
