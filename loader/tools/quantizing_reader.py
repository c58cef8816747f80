"""Reads a checkpoint's matrices as the integers that they become: what `pack --quantize` encodes instead of them.

The pieces of a matrix are asked for in any stretches, by several threads, each stretch once. Rows are quantised when
their integers are read, and their scales and zeros kept until they are asked for; who asks for them waits for that.
Invariant: nobody waits for a job that comes later, for the integers lie before their scales.
Memory: the scales of matrices in work, and for each thread `READ_ELEMENTS` of the source and a few MiB.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..errors import CheckpointError, LoadCancelledError
from ..format.checkpoint import Checkpoint
from ..format.layout import Stretch
from ..format.manifest import DTYPE_BITS
from ..sources.base import Source
from .quantize import CHUNK_ELEMENTS, Quantized, first_unusable, quantize_int4, quantize_int8, to_float32
from .quantize_plan import Piece, QuantizedMatrix, QuantizePlan

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .quantize import Bits, Bytes, Floats

READ_ELEMENTS = 4 << 20  # of the source, at a time


@dataclass(slots=True)
class _Kept:
    """What is known of a matrix in work."""

    scale: Bits  # (rows, groups)
    zero: Bytes | None
    is_known: NDArray[np.bool_]  # of each row
    left_elements: int  # of all its pieces, to be asked for


class QuantizingReader:
    """Thread-safe."""

    def __init__(self, source: Source, checkpoint: Checkpoint, plan: QuantizePlan) -> None:
        self._source = source
        self._checkpoint = checkpoint
        self._pieces = plan.pieces
        self._kept: dict[str, _Kept] = {}
        self._changed = threading.Condition()
        self._is_stopped = False

    def __contains__(self, name: str) -> bool:
        return name in self._pieces

    def stop(self) -> None:
        """Make those who wait end with `LoadCancelledError`."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def read(self, stretch: Stretch, data: Bytes) -> None:
        """Fill `data` with a stretch of a piece. Raises `CheckpointError` naming a row with a number that is none, and
        the source's errors.
        """
        matrix, piece = self._pieces[stretch.tensor.name]
        kept = self._keep(matrix)
        row_elements = stretch.tensor.num_elements // matrix.rows
        begin, end = stretch.start // row_elements, -(-(stretch.start + stretch.count) // row_elements)
        if piece is Piece.WEIGHT:
            self._read_weight(matrix, kept, stretch, begin, end, data)
        else:
            self._wait(kept, begin, end)
            values = kept.scale if piece is Piece.SCALE else kept.zero
            assert values is not None  # or the matrix has no such piece
            first = stretch.start - begin * row_elements
            content = np.ascontiguousarray(values[begin:end]).reshape(-1)[first : first + stretch.count]
            data[:] = content.view(np.uint8)
        self._drop(matrix, kept, stretch.count)

    def _read_weight(
        self, matrix: QuantizedMatrix, kept: _Kept, stretch: Stretch, begin: int, end: int, data: Bytes
    ) -> None:
        row_bytes = stretch.tensor.size_bytes // matrix.rows
        step = max(1, CHUNK_ELEMENTS // matrix.columns)
        read_rows = max(1, READ_ELEMENTS // matrix.columns)
        dtype = self._checkpoint.tensors[matrix.name].entry.dtype
        for first in range(begin, end, read_rows):
            stored = self._read_rows(matrix, first, min(end, first + read_rows))
            for row in range(first, first + len(stored), step):
                some = stored[row - first : row - first + step]
                weights = to_float32(some.reshape(-1), dtype).reshape(len(some), matrix.columns)
                quantized = _quantize(matrix, weights, row)
                self._learn(kept, row, quantized)
                _copy_overlap(quantized.weight, row * row_bytes, data, stretch.offset_bytes)

    def _read_rows(self, matrix: QuantizedMatrix, begin: int, end: int) -> Bytes:
        """(end - begin, bytes of a row), as the checkpoint has them."""
        stored = self._checkpoint.tensors[matrix.name]
        shard = self._checkpoint.shards[stored.shard]
        row_bytes = matrix.columns * DTYPE_BITS[stored.entry.dtype] // 8
        rows = np.empty((end - begin, row_bytes), np.uint8)
        at = stored.entry.begin + begin * row_bytes
        self._source.read_into(shard.name, at, rows.reshape(-1).data, version=shard.version)
        return rows

    def _keep(self, matrix: QuantizedMatrix) -> _Kept:
        with self._changed:
            if matrix.name not in self._kept:
                shape = matrix.rows, matrix.groups
                num_elements = sum(rows * columns for _, _, (rows, columns) in matrix.pieces())
                self._kept[matrix.name] = _Kept(
                    np.zeros(shape, np.uint16),
                    np.zeros(shape, np.uint8) if matrix.has_zero else None,
                    np.zeros(matrix.rows, bool),
                    num_elements,
                )
            return self._kept[matrix.name]

    def _learn(self, kept: _Kept, row: int, quantized: Quantized) -> None:
        """What stands in a row does not depend on who reads it, so two threads may say it of the same."""
        rows = slice(row, row + len(quantized.weight))
        with self._changed:
            kept.scale[rows] = quantized.scale
            if kept.zero is not None and quantized.zero is not None:
                kept.zero[rows] = quantized.zero
            kept.is_known[rows] = True
            self._changed.notify_all()

    def _wait(self, kept: _Kept, begin: int, end: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or bool(kept.is_known[begin:end].all()))
            if self._is_stopped:
                raise LoadCancelledError("packing was stopped")

    def _drop(self, matrix: QuantizedMatrix, kept: _Kept, count: int) -> None:
        with self._changed:
            kept.left_elements -= count
            if kept.left_elements == 0:
                del self._kept[matrix.name]


def _quantize(matrix: QuantizedMatrix, weights: Floats, row: int) -> Quantized:
    bad = first_unusable(weights)
    if bad is not None:
        raise CheckpointError(
            f"tensor {matrix.name}, row {row + bad}: it holds a number that is no weight (NaN, infinite or huge)",
            where=matrix.name,
            hint="Is the model sound? Without --quantize it is packed as it is.",
        )
    if matrix.bits == 8:
        return quantize_int8(weights, matrix.group_size)
    return quantize_int4(weights, matrix.group_size, asymmetric=matrix.has_zero)


def _copy_overlap(rows: NDArray[np.generic], at: int, out: Bytes, out_at: int) -> None:
    """Copy the bytes of `rows`, which begin at byte `at` of their tensor, to where `out`, which begins at `out_at`,
    overlaps them.
    """
    data = rows.reshape(-1).view(np.uint8)
    begin, end = max(at, out_at), min(at + data.size, out_at + out.size)
    out[begin - out_at : end - out_at] = data[begin - at : end - at]
