"""Products with the weights where the loader put them: bf16, fp32, fp16, or integers and fp8 with scales.

Every argument is checked here, since C trusts its caller. Results depend on no number of rows or threads. Calls drop
the GIL.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from ....loader.native.library import fields
from . import arrays
from .arrays import NativeDType

if TYPE_CHECKING:
    from ....loader.native.library import Library
    from .arrays import Array

_GROUP_STEP = 32
_RUN = 64  # columns of 4 bits whose bytes lie together
_ZERO_RANGE = (-129, 128)  # of I16: less one of these, 8 bits are still exact as bf16
_E2M1_GROUP = 32  # columns that share a scale
_FLOATS = (NativeDType.F32, NativeDType.BF16, NativeDType.F16)
_CODES = {"nf4": NativeDType.NF4, "fp4": NativeDType.FP4}


class MatrixRecord(ctypes.Structure):
    """`tn_matrix` of core.h."""

    _fields_ = (
        *fields(ctypes.c_void_p, "data scale zero bias"),
        *fields(ctypes.c_int64, "num_out num_in group_size scale_rows"),
        *fields(ctypes.c_int32, "dtype scale_dtype bias_dtype row_step"),
    )


class LinearArgs(ctypes.Structure):
    """`tn_linear_args` of core.h."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("weight", ctypes.POINTER(MatrixRecord)),
        *fields(ctypes.c_void_p, "x out"),
        *fields(ctypes.c_int64, "num_rows x_stride out_stride"),
        *fields(ctypes.c_int32, "x_dtype out_dtype"),
        ("packed", ctypes.c_void_p),
    )


def is_group_count(num_groups: int, columns: int) -> bool:
    """True if the core takes rows cut into that many groups."""
    if num_groups < 1 or columns % num_groups:
        return False
    return num_groups == 1 or columns // num_groups % _GROUP_STEP == 0


class Weight:
    """Weights w (num_out, num_in) of x @ w.T + bias, with the record of addresses that the core reads.

    Keeps the arrays. They may still be without content, but for an int16 `zero`, whose values are checked.
    """

    __slots__ = ("_arrays", "_codes", "_float8_block", "num_in", "num_out", "record")

    def __init__(
        self,
        data: Array,
        *,
        scale: Array | None = None,
        zero: Array | None = None,
        bias: Array | None = None,
        float8_block: tuple[int, int] | None = None,
        codes: str | None = None,
    ) -> None:
        """`data`: (N, K) float32, uint16 (bf16), float16 or int8, or (N, K / 2) uint8 of two numbers each.

        Or blocks of a GGUF file, (N, blocks, bytes of one) uint8. `scale`: (N, groups) of integers; `zero` likewise,
        uint8 with 4 bits and int16 with 8; `bias`: (N,). With scales of uint8 the numbers are MXFP4's, and rows of
        data, scale and bias may lie equally far apart. With `float8_block`, the rows and columns that share a scale,
        `data` are E4M3 as uint8 (N, K), and `scale` has one for each block, also for those that the edges cut. With
        `codes`, "nf4" or "fp4", `data` are these of bitsandbytes, (N, K / 2) uint8.
        Raises `ValueError` for what the core does not take.
        """
        if data.ndim not in (2, 3) or 0 in data.shape:
            raise ValueError(f"weights must be (num_out, num_in), not {data.shape}")
        if float8_block is not None and data.ndim == 2 and arrays.dtype_of(data) is NativeDType.U8:
            dtype, self.num_in = NativeDType.E4M3, int(data.shape[1])
        elif codes is not None and data.ndim == 2 and arrays.dtype_of(data) is NativeDType.U8:
            dtype, self.num_in = _CODES[codes], 2 * int(data.shape[1])
        else:
            dtype, self.num_in = arrays.block_columns(data) if data.ndim == 3 else _elements(data, scale)
        self.num_out = int(data.shape[0])
        self._arrays = (data, scale, zero, bias)
        self._float8_block = float8_block
        self._codes = codes
        if dtype is NativeDType.E2M1:
            row_step = _row_step(data, scale, bias)
        else:
            row_step = 0
            for array, what in zip(self._arrays, ("weights", "scale", "zero", "bias"), strict=True):
                if array is not None:
                    arrays.check_contiguous(array, what)
        if bias is not None and (bias.shape != (self.num_out,) or arrays.dtype_of(bias) not in _FLOATS):
            raise ValueError(f"bias must be ({self.num_out},) floats, not {bias.shape} {bias.dtype}")
        self.record = MatrixRecord(
            data=arrays.address(data),
            scale=arrays.address_or_null(scale),
            zero=arrays.address_or_null(zero),
            bias=arrays.address_or_null(bias),
            num_out=self.num_out,
            num_in=self.num_in,
            group_size=self._check_groups(dtype, scale, zero)
            if float8_block is None
            else self._check_float8(float8_block, scale),
            scale_rows=0 if float8_block is None else float8_block[0],
            dtype=dtype,
            scale_dtype=_scale_dtype(dtype, scale),
            row_step=row_step,
            bias_dtype=0 if bias is None else arrays.dtype_of(bias),
        )

    def rows(self, first: int, end: int) -> Weight:
        """Some of these rows, as views; scales that rows of fp8 share, which must be there, are copied."""
        data, scale, zero, bias = (None if each is None else each[first:end] for each in self._arrays)
        assert data is not None
        block = self._float8_block
        if block is not None:  # the rows may begin within a block
            every = self._arrays[1]
            assert every is not None
            scale, block = every[np.arange(first, end) // block[0]], (1, block[1])
        return Weight(data, scale=scale, zero=zero, bias=bias, float8_block=block, codes=self._codes)

    def _check_groups(self, dtype: NativeDType, scale: Array | None, zero: Array | None) -> int:
        """The group size, 0 for floats."""
        is_codes = dtype in _CODES.values()
        if dtype in _FLOATS or (dtype >= NativeDType.Q4_K and not is_codes):
            if scale is not None or zero is not None:
                raise ValueError("floats and blocks have no scales and no zeros of their own")
            return 0
        if dtype is NativeDType.E2M1:
            if scale is None or scale.shape != (self.num_out, self.num_in // _E2M1_GROUP) or zero is not None:
                raise ValueError(
                    f"MXFP4 needs a scale for each {_E2M1_GROUP} of {self.num_in} columns, and no zeros"
                )
            if self.num_in % _E2M1_GROUP:
                raise ValueError(f"rows of MXFP4 must be a multiple of {_E2M1_GROUP}, not {self.num_in}")
            return _E2M1_GROUP
        if (dtype is NativeDType.U4 or is_codes) and self.num_in % _RUN:
            raise ValueError(f"rows of 4 bits must be a multiple of {_RUN}, not {self.num_in}")
        if scale is None or scale.ndim != 2 or len(scale) != self.num_out or not scale.shape[1]:
            raise ValueError(f"integers need scales of ({self.num_out}, groups)")
        if arrays.dtype_of(scale) not in (NativeDType.F32, NativeDType.BF16, NativeDType.F16):
            raise ValueError(f"scales must be fp32, bf16 or fp16, not {scale.dtype}")
        if not is_group_count(scale.shape[1], self.num_in):
            raise ValueError(
                f"groups must be a multiple of {_GROUP_STEP} columns or a whole row: {scale.shape[1]} groups of "
                f"{self.num_in} columns"
            )
        if is_codes and (zero is not None or self.num_in // scale.shape[1] % _RUN):
            raise ValueError(f"groups of codes must be a multiple of {_RUN} columns, and have no zeros")
        if zero is not None:
            self._check_zero(dtype, scale, zero)
        return self.num_in // int(scale.shape[1])

    def _check_float8(self, block: tuple[int, int], scale: Array | None) -> int:
        """The group size."""
        rows, columns = block
        expected = -(-self.num_out // rows), -(-self.num_in // columns)
        if scale is None or scale.shape != expected or arrays.dtype_of(scale) not in _FLOATS:
            raise ValueError(f"fp8 in blocks of {block} needs {expected} scales in fp32, bf16 or fp16")
        if columns % _GROUP_STEP and columns < self.num_in:
            raise ValueError(f"blocks of fp8 must have a multiple of {_GROUP_STEP} columns, not {columns}")
        return min(columns, self.num_in)

    def _check_zero(self, dtype: NativeDType, scale: Array, zero: Array) -> None:
        expected = NativeDType.U8 if dtype is NativeDType.U4 else NativeDType.I16
        if zero.shape != scale.shape or arrays.dtype_of(zero) is not expected:
            raise ValueError(f"zeros must be {scale.shape} {expected.name}, not {zero.shape} {zero.dtype}")
        least, most = _ZERO_RANGE
        if expected is NativeDType.I16 and not (least <= int(zero.min()) and int(zero.max()) <= most):
            raise ValueError(f"zeros of 8 bits must be from {least} to {most}")


def _elements(data: Array, scale: Array | None) -> tuple[NativeDType, int]:
    """The dtype of (num_out, …) elements, and their number in a row."""
    dtype, num = arrays.dtype_of(data), int(data.shape[1])
    if dtype is NativeDType.U8:
        is_e2m1 = scale is not None and arrays.dtype_of(scale) is NativeDType.U8
        return NativeDType.E2M1 if is_e2m1 else NativeDType.U4, 2 * num
    if dtype not in (*_FLOATS, NativeDType.I8):
        raise ValueError(f"no product with weights of {data.dtype}")
    return dtype, num


def _scale_dtype(dtype: NativeDType, scale: Array | None) -> NativeDType:
    if scale is None:
        return NativeDType.F32  # not looked at
    return NativeDType.E8M0 if dtype is NativeDType.E2M1 else arrays.dtype_of(scale)


def _row_step(data: Array, scale: Array | None, bias: Array | None) -> int:
    """From one row to the next, in rows: the same in all of them. Raises `ValueError` where they differ."""
    steps = {arrays.row_stride(each, "rows") / each.shape[1] for each in (data, scale) if each is not None}
    if bias is not None:
        steps.add(bias.strides[0] / bias.itemsize if bias.ndim == 1 else 0)
    step = steps.pop()
    if steps or step != int(step):
        raise ValueError("rows of MXFP4, its scales and its bias must lie equally far apart")
    return int(step)


class Products:
    """`tn_linear` of one library."""

    __slots__ = ("_linear", "_scratch_bytes")

    def __init__(self, library: Library) -> None:
        """Raises `NativeLibraryError` where the library was built from other declarations."""
        library.check_struct("tn_matrix", MatrixRecord)
        library.check_struct("tn_linear_args", LinearArgs)
        self._linear = library.functions.tn_linear
        self._linear.argtypes = [ctypes.POINTER(LinearArgs)]
        self._scratch_bytes = library.functions.tn_linear_scratch_bytes
        self._scratch_bytes.argtypes = [ctypes.POINTER(LinearArgs)]
        self._scratch_bytes.restype = ctypes.c_int64

    def linear(self, x: Array, weight: Weight, out: Array) -> Array:
        """out = x @ w.T + bias: x (T, K) and out (T, N), each float32 or uint16 (bf16); returns `out`.

        Sums are fp32, rounded once where `out` is bf16. `out` may not overlap x. Raises `ValueError` for other shapes
        and dtypes.
        """
        _check_rows(x, weight.num_in, "x")
        _check_rows(out, weight.num_out, "out")
        if len(x) != len(out):
            raise ValueError(f"x has {len(x)} rows, and out {len(out)}")
        if not out.flags.writeable or np.may_share_memory(x, out):
            raise ValueError("out must be writable, and apart from x")
        if not len(x):
            return out
        args = LinearArgs(
            size=ctypes.sizeof(LinearArgs),
            weight=ctypes.pointer(weight.record),
            x=arrays.address(x),
            out=arrays.address(out),
            num_rows=len(x),
            x_stride=arrays.row_stride(x, "x"),
            out_stride=arrays.row_stride(out, "out"),
            x_dtype=arrays.dtype_of(x),
            out_dtype=arrays.dtype_of(out),
        )
        scratch = arrays.NativeScratch()
        if scratch_bytes := int(self._scratch_bytes(ctypes.byref(args))):
            args.packed = scratch.address_of(scratch_bytes)
        status = self._linear(ctypes.byref(args))
        assert status == 0, f"tn_linear refused: {status}"
        return out


def _check_rows(array: Array, num_columns: int, what: str) -> None:
    if array.ndim != 2 or array.shape[1] != num_columns:
        raise ValueError(f"{what} must be (rows, {num_columns}), not {array.shape}")
    if arrays.dtype_of(array) not in (NativeDType.F32, NativeDType.BF16) or not array.flags.aligned:
        raise ValueError(f"{what} must be aligned fp32 or bf16 (as uint16), not {array.dtype}")
