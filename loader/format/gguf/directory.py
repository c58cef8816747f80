"""A GGUF file as a model directory: a `Source` with config.json, the tokenizer's files and
model.safetensors.

Nothing is written anywhere: a range of model.safetensors is made from the blocks behind it when it
is read, some rows at a time, so that memory is bounded whatever the file's size, and whatever
packs, inspects or serves a model directory takes a GGUF file from any kind of store. The bytes
depend only on the file.
"""

from __future__ import annotations

import json
import math
import threading
from bisect import bisect_right
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...errors import FormatError, NotFoundError
from ...sources.base import ObjectInfo, Remote, Source, check_name
from ..safetensors import TensorEntry, make_header
from .conversion import floats_of, lies_in_the_file, made_of, made_of_latents, row_bytes
from .fields import GgufFields
from .model import GgufModel, Keeps, TensorPiece, describe_model
from .original import OriginalBytes
from .reader import GgufTensor, read_gguf
from .tokenizer import tokenizer_files

if TYPE_CHECKING:
    import hashlib

    from numpy.typing import NDArray

    from .original import Values

    Bytes = NDArray[np.uint8]

WEIGHTS_NAME = "model.safetensors"
CONFIG_NAME = "config.json"

_READ_ELEMENTS = 4 << 20  # of a tensor, in one request
_STEP_ELEMENTS = 1 << 16  # worked on at a time: with what comes of them they fit in a core's cache


class _Content(NamedTuple):
    info: ObjectInfo  # of the GGUF file
    model: GgufModel
    files: dict[str, bytes]
    header: bytes  # of model.safetensors
    entries: tuple[TensorEntry, ...]  # in the order of their bytes
    pieces: tuple[TensorPiece, ...]  # of the entries
    size_bytes: int  # of model.safetensors
    original: OriginalBytes
    sha256: bytes | None  # of the GGUF file, where it can be compared with what is made of it


class GgufDirectory:
    """The file `name` of `source`, or the one of a `quantisation`, which is closed with it. Reads
    nothing before it is asked for something.

    `keeps` says what of the file stays as it is.
    """

    def __init__(
        self, source: Source, name: str, *, quantisation: str = "", keeps: Keeps = Keeps.BLOCKS
    ) -> None:
        """With a `quantisation`, the `name` is not known yet: ''."""
        self._source = source
        self._name = name if quantisation else check_name(name)
        self._quantisation = quantisation
        self._keeps = keeps
        self._known: _Content | None = None
        self._opening = threading.Lock()
        if isinstance(source, Remote):  # then this is one, too
            self.quiesce = source.quiesce

    @property
    def url(self) -> str:
        return f"{self._source.url.rstrip('/')}/{self._name}".rstrip("/")

    def conversions(self) -> tuple[str, ...]:
        """The conversion of each type of block, a line each. Raises `CheckpointError` for a file
        that is refused.
        """
        return self._open().model.conversions

    @property
    def wire_share(self) -> float:
        """Bytes of the file that are read for one byte of model.safetensors. Raises as `conversions`."""
        content = self._open()
        sources = [tensor for piece in content.pieces for tensor in (piece.source, piece.values) if tensor]
        read_bytes = sum(tensor.num_rows * tensor.row_bytes for tensor in sources)
        return read_bytes / content.size_bytes

    def file_bytes(self) -> int:
        """The size of the GGUF file. Raises as `conversions`."""
        return self._open().info.size_bytes

    def stat(self, name: str) -> ObjectInfo:
        content = self._open()
        if name == WEIGHTS_NAME:
            return ObjectInfo(name, content.size_bytes, content.info.version, sha256=content.sha256)
        if name not in content.files:
            raise NotFoundError(f"{self.url} gives no {name}", source=self.url, name=name)
        return ObjectInfo(name, len(content.files[name]), content.info.version)

    def read(self, name: str, *, max_bytes: int) -> tuple[bytes, ObjectInfo]:
        info = self.stat(name)
        if info.size_bytes > max_bytes:
            raise FormatError(f"{name} has {info.size_bytes} bytes, of {max_bytes} allowed", where=name)
        data = bytearray(info.size_bytes)
        self.read_into(name, 0, memoryview(data))
        return bytes(data), info

    def read_into(
        self, name: str, start: int, buffer: memoryview, *, version: str | None = None
    ) -> str | None:
        content = self._open()
        info = self.stat(name)
        if version not in (None, info.version) or start + len(buffer) > info.size_bytes:
            from ...errors import ChangedError

            raise ChangedError(f"{self.url} is another file by now", source=self.url, name=self._name)
        if name in content.files:
            buffer[:] = content.files[name][start : start + len(buffer)]
        else:
            self._read_weights(content, start, np.frombuffer(buffer, np.uint8))
        return info.version

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        names = sorted((*self._open().files, WEIGHTS_NAME))
        return (self.stat(name) for name in names if name.startswith(prefix))

    def stored_file(self) -> tuple[Source, ObjectInfo]:
        """See `sources.base.Converted`."""
        return self._source, self._open().info

    def original(self, values: Values) -> tuple[hashlib._Hash, Iterator[memoryview]]:
        """See `sources.base.Converted`."""
        original = self._open().original
        return original.begin(), original.after_head(values)

    def close(self) -> None:
        self._source.close()

    def _open(self) -> _Content:
        with self._opening:
            if self._known is None:
                self._known = self._read_content()
            return self._known

    def _read_content(self) -> _Content:
        if not self._name:
            from ...sources.hub.quantisation import choose_file  # most files have names

            names = [info.name for info in self._source.list()]
            self._name = choose_file(names, self._quantisation, where=self._source.url)
        info = self._source.stat(self._name)
        file = read_gguf(self._source, info)
        original = OriginalBytes(self._source, info, file)

        def read_table(tensor: GgufTensor) -> list[float]:
            rows = np.empty((tensor.num_rows, tensor.row_bytes), np.uint8)
            self._source.read_into(info.name, tensor.begin, rows.reshape(-1).data, version=info.version)
            original.keep(tensor, rows)
            numbers: list[float] = floats_of(tensor, rows).reshape(-1).tolist()
            return numbers

        model = describe_model(file, read_table, self._keeps)
        files = tokenizer_files(GgufFields(file.where, file.metadata), model.vocab_size)
        files[CONFIG_NAME] = (json.dumps(model.config, indent=2) + "\n").encode()
        header, layout = make_header(
            [piece.spec for piece in model.pieces], {"format": "pt"}, where=self._name
        )
        by_name = {piece.spec.name: piece for piece in model.pieces}
        entries = tuple(layout.entries.values())
        pieces = tuple(by_name[entry.name] for entry in entries)
        original.set_pieces(zip(entries, pieces, strict=True))
        size_bytes, sha256 = layout.size_bytes, original.sha256
        return _Content(info, model, files, header, entries, pieces, size_bytes, original, sha256)

    def _read_weights(self, content: _Content, start: int, out: Bytes) -> None:
        end = start + len(out)
        if start < len(content.header):
            part = content.header[start:end]
            out[: len(part)] = np.frombuffer(part, np.uint8)
        first = max(0, bisect_right(content.entries, start, key=lambda entry: entry.begin) - 1)
        for entry, piece in zip(content.entries[first:], content.pieces[first:], strict=True):
            if entry.begin >= end:
                break
            begin = max(start, entry.begin)
            stop = min(end, entry.end)
            if begin < stop:
                self._make(content, piece, begin - entry.begin, out[begin - start : stop - start])

    def _make(self, content: _Content, piece: TensorPiece, start: int, out: Bytes) -> None:
        """Fill `out` with a piece's bytes from `start` on."""
        tensor, info = piece.source, content.info
        if lies_in_the_file(piece):
            self._source.read_into(info.name, tensor.begin + start, out.data, version=info.version)
            return
        if piece.values is not None:
            self._make_latents(info, piece, piece.values, start, out)
            return
        own_bytes = row_bytes(piece)
        unit = piece.head_rows or 1  # rows that are only known together
        begin = start // own_bytes // unit * unit
        end = -(-(start + len(out)) // own_bytes)
        end = min(tensor.num_rows, -(-end // unit) * unit)
        read_rows = max(1, _READ_ELEMENTS // tensor.columns // unit) * unit
        step = max(1, _STEP_ELEMENTS // tensor.columns // unit) * unit
        for first in range(begin, end, read_rows):
            stored = np.empty((min(end, first + read_rows) - first, tensor.row_bytes), np.uint8)
            at = tensor.begin + first * tensor.row_bytes
            self._source.read_into(info.name, at, stored.reshape(-1).data, version=info.version)
            if len(stored) == tensor.num_rows:
                content.original.keep(tensor, stored)
            for row in range(0, len(stored), step):
                made = made_of(piece, stored[row : row + step])
                _copy_overlap(made, (first + row) * own_bytes, out, start)

    def _make_latents(
        self, info: ObjectInfo, piece: TensorPiece, values: GgufTensor, start: int, out: Bytes
    ) -> None:
        """Likewise of a piece of keys and `values` of latents, some heads at a time."""
        num_heads = values.shape[0]
        head_bytes = piece.spec.shape[0] // num_heads * row_bytes(piece)
        step = max(1, _READ_ELEMENTS // math.prod(piece.spec.shape) * num_heads)
        end = -(-(start + len(out)) // head_bytes)
        for first in range(start // head_bytes, end, step):
            parts = []
            for tensor in (piece.source, values):
                own_bytes = tensor.size_bytes // num_heads
                stored = np.empty(own_bytes * (min(end, first + step) - first), np.uint8)
                self._source.read_into(
                    info.name, tensor.begin + first * own_bytes, stored.data, version=info.version
                )
                parts.append(made_of_latents(piece, tensor, stored))
            _copy_overlap(np.concatenate(parts, axis=1).reshape(-1), first * head_bytes, out, start)


def _copy_overlap(data: Bytes, data_start: int, out: Bytes, out_start: int) -> None:
    """Copy what of `data`, which begins at byte `data_start`, falls into `out`, which begins at
    `out_start`.
    """
    begin = max(data_start, out_start)
    end = min(data_start + len(data), out_start + len(out))
    if begin < end:
        out[begin - out_start : end - out_start] = data[begin - data_start : end - data_start]
