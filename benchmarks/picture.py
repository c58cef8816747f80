"""The cold start against the link's rate as a picture, from the latest result of `benchmarks.cold_start --save`.

    python -m benchmarks.picture [-o docs/cold-start.svg]

One line a system, and a dashed one for the time that the packed model's bytes alone take. Both axes are logarithmic, so
that a ratio is a distance. A self-contained SVG that can be read on light and on dark ground.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from benchmarks import svg
from benchmarks.cold_start import BASE, PACKED, PLAIN, STANDBY, TRIMMED
from benchmarks.report import newest

WIDTH, HEIGHT = 860, 490
LEFT, RIGHT, TOP, BOTTOM = 64, 284, 58, 82  # margins; the labels of the lines stand in the right one
LABEL_GAP = 17
TARGET = Path(__file__).parent.parent / "docs" / "cold-start.svg"
WIRE = "the wire alone, packed"
COLOURS = {  # each readable on white and on near-black
    PACKED: "#e0561b",
    TRIMMED: "#b8860b",
    STANDBY: "#d6336c",
    PLAIN: "#9a6ee8",
    BASE: "#2f86d6",
    "runai-model-streamer": "#2a9d6f",
    "tensorizer": "#7c8798",
    WIRE: "#8a8a8a",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, default=TARGET)
    options = parser.parse_args()
    options.output.write_text(draw(newest("cold_start")), encoding="utf-8")
    print(options.output)


@dataclass(frozen=True)
class Line:
    """`points` are (MB/s, s), by rate; `spread` the least and the most of each point's rounds."""

    name: str
    points: list[tuple[float, float]]
    spread: list[tuple[float, float]]


@dataclass(frozen=True)
class Axis:
    """Places the numbers from `low` to `high` between the pixels `start` and `end`, by their logarithms."""

    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)


def draw(report: dict[str, Any]) -> str:
    """The SVG's text. Raises SystemExit for a report with less than two rates."""
    links = sorted(
        (link for link in report["results"] if link["rate_mb_s"]), key=lambda link: link["rate_mb_s"]
    )
    if len(links) < 2:
        raise SystemExit("a picture needs at least two rates: python -m benchmarks.cold_start --save")
    lines = lines_of(links)
    times = [time for line in lines for _, time in line.points]
    times += [time for line in lines for ends in line.spread for time in ends]
    across = Axis(links[0]["rate_mb_s"], links[-1]["rate_mb_s"], LEFT, WIDTH - RIGHT)
    upward = Axis(*svg.tick_bounds(min(times), max(times)), HEIGHT - BOTTOM, TOP)
    parts = [
        svg.text(LEFT - 46, 24, _title(report), "title"),
        svg.text(LEFT - 46, 44, "exec → first token, seconds", "small"),
        *_axes(across, upward, [link["rate_mb_s"] for link in links]),
        *(_line(line, across, upward) for line in lines),
        *_labels(lines, across, upward),
        svg.text(LEFT - 46, HEIGHT - 26, svg.source(report), "small"),
        svg.text(LEFT - 46, HEIGHT - 9, svg.cut(report["command"]), "small"),
    ]
    return svg.document(WIDTH, HEIGHT, _title(report), parts)


def lines_of(links: Sequence[dict[str, Any]]) -> list[Line]:
    """One a system that was measured, and the wire's."""
    names = [name for name in COLOURS if any(name in link["systems"] for link in links)]
    lines = []
    for name in names:
        rows = [(link["rate_mb_s"], link["systems"][name]) for link in links if name in link["systems"]]
        points = [(rate, row["first_token_s"]) for rate, row in rows]
        lines.append(Line(name, points, [(min(row["all_s"]), max(row["all_s"])) for _, row in rows]))
    wire = [(link["rate_mb_s"], link["wire_s"]["packed"]) for link in links]
    return [*lines, Line(WIRE, wire, [])]


def _axes(across: Axis, upward: Axis, rates: Sequence[float]) -> list[str]:
    parts = []
    for value in svg.ticks(upward.low, upward.high):
        y = upward.place(value)
        parts.append(svg.rule(LEFT, y, WIDTH - RIGHT, y))
        parts.append(svg.text(LEFT - 8, y + 4, f"{value:g}", "small", "end"))
    for rate in rates:
        x = across.place(rate)
        parts.append(svg.rule(x, HEIGHT - BOTTOM, x, HEIGHT - BOTTOM + 5))
        parts.append(svg.text(x, HEIGHT - BOTTOM + 19, f"{rate:g}", "small", "middle"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(svg.text(middle, HEIGHT - BOTTOM + 36, "link, MB/s", "small", "middle"))
    return parts


def _line(line: Line, across: Axis, upward: Axis) -> str:
    colour = COLOURS[line.name]
    places = [(across.place(rate), upward.place(time)) for rate, time in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dash = ' stroke-dasharray="6 5"' if line.name == WIRE else ""
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>']
    for (x, _), (least, most) in zip(places, line.spread, strict=False):
        if most > least:
            ends = f'y1="{upward.place(least):.1f}" y2="{upward.place(most):.1f}"'
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" {ends} stroke="{colour}" stroke-opacity=".5"/>')
    if line.name != WIRE:
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in places]
    return "\n".join(parts)


def _labels(lines: Sequence[Line], across: Axis, upward: Axis) -> list[str]:
    """Each line's name at its end, in its colour."""
    ends = [upward.place(line.points[-1][1]) for line in lines]
    parts = []
    for line, end, y in zip(lines, ends, svg.spread_out(ends, LABEL_GAP, TOP, HEIGHT - BOTTOM), strict=True):
        x, colour = across.place(line.points[-1][0]), COLOURS[line.name]
        leader = f'points="{x + 6:.1f},{end:.1f} {x + 22:.1f},{y:.1f} {x + 28:.1f},{y:.1f}"'
        parts.append(f'<polyline {leader} fill="none" stroke="{colour}" stroke-opacity=".6"/>')
        label = f"{line.name} {line.points[-1][1]:.1f} s"
        parts.append(f'<text x="{x + 32:.1f}" y="{y + 4:.1f}" style="fill:{colour}">{escape(label)}</text>')
    return parts


def _title(report: dict[str, Any]) -> str:
    return f"Cold start of a model of {report['model']}'s shape, by the link's rate"


if __name__ == "__main__":
    main()
