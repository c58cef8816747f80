"""The bytes of a GGUF file, made again from the values that a load has made of it: for its SHA-256.

    head              tensors, one after the other
    hashed as it      rows restored from their loaded pieces, where these hold every bit; else kept
    was parsed        since they were read, or read again and compared with the pieces

So what is hashed is what was loaded, and next to nothing is read twice: F32 biases that have become
bf16 are kept, as they are small. It does not know what a load is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...errors import IntegrityError
from ...sources.base import ObjectInfo, Source
from ..safetensors import TensorEntry
from .conversion import (
    is_reversible,
    lies_in_the_file,
    made_of,
    made_of_latents,
    restored_from,
    row_bytes,
)
from .model import TensorPiece
from .reader import GgufFile, GgufTensor

if TYPE_CHECKING:
    import hashlib

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

Values = Callable[[int, int], Iterator[memoryview]]  # bytes [begin, end) of model.safetensors, as they come

MAX_KEPT_BYTES = 8 << 20
MAX_KEPT_TENSOR_BYTES = 1 << 20
MAX_AGAIN_SHARE = 1 / 8  # of a file, that is read again; more is not worth it
_STEP_BYTES = 1 << 20


class _Span(NamedTuple):
    """A tensor of the file, or an expert's share of one, and the pieces that were made of it."""

    tensor: GgufTensor
    pieces: tuple[TensorPiece, ...]  # none: it became a setting
    entries: tuple[TensorEntry, ...]  # of the pieces in model.safetensors

    @property
    def is_lost(self) -> bool:
        """True if the pieces do not hold all of it."""
        return not self.pieces or not is_reversible(self.pieces)


class OriginalBytes:
    """The bytes of one file whose store states its SHA-256. Thread-safe."""

    def __init__(self, source: Source, info: ObjectInfo, file: GgufFile) -> None:
        self._source, self._info, self._head = source, info, file.head
        self._spans = {tensor.begin: _Span(tensor, (), ()) for tensor in file.tensors.values()}
        self._kept: dict[int, Bytes] = {}  # by their tensors' begins
        self._kept_bytes = 0

    def set_pieces(self, pieces: Iterable[tuple[TensorEntry, TensorPiece]]) -> None:
        """The tensors of model.safetensors, and what each is made of. Called once."""
        for entry, piece in pieces:
            for tensor in (piece.source, piece.values):
                if tensor is not None:
                    of_it = self._spans.get(tensor.begin)
                    known = of_it if of_it is not None and of_it.pieces else _Span(tensor, (), ())
                    span = _Span(tensor, (*known.pieces, piece), (*known.entries, entry))
                    self._spans[tensor.begin] = span

    @property
    def sha256(self) -> bytes | None:
        """The digest that the store states; None where it states none, or too much would be read again."""
        sizes = (span.tensor.size_bytes for span in self._spans.values() if span.is_lost)
        again_bytes = sum(size_bytes for size_bytes in sizes if size_bytes > MAX_KEPT_TENSOR_BYTES)
        return self._info.sha256 if again_bytes <= MAX_AGAIN_SHARE * self._info.size_bytes else None

    def keep(self, tensor: GgufTensor, rows: Bytes) -> None:
        """Take note of all rows of a tensor, as they were read; of one that its pieces hold, not."""
        if (
            self._info.sha256 is not None
            and self._spans[tensor.begin].is_lost
            and rows.nbytes <= min(MAX_KEPT_TENSOR_BYTES, MAX_KEPT_BYTES - self._kept_bytes)
        ):
            self._kept[tensor.begin] = rows
            self._kept_bytes = sum(each.nbytes for each in list(self._kept.values()))

    def begin(self) -> hashlib._Hash:
        """The SHA-256 of the head, to be continued with what `after_head` gives."""
        assert self._head is not None
        return self._head.sha256.copy()

    def after_head(self, values: Values) -> Iterator[memoryview]:
        """The bytes behind the head, in order. Blocks as `values` does. Raises its errors, the source's, and
        `IntegrityError` where a tensor is another one when it is read again.
        """
        assert self._head is not None
        position = self._head.size_bytes
        for _, span in sorted(self._spans.items()):
            yield from self._read(position, span.tensor.begin)
            yield from self._tensor(span, values)
            self._kept.pop(span.tensor.begin, None)
            position = span.tensor.begin + span.tensor.size_bytes
        yield from self._read(position, self._info.size_bytes)

    def _tensor(self, span: _Span, values: Values) -> Iterator[memoryview]:
        tensor = span.tensor
        if not span.pieces:
            yield from self._rows(tensor, 0, tensor.num_rows)
            return
        if lies_in_the_file(span.pieces[0]):
            yield from values(span.entries[0].begin, span.entries[0].end)
            return
        if span.pieces[0].values is not None:
            yield from self._latents(tensor, span.pieces[0], span.entries[0], values)
            return
        unit = span.pieces[0].head_rows or 1
        step = max(1, _STEP_BYTES // tensor.row_bytes // unit) * unit
        for first in range(0, tensor.num_rows, step):
            stop = min(tensor.num_rows, first + step)
            loaded = [
                _joined(values(entry.begin + first * row_bytes(piece), entry.begin + stop * row_bytes(piece)))
                for piece, entry in zip(span.pieces, span.entries, strict=True)
            ]
            if not span.is_lost:
                yield restored_from(span.pieces, loaded).reshape(-1).data
                continue
            stored = _joined(self._rows(tensor, first, stop)).reshape(stop - first, -1)
            for piece, own in zip(span.pieces, loaded, strict=True):
                if not np.array_equal(made_of(piece, stored), own):
                    raise self._differs(tensor)
            yield stored.reshape(-1).data

    def _latents(
        self, tensor: GgufTensor, piece: TensorPiece, entry: TensorEntry, values: Values
    ) -> Iterator[memoryview]:
        """The matrices for keys or those for values of a piece that has both, some heads at a time."""
        num_heads, per_head = tensor.shape[:2]
        head_bytes = (entry.end - entry.begin) // num_heads
        step = max(1, _STEP_BYTES // head_bytes)
        for first in range(0, num_heads, step):
            stop = min(num_heads, first + step)
            loaded = _joined(values(entry.begin + first * head_bytes, entry.begin + stop * head_bytes))
            stored = _joined(self._rows(tensor, first * per_head, stop * per_head))
            made = made_of_latents(piece, tensor, stored)
            heads = loaded.reshape(stop - first, -1, made.shape[2])
            rows = made.shape[1]
            if not np.array_equal(heads[:, :rows] if tensor is piece.source else heads[:, -rows:], made):
                raise self._differs(tensor)
            yield stored.data

    def _differs(self, tensor: GgufTensor) -> IntegrityError:
        where = f"{tensor.name} in {self._source.url}/{self._info.name}"
        return IntegrityError(
            f"{where} differs in two reads", where=where, hint="Start again: the store is at fault."
        )

    def _rows(self, tensor: GgufTensor, first: int, stop: int) -> Iterator[memoryview]:
        """Rows as the file has them: kept, or read again."""
        kept = self._kept.get(tensor.begin)
        if kept is not None:
            yield kept.reshape(tensor.num_rows, -1)[first:stop].reshape(-1).data
        else:
            begin = tensor.begin + first * tensor.row_bytes
            yield from self._read(begin, begin + (stop - first) * tensor.row_bytes)

    def _read(self, begin: int, end: int) -> Iterator[memoryview]:
        for start in range(begin, end, _STEP_BYTES):
            buffer = memoryview(bytearray(min(end - start, _STEP_BYTES)))
            self._source.read_into(self._info.name, start, buffer, version=self._info.version)
            yield buffer


def _joined(pieces: Iterable[memoryview]) -> Bytes:
    return np.concatenate([np.frombuffer(piece, np.uint8) for piece in pieces])
