"""Element types of a model's tensors, with safetensors' names.

numpy has no bfloat16: BF16 numbers are held as their 16 bits, in uint16. So a type is always passed
together with an array and never inferred from it.
"""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import numpy.typing as npt


class DType(enum.StrEnum):
    """The types that models are stored or computed in."""

    BF16 = "BF16"
    F16 = "F16"
    F32 = "F32"
    F64 = "F64"
    I8 = "I8"
    U8 = "U8"
    I16 = "I16"
    U16 = "U16"
    I32 = "I32"
    U32 = "U32"
    I64 = "I64"
    U64 = "U64"
    BOOL = "BOOL"
    F8_E4M3 = "F8_E4M3"
    F8_E5M2 = "F8_E5M2"

    @property
    def numpy(self) -> np.dtype[Any]:
        """The numpy dtype that holds it."""
        return _NUMPY[self]

    @property
    def size_bytes(self) -> int:
        return _NUMPY[self].itemsize

    @property
    def label(self) -> str:
        """The name used by people and config.json: "bfloat16", "float32"."""
        return _LABELS.get(self, self.numpy.name)

    @classmethod
    def of_label(cls, label: str) -> DType:
        """The reverse of `label`. Raises `ValueError` for an unknown name."""
        for dtype in cls:
            if dtype.label == label:
                return dtype
        raise ValueError(label)


_NUMPY: dict[DType, np.dtype[Any]] = {
    DType.BF16: np.dtype(np.uint16),
    DType.F16: np.dtype(np.float16),
    DType.F32: np.dtype(np.float32),
    DType.F64: np.dtype(np.float64),
    DType.I8: np.dtype(np.int8),
    DType.U8: np.dtype(np.uint8),
    DType.I16: np.dtype(np.int16),
    DType.U16: np.dtype(np.uint16),
    DType.I32: np.dtype(np.int32),
    DType.U32: np.dtype(np.uint32),
    DType.I64: np.dtype(np.int64),
    DType.U64: np.dtype(np.uint64),
    DType.BOOL: np.dtype(np.bool_),
    # numpy has only the bits of these, too.
    DType.F8_E4M3: np.dtype(np.uint8),
    DType.F8_E5M2: np.dtype(np.uint8),
}
_LABELS = {DType.BF16: "bfloat16", DType.F8_E4M3: "float8_e4m3fn", DType.F8_E5M2: "float8_e5m2"}


def to_float32(array: npt.NDArray[Any], dtype: DType) -> npt.NDArray[np.float32]:
    """The same numbers in fp32, exactly where `dtype` is BF16, F16 or F32; a new array unless it is F32."""
    if dtype is DType.BF16:
        wide: npt.NDArray[np.float32] = (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return wide
    return array.astype(np.float32, copy=False)


def from_float32(array: npt.NDArray[np.float32], dtype: DType) -> npt.NDArray[Any]:
    """fp32 numbers in `dtype`, rounded to nearest, ties to even; NaN stays NaN."""
    if dtype is not DType.BF16:
        with np.errstate(over="ignore"):
            return array.astype(dtype.numpy, copy=False)
    bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    half: npt.NDArray[np.uint16] = rounded.astype(np.uint16)
    is_nan = np.isnan(array)
    if is_nan.any():
        half[is_nan] = 0x7FC0
    return half
