"""The picture of the cold start: what it shows is what was measured, and it can be read."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from typing import Any

import pytest
from benchmarks import picture
from benchmarks.cold_start import BASE, PACKED
from benchmarks.svg import spread_out, ticks
from hypothesis import given
from hypothesis import strategies as st

SVG = "{http://www.w3.org/2000/svg}"
GAP = 17.0


def report_of(*rates: float) -> dict[str, Any]:
    links = [
        {
            "rate_mb_s": rate,
            "wire_s": {"plain": 1000 / rate, "packed": 660 / rate} if rate else {"plain": 0.0, "packed": 0.0},
            "systems": {
                PACKED: {"first_token_s": 2.0 + 660 / (rate or 2000), "all_s": [2.5, 9.0]},
                BASE: {"first_token_s": 8.0 + 1000 / (rate or 2000), "all_s": [9.0]},
            },
        }
        for rate in rates
    ]
    return {
        "model": "<a & b>",
        "rounds": 3,
        "date": "2026-01-02 03:04 UTC",
        "command": "python -m benchmarks.cold_start",
        "machine": {"name": "2-core-x86_64", "cpu": "a processor"},
        "results": links,
    }


def test_there_is_one_line_a_system_and_one_for_the_wire_each_with_its_name() -> None:
    svg = ElementTree.fromstring(picture.draw(report_of(100, 400, 200)))
    texts = [element.text for element in svg.iter(f"{SVG}text")]
    assert [text for text in texts if text and text.startswith(PACKED)] == [f"{PACKED} 3.6 s"]
    assert [text for text in texts if text and text.startswith(BASE)] == [f"{BASE} 10.5 s"]
    assert len([text for text in texts if text and text.startswith(picture.WIRE)]) == 1
    assert {"100", "200", "400", "link, MB/s", "exec → first token, seconds"} <= set(texts)
    assert len(list(svg.iter(f"{SVG}circle"))) == 2 * 3


def test_every_point_lies_between_two_rules() -> None:
    svg = ElementTree.fromstring(picture.draw(report_of(100, 200, 400)))
    rules = [float(line.attrib["y1"]) for line in svg.iter(f"{SVG}line") if line.get("class") == "grid"]
    points = [float(circle.attrib["cy"]) for circle in svg.iter(f"{SVG}circle")]
    assert min(rules) <= min(points) <= max(points) <= max(rules)


def test_a_link_without_a_limit_has_no_place_on_the_axis() -> None:
    svg = ElementTree.fromstring(picture.draw(report_of(0, 100, 400)))
    assert len(list(svg.iter(f"{SVG}circle"))) == 2 * 2


def test_a_faster_start_is_lower_and_a_faster_link_further_right() -> None:
    upward = picture.Axis(1, 100, start=400, end=0)
    assert upward.place(1) == 400
    assert upward.place(10) == pytest.approx(200)
    assert upward.place(100) == pytest.approx(0)


def test_one_rate_is_no_picture() -> None:
    with pytest.raises(SystemExit, match="at least two rates"):
        picture.draw(report_of(200, 0))


def test_the_axis_is_marked_at_round_numbers() -> None:
    assert ticks(0.9, 30) == [1, 2, 5, 10, 20]


@given(st.lists(st.floats(0, 400), max_size=12))
def test_labels_never_overlap_and_keep_their_order(places: list[float]) -> None:
    spread = spread_out(places, GAP, 0, 400)
    order = sorted(range(len(places)), key=places.__getitem__)
    for lower, upper in pairwise(order):
        assert spread[upper] - spread[lower] >= GAP - 1e-6
    assert all(-1e-6 <= place <= 400 + 1e-6 for place in spread)


@given(st.lists(st.floats(0, 400), max_size=8))
def test_labels_with_room_stay_where_they_are(places: list[float]) -> None:
    spaced = [25.0 * index for index in range(len(places))]
    assert spread_out(spaced, GAP, 0, 400) == spaced
