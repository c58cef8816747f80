"""A GGUF file as a model directory: a `Source` with config.json, the tokenizer's files and
model.safetensors.

Nothing is written anywhere: a range of model.safetensors is made from the blocks behind it when it
is read, some rows at a time, so that memory is bounded whatever the file's size, and whatever
packs, inspects or serves a model directory takes a GGUF file from any kind of store. The bytes
depend only on the file.
"""

from __future__ import annotations

import json
import threading
from bisect import bisect_right
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...errors import FormatError, NotFoundError
from ...sources.base import ObjectInfo, Remote, Source, check_name
from ..nibbles import pack_nibbles
from ..safetensors import TensorEntry, make_header
from .fields import GgufFields
from .model import Form, GgufModel, Keeps, TensorPiece, describe_model
from .reader import GgufTensor, read_gguf
from .tokenizer import tokenizer_files

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .blocks import Floats

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
        read_bytes = sum(piece.source.num_rows * piece.source.row_bytes for piece in content.pieces)
        return read_bytes / content.size_bytes

    def file_bytes(self) -> int:
        """The size of the GGUF file. Raises as `conversions`."""
        return self._open().info.size_bytes

    def stat(self, name: str) -> ObjectInfo:
        content = self._open()
        if name == WEIGHTS_NAME:
            return ObjectInfo(name, content.size_bytes, content.info.version)
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

        def read_table(tensor: GgufTensor) -> list[float]:
            rows = np.empty((tensor.num_rows, tensor.row_bytes), np.uint8)
            self._source.read_into(info.name, tensor.begin, rows.reshape(-1).data, version=info.version)
            numbers: list[float] = _floats(tensor, rows).reshape(-1).tolist()
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
        return _Content(info, model, files, header, entries, pieces, layout.size_bytes)

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
                self._make(content.info, piece, begin - entry.begin, out[begin - start : stop - start])

    def _make(self, info: ObjectInfo, piece: TensorPiece, start: int, out: Bytes) -> None:
        """Fill `out` with a piece's bytes from `start` on."""
        tensor = piece.source
        if _lies_in_the_file(piece):
            self._source.read_into(info.name, tensor.begin + start, out.data, version=info.version)
            return
        own_bytes = _row_bytes(piece)
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
            for row in range(0, len(stored), step):
                made = _made(piece, stored[row : row + step])
                _copy_overlap(made, (first + row) * own_bytes, out, start)


def _lies_in_the_file(piece: TensorPiece) -> bool:
    """True if the piece's bytes are those of the file, in the same order."""
    is_plain = piece.form is Form.FLOATS and piece.source.type.dtype == piece.spec.dtype and not piece.shift
    return not piece.head_rows and (is_plain or piece.form is Form.BLOCKS)


def _row_bytes(piece: TensorPiece) -> int:
    """Of a piece that a row of its tensor becomes."""
    columns = piece.source.columns
    if piece.form is Form.BLOCKS:
        return piece.source.row_bytes
    if piece.form is Form.FLOATS:
        return columns * (4 if piece.spec.dtype == "F32" else 2)
    groups = columns // piece.source.type.elements
    return {
        Form.INT8: columns,
        Form.INT4: columns // 2,
        Form.E2M1: columns // 2,
        Form.SCALES: 2 * groups,
        Form.E8M0: groups,
    }[piece.form]


def _made(piece: TensorPiece, rows: Bytes) -> Bytes:
    """Some rows of blocks as the piece has them, with rows of heads back in transformers' order."""
    if piece.head_rows:
        # In a head, rows 2i and 2i + 1 turn together; transformers has them half a head apart.
        heads = rows.reshape(-1, piece.head_rows // 2, 2, rows.shape[1])
        rows = np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows.shape)
    if piece.form is Form.BLOCKS:
        return rows.reshape(-1)
    kind = piece.source.type
    blocks = rows.reshape(-1, kind.block_bytes)
    if piece.form is Form.SCALES:
        return np.ascontiguousarray(blocks[:, :2]).reshape(-1)
    if piece.form is Form.E8M0:
        return np.ascontiguousarray(blocks[:, 0])
    if piece.form is Form.E2M1:
        # Byte j holds elements j and j + 16; neighbours are to be in one.
        halves = np.concatenate([blocks[:, 1:] & np.uint8(15), blocks[:, 1:] >> np.uint8(4)], axis=1)
        neighbours: Bytes = halves[:, ::2] | halves[:, 1::2] << np.uint8(4)
        return neighbours.reshape(-1)
    if piece.form is Form.FLOATS:
        if kind.dtype == piece.spec.dtype and not piece.shift:
            return rows.reshape(-1)
        return _encode(kind.to_floats(blocks) + np.float32(piece.shift), piece.spec.dtype)
    assert kind.to_integers is not None
    levels = kind.to_integers(blocks).levels.reshape(len(rows), -1)
    if piece.form is Form.INT8:
        return levels.view(np.uint8).reshape(-1)
    return pack_nibbles((levels + np.int8(8)).view(np.uint8)).reshape(-1)


def _floats(tensor: GgufTensor, rows: Bytes) -> Floats:
    return tensor.type.to_floats(rows.reshape(-1, tensor.type.block_bytes))


def _encode(values: Floats, dtype: str) -> Bytes:
    """The nearest numbers of a dtype, ties to even."""
    if dtype == "F32":
        return values.reshape(-1).view(np.uint8)
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return values.astype("<f2").reshape(-1).view(np.uint8)
    bits = values.reshape(-1).view(np.uint32)
    rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1)))) >> 16).astype("<u2")
    rounded[np.isnan(values.reshape(-1))] = 0x7FC0
    return rounded.view(np.uint8)


def _copy_overlap(data: Bytes, data_start: int, out: Bytes, out_start: int) -> None:
    """Copy what of `data`, which begins at byte `data_start`, falls into `out`, which begins at
    `out_start`.
    """
    begin = max(data_start, out_start)
    end = min(data_start + len(data), out_start + len(out))
    if begin < end:
        out[begin - out_start : end - out_start] = data[begin - data_start : end - data_start]
