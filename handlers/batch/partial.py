"""Finished records of an incomplete part, kept by a stopped worker for its successor.

Without them, a job whose parts take longer than its workers live would never end. They are an
optimisation: missing or damaged ones are computed again. Records are used unchanged, so a part is
the same whichever worker completes it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...loader.errors import FormatError, NotFoundError, SourceError
from ...loader.sources.base import Store
from .lines import Line
from .parts import remove_quietly
from .records import Record

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
