"""One projection of a layer for a few rows: its tensors as arrays, and the kernels that multiply with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..models.converted import ConvertedLinear
from ..models.linear import Linear, Projection, SideBySide
from ..models.quantized import QuantizedLinear
from .compile import kind_of_int4, kind_of_int8
from .expand import expand_int4, expand_int8
from .products import HEIGHTS, INPUT_GROUP, MAX_HEIGHT, bf16_product, int4_product, int8_product
from .rows import quantise
from .vectors import RUN

BF16_RUN = 32
MAX_ROWS = 32  # beyond, torch's products of whole matrices are the faster ones


def padded(num_rows: int) -> int:
    """How many rows are computed for so many, up to MAX_ROWS: as many as a kernel takes, or as several of them do."""
    if num_rows > MAX_HEIGHT:
        return -(-num_rows // MAX_HEIGHT) * MAX_HEIGHT
    return next(height for height in HEIGHTS if height >= num_rows)


class NotCompiledError(Exception):
    """These kernels do not know such a layer; torch goes on computing it."""


def bits(tensor: torch.Tensor) -> np.ndarray:
    """The memory of a contiguous CPU tensor as an array: bf16 as uint16, everything else as what it is."""
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    return tensor.numpy()


@dataclass(slots=True)
class QuantisedInputs:
    """Room for the inputs of quantised weights, K numbers a row."""

    numbers: np.ndarray  # (MAX_ROWS, K) int8
    scales: np.ndarray  # (MAX_ROWS, K / INPUT_GROUP) float32
    totals: np.ndarray  # (MAX_ROWS, K / run) int32

    @classmethod
    def empty(cls, num_in: int, run: int) -> QuantisedInputs:
        return cls(
            np.zeros((MAX_ROWS, num_in), np.int8),
            np.zeros((MAX_ROWS, num_in // INPUT_GROUP), np.float32),
            np.zeros((MAX_ROWS, num_in // run), np.int32),
        )


@dataclass(slots=True)
class Scratch:
    """Memory that all layers share, since one computes at a time; by the sizes that they ask for."""

    kinds: set[str] = field(default_factory=set)  # of the products that they use, as `compile.py` names them
    _inputs: dict[tuple[int, int], QuantisedInputs] = field(default_factory=dict)
    _products: dict[int, np.ndarray] = field(default_factory=dict)
    _rows: dict[tuple[int, str], np.ndarray] = field(default_factory=dict)
    _expanded: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bfloat16))

    def inputs(self, num_in: int, run: int) -> QuantisedInputs:
        if (num_in, run) not in self._inputs:
            self._inputs[num_in, run] = QuantisedInputs.empty(num_in, run)
        return self._inputs[num_in, run]

    def expanded(self, num_rows: int, num_in: int) -> torch.Tensor:
        """(num_rows, num_in) bf16."""
        num_elements = num_rows * num_in
        if len(self._expanded) < num_elements:
            self._expanded = torch.empty(num_elements, dtype=torch.bfloat16)
        return self._expanded[:num_elements].view(num_rows, num_in)

    def product(self, num_out: int) -> np.ndarray:
        """(MAX_ROWS, num_out) float32."""
        if num_out not in self._products:
            self._products[num_out] = np.zeros((MAX_ROWS, num_out), np.float32)
        return self._products[num_out]

    def rows(self, width: int, purpose: str) -> np.ndarray:
        """(MAX_ROWS, width) uint16, not shared with another purpose."""
        if (width, purpose) not in self._rows:
            self._rows[width, purpose] = np.zeros((MAX_ROWS, width), np.uint16)
        return self._rows[width, purpose]


class CompiledProjection:
    """x (T, K) bf16 → x @ w.T in float32, without the bias, which whoever takes the product adds: `bias`."""

    __slots__ = ("_out", "_parts", "bias", "num_out", "quantised")

    def __init__(self, projection: Projection, scratch: Scratch) -> None:
        """Raises NotCompiledError when there is no kernel for such weights."""
        parts = _parts_of(projection)
        self._parts: list[tuple[_Bf16Part | _Int8Part | _Int4Part, int]] = []
        self.quantised = [part for part in parts if isinstance(part, QuantizedLinear)]
        first = 0
        for part in parts:
            self._parts.append((_compile(part, scratch), first))
            first += len(part.weight)
        self.num_out = first
        self._out = scratch.product(first)
        biases = [bits(part.bias.to(torch.bfloat16)) for part in parts if part.bias is not None]
        if biases and len(biases) < len(parts):
            raise NotCompiledError("there is no kernel for a bias that only some of the joined matrices have")
        self.bias = np.concatenate(biases) if biases else np.empty(0, np.uint16)

    def __call__(self, x: np.ndarray, num_rows: int) -> np.ndarray:
        """x (MAX_ROWS, K) uint16; (num_rows, num_out) float32, valid until somebody else asks for that many columns.
        `num_rows` is `padded`; what the rows beyond one's own hold does not matter.
        """
        out = self._out[:num_rows]
        height = min(num_rows, MAX_HEIGHT)
        for row in range(0, num_rows, height):
            for part, first in self._parts:
                part(x[row : row + height], out[row : row + height], first)
        return out


def _parts_of(projection: Projection) -> Sequence[Linear | QuantizedLinear]:
    """The matrices that make it up, their products joined."""
    if isinstance(projection, SideBySide):
        return [part for each in projection.parts for part in _parts_of(each)]
    if isinstance(projection, ConvertedLinear):
        parts = projection.plain_parts(torch.bfloat16)
        if parts is None:
            raise NotCompiledError("there are no kernels for columns in an order of their own")
        return parts
    if isinstance(projection, Linear | QuantizedLinear):
        return [projection]
    raise NotCompiledError(f"there is no kernel for {type(projection).__name__}")


def _compile(part: Any, scratch: Scratch) -> _Bf16Part | _Int8Part | _Int4Part:
    if (
        isinstance(part, Linear)
        and part.weight.dtype is torch.bfloat16
        and part.weight.shape[1] % BF16_RUN == 0
    ):
        scratch.kinds.add("bf16")
        return _Bf16Part(bits(part.weight))
    if isinstance(part, QuantizedLinear) and part.num_in % INPUT_GROUP == 0:
        if part.bits == 8 and part.zero is None and part.scale.shape[1] == 1:
            return _Int8Part(part, scratch)
        if part.bits == 4 and part.group_size % RUN == 0:
            return _Int4Part(part, scratch)
    raise NotCompiledError(f"there is no kernel for {type(part).__name__} of {part.weight.dtype}")


@dataclass(slots=True)
class _Bf16Part:
    weight: np.ndarray

    def __call__(self, x: np.ndarray, out: np.ndarray, first: int) -> None:
        bf16_product(len(x))(self.weight, x, out, first)


class _Int8Part:
    __slots__ = ("_inputs", "_scale", "_weight")

    def __init__(self, part: QuantizedLinear, scratch: Scratch) -> None:
        self._weight, self._scale = bits(part.weight), bits(part.scale)
        self._inputs = scratch.inputs(part.num_in, INPUT_GROUP)
        scratch.kinds.add(kind_of_int8(self._scale.dtype))

    def __call__(self, x: np.ndarray, out: np.ndarray, first: int) -> None:
        inputs = _quantised(x, self._inputs)
        int8_product(len(x))(self._weight, self._scale, *inputs, out, first)


class _Int4Part:
    __slots__ = ("_has_zeros", "_inputs", "_runs_a_group", "_scale", "_weight", "_zero")

    def __init__(self, part: QuantizedLinear, scratch: Scratch) -> None:
        self._weight, self._scale = bits(part.weight), bits(part.scale)
        self._has_zeros = part.zero is not None
        self._zero = bits(part.zero) if part.zero is not None else np.empty((0, 0), np.uint8)
        self._runs_a_group = part.group_size // RUN
        self._inputs = scratch.inputs(part.num_in, RUN)
        scratch.kinds.add(
            kind_of_int4(self._runs_a_group, has_zeros=self._has_zeros, scales=self._scale.dtype)
        )

    def __call__(self, x: np.ndarray, out: np.ndarray, first: int) -> None:
        inputs = _quantised(x, self._inputs)
        product = int4_product(len(x), self._runs_a_group, has_zeros=self._has_zeros)
        product(self._weight, self._scale, self._zero, *inputs, out, first)


def expander(part: QuantizedLinear, scratch: Scratch) -> Callable[[int, int], torch.Tensor]:
    """For `QuantizedLinear.expand`: rows of its weights as bf16, in memory that all of them share."""
    weight, scale = bits(part.weight), bits(part.scale)
    zero = bits(part.zero) if part.zero is not None else np.empty((0, 0), np.uint8)

    def expand(begin: int, end: int) -> torch.Tensor:
        out = scratch.expanded(end - begin, part.num_in)
        if part.bits == 8:
            expand_int8(weight[begin:end], scale[begin:end], bits(out))
        else:
            expand_int4(weight[begin:end], scale[begin:end], zero[begin:end], bits(out))
        return out

    return expand


def _quantised(x: np.ndarray, room: QuantisedInputs) -> Sequence[np.ndarray]:
    num_rows = len(x)
    inputs = room.numbers[:num_rows], room.scales[:num_rows], room.totals[:num_rows]
    quantise(x, *inputs)
    return inputs
