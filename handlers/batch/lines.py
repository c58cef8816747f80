"""The request of one input line.

A line is a request of OpenAI's Batch API (`custom_id`, `method`, `url`, `body`), or a plain one:
`prompt` or `messages` with generation options, or `input` to embed. Anything else is a `Problem`,
which becomes an error record: no line can fail a job. This module does no I/O and makes no checks
that need the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from .splitter import RawLine

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
MAX_ID_CHARS = 512
MAX_SHOWN_CHARS = 80
_MAX_INTEGER_ID = (1 << 63) - 1

CustomId = str | int


@dataclass(frozen=True, slots=True)
class Call:
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
class Problem:
    """The reason why a line has no answer. Codes: docs/batch.md."""

    code: str
    message: str


Request = Call | Generate | Embed | Problem


@dataclass(frozen=True, slots=True)
class Line:
    """One line that is not blank. `custom_id` is None if it is unknown, invalid, or a duplicate."""

    number: int
    custom_id: CustomId | None
    request: Request
    is_openai: bool
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Head:
    """The fields of a line that the scan needs: the name and the form of its answer."""

    custom_id: CustomId | None  # None: the line has no valid one
    # The line has none, so it is the line's number.
    is_implicit: bool
    is_openai: bool
    is_embedding: bool


class _Fields(msgspec.Struct):
    """The fields that are read; all others are skipped."""

    custom_id: Any = msgspec.UNSET
    method: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    url: Any = msgspec.UNSET
    body: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_FIELDS = msgspec.json.Decoder(_Fields)
_OBJECT = msgspec.json.Decoder(dict[str, Any])
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def read_head(raw: RawLine) -> Head | None:
    """The head of a line; None if the line is too long or not a JSON object."""
    if raw.data is None:
        return None
    try:
        fields = _FIELDS.decode(raw.data)
    except _UNREADABLE:
        return None
    given = msgspec.UNSET
    is_openai = fields.url is not given or fields.method is not given or fields.body is not given
    return Head(
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
        custom_id, request = None, Problem("duplicate_custom_id", message)
    elif custom_id is None:
        wanted = f"a text of 1 to {MAX_ID_CHARS} characters or a whole number"
        request = Problem("invalid_custom_id", f"line {raw.number}: the custom_id must be {wanted}")
    return Line(raw.number, custom_id, request, head.is_openai, len(raw.data or b""))


def _unreadable(raw: RawLine, max_line_bytes: int) -> Problem:
    if raw.data is None:
        return Problem("line_too_long", f"line {raw.number} is longer than {max_line_bytes} bytes")
    try:
        _OBJECT.decode(raw.data)
        reason = "it is not an object"
    except _UNREADABLE as error:
        reason = str(error)[:MAX_SHOWN_CHARS].replace("`", "'")
    return Problem("invalid_json", f"line {raw.number} is not a JSON object: {reason}")


def _request_of(raw: RawLine, head: Head) -> Request:
    try:
        fields = _OBJECT.decode(raw.data or b"")
    # In the part that `read_head` skipped.
    except _UNREADABLE:
        return _unreadable(raw, 0)
    fields.pop("custom_id", None)
    return _call(fields, raw.number) if head.is_openai else _plain(fields, raw.number)


def _call(fields: dict[str, Any], number: int) -> Call | Problem:
    method, url, body = fields.get("method", "POST"), fields.get("url"), fields.get("body")
    if method != "POST":
        return _invalid(number, "the method must be POST")
    if not isinstance(url, str) or url not in URLS:
        shown = repr(url[:MAX_SHOWN_CHARS]) if isinstance(url, str) else "none"
        return Problem(
            "unknown_url", f"line {number}: the url must be one of {', '.join(URLS)}; it is {shown}"
        )
    if not isinstance(body, dict):
        return _invalid(number, "the body must be an object")
    if body.get("stream"):
        return _invalid(number, "batch jobs do not stream: leave `stream` out of the body")
    return Call(url, body)


def _plain(fields: dict[str, Any], number: int) -> Generate | Embed | Problem:
    asked = [name for name in ("prompt", "messages", "input") if name in fields]
    if len(asked) != 1:
        return _invalid(number, "give either a prompt, messages or an input")
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


def _invalid(number: int, message: str) -> Problem:
    return Problem("invalid_request", f"line {number}: {message}")
