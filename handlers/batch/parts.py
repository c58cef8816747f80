"""Parts: ranges of the input whose records are one object of the output, written once.

A part is a checkpoint. Its object appears as a whole, by a conditional put: of two workers that
compute the same one, the first wins, and the other's is discarded. This module does not know how
records are made.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import msgspec

from ...loader.errors import AlreadyExistsError, NotFoundError, SourceError
from ...loader.sources.base import Source, Store
from .errors import JobFormatError
from .index import JobIndex
from .lines import Line, parse_line
from .places import Input
from .spec import Share
from .splitter import LineSplitter, RawLine

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


def read_input(
    given: Input,
    version: str,
    start_byte: int,
    end_byte: int,
    *,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Iterator[bytes]:
    """Bytes [start_byte, end_byte) of the input, in pieces. Ends early once `is_stopped`. Blocks.

    Raises `ChangedError` if the input is no longer `version`.
    """
    size_bytes = FIRST_READ_BYTES  # a small input need not use much memory
    while start_byte < end_byte and not is_stopped():
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
    """Whether the record is an error. Raises `msgspec.DecodeError` for an invalid record."""
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
