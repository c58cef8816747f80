"""A timeline as a waterfall of characters, for a terminal of any width.

Time runs to the right. A row of a layer shows its bytes on their way: ░ fetched, ▒ verified, ▓ decoded, ▚ placed on
another device, │ exact, █ executed; what is shorter than a column still takes one, so that nothing that happened is
unseen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .picture import (
    Bar,
    BarKind,
    Figures,
    MarkKind,
    Picture,
    Row,
    Section,
    format_bytes,
    format_s,
    picture_of,
    throughput,
    tick_step_s,
)
from .snapshot import parse_snapshot

DEFAULT_MAX_ROWS = 40
MIN_WIDTH = 40
MAX_LABEL_CHARS = 20

SIGNS: dict[BarKind | MarkKind, str] = {
    BarKind.TASK: "━",
    BarKind.QUEUED: "·",
    BarKind.FETCH: "░",
    BarKind.VERIFY: "▒",
    BarKind.DECODE: "▓",
    BarKind.PLACE: "▚",
    BarKind.EXECUTE: "█",
    BarKind.PREFILL: "═",
    BarKind.GENERATE: "█",
    MarkKind.DRAFT: "╎",
    MarkKind.EXACT: "│",
    MarkKind.FIRST_TOKEN: "◆",
    MarkKind.LAST_TOKEN: "■",
}
SPARKS = " ▁▂▃▄▅▆▇█"

# ANSI colours of the 256 that every terminal has; readable on light and on dark ground.
COLORS: dict[BarKind | MarkKind, str] = {
    BarKind.TASK: "38;5;103",
    BarKind.QUEUED: "38;5;245",
    BarKind.FETCH: "38;5;39",
    BarKind.VERIFY: "38;5;37",
    BarKind.DECODE: "38;5;99",
    BarKind.PLACE: "38;5;133",
    BarKind.EXECUTE: "38;5;208",
    BarKind.PREFILL: "38;5;208",
    BarKind.GENERATE: "38;5;208",
    MarkKind.DRAFT: "38;5;71",
    MarkKind.EXACT: "38;5;71",
    MarkKind.FIRST_TOKEN: "38;5;161",
    MarkKind.LAST_TOKEN: "38;5;245",
}
PLAIN, BOLD, GREY = "", "1", "38;5;245"

LEGEND: tuple[BarKind | MarkKind, ...] = (
    BarKind.FETCH,
    BarKind.VERIFY,
    BarKind.DECODE,
    BarKind.PLACE,
    MarkKind.DRAFT,
    MarkKind.EXACT,
    BarKind.EXECUTE,
    BarKind.QUEUED,
    BarKind.PREFILL,
    MarkKind.FIRST_TOKEN,
)

Cell = tuple[str, str]  # a character and its ANSI style
Line = list[Cell]
BLANK: Cell = (" ", PLAIN)


def render(snapshot: Any, *, width: int, color: bool, max_rows: int = DEFAULT_MAX_ROWS) -> str:
    """The waterfall of a snapshot, as lines of at most `width` columns without trailing blanks.

    `snapshot` is what `Timeline.snapshot` gave, and may come from anywhere. `max_rows` bounds the rows for
    layers: when there are more, neighbours share one. With `color`, ANSI sequences are woven in. Raises
    `FormatError` for what is no timeline.
    """
    width = max(width, MIN_WIDTH)
    picture = picture_of(parse_snapshot(snapshot), max_layer_rows=max_rows)
    label_width = min(MAX_LABEL_CHARS, max((len(row.label) for row in picture.rows), default=0), width // 4)
    note_width = max((len(row.note) for row in picture.rows), default=0)
    num_columns = max(10, width - label_width - note_width - 3)
    lines = _header(picture)
    for section in Section:
        rows = [row for row in picture.rows if row.section is section]
        if rows:
            lines.append([])
        if rows and section is Section.WEIGHTS:
            lines.append(_network_line(picture, label_width, num_columns))
        for row in rows:
            cells = _cells(row, picture.end_s, num_columns)
            lines.append(_line(row.label, label_width, cells, row.note))
    lines.append(_line("", label_width, _axis(picture.end_s, num_columns), ""))
    lines += [[], *_legend(picture, width), *_remarks(picture)]
    return "\n".join(_text(line[:width], color) for line in lines)


# The lines around the picture.


def _header(picture: Picture) -> list[Line]:
    figures = picture.figures
    if figures.failure:
        title = f"the cold start failed: {figures.failure}"
    elif figures.first_token_s is not None:
        title = f"first token after {format_s(figures.first_token_s)}"
    else:
        title = "no token yet"
    lines = [_styled(title, BOLD)]
    if figures.stored_bytes:
        lines.append(_styled(_load_figures(figures)))
    moments = [
        ("draft there", figures.draft_s),
        (figures.possible, figures.possible_s),
        ("exact", figures.exact_s),
    ]
    reached = [f"{name} after {format_s(at_s)}" for name, at_s in moments if at_s is not None]
    lines += [_styled(text) for text in (", ".join(reached), figures.decision, figures.outcome) if text]
    return lines


def _load_figures(figures: Figures) -> str:
    text = f"{format_bytes(figures.stored_bytes)} in {format_s(figures.fetch_s)}"
    if figures.fetch_s > 0:
        text += f" ({format_bytes(figures.bytes_per_s)}/s)"
    if figures.weight_bytes:
        text += f", {format_bytes(figures.weight_bytes)} of weights"
    return text


def _remarks(picture: Picture) -> list[Line]:
    remarks = []
    if picture.num_hidden_requests:
        remarks.append(f"{picture.num_hidden_requests} more requests are not shown")
    if picture.num_dropped_spans:
        remarks.append(f"{picture.num_dropped_spans} spans were dropped when the timeline was full")
    return [_styled(remark, GREY) for remark in remarks]


def _legend(picture: Picture, width: int) -> list[Line]:
    """The meaning of the signs in this picture, in as many lines as needed."""
    seen: set[BarKind | MarkKind] = {bar.kind for row in picture.rows for bar in row.bars}
    seen |= {mark.kind for row in picture.rows for mark in row.marks}
    lines: list[Line] = []
    for kind in LEGEND:
        if kind in seen:
            entry = [(SIGNS[kind], COLORS[kind]), *_styled(f" {kind.value}   ", GREY)]
            if not lines or len(lines[-1]) + len(entry) > width:
                lines.append([])
            lines[-1] += entry
    return lines


def _axis(end_s: float, num_columns: int) -> Line:
    """Seconds under the picture, at a distance that leaves their figures room."""
    step_s = tick_step_s(end_s, max(1, num_columns // 12))
    cells = [BLANK] * num_columns
    number = 0
    while number * step_s <= end_s:
        figure = f"╵{number * step_s:g} s"
        column = int(number * step_s / end_s * (num_columns - 1))
        if column + len(figure) <= num_columns:
            cells[column : column + len(figure)] = _styled(figure, GREY)
        number += 1
    return cells


# The rows.


def _cells(row: Row, end_s: float, num_columns: int) -> Line:
    """Bars in the order of a weight's way, so that the later phase covers the earlier one; then the marks."""
    cells = [BLANK] * num_columns
    column_s = end_s / num_columns
    order = {kind: number for number, kind in enumerate((*BarKind, *reversed(MarkKind)))}
    for bar in sorted(row.bars, key=lambda bar: order[bar.kind]):
        _draw_bar(cells, bar, column_s)
    for mark in sorted(row.marks, key=lambda mark: order[mark.kind]):
        _place_mark(cells, min(num_columns - 1, int(mark.at_s / column_s)), mark.kind)
    return cells


def _draw_bar(cells: Line, bar: Bar, column_s: float) -> None:
    first = min(len(cells) - 1, int(bar.start_s / column_s))
    last = min(len(cells), max(first + 1, math.ceil(bar.end_s / column_s)))
    hides_decoding = bar.kind is BarKind.EXECUTE and cells[first][0] == SIGNS[BarKind.DECODE]
    if hides_decoding and cells[first + 1 : first + 2] == [BLANK]:
        first, last = first + 1, max(last, first + 2)
    cells[first:last] = [(SIGNS[bar.kind], COLORS[bar.kind])] * (last - first)


def _place_mark(cells: Line, column: int, kind: MarkKind) -> None:
    """Place a mark. Tokens are marked where they came; a ready mark is next to the end of its bar,
    if there is room.
    """
    cell = (SIGNS[kind], COLORS[kind])
    if kind in (MarkKind.FIRST_TOKEN, MarkKind.LAST_TOKEN):
        cells[column] = cell
        return
    for place in (column, column + 1):
        if place < len(cells) and cells[place][0] in (" ", SIGNS[BarKind.FETCH]):
            cells[place] = cell
            return


def _network_line(picture: Picture, label_width: int, num_columns: int) -> Line:
    """The rate of arriving bytes, relative to the fastest column."""
    arrived = throughput(picture, num_columns)
    highest = max(arrived)
    if not highest:
        return _line("network", label_width, [], "")
    sparks = [
        (SPARKS[math.ceil(count / highest * (len(SPARKS) - 1))], COLORS[BarKind.FETCH]) for count in arrived
    ]
    rate = highest * num_columns / picture.end_s
    return _line("network", label_width, sparks, f"peak {format_bytes(rate)}/s")


def _line(label: str, label_width: int, cells: Sequence[Cell], note: str) -> Line:
    shown = label if len(label) <= label_width else f"{label[: label_width - 1]}…"
    return [*_styled(f"{shown:>{label_width}} "), *cells, *_styled(f" {note}", GREY)]


def _styled(text: str, style: str = PLAIN) -> Line:
    return [(character, style) for character in text]


def _text(line: Sequence[Cell], color: bool) -> str:
    """The line's characters, each run of a style between its ANSI sequences."""
    end = len(line)
    while end and line[end - 1][0] == " ":
        end -= 1
    if not color:
        return "".join(character for character, _ in line[:end])
    pieces, current = [], PLAIN
    for character, style in line[:end]:
        wanted = current if character == " " else style
        if wanted != current:
            pieces.append(f"\x1b[0;{wanted}m" if wanted else "\x1b[0m")
            current = wanted
        pieces.append(character)
    return "".join(pieces) + ("\x1b[0m" if current else "")
