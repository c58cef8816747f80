"""The input of a job: its lines, the request of each, and one pass over all of them. Pure: the
caller feeds it.

Invariant: lines do not depend on the chunks of bytes in which they arrive, and at most one line of
the allowed length is held. A longer one is skipped, and reported.

A line is a request of OpenAI's Batch API (`custom_id`, `method`, `url`, `body`), or a plain one:
`prompt` or `messages` with generation options, `input` to embed, or the name of a `file` of sound. Anything else is
a `LineProblem`, which becomes an error record: no line can fail a job. Nothing that needs the model is checked here.

One pass finds the beginnings of the parts, the number of records, and duplicates of custom_ids. Its
memory is one line, 17 bytes a record, and the positions of the parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ...loader.errors import UsageError
from ...loader.sources.base import check_name

# Some editors write it before the first line.
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Bytes around a line that do not count.
_MARK_BYTES = len(_BYTE_ORDER_MARK) + len(b"\r")


class RawLine(NamedTuple):
    """A line of the input. `data` is without the line end; None: it is longer than allowed."""

    number: int  # from 1, counting blank lines
    start_byte: int
    data: bytes | None

    @property
    def is_blank(self) -> bool:
        return self.data is not None and not self.data.strip()


class LineSplitter:
    """The splitter. Feed it the bytes from `start_byte` on, where line number `first_line` begins,
    and then `finish`.
    """

    def __init__(self, max_line_bytes: int, *, start_byte: int = 0, first_line: int = 1) -> None:
        self._max_line_bytes = max_line_bytes
        self._number = first_line
        self._start_byte = start_byte
        self._next_byte = start_byte
        self._held = bytearray()
        self._is_too_long = False

    @property
    def next_byte(self) -> int:
        """The position of the first byte not fed yet."""
        return self._next_byte

    def feed(self, chunk: bytes) -> Iterator[RawLine]:
        """The lines that end in the chunk. Consume all before feeding the next one."""
        position = 0
        base = self._next_byte
        while (end := chunk.find(b"\n", position)) >= 0:
            self._hold(chunk, position, end)
            self._next_byte = base + end + 1
            yield self._end_line()
            position = end + 1
        self._hold(chunk, position, len(chunk))
        self._next_byte = base + len(chunk)

    def finish(self) -> Iterator[RawLine]:
        """The last line, if it has no line end."""
        if self._next_byte > self._start_byte:
            yield self._end_line()

    def _hold(self, chunk: bytes, start: int, end: int) -> None:
        if self._is_too_long or len(self._held) + end - start > self._max_line_bytes + _MARK_BYTES:
            self._is_too_long = True
            self._held.clear()
        else:
            self._held += chunk[start:end]

    def _end_line(self) -> RawLine:
        data: bytes | None = None
        if not self._is_too_long:
            data = bytes(self._held).removesuffix(b"\r")
            if self._number == 1:
                data = data.removeprefix(_BYTE_ORDER_MARK)
            if len(data) > self._max_line_bytes:
                data = None
        line = RawLine(self._number, self._start_byte, data)
        self._number += 1
        self._start_byte = self._next_byte
        self._held.clear()
        self._is_too_long = False
        return line


TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", TRANSCRIPTIONS, TRANSLATIONS)
# Of transcripts: those that are JSON.
TRANSCRIPT_FORMATS = ("json", "verbose_json")
MAX_ID_CHARS = 512
MAX_SHOWN_CHARS = 80
_MAX_INTEGER_ID = (1 << 63) - 1

CustomId = str | int


@dataclass(frozen=True, slots=True)
class RouteCall:
    """A request to a route of the HTTP API."""

    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Generate:
    prompt: str | Sequence[Mapping[str, Any]]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Embed:
    text: str


@dataclass(frozen=True, slots=True)
class Transcribe:
    """A file of sound next to the input, and the other fields of a form for the route at `url`."""

    url: str
    file: str
    version: str  # ''; any
    fields: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class LineProblem:
    """The reason why a line has no answer. Codes: docs/batch.md."""

    code: str
    message: str


Request = RouteCall | Generate | Embed | Transcribe | LineProblem


@dataclass(frozen=True, slots=True)
class Line:
    """One line that is not blank. `custom_id` is None if it is unknown, invalid, or a duplicate."""

    number: int
    custom_id: CustomId | None
    request: Request
    is_openai: bool
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LineHead:
    """The fields of a line that the scan needs: the name and the form of its answer."""

    custom_id: CustomId | None  # None: the line has no valid one
    # The line has none, so it is the line's number.
    is_implicit: bool
    is_openai: bool
    is_embedding: bool


class _LineFields(msgspec.Struct):
    """The fields that are read; all others are skipped."""

    custom_id: Any = msgspec.UNSET
    method: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    url: Any = msgspec.UNSET
    body: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_FIELDS = msgspec.json.Decoder(_LineFields)
_OBJECT = msgspec.json.Decoder(dict[str, Any])
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def read_head(raw: RawLine) -> LineHead | None:
    """The head of a line; None if the line is too long or not a JSON object."""
    if raw.data is None:
        return None
    try:
        fields = _FIELDS.decode(raw.data)
    except _UNREADABLE:
        return None
    given = msgspec.UNSET
    is_openai = fields.url is not given or fields.method is not given or fields.body is not given
    return LineHead(
        is_implicit=fields.custom_id is given or fields.custom_id is None,
        custom_id=_usable_id(fields.custom_id, raw.number),
        is_openai=is_openai,
        is_embedding=fields.url == "/v1/embeddings" if is_openai else fields.input is not given,
    )


def _usable_id(value: Any, number: int) -> CustomId | None:
    if value is msgspec.UNSET or value is None:
        return str(number)
    if isinstance(value, str) and 0 < len(value) <= MAX_ID_CHARS:
        return value
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MAX_INTEGER_ID:
        return value
    return None


def parse_line(raw: RawLine, *, is_duplicate: bool, job_is_openai: bool, max_line_bytes: int) -> Line:
    """The line as a request. `job_is_openai` selects the form of an unreadable line's error."""
    head = read_head(raw)
    if head is None:
        return Line(raw.number, None, _unreadable(raw, max_line_bytes), job_is_openai)
    custom_id = head.custom_id
    request: Request = _request_of(raw, head)
    if is_duplicate:
        shown = str(custom_id)[:MAX_SHOWN_CHARS]
        message = f"line {raw.number}: the custom_id {shown!r} is a duplicate of an earlier line's"
        if head.is_implicit:
            message = f"line {raw.number} has no custom_id, and its number is that of another line"
        custom_id, request = None, LineProblem("duplicate_custom_id", message)
    elif custom_id is None:
        wanted = f"a text of 1 to {MAX_ID_CHARS} characters or a whole number"
        request = LineProblem("invalid_custom_id", f"line {raw.number}: the custom_id must be {wanted}")
    return Line(raw.number, custom_id, request, head.is_openai, len(raw.data or b""))


def _unreadable(raw: RawLine, max_line_bytes: int) -> LineProblem:
    if raw.data is None:
        return LineProblem("line_too_long", f"line {raw.number} is longer than {max_line_bytes} bytes")
    try:
        _OBJECT.decode(raw.data)
        reason = "it is not an object"
    except _UNREADABLE as error:
        reason = str(error)[:MAX_SHOWN_CHARS].replace("`", "'")
    return LineProblem("invalid_json", f"line {raw.number} is not a JSON object: {reason}")


def _request_of(raw: RawLine, head: LineHead) -> Request:
    try:
        fields = _OBJECT.decode(raw.data or b"")
    # In the part that `read_head` skipped.
    except _UNREADABLE:
        return _unreadable(raw, 0)
    fields.pop("custom_id", None)
    return _call(fields, raw.number) if head.is_openai else _plain(fields, raw.number)


def _call(fields: dict[str, Any], number: int) -> RouteCall | Transcribe | LineProblem:
    method, url, body = fields.get("method", "POST"), fields.get("url"), fields.get("body")
    if method != "POST":
        return _invalid(number, "the method must be POST")
    if not isinstance(url, str) or url not in URLS:
        shown = repr(url[:MAX_SHOWN_CHARS]) if isinstance(url, str) else "none"
        return LineProblem(
            "unknown_url", f"line {number}: the url must be one of {', '.join(URLS)}; it is {shown}"
        )
    if not isinstance(body, dict):
        return _invalid(number, "the body must be an object")
    if body.get("stream"):
        return _invalid(number, "batch jobs do not stream: leave `stream` out of the body")
    return _transcribe(body, number, url) if url in (TRANSCRIPTIONS, TRANSLATIONS) else RouteCall(url, body)


def _plain(fields: dict[str, Any], number: int) -> Generate | Embed | Transcribe | LineProblem:
    # A chat's options may have a name of these, but no sound's have `prompt` without a `file`.
    if "file" in fields:
        urls = {"transcribe": TRANSCRIPTIONS, "translate": TRANSLATIONS}
        task = fields.pop("task", "transcribe")
        if not isinstance(task, str) or task not in urls:
            return _invalid(number, f"the task must be one of {', '.join(urls)}")
        return _transcribe(fields, number, urls[task])
    asked = [name for name in ("prompt", "messages", "input") if name in fields]
    if len(asked) != 1:
        return _invalid(number, "give either a prompt, messages, an input or a file")
    name = asked[0]
    value: Any = fields.pop(name)
    if not isinstance(value, list if name == "messages" else str):
        wanted = "a list of messages" if name == "messages" else "a text"
        return _invalid(number, f"{name} must be {wanted}, not {type(value).__name__}")
    if name != "input":
        return Generate(value, fields)
    if fields:
        unknown = next(iter(fields))[:MAX_SHOWN_CHARS]
        return _invalid(number, f"an embedding has no option {unknown!r}")
    return Embed(str(value))


def _transcribe(fields: dict[str, Any], number: int, url: str) -> Transcribe | LineProblem:
    file, version = fields.pop("file", None), fields.pop("version", "")
    if not isinstance(file, str) or not _is_name(file):
        return _invalid(number, "the file must be the name of one in the input's folder")
    if not isinstance(version, str):
        return _invalid(number, "the version must be an ETag, or a generation")
    if fields.get("response_format", TRANSCRIPT_FORMATS[0]) not in TRANSCRIPT_FORMATS:
        return _invalid(number, f"the response_format must be one of {', '.join(TRANSCRIPT_FORMATS)}")
    if fields.get("stream"):
        return _invalid(number, "batch jobs do not stream: leave `stream` out")
    form: list[tuple[str, str]] = []
    for name, value in fields.items():
        inner = value.items() if isinstance(value, dict) else ()
        pairs = [(f"{name}[{key}]", each) for key, each in inner] if inner else [(name, value)]
        if isinstance(value, list):
            pairs = [(name, each) for each in value]
        for key, each in pairs:
            if not isinstance(each, str | int | float):
                return _invalid(number, f"{key[:MAX_SHOWN_CHARS]} must be a text or a number")
            form.append((key, str(each).lower() if isinstance(each, bool) else str(each)))
    return Transcribe(url, file, version, tuple(form))


def _is_name(text: str) -> bool:
    try:
        return check_name(text) == text
    except UsageError:
        return False


def _invalid(number: int, message: str) -> LineProblem:
    return LineProblem("invalid_request", f"line {number}: {message}")


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


class LineScanner:
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
        """True if the open part ends before this line."""
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
