"""`teneral timeline`: fetch or read a snapshot, and draw it in the terminal or into a page, or
write it for other programs: Chrome's trace events, which Perfetto and `chrome://tracing` open.

Their format is the JSON object of "Trace Event Format": complete events ("X") and instants ("i"),
times in microseconds. A lane becomes a thread; where its spans overlap, as those of parts fetched
at the same time do, it becomes several.
"""

from __future__ import annotations

import heapq
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...loader.errors import FormatError, NotFoundError, UsageError
from ...loader.sources.base import SourceOptions
from ...loader.sources.open import open_source
from ...loader.timeline import Span
from .snapshot import TimelineSnapshot, parse_snapshot

MAX_SNAPSHOT_BYTES = 64 << 20
MIN_WIDTH, DEFAULT_WIDTH, MAX_WIDTH = 40, 100, 400
# Lanes in the order in which Perfetto is to show them; others follow by name.
_ORDER = (
    "process",
    "manifest",
    "tokenizer",
    "model",
    "device",
    "fetch",
    "verify",
    "decode",
    "place",
    "ready",
    "draft",
)
_PROCESS = 1  # the id that a trace of one process needs


def show_timeline(
    place: str,
    *,
    output: str | None,
    form: str | None,
    width: int | None,
    color: str,
    api_key: str | None,
    page: Callable[[dict[str, Any]], str],
) -> int:
    """Draw the snapshot at `place`, a server's address or a file. Prints it, or writes it to `output`.

    `form` is text, html or perfetto; None: html for an output, else text. `page` makes the HTML of a
    checked snapshot: it belongs to the handlers, which this folder does not know.
    """
    snapshot = read_snapshot(place, api_key)
    form = form or ("text" if output is None else "html")
    drawn = (
        _drawn_text(snapshot, width, color, output) if form == "text" else _drawn_file(snapshot, form, page)
    )
    if output is None:
        print(drawn)
    else:
        _write_page(Path(output), drawn if drawn.endswith("\n") else f"{drawn}\n")
        print(f"wrote {output}")
    return 0


def _drawn_file(snapshot: dict[str, Any], form: str, page: Callable[[dict[str, Any]], str]) -> str:

    if form == "html":
        return page(checked_snapshot(snapshot))
    return json.dumps(chrome_trace(snapshot), separators=(",", ":"))


def _drawn_text(snapshot: dict[str, Any], width: int | None, color: str, output: str | None) -> str:
    from .view import render

    columns = width or shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns
    if not MIN_WIDTH <= columns <= MAX_WIDTH and width is not None:
        raise UsageError(f"--width must be from {MIN_WIDTH} to {MAX_WIDTH}", key="width")
    columns = min(max(columns, MIN_WIDTH), MAX_WIDTH)
    is_terminal = output is None and sys.stdout.isatty() and "NO_COLOR" not in os.environ
    colored = color == "always" or (color == "auto" and is_terminal)
    return render(snapshot, width=columns, color=colored)


def read_snapshot(place: str, api_key: str | None = None) -> dict[str, Any]:
    """The snapshot at a server's address (`/timeline` is added where it has no path), or in a file.
    Bounded.
    """
    if place.startswith(("http://", "https://")):
        scheme, _, rest = place.rstrip("/").partition("://")
        folder, _, name = rest.rpartition("/") if "/" in rest else (rest, "", "timeline")
        headers = (("Authorization", f"Bearer {api_key}"),) if api_key else ()
        source = open_source(f"{scheme}://{folder}", SourceOptions(headers=headers, max_attempts=1))
        try:
            data, _ = source.read(name, max_bytes=MAX_SNAPSHOT_BYTES)
        finally:
            source.close()
    else:
        data = _read_file(Path(place))
    try:
        snapshot = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{place} is not JSON: {error}",
            where=place,
            hint="Give a server's address, or what its /timeline returned.",
        ) from error
    if not isinstance(snapshot, dict):
        raise FormatError(f"{place} is not a timeline", where=place)
    return snapshot


def _read_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_SNAPSHOT_BYTES + 1)
    except OSError as error:
        raise NotFoundError(
            f"cannot read {path}: {error.strerror}",
            source=str(path),
            hint="Give a server's address (http://host:8080) or a file with what its /timeline returned.",
        ) from error
    if len(data) > MAX_SNAPSHOT_BYTES:
        raise FormatError(f"{path} is larger than {MAX_SNAPSHOT_BYTES} bytes", where=str(path))
    return data


def _write_page(path: Path, page: str) -> None:
    """Whole or not at all."""
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        unfinished.write_text(page, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise UsageError(f"cannot write {path}: {error.strerror}", key="output") from error


def chrome_trace(snapshot: Any) -> dict[str, Any]:
    """A JSON-ready value. Raises `FormatError` for a value that is not a timeline's snapshot."""
    parsed = parse_snapshot(snapshot)
    events: list[dict[str, Any]] = [_named("process_name", 0, "teneral")]
    thread = 0
    for lane, spans in _by_lane(parsed):
        free: list[tuple[float, int]] = []  # a heap of this lane's threads: the end of its last span, its id
        first = thread
        for span in spans:
            if free and free[0][0] <= span.start_s:
                _, own = heapq.heappop(free)
            else:
                own, thread = thread, thread + 1
                events.append(
                    _named("thread_name", own, lane if own == first else f"{lane} {own - first + 1}")
                )
                events.append({**_named("thread_sort_index", own, ""), "args": {"sort_index": own}})
            heapq.heappush(free, (span.end_s, own))
            event: dict[str, Any] = {
                "name": span.name,
                "cat": lane,
                "pid": _PROCESS,
                "tid": own,
                "ts": round(1e6 * span.start_s),
                "args": span.attributes,
            }
            if span.end_s == span.start_s:
                events.append({**event, "ph": "i", "s": "t"})
            else:
                events.append({**event, "ph": "X", "dur": round(1e6 * (span.end_s - span.start_s))})
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"started_unix_s": parsed.started_unix_s, "dropped_spans": parsed.num_dropped},
    }


# Attributes that the page reads, by their type: of others, which a file from anywhere may have, it needs nothing.
_TEXTS = frozenset(("group", "tier", "request", "error"))
_NUMBERS = frozenset(
    {"part", "bytes", "layer", "tokens", "stored_bytes", "weight_bytes", "exact_s", "token_s"}
    | {"num_draft_steps", "num_accepted", "num_judged"}
)
_LARGEST = 1e15


def checked_snapshot(snapshot: Any) -> dict[str, Any]:
    """The snapshot with what the page reads and nothing else, each value of its type. Raises `FormatError`."""
    parsed = parse_snapshot(snapshot)
    return {
        "schema": 1,
        "started_unix_s": parsed.started_unix_s,
        "now_s": parsed.now_s,
        "dropped_spans": parsed.num_dropped,
        "spans": [
            {
                "lane": span.lane,
                "name": span.name,
                "start_s": round(span.start_s, 6),
                "end_s": round(span.end_s, 6),
                "attributes": {
                    name: value
                    for name, value in span.attributes.items()
                    if (name in _TEXTS and isinstance(value, str)) or (name in _NUMBERS and _is_number(value))
                },
            }
            for span in parsed.spans
        ],
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST


def _by_lane(parsed: TimelineSnapshot) -> list[tuple[str, list[Span]]]:
    lanes: dict[str, list[Span]] = {}
    for span in parsed.spans:
        lanes.setdefault(span.lane, []).append(span)
    rank = {lane: number for number, lane in enumerate(_ORDER)}
    return sorted(lanes.items(), key=lambda item: (rank.get(item[0], len(rank)), item[0]))


def _named(kind: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": thread, "args": {"name": name}}
