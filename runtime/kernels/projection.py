"""One projection of a layer for a few rows: its tensors, and the room that it computes in, as a record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..models.converted import ConvertedLinear
from ..models.linear import Linear, Projection, SideBySide
from ..models.quantized import QuantizedLinear
from . import records
from .expand import expand_int4, expand_int8
from .products import INPUT_GROUP
from .records import MAX_PARTS, MAX_ROWS, PART_FIELDS, PROJECTION_FIELDS
from .vectors import RUN

BF16_RUN = 32
CACHE_LINE_BYTES = 64


class NotCompiledError(Exception):
    """These kernels do not know such a layer; torch goes on computing it."""


def bits(tensor: torch.Tensor) -> np.ndarray:
    """The memory of a contiguous CPU tensor as an array: bf16 as uint16, everything else as what it is."""
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    return tensor.numpy()


def _room(width: int, dtype: type[np.generic]) -> np.ndarray:
    """(MAX_ROWS, width) zeros that begin where a cache line does: a vector that lies in two of them takes two loads."""
    size = MAX_ROWS * width
    memory = np.zeros(size + CACHE_LINE_BYTES, dtype)
    first = -memory.ctypes.data % CACHE_LINE_BYTES // memory.itemsize
    return memory[first : first + size].reshape(MAX_ROWS, width)


@dataclass(slots=True)
class QuantisedInputs:
    """Room for the inputs of quantised weights, K numbers a row."""

    numbers: np.ndarray  # (MAX_ROWS, K) int8
    scales: np.ndarray  # (MAX_ROWS, K / INPUT_GROUP) float32
    totals: np.ndarray  # (MAX_ROWS, K / run) int32

    @classmethod
    def empty(cls, num_in: int, run: int) -> QuantisedInputs:
        return cls(
            _room(num_in, np.int8), _room(num_in // INPUT_GROUP, np.float32), _room(num_in // run, np.int32)
        )


@dataclass(slots=True)
class Scratch:
    """Memory that all layers share, since one computes at a time; by the sizes that they ask for."""

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
            self._products[num_out] = _room(num_out, np.float32)
        return self._products[num_out]

    def rows(self, width: int, purpose: str) -> np.ndarray:
        """(MAX_ROWS, width) uint16, not shared with another purpose."""
        if (width, purpose) not in self._rows:
            self._rows[width, purpose] = _room(width, np.uint16)
        return self._rows[width, purpose]


class CompiledProjection:
    """x (T, K) bf16 → x @ w.T in float32, without the bias, which whoever takes the product adds: its record."""

    __slots__ = ("_held", "out", "quantised", "record")

    def __init__(self, projection: Projection, inputs: np.ndarray, scratch: Scratch) -> None:
        """`inputs` (MAX_ROWS, K) uint16 is where x will be. Raises NotCompiledError when there is no kernel for such
        weights.
        """
        parts = _parts_of(projection)
        if len(parts) > MAX_PARTS:
            raise NotCompiledError(f"there is no kernel for {len(parts)} matrices side by side")
        self.quantised = [part for part in parts if isinstance(part, QuantizedLinear)]
        self.record = np.zeros(PROJECTION_FIELDS, np.int64)
        self._held: list[np.ndarray] = [inputs]  # what the record points to
        record, num_out = self.record, 0
        for number, part in enumerate(parts):
            begin = records.FIRST_PART + number * PART_FIELDS
            record[begin : begin + PART_FIELDS] = self._part(part, num_out)
            num_out += len(part.weight)
        self.out = scratch.product(
            num_out
        )  # (MAX_ROWS, num_out) float32, until somebody else computes as many
        record[records.NUM_PARTS], record[records.NUM_OUT] = len(parts), num_out
        record[records.NUM_IN] = num_in = inputs.shape[1]
        record[records.INPUT], record[records.OUT] = self._hold(inputs), self._hold(self.out)
        biases = [bits(part.bias.to(torch.bfloat16)) for part in parts if part.bias is not None]
        if biases and len(biases) < len(parts):
            raise NotCompiledError("there is no kernel for a bias that only some of the joined matrices have")
        if biases:
            record[records.BIAS] = self._hold(np.concatenate(biases))
        self._make_room(scratch, num_in)

    def _make_room(self, scratch: Scratch, num_in: int) -> None:
        """For quantised inputs, where one of the parts has quantised weights: of one kind, then."""
        runs = {RUN if part.bits == 4 else INPUT_GROUP for part in self.quantised}
        if len(runs) > 1:
            raise NotCompiledError("there is no kernel for int8 and int4 side by side")
        for run in runs:
            room = scratch.inputs(num_in, run)
            self.record[records.RUN_SIZE] = run
            for place, array in (
                (records.NUMBERS, room.numbers),
                (records.SCALES, room.scales),
                (records.TOTALS, room.totals),
            ):
                self.record[place] = self._hold(array)

    def _part(self, part: Linear | QuantizedLinear, first: int) -> list[int]:
        """The fields of a part, in their order."""
        rows = len(part.weight)
        weight = self._hold(bits(part.weight))
        if isinstance(part, Linear):
            if part.weight.dtype is torch.bfloat16 and part.weight.shape[1] % BF16_RUN == 0:
                return [records.BF16, first, rows, weight, 0, 0, 0, 0]
        elif part.num_in % INPUT_GROUP == 0:
            scale = bits(part.scale)
            big = int(scale.dtype == np.float32)
            if part.bits == 8 and part.zero is None and part.scale.shape[1] == 1:
                return [records.INT8, first, rows, weight, self._hold(scale), 0, big, 0]
            runs_a_group = part.group_size // RUN
            if part.bits == 4 and part.group_size % RUN == 0 and runs_a_group.bit_count() == 1:
                zero = 0 if part.zero is None else self._hold(bits(part.zero))
                shift = runs_a_group.bit_length() - 1
                return [records.INT4, first, rows, weight, self._hold(scale), zero, big, shift]
        raise NotCompiledError(f"there is no kernel for {type(part).__name__} of {part.weight.dtype}")

    def _hold(self, array: np.ndarray) -> int:
        """The array's address, good for as long as this is there."""
        assert array.flags.c_contiguous
        self._held.append(array)
        return array.ctypes.data


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
