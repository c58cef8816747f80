"""A timeline's snapshot, read back: from JSON that came from a file or an address, and may be anything, to
values.

`docs/timeline.md` is the norm. What has the wrong type, is out of bounds or too much is refused, naming the
place; attributes that are not understood are left alone. It does not know what spans mean.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Any

from ...loader.errors import FormatError
from ...loader.timeline import MAX_SPANS, Span

SCHEMA = 1
MAX_NAME_CHARS = 120
MAX_TIME_S = 1e9  # thirty years
MAX_ATTRIBUTES = 32


@dataclass(frozen=True, slots=True)
class TimelineSnapshot:
    """Spans in the order of their start; names and texts in them are printable and short."""

    spans: tuple[Span, ...]
    now_s: float  # when it was taken, since the process began
    started_unix_s: float
    num_dropped: int


def parse_snapshot(value: Any) -> TimelineSnapshot:
    """`value` is what `Timeline.snapshot` gave, or what JSON made of it. Raises `FormatError`."""
    if not isinstance(value, dict) or not isinstance(value.get("spans"), list):
        raise FormatError(
            "this is no timeline", hint="Give what a server's /timeline answers, or a file with it."
        )
    if value.get("schema") != SCHEMA:
        raise FormatError(
            f"the timeline has schema {_shown(value.get('schema'))}, but {SCHEMA} is understood here",
            where="schema",
            hint="Draw it with the version of teneral that wrote it.",
        )
    if len(value["spans"]) > MAX_SPANS:
        raise FormatError(f"the timeline has more than {MAX_SPANS} spans", where="spans")
    spans = [_span(entry, f"spans[{index}]") for index, entry in enumerate(value["spans"])]
    return TimelineSnapshot(
        spans=tuple(sorted(spans, key=lambda span: span.start_s)),
        now_s=_number(value, "now_s", MAX_TIME_S, ""),
        started_unix_s=_number(value, "started_unix_s", 1e11, ""),
        num_dropped=int(_number(value, "dropped_spans", 1e15, "")),
    )


def clean_text(text: str, max_chars: int = MAX_NAME_CHARS) -> str:
    """The text with every character taking one column: no escape sequences for a terminal to obey."""
    cut = text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"
    if cut.isascii() and cut.isprintable():
        return cut
    return "".join(character if _is_one_column(character) else "?" for character in cut)


def _span(entry: Any, where: str) -> Span:
    if not isinstance(entry, dict):
        raise FormatError(f"{where} is not an object", where=where)
    for key in ("lane", "name"):
        if not isinstance(entry.get(key), str):
            raise FormatError(f"{where}.{key} is not a text", where=f"{where}.{key}")
    start_s = _number(entry, "start_s", MAX_TIME_S, f"{where}.")
    end_s = _number(entry, "end_s", MAX_TIME_S, f"{where}.")
    if end_s < start_s:
        raise FormatError(f"{where} ends before it starts", where=where)
    attributes = entry.get("attributes", {})
    if not isinstance(attributes, dict) or len(attributes) > MAX_ATTRIBUTES:
        raise FormatError(f"{where}.attributes is no object of up to {MAX_ATTRIBUTES} keys", where=where)
    return Span(
        clean_text(entry["lane"]),
        clean_text(entry["name"]),
        start_s,
        end_s,
        {name: clean_text(item) if isinstance(item, str) else item for name, item in attributes.items()},
    )


def _number(owner: dict[str, Any], key: str, largest: float, where: str) -> float:
    number = owner.get(key)
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise FormatError(f"{where}{key} is not a number", where=f"{where}{key}")
    # A process's start is known to 10 ms, so something may seem to come a little before it. NaN fails as
    # well.
    if not -1.0 <= number <= largest:
        raise FormatError(f"{where}{key} is {_shown(number)}, out of bounds", where=f"{where}{key}")
    return max(0.0, float(number))


def _shown(value: Any) -> str:
    if isinstance(value, int) and abs(value) >= 10**18:
        return "a huge number"
    return (
        clean_text(repr(value), 40) if isinstance(value, int | float | str | None) else type(value).__name__
    )


def _is_one_column(character: str) -> bool:
    return (
        character.isprintable()
        and unicodedata.east_asian_width(character) not in "WF"
        and not unicodedata.combining(character)
    )


def whole_number(value: Any) -> int | None:
    """An attribute that counts something; None when it does not."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
    return value if is_count else None
