"""The safetensors file format: a distrustful header parser, and a writer that streams.

A file is an 8-byte little-endian header length, a JSON header, and the tensors' bytes back to back.
What this module hands out is consistent: every tensor's bytes agree with its dtype and shape, and
together they fill the file without holes or overlaps. It knows nothing of directories, shards or
models, and reads no content.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO, NamedTuple

from ..errors import CheckpointError
from ..sources.base import ObjectInfo, Source, is_showable
from .manifest import DTYPE_BITS, tensor_bytes

PREFIX_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the reference implementation's own limit
MAX_TENSORS = 250_000  # in one file; the largest published models have 140,000 in all
MAX_NAME_BYTES = 1024
MAX_METADATA_BYTES = 16 * 1024 * 1024
MAX_DIMENSIONS = 32
MAX_ELEMENTS = 1 << 48  # of one tensor, also with its empty dimensions counted as 1
METADATA_KEY = "__metadata__"

# Holds the whole header of all but unusual files, so that one request does.
FIRST_READ_BYTES = 128 * 1024
# Tensor data starts at a multiple of it, as the reference implementation's does.
_ALIGNMENT_BYTES = 8

_INCOMPLETE_HINT = "It was cut off, perhaps by an interrupted download: fetch it again."

# Python takes up to 160 bytes for a value that a hostile header spells in three, so structure is
# counted before anything is built from it. A tensor needs an object, two lists and a few commas;
# the rest is for texts.
_MAX_STRUCTURE = {b"{": 2 * MAX_TENSORS, b"[": 4 * MAX_TENSORS, b",": 8 * MAX_TENSORS}


class TensorSpec(NamedTuple):
    """A tensor without its place, as a writer knows it before it gets the bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class TensorEntry(NamedTuple):
    """One tensor, whose content is bytes [begin, end) counted from the start of the file."""

    name: str
    dtype: str  # a key of DTYPE_BITS
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin


class SafetensorsFile(NamedTuple):
    """A checked header. `entries` stand in the order of their bytes, which begin at `data_start`.
    `head_sha256` is the digest of the bytes before, of a file whose store states its own.
    """

    where: str
    metadata: dict[str, str]
    entries: dict[str, TensorEntry]
    data_start: int
    size_bytes: int
    head_sha256: bytes | None = None


def read_header(source: Source, info: ObjectInfo, *, start: bytes = b"") -> SafetensorsFile:
    """Read and check the header of one file, in one request where it is of usual size.

    `start` is what the caller has of this file already: its first `FIRST_READ_BYTES`, or nothing.

    Raises `CheckpointError`, or the source's own errors. Memory: see `parse_header`.
    """
    where = info.name
    if info.size_bytes < PREFIX_BYTES:
        raise CheckpointError(
            f"{where} has {info.size_bytes} bytes, too few for a safetensors file",
            where=where,
            hint=_INCOMPLETE_HINT,
        )
    if not start:
        first = bytearray(min(info.size_bytes, FIRST_READ_BYTES))
        source.read_into(info.name, 0, memoryview(first), version=info.version)
        start = bytes(first)
    end = PREFIX_BYTES + header_size(start[:PREFIX_BYTES], info.size_bytes, where=where)
    head = bytearray(start[:end])
    if end > len(start):
        head += bytes(end - len(start))
        with memoryview(head) as view:
            source.read_into(info.name, len(start), view[len(start) :], version=info.version)
    file = parse_header(bytes(head[PREFIX_BYTES:]), info.size_bytes, where=where)
    if info.sha256 is None:
        return file
    import hashlib  # few stores state digests

    return file._replace(head_sha256=hashlib.sha256(head).digest())


def header_size(prefix: bytes, file_size_bytes: int, *, where: str) -> int:
    """The length of the JSON header, read from the file's first 8 bytes and bounded."""
    (size_bytes,) = struct.unpack("<Q", prefix)
    if size_bytes > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{where}: its header claims {size_bytes} bytes, of {MAX_HEADER_BYTES} allowed",
            where=where,
            hint="This is probably not a safetensors file.",
        )
    if size_bytes > file_size_bytes - PREFIX_BYTES:
        raise CheckpointError(
            f"{where}: its header claims {size_bytes} bytes, but the file has only {file_size_bytes}",
            where=where,
            hint=_INCOMPLETE_HINT,
        )
    return int(size_bytes)


def parse_header(header: bytes, file_size_bytes: int, *, where: str) -> SafetensorsFile:
    """Check a JSON header (without its 8-byte prefix) against the size of its file.

    Raises `CheckpointError` naming `where` and the tensor. Memory: about 1 KiB a tensor; bounds on
    structure keep the worst header that is accepted under 1 GiB.
    """
    metadata: dict[str, str] = {}
    data_start = PREFIX_BYTES + len(header)
    found: list[TensorEntry] = []
    for name, value in decode_object(header, where=where).items():
        if name == METADATA_KEY:
            metadata = _check_metadata(value, where)
        else:
            found.append(_check_entry(name, value, data_start, where))
    found.sort(key=lambda entry: (entry.begin, entry.end))
    _check_layout(found, data_start, file_size_bytes, where)
    entries = {entry.name: entry for entry in found}
    return SafetensorsFile(where, metadata, entries, data_start, file_size_bytes)


def make_header(
    tensors: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None, *, where: str = "a new file"
) -> tuple[bytes, SafetensorsFile]:
    """The first bytes of a file (prefix and header) that holds these tensors in this order, and its
    layout.

    Tensors are aligned to their element size when larger elements come first. Raises
    `CheckpointError` for duplicate names or shapes that do not fill whole bytes.
    """
    document: dict[str, Any] = {METADATA_KEY: dict(metadata)} if metadata else {}
    position = 0
    for name, dtype, shape in tensors:
        if name in document or name == METADATA_KEY:
            raise CheckpointError(f"{where}: two tensors are called {name!r}", where=f"{where}: {name}")
        _check_packed(name, dtype, shape, where)
        end = position + tensor_bytes(dtype, shape)
        document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    layout = parse_header(text, PREFIX_BYTES + len(text) + position, where=where)
    return struct.pack("<Q", len(text)) + text, layout


class SafetensorsWriter:
    """Writes one file front to back: the tensor list first, then their bytes in that order, in any
    pieces.

    The file stays the caller's and is not closed. Data given to `write` may be reused when it
    returns.
    """

    def __init__(
        self, file: BinaryIO, tensors: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None
    ) -> None:
        header, self.layout = make_header(tensors, metadata)
        self._file = file
        self._left_bytes = self.layout.size_bytes - len(header)
        file.write(header)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append content. Raises `CheckpointError` when it is more than the tensors need."""
        size_bytes = memoryview(data).nbytes
        if size_bytes > self._left_bytes:
            raise CheckpointError(f"{size_bytes - self._left_bytes} bytes more than the tensors hold")
        self._file.write(data)
        self._left_bytes -= size_bytes

    def finish(self) -> SafetensorsFile:
        """The layout of the finished file. Raises `CheckpointError` while content is missing."""
        if self._left_bytes:
            raise CheckpointError(f"{self._left_bytes} bytes of tensor content were never written")
        return self.layout


def decode_object(data: bytes, *, where: str) -> dict[str, Any]:
    """A JSON object of untrusted origin, with duplicate keys and absurd amounts of structure
    refused.

    Numbers may still be of any kind; the caller checks types. Raises `CheckpointError`.
    """
    if not data.startswith(b"{"):
        raise CheckpointError(f"{where} does not hold a JSON object where it must", where=where)
    if any(data.count(sign) > limit for sign, limit in _MAX_STRUCTURE.items()):
        raise CheckpointError(
            f"{where} describes more than the {MAX_TENSORS} tensors that are allowed",
            where=where,
            hint="Split the model into more shards.",
        )
    try:
        value: dict[str, Any] = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{where} does not hold valid JSON: {error}", where=where, hint=_INCOMPLETE_HINT
        ) from error
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"{twice[:100]!r} stands there twice")
    return table


def _check_metadata(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise CheckpointError(f"{where}: its {METADATA_KEY} is not a table of texts", where=where)
    texts = itertools.chain(value.keys(), value.values())
    try:
        size_bytes = sum(len(text.encode()) for text in texts)
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{where}: its {METADATA_KEY} holds half a character", where=where) from error
    if size_bytes > MAX_METADATA_BYTES:
        raise CheckpointError(
            f"{where}: its {METADATA_KEY} has {size_bytes} bytes, of {MAX_METADATA_BYTES} allowed",
            where=where,
        )
    return dict(value)


def _check_entry(name: str, value: Any, data_start: int, where: str) -> TensorEntry:
    """One tensor of the header, in itself: types, ranges, and as many bytes as its shape needs."""
    if not is_tensor_name(name):
        raise CheckpointError(f"{where}: {name[:100]!r} is not a usable tensor name", where=where)
    here = f"{where}: {name}"
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise CheckpointError(f"{here}: needs dtype, shape and data_offsets", where=here)
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(
            f"{here}: unknown dtype {str(dtype)[:40]!r}",
            where=here,
            hint=f"Known are {', '.join(sorted(DTYPE_BITS))}.",
        )
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS or _num_slots(shape) > MAX_ELEMENTS:
        raise CheckpointError(f"{here}: {str(shape)[:100]} is not a shape", where=here)
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{here}: {str(offsets)[:100]} are not offsets", where=here)
    _check_packed(name, dtype, tuple(shape), where)
    begin, end = offsets
    needed = tensor_bytes(dtype, tuple(shape))
    if end - begin != needed:
        raise CheckpointError(
            f"{here}: {dtype} of shape {shape} takes {needed} bytes, but its offsets span {end - begin}",
            where=here,
        )
    return TensorEntry(name, dtype, tuple(shape), data_start + begin, data_start + end)


def _check_packed(name: str, dtype: str, shape: tuple[int, ...], where: str) -> None:
    """Sub-byte dtypes are stored packed, so their tensors must end on a byte."""
    if math.prod(shape) * DTYPE_BITS[dtype] % 8:
        here = f"{where}: {name}"
        raise CheckpointError(f"{here}: {dtype} of shape {list(shape)} does not fill whole bytes", where=here)


def _check_layout(entries: list[TensorEntry], data_start: int, file_size_bytes: int, where: str) -> None:
    """Sorted entries must fill [data_start, file_size_bytes) exactly: no overlaps, holes or
    remainders.
    """
    position = data_start
    for entry in entries:
        if entry.begin != position:
            kind = "overlaps the tensor before it" if entry.begin < position else "leaves a hole before it"
            raise CheckpointError(f"{where}: {entry.name} {kind}", where=f"{where}: {entry.name}")
        position = entry.end
    if position > file_size_bytes:
        raise CheckpointError(
            f"{where}: {position} bytes are described, but the file has only {file_size_bytes}",
            where=where,
            hint=_INCOMPLETE_HINT,
        )
    if position < file_size_bytes:
        raise CheckpointError(
            f"{where}: {file_size_bytes - position} bytes after the last tensor belong to nothing",
            where=where,
        )


def is_tensor_name(name: str) -> bool:
    """True if a name is of bounded length and `is_showable`: it will end up in terminals and logs."""
    return is_showable(name) and 0 < len(name.encode()) <= MAX_NAME_BYTES


def _are_sizes(value: Any) -> bool:
    """True if it is a list of numbers from 0 to what 63 bits hold. `True` is no number here."""
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 1 << 63 for size in value)


def _num_slots(shape: list[int]) -> int:
    return math.prod(max(1, size) for size in shape)
