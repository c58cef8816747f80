"""One pass over the input: the beginnings of its parts, the number of records, and the duplicates
of custom_ids.

The input is streamed: memory is one line, 17 bytes a record, and the positions of the parts. Pure:
the caller feeds it. Of the lines it uses only `read_head`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from ...loader.errors import UsageError
from .lines import read_head
from .splitter import LineSplitter, RawLine

MAX_PARTS = 4_096
# Of input, unless one line is larger, or there would be too many parts.
MAX_PART_BYTES = 1 << 20
# Factor for parts of mostly embeddings, whose lines take little time.
EMBEDDING_LINES = 8
_HASH_BYTES = 16


@dataclass(frozen=True, slots=True)
class PartSpan:
    """Bytes [start_byte, end_byte) of the input, from line `first_line` on, with `num_records`
    records, the first of which is the job's record `first_record`.
    """

    start_byte: int
    end_byte: int
    first_line: int
    num_records: int
    first_record: int


@dataclass(frozen=True, slots=True)
class Scanned:
    """The result of the pass.

    `duplicates` has a bit a record, set if another record has its custom_id: an earlier one, or,
    for a line without a custom_id, any line that has the line's number as its own.
    """

    parts: tuple[PartSpan, ...]
    num_lines: int
    num_records: int
    is_openai: bool  # of the first readable line
    duplicates: bytes


class Scanner:
    """The pass. Feed it all bytes, in order, and then `finish`."""

    def __init__(self, *, max_line_bytes: int, max_lines: int, part_lines: int) -> None:
        self._splitter = LineSplitter(max_line_bytes)
        self._max_lines = max_lines
        self._part_lines = part_lines
        # The first byte, line and record of each part.
        self._starts: list[tuple[int, int, int]] = []
        self._hashes = bytearray()
        # A byte a record: whether its custom_id is its line's number.
        self._implicit = bytearray()
        self._num_lines = 0
        self._num_records = 0
        self._num_embeddings = 0
        self._is_openai: bool | None = None

    def feed(self, chunk: bytes) -> None:
        """Add bytes. Raises `UsageError` for too many lines."""
        self._take(self._splitter.feed(chunk))

    def finish(self) -> Scanned:
        self._take(self._splitter.finish())
        is_embedding = 2 * self._num_embeddings > self._num_records
        starts = merged(self._starts, MAX_PARTS, EMBEDDING_LINES if is_embedding else 1)
        ends = [*starts[1:], (self._splitter.next_byte, 0, self._num_records)][: len(starts)]
        parts = tuple(
            PartSpan(byte, end_byte, line, end_record - record, record)
            for (byte, line, record), (end_byte, _, end_record) in zip(starts, ends, strict=True)
        )
        return Scanned(
            parts=parts,
            num_lines=self._num_lines,
            num_records=self._num_records,
            is_openai=bool(self._is_openai),
            duplicates=np.packbits(duplicates_of(self._hashes, self._implicit)).tobytes(),
        )

    def _take(self, lines: Iterable[RawLine]) -> None:
        for raw in lines:
            self._num_lines += 1
            if self._num_lines > self._max_lines:
                raise UsageError(
                    f"the input has more than {self._max_lines} lines",
                    key="max_lines",
                    hint="Split it into several jobs, or allow more with --max-lines.",
                )
            if not raw.is_blank:
                self._add_record(raw)

    def _add_record(self, raw: RawLine) -> None:
        if not self._starts or self._is_full(raw):
            self._starts.append((raw.start_byte, raw.number, self._num_records))
        head = read_head(raw)
        if head is not None:
            self._num_embeddings += head.is_embedding
            if self._is_openai is None:
                self._is_openai = head.is_openai
        # A line without a name of its own cannot be a duplicate: no text begins with this byte.
        name = (
            b"\xff%d" % self._num_records
            if head is None or head.custom_id is None
            else str(head.custom_id).encode("utf-8", "surrogatepass")
        )
        self._implicit.append(head is not None and head.is_implicit)
        self._hashes += blake2b(name, digest_size=_HASH_BYTES).digest()
        self._num_records += 1

    def _is_full(self, raw: RawLine) -> bool:
        """Whether the open part ends before this line."""
        start_byte, _, first_record = self._starts[-1]
        size_bytes = raw.start_byte + len(raw.data or b"") - start_byte
        return self._num_records - first_record >= self._part_lines or size_bytes > MAX_PART_BYTES


def merged(starts: list[tuple[int, int, int]], max_parts: int, wanted: int) -> list[tuple[int, int, int]]:
    """Every n-th beginning of a part, so that `wanted` neighbours become one, or more if there
    would be too many.
    """
    step = max(wanted, -(-len(starts) // max_parts))
    return starts[::step]


def duplicates_of(hashes: bytearray, implicit: bytearray) -> np.ndarray:
    """(N,) bool from N hashes of 16 bytes: whether an earlier one is the same.

    Hashes that are not `implicit` (N bytes) come before those that are, and otherwise in input
    order. Takes about 40 bytes a hash.
    """
    pairs = np.frombuffer(bytes(hashes), dtype=np.uint64).reshape(-1, 2)  # (N, 2)
    flags = np.zeros(len(pairs), dtype=bool)  # (N,)
    is_implicit = np.frombuffer(bytes(implicit), dtype=np.uint8)  # (N,)
    order = np.lexsort((is_implicit, pairs[:, 1], pairs[:, 0]))  # (N,); stable: the earliest comes first
    ordered = pairs[order]
    flags[order[1:]] = (ordered[1:] == ordered[:-1]).all(axis=1)
    return flags
