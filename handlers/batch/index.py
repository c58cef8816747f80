"""`job.json`: a job's identity, and the parts of its input. Written once, by the first worker; all
workers of the job use it.

Untrusted input: every invariant holds for an index that `parse_index` returns. This module does no
I/O.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ...loader.format.json_object import DocumentKind, JsonObject, is_text, with_own_digest
from .input import MAX_PARTS, PartSpan, Scanned
from .spec import MAX_LINE_BYTES, MAX_LINES, JobFormatError, JobMismatchError

INDEX_NAME = "job.json"
FORMAT_NAME = "teneral-batch"
FORMAT_VERSION = 1
MAX_INDEX_BYTES = 8 << 20
MAX_INPUT_BYTES = 1 << 48
_CHUNK_CHARS = 1_000
_DAMAGED = "It is damaged, or Teneral did not write it: choose another output, or remove this one."
_NEWER = "A newer Teneral may have written it: upgrade, or choose another output."
INDEX = DocumentKind(INDEX_NAME, JobFormatError, _DAMAGED, _NEWER)
_KEYS = frozenset(
    (
        "format", "version", "key", "input", "input_version", "model", "options", "openai", "bytes", "lines",
        "records", "starts", "first_lines", "part_records", "duplicates",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """The identity of a job: runs with the same identity are one job."""

    input: str  # its address
    input_version: str
    model: str  # the digest of its artifact
    options: Mapping[str, str]  # all other settings that affect the answers

    @property
    def key(self) -> str:
        """The idempotency key: 64 hexadecimal digits."""
        described = [
            FORMAT_NAME, FORMAT_VERSION, self.input, self.input_version, self.model, sorted(self.options.items())
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(described).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class JobIndex:
    identity: JobIdentity
    key: str
    size_bytes: int
    max_line_bytes: int
    num_lines: int
    num_records: int
    is_openai: bool
    parts: tuple[PartSpan, ...]
    duplicates: bytes  # one bit for each record, the first in the highest bit

    def is_duplicate(self, record: int) -> bool:
        return bool(self.duplicates[record >> 3] >> (7 - (record & 7)) & 1)

    def seed(self, line_number: int) -> int:
        """The default seed of a line: a repeated run draws the same tokens."""
        return int.from_bytes(self._hash("seed", line_number)[:8], "big") >> 1  # from 0 to 2**63 - 1

    def record_id(self, line_number: int) -> str:
        return self._hash("record", line_number)[:12].hex()

    def _hash(self, what: str, line_number: int) -> bytes:
        return hashlib.sha256(f"{self.key} {what} {line_number}".encode()).digest()


def make_index(identity: JobIdentity, scanned: Scanned, *, size_bytes: int, max_line_bytes: int) -> JobIndex:
    return JobIndex(
        identity=identity,
        key=identity.key,
        size_bytes=size_bytes,
        max_line_bytes=max_line_bytes,
        num_lines=scanned.num_lines,
        num_records=scanned.num_records,
        is_openai=scanned.is_openai,
        parts=scanned.parts,
        duplicates=scanned.duplicates,
    )


def check_same_job(index: JobIndex, wanted: JobIdentity, *, place: str) -> None:
    """Raise `JobMismatchError`, naming the difference."""
    found = index.identity
    if index.key == wanted.key:
        return
    if found.input != wanted.input:
        what = f"another input: {found.input}, not {wanted.input}"
    elif found.input_version != wanted.input_version:
        what = (
            f"another version of the input {wanted.input}: {found.input_version}, not {wanted.input_version}"
        )
    elif found.model != wanted.model:
        what = f"another model: {found.model}, not {wanted.model}"
    else:
        names = sorted(found.options.keys() | wanted.options.keys())
        differing = [name for name in names if found.options.get(name) != wanted.options.get(name)]
        differences = [
            f"{name} {found.options.get(name)}, not {wanted.options.get(name)}" for name in differing
        ]
        what = f"other options: {'; '.join(differences)}"
    raise JobMismatchError(
        f"{place} holds the job of {what}",
        source=place,
        name=INDEX_NAME,
        hint="Choose another output for this one.",
    )


def dump_index(index: JobIndex) -> bytes:
    """The index as JSON. The same job gives the same bytes."""
    identity = index.identity
    document = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "key": index.key,
        "input": identity.input,
        "input_version": identity.input_version,
        "model": identity.model,
        "options": dict(sorted(identity.options.items())),
        "openai": int(index.is_openai),
        "bytes": index.size_bytes,
        "lines": index.num_lines,
        "records": index.num_records,
        "starts": [part.start_byte for part in index.parts],
        "first_lines": [part.first_line for part in index.parts],
        "part_records": [part.num_records for part in index.parts],
        "duplicates": _packed(index.duplicates),
    }
    return with_own_digest(json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode())


def parse_index(data: bytes) -> JobIndex:
    """Parse an index. Raises `IntegrityError` if it does not have the digest that stands at its end;
    else `JobFormatError`, whose `where` names the place.
    """
    document = INDEX.read_checked(data, max_items=4 * MAX_PARTS + 1_000)
    top = JsonObject(document, INDEX_NAME, _KEYS, document=INDEX)
    if top.text("format") != FORMAT_NAME or top.integer("version") != FORMAT_VERSION:
        INDEX.refuse("it is of another format or version", INDEX_NAME, hint=_NEWER)
    identity = JobIdentity(
        top.text("input"), top.text("input_version"), top.text("model"), top.table("options", is_text)
    )
    if top.text("key") != identity.key:
        INDEX.refuse("it is not the key of the other fields", "key")
    size_bytes, num_lines = top.integer("bytes", MAX_INPUT_BYTES), top.integer("lines", MAX_LINES)
    num_records = top.integer("records", num_lines)
    return JobIndex(
        identity=identity,
        key=identity.key,
        size_bytes=size_bytes,
        max_line_bytes=_max_line_bytes(identity.options),
        num_lines=num_lines,
        num_records=num_records,
        is_openai=bool(top.integer("openai", 1)),
        parts=_parts(top, size_bytes, num_lines, num_records),
        duplicates=_duplicates(top, num_records),
    )


def _max_line_bytes(options: Mapping[str, str]) -> int:
    text = options.get("max_line_bytes", "")
    if not (text.isascii() and text.isdigit() and len(text) < 12 and 0 < int(text) <= MAX_LINE_BYTES):
        INDEX.refuse("it is not a length of lines", "options.max_line_bytes")
    return int(text)


def _parts(top: JsonObject, size_bytes: int, num_lines: int, num_records: int) -> tuple[PartSpan, ...]:
    starts = _integers(top, "starts", size_bytes)
    lines = _integers(top, "first_lines", num_lines)
    counts = _integers(top, "part_records", num_records)
    if not len(starts) == len(lines) == len(counts):
        INDEX.refuse("the lists have different lengths", "starts")
    for key, values in (("starts", [*starts, size_bytes]), ("first_lines", [0, *lines])):
        if any(after <= before for before, after in pairwise(values)):
            INDEX.refuse("the numbers do not ascend", key)
    if sum(counts) != num_records or 0 in counts:
        INDEX.refuse("the parts' records do not add up", "part_records")
    parts, record = [], 0
    for number, (start, line, count) in enumerate(zip(starts, lines, counts, strict=True)):
        end = starts[number + 1] if number + 1 < len(starts) else size_bytes
        parts.append(PartSpan(start, end, line, count, record))
        record += count
    return tuple(parts)


def _integers(top: JsonObject, key: str, maximum: int) -> list[int]:
    values: list[int] = []
    for value, place in top.items(key, MAX_PARTS):
        if type(value) is not int or not 0 <= value <= maximum:
            INDEX.refuse(f"it is not an integer from 0 to {maximum}", place)
        values.append(value)
    return values


def _packed(flags: bytes) -> list[str]:
    """The flags as texts of bounded length, mostly zeros and therefore short."""
    text = base64.b64encode(zlib.compress(flags, 6)).decode()
    return [text[start : start + _CHUNK_CHARS] for start in range(0, len(text), _CHUNK_CHARS)]


def _duplicates(top: JsonObject, num_records: int) -> bytes:
    chunks: list[str] = []
    for value, place in top.items("duplicates", 2 * MAX_LINES // 8 // _CHUNK_CHARS):
        if not is_text(value):
            INDEX.refuse("it is not a text", place)
        chunks.append(value)
    size_bytes = -(-num_records // 8)
    try:
        packed = base64.b64decode("".join(chunks), validate=True)
        flags = zlib.decompressobj().decompress(packed, size_bytes + 1)
    except (binascii.Error, ValueError, zlib.error):
        flags = b"\xff" * (size_bytes + 1)
    if len(flags) != size_bytes:
        INDEX.refuse("it is not a bit for each record", "duplicates")
    return flags


def index_options(options: Mapping[str, Any]) -> dict[str, str]:
    """Options as texts for the index; without those that are None."""
    return {name: str(value) for name, value in options.items() if value is not None}
