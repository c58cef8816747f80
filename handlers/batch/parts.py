"""The parts of a job: ranges of the input whose records are one object of the output; the stores
and names of these objects, and the remains of an incomplete part.

If the output is a folder or prefix, the job's own objects are in it. If it is a name that ends in
`.jsonl`, they are in a folder next to it, `NAME.jsonl.parts/`, and the file comes last.

A part is a checkpoint. Its object appears as a whole, by a conditional put: of two workers that
compute the same one, the first wins, and the other's is discarded. A stopped worker keeps the
finished records of an incomplete part for its successor: a job whose parts take longer than its
workers live would never end otherwise. Missing or damaged ones are computed again. Records are used
unchanged, so a part is the same whichever worker completes it.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self
from urllib.parse import unquote, urlsplit

import msgspec

from ...loader.errors import (
    AlreadyExistsError,
    ChangedError,
    FormatError,
    NotFoundError,
    SourceError,
    UsageError,
)
from ...loader.format.json_object import is_text
from ...loader.sources.base import ObjectInfo, Source, SourceOptions, Store, check_name
from ...loader.sources.open import open_source, open_store, scheme_of
from .answers import Record
from .index import JobIndex
from .input import Line, LineSplitter, RawLine, parse_line
from .sounds import Files, SoundLines, is_sound, shared_version
from .spec import JobFormatError, JobSpec, Share

if TYPE_CHECKING:
    from ...runtime.config import ServeConfig

WORK_SUFFIX = ".parts"
FILE_SUFFIX = ".jsonl"


@dataclass(frozen=True, slots=True)
class Input:
    """The object to read. `address` identifies it for as long as its content is the same."""

    source: Source
    name: str
    address: str
    version: str | None  # the expected one
    files: Files | None = None  # next to it

    def look(self) -> ObjectInfo:
        """The current object. Raises `ChangedError` if it is not the expected version."""
        info = self.source.stat(self.name)
        if self.version is not None and self.version.strip('"') != info.version.strip('"'):
            raise ChangedError(
                f"{self.address} has the version {info.version}, not the expected {self.version}",
                source=self.source.url,
                name=self.name,
                hint="It was replaced: the newer version is a job of its own.",
            )
        return info

    def identity_of(self, info: ObjectInfo) -> str:
        """The version in the job's identity."""
        is_folder = self.address.endswith("/")
        return info.version if is_folder else shared_version(self.address, info.version)


@dataclass(frozen=True, slots=True)
class Places:
    """The open stores of a job. A context manager, which closes them."""

    input: Input
    output: str  # as configured
    work: Store  # of the job's own objects
    # Of the one output file, if one is configured.
    final: Store | None
    final_name: str = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for store in (self.input.source, self.work, self.final):
            if store is not None:
                store.close()


def open_places(spec: JobSpec, config: ServeConfig) -> Places:
    """Open the stores, without I/O in any. Raises `UsageError` for invalid addresses."""
    options = spec.source_options or config.source_options
    given = _open_input(spec, config, options)
    if not is_text(given.address):
        raise UsageError(
            f"the address of the input is too long or not printable: {spec.input[:80]!r}", key="input"
        )
    if not spec.output.endswith(FILE_SUFFIX):
        return Places(given, spec.output, open_store(spec.output, options), None)
    folder, name = _folder_and_name(spec.output, "output")
    if _plain(folder, name) == given.address:
        raise UsageError("the output is the input", key="output", hint="Choose another file for the answers.")
    work = open_store(spec.output + WORK_SUFFIX, options)
    return Places(given, spec.output, work, open_store(folder, options), name)


def _open_input(spec: JobSpec, config: ServeConfig, options: SourceOptions) -> Input:
    if spec.input.endswith("/") or os.path.isdir(spec.input):
        if not scheme_of(spec.input) and not os.path.isdir(os.path.expanduser(spec.input)):
            raise UsageError(f"there is no folder {spec.input}", key="input")
        folder, name = spec.input.rstrip("/") or "/", ""
    else:
        folder, name = _folder_and_name(spec.input, "input")
    source, address = open_source(folder, options), _plain(folder, name)
    if name and not is_sound(name):
        return Input(source, name, address, spec.input_version, Files(source, address, are_input=False))
    fields = msgspec.json.decode(config.batch_audio or "{}")
    lines = SoundLines(source, name, address=address, fields=fields, max_lines=spec.max_lines)
    files = Files(source, address, are_input=True)
    return Input(lines, name or "files of sound", address, spec.input_version, files)


def _folder_and_name(address: str, key: str) -> tuple[str, str]:
    """The folder and the name in it."""
    scheme = scheme_of(address)
    if scheme in ("", "file"):
        path = unquote(urlsplit(address).path) if scheme else os.path.expanduser(address)
        if not path or path.endswith("/") or "\0" in path:
            raise UsageError(f"{address!r} does not name a file", key=key)
        folder, name = os.path.split(os.path.abspath(path))
        return folder, check_name(name)
    folder, _, name = address.rpartition("/")
    if folder.endswith("/") or not name:  # s3://bucket, or s3://bucket/folder/
        raise UsageError(
            f"{address} does not name an object",
            key=key,
            hint="Write s3://bucket/key, gs://bucket/key, or the path of a file.",
        )
    return folder, check_name(name)


def _plain(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}"


PARTS_FOLDER = "parts/"
READ_BYTES = 8 << 20  # of the input at a time
FIRST_READ_BYTES = 1 << 20
MAX_PART_OBJECT_BYTES = 1 << 30
_NAME = re.compile(r"parts/(\d{6})\.jsonl")


@dataclass(frozen=True, slots=True)
class PartInfo:
    """A finished part."""

    size_bytes: int
    sha256: str
    num_records: int
    num_failed: int


def part_name(number: int) -> str:
    return f"{PARTS_FOLDER}{number:06}.jsonl"


def list_parts(work: Store, num_parts: int | None = None) -> frozenset[int]:
    """The numbers of the finished parts: of a job with `num_parts`, or any."""
    try:
        found = [_NAME.fullmatch(info.name) for info in work.list(PARTS_FOLDER)]
    except NotFoundError:  # nothing was written yet
        return frozenset()
    numbers = (int(match[1]) for match in found if match is not None)
    return frozenset(number for number in numbers if num_parts is None or number < num_parts)


def is_there(work: Store, number: int) -> bool:
    try:
        work.stat(part_name(number))
    except NotFoundError:
        return False
    return True


def plan_order(num_parts: int, done: frozenset[int], share: Share | None, start: int) -> list[int]:
    """The missing parts of a worker's share in its order: from `start` on, then from the beginning.
    Workers that begin at different places collide late.
    """
    share = share or Share(0, 1)
    mine = [number for number in range(share.index, num_parts, share.count) if number not in done]
    return [number for number in mine if number >= start] + [number for number in mine if number < start]


def read_input(given: Input, version: str, start_byte: int, end_byte: int) -> Iterator[bytes]:
    """Bytes [start_byte, end_byte) of the input, in pieces. Blocks.

    Raises `ChangedError` if the input is no longer `version`.
    """
    size_bytes = FIRST_READ_BYTES  # a small input need not use much memory
    while start_byte < end_byte:
        buffer = bytearray(min(size_bytes, end_byte - start_byte))
        given.source.read_into(given.name, start_byte, memoryview(buffer), version=version)
        yield bytes(buffer)
        start_byte += len(buffer)
        size_bytes = READ_BYTES


def read_lines(given: Input, version: str, index: JobIndex, number: int) -> list[Line]:
    """The requests of a part. Blocks. Raises `JobFormatError` if the index does not match the
    input.
    """
    part = index.parts[number]
    splitter = LineSplitter(index.max_line_bytes, start_byte=part.start_byte, first_line=part.first_line)
    lines: list[Line] = []
    for raw in _split(read_input(given, version, part.start_byte, part.end_byte), splitter):
        if raw.is_blank:
            continue
        if len(lines) == part.num_records:
            break
        is_duplicate = index.is_duplicate(part.first_record + len(lines))
        lines.append(
            parse_line(
                raw,
                is_duplicate=is_duplicate,
                job_is_openai=index.is_openai,
                max_line_bytes=index.max_line_bytes,
            )
        )
    if len(lines) != part.num_records or splitter.next_byte != part.end_byte:
        raise JobFormatError(
            f"part {number} of the input does not have the {part.num_records} records of job.json",
            where=f"part {number}",
            hint="job.json is damaged: choose another output, or remove this one.",
        )
    return lines


def _split(chunks: Iterable[bytes], splitter: LineSplitter) -> Iterator[RawLine]:
    for chunk in chunks:
        yield from splitter.feed(chunk)
    yield from splitter.finish()


def put_part(work: Store, number: int, data: bytes, info: PartInfo) -> PartInfo | None:
    """Write the part. Returns `info`; None if another worker's part may exist already. Blocks."""
    try:
        work.put(part_name(number), data, if_absent=True)
    except AlreadyExistsError:
        return None
    except SourceError:
        # A store may refuse an object that it has just accepted from another worker (S3 returns
        # 409), or its response was lost.
        if _is_there_surely(work, number):
            return None
        raise
    return info


def _is_there_surely(work: Store, number: int) -> bool:
    try:
        return is_there(work, number)
    except SourceError:
        return False


def describe_part(data: bytes, num_failed: int) -> PartInfo:
    return PartInfo(len(data), hashlib.sha256(data).hexdigest(), data.count(b"\n"), num_failed)


class _Response(msgspec.Struct):
    status_code: int = 0


class _Record(msgspec.Struct):
    """The fields that mark a record as an error, in both forms."""

    error: msgspec.Raw = msgspec.Raw(b"null")
    response: _Response | None = None


_RECORD = msgspec.json.Decoder(_Record)


def is_failed_record(record: bytes) -> bool:
    """True if the record is an error. Raises `msgspec.DecodeError` for an invalid record."""
    read = _RECORD.decode(record)
    has_error = bytes(read.error) != b"null"
    return has_error or (read.response is not None and read.response.status_code != 200)


def read_part(work: Source, number: int, index: JobIndex) -> tuple[bytes, PartInfo]:
    """Read a finished part of any worker. Blocks. Raises `JobFormatError` if it does not have the
    part's records.
    """
    name = part_name(number)
    data, _ = work.read(name, max_bytes=MAX_PART_OBJECT_BYTES)
    records = data.split(b"\n")
    try:
        num_failed = sum(map(is_failed_record, records[:-1]))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        num_failed = -1
    info = describe_part(data, num_failed)
    if num_failed < 0 or records[-1] or info.num_records != index.parts[number].num_records:
        raise JobFormatError(
            f"{name} in {work.url} does not hold the {index.parts[number].num_records} records of that part",
            where=name,
            hint="It is damaged: remove it and run the job again.",
        )
    return data, info


def remove_quietly(work: Store, name: str) -> None:
    """Remove an object that is no longer needed, ignoring errors."""
    try:
        work.delete(name)
    except SourceError:
        return


PARTIAL_FOLDER = "partial/"
MAX_PARTIAL_BYTES = 256 << 20

_Entry = tuple[int, bool, int, msgspec.Raw]  # line number, whether it is an error, tokens, the record
_ENTRY = msgspec.json.Decoder(_Entry)


def partial_name(number: int) -> str:
    return f"{PARTIAL_FOLDER}{number:06}.jsonl"


def list_partials(work: Store) -> frozenset[int]:
    """The parts with partial records. Blocks."""
    try:
        names = [
            info.name.removeprefix(PARTIAL_FOLDER).removesuffix(".jsonl")
            for info in work.list(PARTIAL_FOLDER)
        ]
    except NotFoundError:
        return frozenset()
    return frozenset(int(name) for name in names if len(name) == 6 and name.isascii() and name.isdigit())


def write_partial(work: Store, number: int, lines: Sequence[Line], records: Sequence[Record | None]) -> None:
    """Store these records, replacing those of another worker for the same part. Blocks."""
    entries = [
        msgspec.json.encode(
            (line.number, record.is_failed, record.num_tokens, msgspec.Raw(record.data.rstrip()))
        )
        for line, record in zip(lines, records, strict=True)
        if record is not None
    ]
    work.put(partial_name(number), b"\n".join(entries))


def read_partial(work: Store, number: int, lines: Sequence[Line]) -> list[Record | None]:
    """A record for each of the part's lines, None if unknown. Blocks."""
    found: dict[int, Record] = {}
    try:
        data, _ = work.read(partial_name(number), max_bytes=MAX_PARTIAL_BYTES)
        for entry in data.split(b"\n"):
            line_number, is_failed, num_tokens, record = _ENTRY.decode(entry)
            found[line_number] = Record(bytes(record) + b"\n", is_failed, num_tokens)
    except (SourceError, FormatError, msgspec.DecodeError, UnicodeDecodeError):
        return [None] * len(lines)
    return [found.get(line.number) for line in lines]


def remove_partial(work: Store, number: int) -> None:
    """Remove a part's partial records. Blocks."""
    remove_quietly(work, partial_name(number))
