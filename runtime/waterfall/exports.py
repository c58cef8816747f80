"""A timeline for other programs: Chrome's trace events, which Perfetto and `chrome://tracing` open.

The format is the JSON object of "Trace Event Format": complete events ("X") and instants ("i"), times in microseconds.
A lane becomes a thread; where its spans overlap, as those of parts fetched at the same time do, it becomes several.
"""

from __future__ import annotations

import heapq
from typing import Any

from ...loader.timeline import Span
from .snapshot import Snapshot, parse_snapshot

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


def _by_lane(parsed: Snapshot) -> list[tuple[str, list[Span]]]:
    lanes: dict[str, list[Span]] = {}
    for span in parsed.spans:
        lanes.setdefault(span.lane, []).append(span)
    rank = {lane: number for number, lane in enumerate(_ORDER)}
    return sorted(lanes.items(), key=lambda item: (rank.get(item[0], len(rank)), item[0]))


def _named(kind: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": thread, "args": {"name": name}}
