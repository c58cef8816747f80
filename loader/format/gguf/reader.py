"""The GGUF container: a distrustful parser of its metadata and its table of tensors.

The format is ggml's `docs/gguf.md`, versions 2 and 3, little-endian. Everything is bounded before
anything is built from it, and tensors must follow each other without holes or overlaps, as
llama.cpp demands too. Tensor content is not read here, and nothing is known of models.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...errors import CheckpointError
from ...sources.base import ObjectInfo, Source
from ..safetensors import is_tensor_name
from .blocks import BLOCK_TYPES, BlockType

if TYPE_CHECKING:
    import hashlib

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Metadata and table together; a vocabulary of 262,144 tokens takes 12 MiB.
MAX_HEADER_BYTES = 256 << 20
MAX_KEYS = 65_536
MAX_KEY_BYTES = 1024
MAX_TEXT_BYTES = 16 << 20
MAX_ARRAY_ELEMENTS = 4 << 20
MAX_TENSORS = 100_000
MAX_DIMENSIONS = 4  # ggml's own limit
MAX_COLUMNS = 1 << 22  # of one row, which is the least that is read at once
MAX_ELEMENTS = 1 << 48  # of one tensor
DEFAULT_ALIGNMENT_BYTES = 32
MAX_ALIGNMENT_BYTES = 1 << 20
ALIGNMENT_KEY = "general.alignment"

_READ_BYTES = 1 << 20  # first, then twice as many each time
_INCOMPLETE_HINT = "It was cut off, perhaps by an interrupted download: fetch it again."

_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_BOOL, _TEXT, _ARRAY = 7, 8, 9


class GgufTensor(NamedTuple):
    """One tensor, whose blocks are bytes [begin, begin + size_bytes) counted from the start of the
    file.
    """

    name: str
    type: BlockType
    shape: tuple[int, ...]  # as numpy has it: the last dimension is that of neighbours
    begin: int
    size_bytes: int

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def columns(self) -> int:
        return self.shape[-1]

    @property
    def row_bytes(self) -> int:
        return self.type.row_bytes(self.columns)

    def part(self, first: int, num: int, *shape: int) -> GgufTensor:
        """The rows [first, first + num) of the first dimension as a tensor of this shape."""
        begin, end = (self.size_bytes * row // self.shape[0] for row in (first, first + num))
        return self._replace(shape=shape, begin=self.begin + begin, size_bytes=end - begin)


class FileHead(NamedTuple):
    """The bytes in front of the tensors, and the SHA-256 of them as they were read, to be copied and
    continued.
    """

    size_bytes: int
    sha256: hashlib._Hash


class GgufFile(NamedTuple):
    """A checked header. Values of `metadata` are int, float, bool, str, list of str or bool, or a
    numeric array.
    """

    where: str
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]  # in the order of their bytes
    head: FileHead | None = None  # of a file whose store states its digest


def read_gguf(source: Source, info: ObjectInfo) -> GgufFile:
    """Read and check the header of one file, in a few requests.

    Raises `CheckpointError` naming the file and the key or tensor, or the source's own errors.
    Memory: the header, and about 100 bytes for each text in it.
    """
    header = _Header(source, info)
    header.check_magic()
    num_tensors = header.count("tensors", MAX_TENSORS)
    num_keys = header.count("keys of metadata", MAX_KEYS)
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = header.text(MAX_KEY_BYTES)
        if key in metadata:
            raise header.wrong(f"the key {key[:100]!r} occurs twice")
        metadata[key] = header.value(key)
    alignment = _alignment(header, metadata)
    table = [_read_entry(header) for _ in range(num_tensors)]
    begin = -(-header.position // alignment) * alignment
    tensors = _place(header, table, begin, alignment)
    return GgufFile(info.name, metadata, tensors, header.digest(begin) if info.sha256 is not None else None)


class _TensorEntry(NamedTuple):
    name: str
    type: BlockType
    shape: tuple[int, ...]
    offset: int


class _Header:
    """The file's beginning, read as far as it is needed; every size is checked before it is used."""

    def __init__(self, source: Source, info: ObjectInfo) -> None:
        self._source = source
        self._info = info
        self._data = bytearray()
        self.position = 0

    @property
    def size_bytes(self) -> int:
        """Of the whole file."""
        return self._info.size_bytes

    def wrong(self, what: str, *, hint: str = "") -> CheckpointError:
        return CheckpointError(f"{self._info.name}: {what}", where=self._info.name, hint=hint)

    def check_magic(self) -> None:
        start = self.take(8)
        if start[:4] != MAGIC:
            raise self.wrong("not a GGUF file: it does not begin with GGUF")
        version = int.from_bytes(start[4:], "little")
        if version not in VERSIONS:
            is_swapped = int.from_bytes(start[4:], "big") in VERSIONS
            raise self.wrong(
                "big-endian GGUF files are not supported"
                if is_swapped
                else f"GGUF version {version} is not supported",
                hint=f"Versions {' and '.join(map(str, VERSIONS))} are: convert the model again.",
            )

    def take(self, num_bytes: int) -> memoryview:
        """The next bytes."""
        end = self.position + num_bytes
        if end > MAX_HEADER_BYTES:
            raise self.wrong(f"its metadata takes more than the {MAX_HEADER_BYTES} bytes that are allowed")
        if end > len(self._data):
            self._read(end)
        view = memoryview(self._data).toreadonly()[self.position : end]
        self.position = end
        return view

    def _read(self, end: int) -> None:
        if end > self.size_bytes:
            raise self.wrong(
                f"its metadata reaches byte {end}, but the file has {self.size_bytes}", hint=_INCOMPLETE_HINT
            )
        have = len(self._data)
        more = bytearray(min(self.size_bytes, max(end, 2 * have, _READ_BYTES)) - have)
        self._source.read_into(self._info.name, have, memoryview(more), version=self._info.version)
        self._data = self._data + more  # a new one: views of the old one may still be there

    def digest(self, end: int) -> FileHead:
        """Of all up to `end`, or to that of the file."""
        import hashlib  # few stores state digests

        size_bytes = min(end, self.size_bytes)
        self.take(size_bytes - self.position)
        return FileHead(size_bytes, hashlib.sha256(self._data[:size_bytes]))

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def count(self, what: str, most: int) -> int:
        number = int(self.number("Q"))
        if number > most:
            raise self.wrong(f"claims {number} {what}, of {most} allowed")
        return number

    def text(self, max_bytes: int) -> str:
        num_bytes = int(self.number("Q"))
        if num_bytes > max_bytes:
            raise self.wrong(f"a text claims {num_bytes} bytes, of {max_bytes} allowed")
        try:
            return str(self.take(num_bytes), "utf-8")
        except UnicodeDecodeError as error:
            raise self.wrong(f"a text is not UTF-8: {error}") from error

    def value(self, key: str) -> Any:
        kind = int(self.number("I"))
        if kind in _NUMBERS:
            return np.frombuffer(self.take(np.dtype(_NUMBERS[kind]).itemsize), _NUMBERS[kind])[0].item()
        if kind == _BOOL:
            return self._boolean(key)
        if kind == _TEXT:
            return self.text(MAX_TEXT_BYTES)
        if kind == _ARRAY:
            return self._array(key)
        raise self.wrong(f"{key[:100]!r} has the unknown type {kind}")

    def _boolean(self, key: str) -> bool:
        value = self.take(1)[0]
        if value > 1:
            raise self.wrong(f"{key[:100]!r} is neither true nor false: {value}")
        return value == 1

    def _array(self, key: str) -> Any:
        kind = int(self.number("I"))
        number = self.count(f"elements of {key[:100]!r}", MAX_ARRAY_ELEMENTS)
        if kind in _NUMBERS:
            dtype = np.dtype(_NUMBERS[kind])
            return np.frombuffer(self.take(number * dtype.itemsize), dtype).copy()
        readers: dict[int, Callable[[], Any]] = {
            _BOOL: lambda: self._boolean(key),
            _TEXT: lambda: self.text(MAX_TEXT_BYTES),
        }
        if kind not in readers:
            what = "an array of arrays" if kind == _ARRAY else f"an array of the unknown type {kind}"
            raise self.wrong(f"{key[:100]!r} is {what}, which is not supported")
        read = readers[kind]
        return [read() for _ in range(number)]


def _alignment(header: _Header, metadata: dict[str, Any]) -> int:
    alignment = metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT_BYTES)
    if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT_BYTES or alignment & (alignment - 1):
        raise header.wrong(
            f"{ALIGNMENT_KEY} is {str(alignment)[:40]}, but must be a power of two from 8 to {MAX_ALIGNMENT_BYTES}"
        )
    return alignment


def _read_entry(header: _Header) -> _TensorEntry:
    name = header.text(MAX_KEY_BYTES)
    if not is_tensor_name(name):
        raise header.wrong(f"{name[:100]!r} is not a usable tensor name")
    num_dimensions = int(header.number("I"))
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise header.wrong(f"{name} has {num_dimensions} dimensions, of 1 to {MAX_DIMENSIONS} allowed")
    sizes = [int(header.number("Q")) for _ in range(num_dimensions)]
    if 0 in sizes or sizes[0] > MAX_COLUMNS or math.prod(sizes) > MAX_ELEMENTS:
        raise header.wrong(f"{name}: {sizes} is not a usable shape")
    number = int(header.number("I"))
    if number not in BLOCK_TYPES:
        known = ", ".join(sorted(kind.name for kind in BLOCK_TYPES.values()))
        raise header.wrong(
            f"{name} is of type {number}, which is not supported",
            hint=f"Supported are {known}: make the file in one of these.",
        )
    kind = BLOCK_TYPES[number]
    if sizes[0] % kind.elements:
        raise header.wrong(f"{name}: rows of {sizes[0]} cannot be cut into blocks of {kind.elements}")
    return _TensorEntry(name, kind, tuple(reversed(sizes)), int(header.number("Q")))


def _place(header: _Header, table: list[_TensorEntry], begin: int, alignment: int) -> dict[str, GgufTensor]:
    """Tensors must follow each other, each at the next multiple of the alignment, up to the end of
    the file.
    """
    tensors: dict[str, GgufTensor] = {}
    position = 0
    for entry in sorted(table, key=lambda entry: entry.offset):
        if entry.name in tensors:
            raise header.wrong(f"two tensors are called {entry.name}")
        if entry.offset != position:
            kind = "overlaps the tensor before it" if entry.offset < position else "leaves a hole before it"
            raise header.wrong(f"{entry.name} at offset {entry.offset} {kind}")
        size_bytes = entry.type.row_bytes(entry.shape[-1]) * math.prod(entry.shape[:-1])
        if begin + position + size_bytes > header.size_bytes:
            raise header.wrong(
                f"{entry.name} reaches byte {begin + position + size_bytes}, but the file has {header.size_bytes}",
                hint=_INCOMPLETE_HINT,
            )
        tensors[entry.name] = GgufTensor(entry.name, entry.type, entry.shape, begin + position, size_bytes)
        position = -(-(position + size_bytes) // alignment) * alignment
    left = header.size_bytes - (begin + position)
    if tensors and left > 0:
        raise header.wrong(f"{left} bytes after the last tensor belong to nothing")
    return tensors
