"""Elements of the pictures: SVG that is readable on light and on dark ground."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #24292f; }
  .small { font-size: 12px; fill: #57606a; }
  .title { font-size: 15px; font-weight: 600; }
  .grid { stroke: #d0d7de; stroke-width: 1; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .small { fill: #9198a1; } .grid { stroke: #3d444d; }
  }
"""


def spread_out(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The places, moved as little as need be for each to be `gap` from the next and all within [low, high].

    In the order in which they came. There is room for all of them, or they go on beyond `high`.
    """
    order = sorted(range(len(places)), key=places.__getitem__)
    result = list(places)
    top = low - gap
    for index in order:
        top = result[index] = max(result[index], top + gap)
    bottom = max(high, low + gap * (len(places) - 1)) + gap
    for index in reversed(order):
        bottom = result[index] = min(result[index], bottom - gap)
    return result


def ticks(low: float, high: float) -> list[float]:
    """The numbers 1, 2 and 5 times a power of ten within [low, high]."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [digit * 10.0**exponent for exponent in exponents for digit in (1, 2, 5)]
    return [value for value in values if low <= value <= high]


def tick_bounds(low: float, high: float) -> tuple[float, float]:
    """The nearest ticks around [low, high]: every point lies between two rules."""
    around = ticks(low / 10, high * 10)
    return max(value for value in around if value <= low), min(value for value in around if value >= high)


def document(width: int, height: int, label: str, parts: Sequence[str]) -> str:
    """The whole text; `label` is what it shows, for screen readers."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
    return "\n".join([f'{head}aria-label="{escape(label)}">', f"<style>{STYLE}</style>", *parts, "</svg>\n"])


def source(report: dict[str, Any]) -> str:
    """The source of the figures, as text."""
    rounds = f"medians of {report['rounds']} rounds" if report["rounds"] > 1 else "one round"
    machine = report["machine"]
    return f"{machine['name']} ({machine['cpu']}), {report['date'][:10]}, {rounds}:"


def cut(words: str, max_characters: int = 120) -> str:
    return words if len(words) <= max_characters else f"{words[: max_characters - 1]}…"


def rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="grid" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def text(x: float, y: float, words: str, style: str, anchor: str = "start") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
