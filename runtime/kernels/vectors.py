"""Vector values for numba: what its loops cannot say, said in LLVM's terms.

A kernel that reads weights at the speed of memory has to turn them into numbers on the way, 64 bytes at a time: bf16
pairs by one dot-product instruction, bytes by another, nibbles after one mask and one shift. Numba compiles loops
over scalars, and its optimiser finds these instructions in none of them, so here are the few vector types and
operations that `products.py` is written with. Each is an LLVM expression that any processor can run; where this one
has the instruction for it, its name is used instead.

Knows nothing of tensors or layers. Offsets count elements, are not checked, and must lie within the array.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from .sizes import Size

NUM_LANES = 16  # of the sums: float32, or int32
RUN = 64  # bytes of a vector of integers

_I8, _I16, _I32, _FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
_SUMS, _COUNTS = ir.VectorType(_FLOAT, NUM_LANES), ir.VectorType(_I32, NUM_LANES)


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no class for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


def processor_features() -> frozenset[str]:
    """What this processor's instructions are called, as far as they matter here."""
    features = llvmlite.binding.get_host_cpu_features()
    return frozenset(name for name in ("avx512bf16", "avx512vnni", "avx512f", "avx2") if features.get(name))


class Bf16Vector(types.Type):
    """32 bf16 numbers, as their bits."""

    def __init__(self) -> None:
        super().__init__(name="Bf16Vector")


class ByteVector(types.Type):
    """64 bytes."""

    def __init__(self) -> None:
        super().__init__(name="ByteVector")


class ScaleVector(types.Type):
    """16 float32: a factor for each lane."""

    def __init__(self) -> None:
        super().__init__(name="ScaleVector")


class Sums(types.Type):
    """For each of `num_rows` products, 16 float32 whose sum it is."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        super().__init__(name=f"Sums({num_rows})")


class Counts(types.Type):
    """The same in integers: 16 int32."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        super().__init__(name=f"Counts({num_rows})")


@register_model(Bf16Vector)
class _Bf16Model(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, ir.VectorType(_I16, 32))


@register_model(ByteVector)
class _ByteModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, ir.VectorType(_I8, RUN))


@register_model(ScaleVector)
class _ScaleModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, _SUMS)


@register_model(Sums)
class _SumsModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, ir.ArrayType(_SUMS, fe_type.num_rows))


@register_model(Counts)
class _CountsModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, ir.ArrayType(_COUNTS, fe_type.num_rows))


BF16, BYTES, SCALES = Bf16Vector(), ByteVector(), ScaleVector()


# -- reading -------------------------------------------------------------------------------------------------


@intrinsic
def load_bf16(typing: Any, array: Any, offset: Any) -> Any:
    """32 elements of a uint16 array, from `offset` on."""
    return BF16(array, types.intp), lambda ctx, builder, sig, args: _load(ctx, builder, sig, args, _I16, 32)


@intrinsic
def load_bytes(typing: Any, array: Any, offset: Any) -> Any:
    """64 elements of a uint8 or int8 array, from `offset` on."""
    return BYTES(array, types.intp), lambda ctx, builder, sig, args: _load(ctx, builder, sig, args, _I8, RUN)


@intrinsic
def load_nibbles(typing: Any, array: Any, offset: Any) -> Any:
    """32 elements of a uint8 array as 64 numbers from 0 to 15: their low halves, then their high ones."""

    def generate(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        packed = _load(ctx, builder, sig, args, _I8, 32)
        half = packed.type
        low = builder.and_(packed, ir.Constant(half, [15] * 32))
        high = builder.lshr(packed, ir.Constant(half, [4] * 32))
        return builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(_I32, RUN), list(range(RUN))))

    return BYTES(array, types.intp), generate


@intrinsic
def fetch_ahead(typing: Any, array: Any, offset: Any) -> Any:
    """Have memory bring the cache line of this element, which may lie beyond the array's end."""

    def generate(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        array, offset = args
        data = ctx.make_array(sig.args[0])(ctx, builder, array).data
        place = builder.bitcast(builder.gep(data, [offset]), ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [place.type, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [place, _lane(0), _lane(3), _lane(1)])
        return ctx.get_dummy_value()

    return types.none(array, types.intp), generate


@intrinsic
def biased(typing: Any, vector: Any) -> Any:
    """Bytes from -128 to 127, as those from 0 to 255 that are 128 more."""

    def generate(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.xor(args[0], ir.Constant(args[0].type, [0x80] * RUN))

    return BYTES(BYTES), generate


@intrinsic
def store_meant(typing: Any, numbers: Any, zero: Any, scale: Any, out: Any, offset: Any) -> Any:
    """(number - zero) * scale of 64 numbers from 0 to 255, as the bits of bf16, into 64 elements of a uint16 array."""

    def generate(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        numbers, zero, scale, out, offset = args
        wide, floats = ir.VectorType(_I32, RUN), ir.VectorType(_FLOAT, RUN)
        levels = builder.uitofp(builder.zext(numbers, wide), floats)
        values = builder.fmul(builder.fsub(levels, _splat(builder, zero, RUN)), _splat(builder, scale, RUN))
        bits = builder.bitcast(values, wide)
        is_odd = builder.and_(builder.lshr(bits, ir.Constant(wide, [16] * RUN)), ir.Constant(wide, [1] * RUN))
        nearest = builder.add(builder.add(bits, ir.Constant(wide, [0x7FFF] * RUN)), is_odd)
        halves = ir.VectorType(_I16, RUN)
        nearest = builder.trunc(builder.lshr(nearest, ir.Constant(wide, [16] * RUN)), halves)
        data = ctx.make_array(sig.args[3])(ctx, builder, out).data
        place = builder.bitcast(builder.gep(data, [offset]), halves.as_pointer())
        builder.store(nearest, place).align = 1
        return ctx.get_dummy_value()

    return types.none(numbers, types.float32, types.float32, out, types.intp), generate


@intrinsic
def factor(typing: Any, number: Any) -> Any:
    """One number for all lanes."""
    return SCALES(types.float32), lambda ctx, builder, sig, args: _splat(builder, args[0])


@intrinsic
def widened(typing: Any, bits: Any) -> Any:
    """The float32 that has the value of a bf16 number, given by its bits; a float32 as it is."""

    def generate(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        if sig.args[0] == types.float32:
            return args[0]
        return builder.bitcast(builder.shl(builder.zext(args[0], _I32), ir.Constant(_I32, 16)), _FLOAT)

    return types.float32(bits), generate


@intrinsic
def narrowed(typing: Any, number: Any) -> Any:
    """The bits of the nearest bf16, even among two; of a number that is none, those of 0x7FC0."""

    def generate(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        def constant(value: int) -> Any:
            return ir.Constant(_I32, value)

        bits = builder.bitcast(args[0], _I32)
        is_odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
        nearest = builder.lshr(builder.add(builder.add(bits, constant(0x7FFF)), is_odd), constant(16))
        is_nan = builder.fcmp_unordered("uno", args[0], args[0])
        return builder.trunc(builder.select(is_nan, constant(0x7FC0), nearest), _I16)

    return types.uint16(types.float32), generate


@intrinsic
def from_bits(typing: Any, bits: Any) -> Any:
    """The float32 with these bits."""
    return types.float32(types.uint32), lambda ctx, builder, sig, args: builder.bitcast(args[0], _FLOAT)


# -- computing -----------------------------------------------------------------------------------------------


@intrinsic
def no_sums(typing: Any, num_rows: Any) -> Any:
    """Zeros for so many products, a `Size`."""
    assert isinstance(num_rows, Size)
    kind = Sums(num_rows.value)
    return kind(num_rows), lambda ctx, builder, sig, args: ir.Constant(ctx.get_value_type(kind), None)


@intrinsic
def add_bf16(typing: Any, sums: Any, weights: Any, inputs: Any, offset: Any) -> Any:
    """To each sum, the product of 32 weights with the 32 numbers from `offset` on in its row of `inputs` (num_rows, K)
    uint16: the bits of bf16.
    """

    def generate(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        total, weights, inputs, offset = args
        for row in range(sums.num_rows):
            numbers = _load_row(ctx, builder, sig.args[2], inputs, row, offset, _I16, 32)
            before = builder.extract_value(total, row)
            total = builder.insert_value(total, _dot_bf16(builder, before, weights, numbers), row)
        return total

    return sums(sums, weights, inputs, types.intp), generate


@intrinsic
def counts_from(typing: Any, num_rows: Any, zero: Any, totals: Any, column: Any) -> Any:
    """Counts for so many products (a `Size`) with weights that are all `zero` too high: what these add to the product
    with inputs whose sums are in this column of `totals` (num_rows, …) int32.
    """
    kind = Counts(num_rows.value)

    def generate(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        _, zero, totals, column = args
        counts = ir.Constant(ctx.get_value_type(kind), None)
        for row in range(kind.num_rows):
            surplus = builder.mul(zero, _element(ctx, builder, sig.args[2], totals, row, column))
            lanes = builder.insert_element(ir.Constant(_COUNTS, None), builder.neg(surplus), _lane(0))
            counts = builder.insert_value(counts, lanes, row)
        return counts

    return kind(num_rows, types.int32, totals, types.intp), generate


@intrinsic
def count_bytes(typing: Any, counts: Any, weights: Any, inputs: Any, offset: Any) -> Any:
    """To each count, the product of 64 weights from 0 to 255 with the 64 numbers from `offset` on in its row of
    `inputs` (num_rows, K) int8.
    """

    def generate(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        counts_, weights, inputs, offset = args
        for row in range(counts.num_rows):
            numbers = _load_row(ctx, builder, sig.args[2], inputs, row, offset, _I8, RUN)
            lanes = _dot_bytes(builder, builder.extract_value(counts_, row), weights, numbers)
            counts_ = builder.insert_value(counts_, lanes, row)
        return counts_

    return counts(counts, weights, inputs, types.intp), generate


@intrinsic
def add_counts(typing: Any, sums: Any, counts: Any, factors: Any) -> Any:
    """To each sum, its counts times a factor for each lane."""

    def generate(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        sums_, counts, factors = args
        for row in range(sums.num_rows):
            floats = builder.sitofp(builder.extract_value(counts, row), _SUMS)
            lanes = _multiply_add(builder, floats, factors, builder.extract_value(sums_, row))
            sums_ = builder.insert_value(sums_, lanes, row)
        return sums_

    return sums(sums, counts, factors), generate


@intrinsic
def add_scaled(typing: Any, sums: Any, parts: Any, scales: Any, column: Any) -> Any:
    """To each sum, its part (a sum, or a count) times its row's number in this column of `scales` (num_rows, …)."""

    def generate(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        sums_, parts_, scales, column = args
        for row in range(sums.num_rows):
            part = builder.extract_value(parts_, row)
            if isinstance(parts, Counts):
                part = builder.sitofp(part, _SUMS)
            scale = _splat(builder, _element(ctx, builder, sig.args[2], scales, row, column))
            lanes = _multiply_add(builder, part, scale, builder.extract_value(sums_, row))
            sums_ = builder.insert_value(sums_, lanes, row)
        return sums_

    return sums(sums, parts, scales, types.intp), generate


@intrinsic
def store_totals(typing: Any, sums: Any, factor: Any, out: Any, column: Any) -> Any:
    """`factor` times the products, into this column of `out` (num_rows, N) float32."""

    def generate(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        sums_, factor, out, column = args
        kind = ir.FunctionType(_FLOAT, [_FLOAT, _SUMS])
        reduce = cgutils.get_or_insert_function(builder.module, kind, "llvm.vector.reduce.fadd.v16f32")
        for row in range(sums.num_rows):
            lanes = builder.extract_value(sums_, row)
            product = builder.call(reduce, [ir.Constant(_FLOAT, 0.0), lanes], fastmath=("reassoc",))
            place = _pointer(ctx, builder, sig.args[2], out, row, column)
            builder.store(builder.fmul(product, factor), place)
        return ctx.get_dummy_value()

    return types.none(sums, types.float32, out, types.intp), generate


def _dot_bf16(builder: Any, sums: Any, weights: Any, inputs: Any) -> Any:
    if "avx512bf16" in processor_features():
        bf16s = ir.VectorType(_BFloat(), 32)
        kind = ir.FunctionType(_SUMS, [_SUMS, bf16s, bf16s])
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        return builder.call(function, [sums, builder.bitcast(weights, bf16s), builder.bitcast(inputs, bf16s)])
    for half in (range(16), range(16, 32)):
        sums = _multiply_add(builder, _floats(builder, weights, half), _floats(builder, inputs, half), sums)
    return sums


def _floats(builder: Any, bits: Any, places: range) -> Any:
    """Sixteen of 32 bf16 as float32."""
    chosen = builder.shuffle_vector(bits, bits, ir.Constant(ir.VectorType(_I32, 16), list(places)))
    shifted = builder.shl(builder.zext(chosen, _COUNTS), ir.Constant(_COUNTS, [16] * 16))
    return builder.bitcast(shifted, _SUMS)


def _dot_bytes(builder: Any, counts: Any, weights: Any, inputs: Any) -> Any:
    if "avx512vnni" in processor_features():
        # LLVM has changed the types of this one's operands from vectors of 32 bits to vectors of bytes.
        operand = inputs.type if llvmlite.binding.llvm_version_info >= (22,) else _COUNTS
        kind = ir.FunctionType(_COUNTS, [_COUNTS, operand, operand])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpdpbusd.512")
        return builder.call(
            function, [counts, builder.bitcast(weights, operand), builder.bitcast(inputs, operand)]
        )
    for place in range(4):
        places = ir.Constant(ir.VectorType(_I32, NUM_LANES), list(range(place, RUN, 4)))
        left = builder.zext(builder.shuffle_vector(weights, weights, places), _COUNTS)
        right = builder.sext(builder.shuffle_vector(inputs, inputs, places), _COUNTS)
        counts = builder.add(counts, builder.mul(left, right))
    return counts


def _multiply_add(builder: Any, left: Any, right: Any, addend: Any) -> Any:
    kind = ir.FunctionType(_SUMS, [_SUMS, _SUMS, _SUMS])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.fmuladd.v16f32")
    return builder.call(function, [left, right, addend])


def _splat(builder: Any, scalar: Any, count: int = NUM_LANES) -> Any:
    single = builder.insert_element(ir.Constant(ir.VectorType(_FLOAT, count), ir.Undefined), scalar, _lane(0))
    return builder.shuffle_vector(single, single, ir.Constant(ir.VectorType(_I32, count), [0] * count))


def _lane(number: int) -> Any:
    return ir.Constant(_I32, number)


def _load(ctx: Any, builder: Any, sig: Any, args: Any, element: ir.Type, count: int) -> Any:
    array, offset = args
    data = ctx.make_array(sig.args[0])(ctx, builder, array).data
    return _load_at(builder, builder.gep(data, [offset]), element, count)


def _load_row(
    ctx: Any, builder: Any, kind: Any, rows: Any, row: int, offset: Any, element: ir.Type, count: int
) -> Any:
    return _load_at(builder, _pointer(ctx, builder, kind, rows, row, offset), element, count)


def _load_at(builder: Any, pointer: Any, element: ir.Type, count: int) -> Any:
    pointer = builder.bitcast(pointer, ir.VectorType(element, count).as_pointer())
    loaded = builder.load(pointer)
    loaded.align = 1
    return loaded


def _element(ctx: Any, builder: Any, kind: Any, rows: Any, row: int, column: Any) -> Any:
    return builder.load(_pointer(ctx, builder, kind, rows, row, column))


def _pointer(ctx: Any, builder: Any, kind: Any, rows: Any, row: int, column: Any) -> Any:
    """Where this element of a contiguous array of two dimensions is."""
    array = ctx.make_array(kind)(ctx, builder, rows)
    width = builder.extract_value(array.shape, 1)
    return builder.gep(array.data, [builder.add(builder.mul(width, ir.Constant(width.type, row)), column)])
