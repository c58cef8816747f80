"""A timeline as a page: one file with its picture, style and script inside, that asks nothing of any
other place.

Everything that comes from the snapshot is text in the page, never markup: it is escaped here, where it is
written, and the page forbids every script but its own. The size is bounded: of very many bars, neighbours
are drawn as one.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from html import escape
from typing import Any

from .page import SCRIPT, STYLE
from .picture import (
    Bar,
    Kind,
    Mark,
    MarkKind,
    Picture,
    Row,
    Section,
    format_bytes,
    format_s,
    throughput,
    tick_step_s,
)
from .reading import picture_of
from .snapshot import parse_snapshot

MAX_LAYER_ROWS = 130
MAX_BARS = 8_000
MAX_MARKS_PER_ROW = 64

# The drawing's own units, which are pixels at full width.
WIDTH, LEFT, RIGHT = 1240, 148, 1130
TOP, HEAD_HEIGHT, NETWORK_HEIGHT, BOTTOM = 44, 26, 46, 14
NUM_NETWORK_BINS = 220
MIN_BAR_WIDTH = 1.6

SECTIONS = {Section.START: "PROCESS", Section.WEIGHTS: "WEIGHTS", Section.REQUESTS: "REQUESTS"}

# What can be switched off: a shape's class, what it is called, and which shapes go with it.
LEGEND = (
    ("task", "setting up", ".task"),
    ("fetch", "fetch", ".fetch:not(.refine)"),
    ("fetch refine", "fetch what makes it exact", ".fetch.refine"),
    ("verify", "verify", ".verify"),
    ("decode", "decode", ".decode"),
    ("place", "place on the device", ".place"),
    ("exact", "layer exact", ".exact, .draft"),
    ("execute", "execute", ".execute, .generate"),
    ("queued", "queued", ".queued"),
    ("prefill", "prefill", ".prefill"),
    ("first-token", "first token", ".first-token"),
)


def render_html(snapshot: Any) -> str:
    """The page, as text. `snapshot` is what `Timeline.snapshot` gave, and may come from anywhere.

    Raises `FormatError` for what is no timeline.
    """
    picture = _thin_out(picture_of(parse_snapshot(snapshot), max_layer_rows=MAX_LAYER_ROWS))
    script_hash = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{script_hash}'"
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(_title(picture))}</title>
<style>{STYLE}</style>
<main>
{_heading(picture)}
{_cards(picture)}
<div class="legend">{_legend(picture)}</div>
<div class="chart">{_svg(picture)}</div>
<footer>{escape(" · ".join(_remarks(picture)))}</footer>
</main>
<div id="tip" role="status"></div>
<script>{SCRIPT}</script>
</html>
"""


# Around the picture.


def _title(picture: Picture) -> str:
    if picture.figures.failure:
        return "A cold start that failed"
    first_token_s = picture.figures.first_token_s
    if first_token_s is None:
        return "A cold start"
    return f"A cold start: first token after {format_s(first_token_s)}"


def _heading(picture: Picture) -> str:
    figures = picture.figures
    if figures.failure:
        return f'<h1 class="failed">The cold start failed: {escape(figures.failure)}</h1>'
    if figures.first_token_s is None:
        return "<h1>No token yet</h1>"
    first_token = f"<em>{format_s(figures.first_token_s)}</em>"
    return f'<h1>First token after {first_token}</h1><p class="lead">from the start of the process</p>'


def _cards(picture: Picture) -> str:
    figures = picture.figures
    cards = []
    if figures.can_answer_s is not None:
        cards.append(("can answer after", format_s(figures.can_answer_s)))
    if figures.stored_bytes:
        cards.append(("fetched", f"{format_bytes(figures.stored_bytes)} in {format_s(figures.fetch_s)}"))
        cards.append(("on average", f"{format_bytes(figures.bytes_per_s)}/s"))
    if figures.weight_bytes:
        cards.append(("weights in memory", format_bytes(figures.weight_bytes)))
    if figures.exact_s is not None:
        cards.append(("all exact after", format_s(figures.exact_s)))
    if figures.decision:
        cards.append(("tiers", escape(figures.decision)))
    if figures.outcome:
        cards.append(("draft", escape(figures.outcome)))
    shown = "".join(f"<div><dt>{name}</dt><dd>{figure}</dd></div>" for name, figure in cards)
    return f"<dl>{shown}</dl>"


def _legend(picture: Picture) -> str:
    classes = {_bar_class(bar) for row in picture.rows for bar in row.bars}
    classes |= {_mark_class(mark) for row in picture.rows for mark in row.marks}
    return "".join(
        f'<button aria-pressed="true" data-shapes="{shapes}"><i class="{name}"></i>{label}</button>'
        for name, label, shapes in LEGEND
        if name in classes
    )


def _remarks(picture: Picture) -> Iterable[str]:
    yield f"process started {datetime.fromtimestamp(picture.started_unix_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
    if picture.num_hidden_requests:
        yield f"{picture.num_hidden_requests} more requests are not shown"
    if picture.num_dropped_spans:
        yield f"{picture.num_dropped_spans} spans were dropped when the timeline was full"


# The picture.


def _svg(picture: Picture) -> str:
    row_height = 18 if len(picture.rows) <= 60 else 12
    body: list[str] = []
    y = float(TOP)
    for section in Section:
        rows = [row for row in picture.rows if row.section is section]
        if not rows:
            continue
        body.append(_text(10, y + HEAD_HEIGHT - 8, SECTIONS[section], "head"))
        y += HEAD_HEIGHT
        if section is Section.WEIGHTS:
            body.append(_network(picture, y))
            y += NETWORK_HEIGHT
        for row in rows:
            body.append(_row(row, picture.end_s, y, row_height))
            y += row_height
    height = y + BOTTOM
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(_title(picture))}"'
        f' data-left="{LEFT}" data-right="{RIGHT}" data-end="{picture.end_s:.6f}">'
        f"{_axis(picture.end_s, height)}{''.join(body)}{_moments(picture, height)}"
        f'<line id="pointer" y1="{TOP - 10}" y2="{height - 4:g}" visibility="hidden"/></svg>'
    )


def _row(row: Row, end_s: float, y: float, height: float) -> str:
    order = list(Kind)
    bars = "".join(
        _bar(bar, end_s, y, height) for bar in sorted(row.bars, key=lambda bar: order.index(bar.kind))
    )
    marks = "".join(_mark(mark, end_s, y, height) for mark in row.marks)
    baseline = y + height / 2 + 4
    label = row.label if len(row.label) <= 19 else f"{row.label[:18]}…"
    return (
        f'<g class="row"><rect class="band" x="0" y="{y:g}" width="{WIDTH}" height="{height - 1:g}"/>'
        f"{_text(LEFT - 12, baseline, label, 'label', anchor='end')}{bars}{marks}"
        f"{_text(RIGHT + 10, baseline, row.note, 'note')}</g>"
    )


def _bar(bar: Bar, end_s: float, y: float, row_height: float) -> str:
    x = _x(bar.start_s, end_s)
    width = max(MIN_BAR_WIDTH, _x(bar.end_s, end_s) - x)
    top, bottom = (y + edge * (row_height - 1) for edge in _edges(bar))
    place = f'x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{bottom - top:.1f}"'
    return f'<rect class="{_bar_class(bar)}" {place} rx="1.5"><title>{escape(bar.title)}</title></rect>'


def _edges(bar: Bar) -> tuple[float, float]:
    """Where a bar lies in its row, from 0 at the top to 1: a layer's tiers arrive one above the other."""
    if bar.kind is Kind.QUEUED:
        return 0.35, 0.65
    if bar.tier and bar.kind is not Kind.EXECUTE:
        return (0.14, 0.5) if bar.tier == "draft" else (0.5, 0.86)
    return 0.14, 0.86


def _mark(mark: Mark, end_s: float, y: float, row_height: float) -> str:
    x, kind, title = _x(mark.at_s, end_s), _mark_class(mark), f"<title>{escape(mark.title)}</title>"
    if mark.kind in (MarkKind.DRAFT, MarkKind.EXACT):
        place = f'x="{x - 0.9:.1f}" y="{y:g}" width="1.8" height="{row_height - 1:g}"'
        return f'<rect class="{kind}" {place}>{title}</rect>'
    middle = y + (row_height - 1) / 2
    half = row_height * (0.4 if mark.kind is MarkKind.FIRST_TOKEN else 0.22)
    corners = [(x, middle - half), (x + half, middle), (x, middle + half), (x - half, middle)]
    points = " ".join(f"{corner_x:.1f},{corner_y:.1f}" for corner_x, corner_y in corners)
    return f'<polygon class="{kind}" points="{points}">{title}</polygon>'


def _network(picture: Picture, y: float) -> str:
    """How fast bytes arrived, as an area."""
    arrived = throughput(picture, NUM_NETWORK_BINS)
    highest = max(arrived)
    if not highest:
        return ""
    base, scale = y + NETWORK_HEIGHT - 8, (NETWORK_HEIGHT - 12) / highest
    step = (RIGHT - LEFT) / NUM_NETWORK_BINS
    points = " ".join(
        f"{LEFT + (index + 0.5) * step:.1f},{base - count * scale:.1f}" for index, count in enumerate(arrived)
    )
    rate = highest * NUM_NETWORK_BINS / picture.end_s
    return (
        f'<polygon class="network" points="{LEFT},{base:g} {points} {RIGHT},{base:g}"/>'
        f'<polyline class="network-line" points="{points}"/>'
        f"{_text(LEFT - 12, base - 4, 'network', 'label', anchor='end')}"
        f"{_text(RIGHT + 10, base - 4, f'peak {format_bytes(rate)}/s', 'note')}"
    )


def _axis(end_s: float, height: float) -> str:
    step_s = tick_step_s(end_s, 10)
    pieces = []
    number = 0
    while number * step_s <= end_s:
        x = _x(number * step_s, end_s)
        pieces.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{height - 4:g}"/>')
        pieces.append(_text(x, TOP - 14, f"{number * step_s:g} s", "tick", anchor="middle"))
        number += 1
    return "".join(pieces)


def _moments(picture: Picture, height: float) -> str:
    """Lines through all rows at the moments that matter."""
    figures = picture.figures
    moments = (
        ("answer", "can answer", figures.can_answer_s),
        ("all-exact", "exact", figures.exact_s),
        ("token", "first token", figures.first_token_s),
    )
    reached = [(at_s, name, label) for name, label, at_s in moments if at_s is not None]
    pieces = []
    previous_x = 0.0
    for at_s, name, label in sorted(reached):
        if at_s > picture.end_s:
            continue
        x = _x(at_s, picture.end_s)
        pieces.append(
            f'<line class="moment-line {name}" x1="{x:.1f}" x2="{x:.1f}" y1="20" y2="{height - 4:g}"/>'
        )
        # Of two moments close together, one has its name to the left of its line, the other to the right.
        side, anchor = (4, "start") if x - previous_x < 90 else (-4, "end")
        pieces.append(_text(x + side, 14, label, f"moment {name}", anchor))
        previous_x = x
    return "".join(pieces)


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _x(at_s: float, end_s: float) -> float:
    return LEFT + (RIGHT - LEFT) * min(1.0, at_s / end_s)


def _bar_class(bar: Bar) -> str:
    return "fetch refine" if bar.kind is Kind.FETCH and bar.tier == "refine" else bar.kind.value


def _mark_class(mark: Mark) -> str:
    return mark.kind.value.replace(" ", "-")


# What is too much to draw.


def _thin_out(picture: Picture) -> Picture:
    """The picture with at most about `MAX_BARS` bars: neighbours that a reader could not tell apart
    become one.
    """
    rows: Sequence[Row] = picture.rows
    gap_s = picture.end_s / 4000
    while sum(len(row.bars) for row in rows) > MAX_BARS and gap_s <= picture.end_s:
        rows = [replace(row, bars=_joined(row.bars, gap_s)) for row in rows]
        gap_s *= 4
    return replace(picture, rows=tuple(replace(row, marks=row.marks[:MAX_MARKS_PER_ROW]) for row in rows))


def _joined(bars: Iterable[Bar], gap_s: float) -> tuple[Bar, ...]:
    joined: dict[tuple[Kind, str], list[Bar]] = {}
    for bar in sorted(bars, key=lambda bar: bar.start_s):
        kept = joined.setdefault((bar.kind, bar.tier), [])
        if kept and bar.start_s - kept[-1].end_s <= gap_s:
            kept[-1] = _together(kept[-1], bar)
        else:
            kept.append(bar)
    return tuple(bar for kept in joined.values() for bar in kept)


def _together(first: Bar, second: Bar) -> Bar:
    size_bytes = first.size_bytes + second.size_bytes
    return replace(
        first,
        end_s=max(first.end_s, second.end_s),
        size_bytes=size_bytes,
        title=f"several: {first.kind.value} {format_bytes(size_bytes)}" if size_bytes else "several",
    )
