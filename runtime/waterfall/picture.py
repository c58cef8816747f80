"""The conversion of a timeline's snapshot to its picture: rows of bars and marks, and the figures
above them, as values.

The picture is that of the cold start: it ends when the load and the first requests have, so that a
server which has been up for a day still shows its first seconds. `docs/timeline.md` lists the lanes
and attributes. Both drawings, for a terminal and for a browser, are made from it.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ...loader.timeline import Span
from .snapshot import TimelineSnapshot, clean_text, whole_number

MAX_REQUEST_ROWS = 12
MAX_TASK_ROWS = 40
LOAD_LANES = ("fetch", "verify", "decode", "place")
DECISIONS = ("draft-first: ", "exact: ")  # prefixes of the mark that names the first tier
OTHER_LANES = (*LOAD_LANES, "ready", "execute", "request")
SMALLEST_END_S = 1e-3


class BarKind(enum.StrEnum):
    """The kind of a bar, in the order of the phases of a weight and then of a request."""

    TASK = "task"
    FETCH = "fetch"
    VERIFY = "verify"
    DECODE = "decode"
    PLACE = "place"  # on another device
    EXECUTE = "execute"
    QUEUED = "queued"
    PREFILL = "prefill"
    GENERATE = "generate"


class MarkKind(enum.StrEnum):
    DRAFT = "draft"
    EXACT = "exact"
    FIRST_TOKEN = "first token"  # noqa: S105 - not that kind of token
    LAST_TOKEN = "last token"  # noqa: S105


class Section(enum.StrEnum):
    START = "start"
    WEIGHTS = "weights"
    REQUESTS = "requests"


@dataclass(frozen=True, slots=True)
class Bar:
    """Half-open [start_s, end_s) since process start. `tier` is "draft", "refine" or ""."""

    kind: BarKind
    start_s: float
    end_s: float
    title: str
    tier: str = ""
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Mark:
    kind: MarkKind
    at_s: float
    title: str


@dataclass(frozen=True, slots=True)
class Row:
    """`note` is the one figure worth reading at the end of the line."""

    section: Section
    label: str
    bars: tuple[Bar, ...]
    marks: tuple[Mark, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Figures:
    """Moments since process start; None: has not happened. Bytes are 0 when they are not known."""

    first_token_s: float | None = None
    draft_s: float | None = None  # all of the draft is there
    possible_s: float | None = None  # a first token, or answer, in this server's mode
    exact_s: float | None = None
    possible: str = "first answer possible"
    stored_bytes: int = 0
    weight_bytes: int = 0
    fetch_s: float = 0.0
    failure: str = ""
    # The tier that the load took first, and why.
    decision: str = ""
    outcome: str = ""  # result of drafting ahead

    @property
    def bytes_per_s(self) -> float:
        return self.stored_bytes / self.fetch_s if self.fetch_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Picture:
    """All of it lies in [0, end_s]. `num_hidden_requests` came later, or were too many."""

    end_s: float
    figures: Figures
    rows: tuple[Row, ...]
    num_hidden_requests: int
    num_dropped_spans: int
    started_unix_s: float


def throughput(picture: Picture, num_bins: int) -> list[float]:
    """Bytes that arrived in each of the equal intervals of [0, end_s], as if each part had arrived
    at a constant rate.
    """
    bins, steps = [0.0] * num_bins, [0.0] * (num_bins + 1)
    width_s = picture.end_s / num_bins
    for row in picture.rows:
        for bar in row.bars:
            if bar.kind is BarKind.FETCH and bar.size_bytes:
                _spread(bins, steps, bar, width_s)
    levels = itertools.accumulate(steps[:num_bins])
    noise = 1e-9 * sum(bins)  # what adding and taking away leaves
    return [
        count if (count := alone + level) > noise else 0.0 for alone, level in zip(bins, levels, strict=True)
    ]


def share_rows(rows: Sequence[Row], max_rows: int) -> list[Row]:
    """The rows themselves, or at most `max_rows` in which neighbours were merged."""
    if len(rows) <= max_rows:
        return list(rows)
    per_row = math.ceil(len(rows) / max(1, max_rows))
    shared = []
    for start in range(0, len(rows), per_row):
        together = rows[start : start + per_row]
        first, last = together[0].label, together[-1].label
        prefix = first[: len(first) - len(first.lstrip("abcdefghijklmnopqrstuvwxyz._"))]
        label = first if len(together) == 1 else f"{first}–{last.removeprefix(prefix) if prefix else last}"
        shared.append(
            Row(
                section=together[0].section,
                label=label,
                bars=tuple(bar for row in together for bar in row.bars),
                marks=tuple(mark for row in together for mark in row.marks),
                note=together[-1].note,
            )
        )
    return shared


def tick_step_s(end_s: float, max_ticks: int) -> float:
    """The smallest of …, 0.5, 1, 2, 5, 10, … that divides [0, end_s] into at most `max_ticks`
    pieces.
    """
    rough_s = end_s / max_ticks
    power = 10.0 ** math.floor(math.log10(rough_s))
    return next(step for factor in (1, 2, 5, 10) if (step := factor * power) >= rough_s * (1 - 1e-9))


def format_s(seconds: float) -> str:
    """Like "64 ms", "5.37 s", "2 min 5 s"."""
    if seconds < 0.0995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 99.95:
        return f"{seconds:.2f} s"
    return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


def format_bytes(count: float) -> str:
    """Like "988 MB", decimal as networks and stores count."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit in ("B", "kB", "MB") else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def _spread(bins: list[float], steps: list[float], bar: Bar, width_s: float) -> None:
    """Add a bar's bytes: to `bins` those of the stretches it begins and ends in, to `steps` where the level
    between them rises and falls, so that a long bar costs no more than a short one.
    """
    took_s = bar.end_s - bar.start_s
    first, last = (min(len(bins) - 1, int(at_s / width_s)) for at_s in (bar.start_s, bar.end_s))
    if first == last or took_s <= 0:
        bins[first] += bar.size_bytes
        return
    rate = bar.size_bytes / took_s
    bins[first] += rate * ((first + 1) * width_s - bar.start_s)
    bins[last] += rate * (bar.end_s - last * width_s)
    steps[first + 1] += rate * width_s
    steps[last] -= rate * width_s


ENGINE_MARKS = ("engine runs", "can answer")  # the latter in timelines of older versions
REQUEST_KINDS = {"queued": BarKind.QUEUED, "prefill": BarKind.PREFILL, "decode": BarKind.GENERATE}
REQUEST_MARKS = {"first token": MarkKind.FIRST_TOKEN, "last token": MarkKind.LAST_TOKEN}


def picture_of(snapshot: TimelineSnapshot, *, max_layer_rows: int) -> Picture:
    """The picture of a snapshot. Neighbouring layers share rows, so that `max_layer_rows` are enough."""
    lanes: dict[str, list[Span]] = defaultdict(list)
    for span in snapshot.spans:
        lanes[span.lane].append(span)
    tasks, layers = _task_rows(lanes), _layer_rows(lanes)
    loaded_s = _loaded_s(snapshot.now_s, [*tasks, *layers], lanes["fetch"])
    requests, num_hidden = _request_rows(lanes["request"], latest_s=1.5 * loaded_s)
    rows = [*tasks, *share_rows(layers, max_layer_rows), *_step_row(lanes["execute"]), *requests]
    # A long answer, or a first request that came late, must not squeeze what went before.
    rows = [clipped for row in rows if (clipped := _clip(row, 2 * loaded_s)).bars or clipped.marks]
    return Picture(
        end_s=max([loaded_s, *(_last_s(row) for row in rows)]),
        figures=_figures(lanes, snapshot.now_s),
        rows=tuple(rows),
        num_hidden_requests=num_hidden,
        num_dropped_spans=snapshot.num_dropped,
        started_unix_s=snapshot.started_unix_s,
    )


# The rows.


def _task_rows(lanes: dict[str, list[Span]]) -> list[Row]:
    """The process's own work: a row for each lane; in the lane "process", shared by threads, a row
    for each name.
    """
    rows: dict[str, list[Bar]] = {}
    for span in sorted((span for lane in lanes.values() for span in lane), key=lambda span: span.start_s):
        if span.lane in OTHER_LANES or span.end_s == span.start_s:
            continue
        label = span.name if span.lane == "process" else span.lane
        title = f"{label}: {span.name}" if label != span.name else label
        bar = Bar(BarKind.TASK, span.start_s, span.end_s, f"{title}, {format_s(span.end_s - span.start_s)}")
        rows.setdefault(label, []).append(bar)
    return [
        Row(Section.START, label, tuple(bars), note=format_s(sum(bar.end_s - bar.start_s for bar in bars)))
        for label, bars in list(rows.items())[:MAX_TASK_ROWS]
    ]


@dataclass(slots=True)
class _Layer:
    """The spans of one layer group."""

    order: float = math.inf  # number of its first part: parts are numbered in forward order
    bars: list[Bar] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)


def _layer_rows(lanes: dict[str, list[Span]]) -> list[Row]:
    layers: dict[str, _Layer] = defaultdict(_Layer)
    share = _wire_share(lanes)
    for lane in LOAD_LANES:
        for span in lanes[lane]:
            group = span.attributes.get("group")
            if isinstance(group, str):
                layer = layers[group]
                layer.bars.append(_part_bar(BarKind(lane), group, span, share if lane == "fetch" else 1.0))
                part = whole_number(span.attributes.get("part"))
                layer.order = min(layer.order, math.inf if part is None else part)
    for span in lanes["ready"]:
        group, tier = span.attributes.get("group"), span.attributes.get("tier")
        if isinstance(group, str) and tier in ("draft", "exact"):
            layers[group].marks.append(
                Mark(MarkKind(tier), span.start_s, f"{group}: {tier}, {format_s(span.start_s)}")
            )
    for span in lanes["execute"]:
        if "layer" in span.attributes:
            layer = layers[span.name]
            title = f"{span.name}: executed in {format_s(span.end_s - span.start_s)}"
            layer.bars.append(Bar(BarKind.EXECUTE, span.start_s, span.end_s, title))
            if span.attributes["layer"] == -1:  # the embeddings, which may lie in the store as the head
                layer.order = -1
    ordered = sorted(layers.items(), key=lambda item: item[1].order)
    return [
        Row(Section.WEIGHTS, name, tuple(layer.bars), tuple(layer.marks), note=_exact_note(layer.marks))
        for name, layer in ordered
    ]


def _wire_share(lanes: dict[str, list[Span]]) -> float:
    """Bytes that crossed the network for one of the load's, which a GGUF file's source makes of fewer."""
    found = (span.attributes.get("wire_share") for span in lanes["manifest"])
    return next((float(share) for share in found if isinstance(share, float) and 0 < share < 1e3), 1.0)


def _part_bar(kind: BarKind, group: str, span: Span, share: float) -> Bar:
    size_bytes = round(share * (whole_number(span.attributes.get("bytes")) or 0))
    tier = span.attributes.get("tier")
    tier = tier if tier in ("draft", "refine") else ""
    part = whole_number(span.attributes.get("part"))
    whose = f"{group} {tier}" if tier else group
    what = kind.value if part is None else f"{kind.value} part {part}"
    title = f"{whose}: {what}, {format_bytes(size_bytes)} in {format_s(span.end_s - span.start_s)}"
    return Bar(kind, span.start_s, span.end_s, clean_text(title), tier, size_bytes)


def _exact_note(marks: Iterable[Mark]) -> str:
    exact_s = [mark.at_s for mark in marks if mark.kind is MarkKind.EXACT]
    return f"exact {format_s(max(exact_s))}" if exact_s else ""


def _step_row(spans: Iterable[Span]) -> list[Row]:
    """The first passes through the whole model."""
    bars = []
    for span in spans:
        if "layer" not in span.attributes:
            tokens = whole_number(span.attributes.get("tokens")) or 0
            title = f"{span.name}: {tokens} tokens in {format_s(span.end_s - span.start_s)}"
            bars.append(Bar(BarKind.EXECUTE, span.start_s, span.end_s, title))
    return [Row(Section.REQUESTS, "forward passes", tuple(bars))] if bars else []


def _request_rows(spans: Iterable[Span], *, latest_s: float) -> tuple[list[Row], int]:
    """Requests that came before `latest_s`, and how many are left out."""
    by_request: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        name = span.attributes.get("request")
        by_request[name if isinstance(name, str) else ""].append(span)
    early = [item for item in by_request.items() if item[1][0].start_s <= latest_s][:MAX_REQUEST_ROWS]
    rows = [_request_row(f"request {number}", *item) for number, item in enumerate(early, start=1)]
    return rows, len(by_request) - len(rows)


def _request_row(label: str, request: str, spans: list[Span]) -> Row:
    bars, marks = [], []
    for span in spans:
        if span.name in REQUEST_KINDS:
            title = clean_text(f"{request}: {span.name} for {format_s(span.end_s - span.start_s)}")
            bars.append(Bar(REQUEST_KINDS[span.name], span.start_s, span.end_s, title))
        elif span.name in REQUEST_MARKS:
            title = clean_text(f"{request}: {span.name} after {format_s(span.start_s - spans[0].start_s)}")
            marks.append(Mark(REQUEST_MARKS[span.name], span.start_s, title))
    first_s = [mark.at_s for mark in marks if mark.kind is MarkKind.FIRST_TOKEN]
    note = f"token {format_s(min(first_s))}" if first_s else ""
    return Row(Section.REQUESTS, label, tuple(bars), tuple(marks), note)


def _clip(row: Row, end_s: float) -> Row:
    """The row without the part after `end_s`."""
    bars = tuple(replace(bar, end_s=min(bar.end_s, end_s)) for bar in row.bars if bar.start_s < end_s)
    return replace(row, bars=bars, marks=tuple(mark for mark in row.marks if mark.at_s <= end_s))


# The figures.


def _figures(lanes: dict[str, list[Span]], now_s: float) -> Figures:
    moments = {span.name: span.start_s for span in reversed(lanes["process"]) if span.start_s == span.end_s}
    first_tokens = [span.start_s for span in lanes["request"] if span.name == "first token"]
    failed = next((span for span in lanes["process"] if span.name == "failed"), None)
    failure = failed.attributes.get("error", "failed") if failed else ""
    exact_s = moments.get("all weights exact")
    engine = next((span for span in lanes["process"] if span.name in ENGINE_MARKS), None)
    mode = engine.attributes.get("first_token") if engine else None
    draft_s = _draft_s(lanes["ready"]) if exact_s is not None else None
    weights_s = draft_s if mode in ("draft", "sketch") and draft_s is not None else exact_s
    figures = Figures(
        first_token_s=min(first_tokens, default=None),
        draft_s=draft_s,
        possible_s=max(engine.start_s, weights_s) if engine and weights_s is not None else None,
        exact_s=exact_s,
        possible="first answer possible" if mode is None else "first token possible",
        failure=failure if isinstance(failure, str) else "failed",
        decision=next((span.name for span in lanes["process"] if span.name.startswith(DECISIONS)), ""),
        outcome=_outcome(lanes["draft"]),
    )
    share = _wire_share(lanes)
    load = next((span for span in lanes["fetch"] if span.name == "load"), None)
    if load is not None:
        return replace(
            figures,
            stored_bytes=round(share * (whole_number(load.attributes.get("stored_bytes")) or 0)),
            weight_bytes=whole_number(load.attributes.get("weight_bytes")) or 0,
            fetch_s=load.end_s - load.start_s,
        )
    parts = [span for span in lanes["fetch"] if "part" in span.attributes]
    if not parts:
        return figures
    arrived = sum(whole_number(span.attributes.get("bytes")) or 0 for span in parts)
    return replace(figures, stored_bytes=round(share * arrived), fetch_s=max(0.0, now_s - parts[0].start_s))


def _draft_s(marks: Iterable[Span]) -> float | None:
    """When the last group's draft was there; None where not all groups have one."""
    groups: dict[str, dict[object, float]] = {"draft": {}, "exact": {}}
    for mark in marks:
        tier = mark.attributes.get("tier")
        if isinstance(tier, str) and tier in groups:
            groups[tier][mark.attributes.get("group")] = mark.start_s
    drafts = groups["draft"]
    return max(drafts.values()) if drafts and drafts.keys() >= groups["exact"].keys() else None


def _outcome(spans: Iterable[Span]) -> str:
    """Of drafting ahead, in words; empty when it did not come to an end."""
    last = next((span for span in spans if span.name == "exact from here on"), None)
    if last is None:
        return ""
    keys = ("num_draft_steps", "num_accepted", "num_judged")
    steps, accepted, judged = (whole_number(last.attributes.get(key)) or 0 for key in keys)
    return f"drafted in {steps:,} steps, {accepted:,} of {judged:,} proposals confirmed"


def _loaded_s(now_s: float, rows: Iterable[Row], fetches: list[Span]) -> float:
    """The time when the process had started and the weights had arrived; now, while they are still
    arriving. Never 0.
    """
    if fetches and not any(span.name == "load" for span in fetches):
        return max(now_s, SMALLEST_END_S)
    loading = [bar.end_s for row in rows for bar in row.bars if bar.kind is not BarKind.EXECUTE]
    ready = [mark.at_s for row in rows for mark in row.marks]
    return max([SMALLEST_END_S, *loading, *ready])


def _last_s(row: Row) -> float:
    return max([bar.end_s for bar in row.bars] + [mark.at_s for mark in row.marks])
