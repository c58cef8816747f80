"""Tokens received over time as a picture, from the latest result of `benchmarks.draft --save`.

    python -m benchmarks.draft_picture [--rate-mb-s 200] [-o docs/draft.svg]

One line a system, over a link of one rate: it rises by one at each token. Of the peers only the one whose first token
comes first is shown. Dots that are hollow are tokens that the draft chose. Two dashed marks show when a link of that
rate has brought the draft's bytes, and all of the packed model's.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import svg
from benchmarks.draft import AHEAD, COMPARED, DRAFT, MODES, WITHOUT
from benchmarks.report import newest

WIDTH, HEIGHT = 860, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 270, 78, 82  # margins; the lines' names stand in the right one
RATE_MB_S = 200.0
TARGET = Path(__file__).parent.parent / "docs" / "draft.svg"
LABEL_GAP = 44
COLOURS = {DRAFT: "#e0561b", AHEAD: "#d6336c", WITHOUT: "#9a6ee8"}  # each readable on white and on near-black
PEER_COLOUR, WIRE_COLOUR = "#2f86d6", "#8a8a8a"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rate-mb-s",
        type=float,
        default=RATE_MB_S,
        help="rate of the link; the nearest measured one is drawn",
    )
    parser.add_argument("-o", "--output", type=Path, default=TARGET)
    options = parser.parse_args()
    options.output.write_text(draw(newest("draft"), options.rate_mb_s), encoding="utf-8")
    print(options.output)


@dataclass(frozen=True)
class Plot:
    """Maps times from 0 to `end_s`, and numbers of tokens, into the margins."""

    end_s: float
    num_tokens: int

    def x(self, time_s: float) -> float:
        return LEFT + (WIDTH - RIGHT - LEFT) * time_s / self.end_s

    def y(self, num_tokens: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * num_tokens / self.num_tokens


def draw(report: dict[str, Any], rate_mb_s: float = RATE_MB_S) -> str:
    """The SVG's text. Raises SystemExit for a report without a system that could be shown."""
    link = nearest(report["results"], rate_mb_s)
    systems = {name: link["systems"][name] for name in shown(link["systems"])}
    if not systems:
        raise SystemExit("nothing was measured at that rate: python -m benchmarks.draft --save")
    plot = Plot(1.05 * max(row["last_token_s"] for row in systems.values()), report["num_tokens"])
    heading = f"{report['model']} over {link['rate_mb_s']:g} MB/s: tokens received"
    parts = [
        svg.text(LEFT - 46, 24, heading, "title"),
        svg.text(LEFT - 46, 44, "since exec; hollow: chosen by the draft", "small"),
        *_axes(plot),
        *_mark(plot, link["wire_s"]["draft"], "draft's bytes", "end"),
        *_mark(plot, link["wire_s"]["packed"], "all bytes", "start"),
        *(_line(plot, row, colour_of(name)) for name, row in systems.items()),
        *_names(systems),
        svg.text(LEFT - 46, HEIGHT - 26, svg.source(report), "small"),
        svg.text(LEFT - 46, HEIGHT - 9, svg.cut(report["command"]), "small"),
    ]
    return svg.document(WIDTH, HEIGHT, heading, parts)


def nearest(links: Sequence[dict[str, Any]], rate_mb_s: float) -> dict[str, Any]:
    """The results at the rate nearest to this one."""
    return min(links, key=lambda link: abs(link["rate_mb_s"] - rate_mb_s))


def shown(systems: dict[str, Any]) -> list[str]:
    """All of our own that were measured, and the peer whose first token came first."""
    peers = [name for name in COMPARED if name in systems]
    best = sorted(peers, key=lambda name: float(systems[name]["first_token_s"]))[:1]
    return [*(name for name in MODES if name in systems), *best]


def colour_of(name: str) -> str:
    return COLOURS.get(name, PEER_COLOUR)


def _axes(plot: Plot) -> list[str]:
    parts = []
    for count in range(0, plot.num_tokens + 1, max(1, plot.num_tokens // 4)):
        y = plot.y(count)
        parts.append(svg.rule(LEFT, y, WIDTH - RIGHT, y))
        parts.append(svg.text(LEFT - 8, y + 4, str(count), "small", "end"))
    step_s = next((step for step in svg.ticks(0.01, plot.end_s) if plot.end_s / step <= 10), plot.end_s)
    for number in range(int(plot.end_s / step_s) + 1):
        x = plot.x(number * step_s)
        parts.append(svg.rule(x, HEIGHT - BOTTOM, x, HEIGHT - BOTTOM + 5))
        parts.append(svg.text(x, HEIGHT - BOTTOM + 19, f"{number * step_s:g}", "small", "middle"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(svg.text(middle, HEIGHT - BOTTOM + 36, "seconds", "small", "middle"))
    return parts


def _mark(plot: Plot, time_s: float, words: str, anchor: str) -> list[str]:
    x, gap = plot.x(time_s), -4 if anchor == "end" else 4
    ends = f'x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 14}" y2="{HEIGHT - BOTTOM}"'
    return [
        f'<line class="wire" {ends} stroke="{WIRE_COLOUR}" stroke-dasharray="6 5"/>',
        svg.text(x + gap, TOP - 8, f"{words} {time_s:.1f} s", "small", anchor),
    ]


def _line(plot: Plot, row: dict[str, Any], colour: str) -> str:
    places = [(plot.x(time_s), number) for number, time_s in enumerate(row["token_times_s"])]
    corners = [(x, plot.y(count)) for x, number in places for count in (number, number + 1)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
    dots = [
        f'<circle cx="{x:.1f}" cy="{plot.y(number + 1):.1f}" r="3" stroke="{colour}" '
        f'fill="{"none" if number < row["num_drafted"] else colour}"/>'
        for x, number in places
    ]
    return "\n".join([f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>', *dots])


def _names(systems: dict[str, dict[str, Any]]) -> list[str]:
    """In the right margin, the one whose first token comes first on top."""
    parts = []
    order = sorted(systems, key=lambda name: float(systems[name]["first_token_s"]))
    for number, name in enumerate(order):
        row, y = systems[name], TOP + 12 + LABEL_GAP * number
        times = (
            f"first {row['first_token_s']:.2f} s, {len(row['token_times_s'])}th {row['last_token_s']:.2f} s"
        )
        x = WIDTH - RIGHT + 28
        parts.append(f'<text x="{x}" y="{y}" style="fill:{colour_of(name)}">{name}</text>')
        parts.append(svg.text(x, y + 17, times, "small"))
    return parts


if __name__ == "__main__":
    main()
