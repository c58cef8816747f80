from __future__ import annotations

import re

import pytest
from tests.support.cold_start import cold_start

from teneral.loader.timeline import MAX_SPANS, Timeline
from teneral.runtime.waterfall.picture import format_bytes, format_s, picture_of, throughput, tick_step_s
from teneral.runtime.waterfall.snapshot import parse_snapshot
from teneral.runtime.waterfall.view import render


def row(drawn, label):
    (line,) = [line for line in drawn.split("\n") if line.lstrip().startswith(f"{label} ")]
    return line


@pytest.fixture(scope="module")
def drawn():
    return render(cold_start(num_layers=8, layer_s=0.4), width=120, color=False)


def test_the_figures_stand_above(drawn):
    first, second, third, *_ = drawn.split("\n")
    assert first == "first token after 4.63 s"
    assert second == "220 MB in 4.42 s (50 MB/s), 330 MB of weights"
    assert third == "draft there after 4.38 s, first token possible after 4.62 s, exact after 4.62 s"


def moments(snapshot):
    return picture_of(parse_snapshot(snapshot), max_layer_rows=40).figures


def test_a_first_token_is_possible_with_the_weights_that_the_server_takes_it_from():
    exact = cold_start(num_layers=8, layer_s=0.4)
    assert moments(exact).possible_s == moments(exact).exact_s > moments(exact).draft_s
    draft = cold_start(num_layers=8, layer_s=0.4)
    (engine,) = [span for span in draft["spans"] if span["name"] == "engine runs"]
    engine["attributes"]["first_token"] = "draft"
    assert moments(draft).possible_s == moments(draft).draft_s
    # An encoder's mark says nothing of tokens; one of an older version nothing at all.
    engine.pop("attributes")
    assert (moments(draft).possible, moments(draft).possible_s) == (
        "first answer possible",
        moments(draft).exact_s,
    )
    engine["name"] = "can answer"
    assert moments(draft).possible_s == moments(draft).exact_s


def test_nothing_is_possible_while_the_weights_arrive():
    snapshot = cold_start(num_layers=8, layer_s=0.4)
    snapshot["spans"] = [
        span
        for span in snapshot["spans"]
        if span["name"] not in ("all weights exact", "load")
        and span.get("attributes", {}).get("group") != "head"
    ]
    assert (moments(snapshot).draft_s, moments(snapshot).possible_s) == (None, None)


def test_bytes_of_the_network_are_shown_where_the_load_makes_more_of_them():
    snapshot = cold_start(num_layers=8, layer_s=0.4)
    whole = render(snapshot, width=120, color=False)
    mark = {"lane": "manifest", "name": "made of fewer bytes", "start_s": 0.2, "end_s": 0.2}
    snapshot["spans"].append({**mark, "attributes": {"wire_share": 0.5}})
    half = render(snapshot, width=120, color=False)
    assert "220 MB in 4.42 s (50 MB/s)" in whole
    assert "110 MB in 4.42 s (25 MB/s), 330 MB of weights" in half
    peaks = [float(re.search(r"peak ([\d.]+) MB/s", drawn)[1]) for drawn in (whole, half)]
    assert peaks[1] == pytest.approx(peaks[0] / 2, abs=1)


def test_every_part_of_the_start_and_every_layer_has_a_row_in_order(drawn):
    labels = [line.split(" ━")[0].split(" ░")[0].strip() for line in drawn.split("\n")]
    places = [
        next(place for place, label in enumerate(labels) if label.startswith(name))
        for name in (
            "start interpreter",
            "import torch",
            "network",
            "embed",
            "layers.0",
            "layers.7",
            "head",
            "forward passes",
            "request 1",
        )
    ]
    assert places == sorted(places)


def test_a_layer_is_fetched_decoded_ready_and_executed_from_left_to_right(drawn):
    line = row(drawn, "embed")
    signs = [line.index(sign) for sign in "░▓│█"]
    assert signs == sorted(signs)
    assert line.endswith("exact 1.02 s")


def test_later_layers_lie_further_to_the_right(drawn):
    begins = [row(drawn, f"layers.{index}").index("░") for index in range(8)]
    ends = [row(drawn, f"layers.{index}").rindex("█") for index in range(8)]
    assert begins == sorted(begins)
    assert begins[0] < begins[7]
    assert ends == sorted(ends)


def test_the_first_token_is_marked_behind_the_last_layer(drawn):
    executed = row(drawn, "head").rindex("█")  # may be drawn a column late, so that its decoding can be seen
    assert row(drawn, "request 1").index("◆") >= executed - 1


def test_what_is_shorter_than_a_column_is_still_seen():
    timeline = Timeline(started_at=0.0)
    timeline.add("process", "long", 0.0, 1000.0)
    timeline.add("process", "short", 500.0, 500.0001)
    assert row(render(timeline.snapshot(), width=60, color=False), "short").count("━") == 1


def test_neighbouring_layers_share_a_row_when_there_are_many():
    drawn = render(cold_start(num_layers=80, layer_s=0.02), width=100, color=False, max_rows=20)
    layers = [line for line in drawn.split("\n") if "layers." in line]
    assert 10 < len(layers) <= 20
    assert "embed–layers.3" in drawn
    assert "layers.4–8" in drawn


@pytest.mark.parametrize("width", [1, 40, 79, 200])
def test_no_line_is_wider_than_asked(width):
    drawn = render(cold_start(num_requests=3), width=width, color=False)
    assert max(map(len, drawn.split("\n"))) <= max(width, 40)


def test_color_changes_nothing_but_the_color():
    snapshot = cold_start()
    colored = render(snapshot, width=100, color=True)
    assert "\x1b[0;38;5;" in colored
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == render(snapshot, width=100, color=False)


def test_every_style_is_ended_in_its_line():
    for line in render(cold_start(), width=100, color=True).split("\n"):
        assert (
            "\x1b" not in line or line.rindex("\x1b[0m") > line.rindex("\x1b[0;") or line.endswith("\x1b[0m")
        )


def test_a_name_cannot_control_a_terminal():
    timeline = Timeline(started_at=0.0)
    timeline.add("process", "\x1b]0;owned\x07\x1b[2J", 0.0, 1.0)
    timeline.add("request", "queued", 0.0, 1.0, request="\x1b[31m")
    assert "\x1b" not in render(timeline.snapshot(), width=100, color=False)


def test_a_load_that_failed_says_why():
    timeline = Timeline(started_at=0.0)
    timeline.add("process", "start interpreter", 0.0, 0.1)
    timeline.add("process", "failed", 1.0, 1.0, error="part 3 differs from its digest")
    assert render(timeline.snapshot(), width=80, color=False).startswith(
        "the cold start failed: part 3 differs from its digest"
    )


def test_a_load_that_goes_on_is_drawn_up_to_now():
    timeline = Timeline(started_at=0.0)
    timeline.add("fetch", "embed draft", 1.0, 2.0, group="embed", tier="draft", part=0, bytes=10_000_000)
    snapshot = {**timeline.snapshot(), "now_s": 3.0}
    drawn = render(snapshot, width=80, color=False)
    assert drawn.startswith("no token yet\n10 MB in 2.00 s (5 MB/s)")
    assert picture_of(parse_snapshot(snapshot), max_layer_rows=9).end_s == 3.0


def test_an_empty_timeline_can_be_drawn():
    drawn = render(Timeline(started_at=0.0).snapshot(), width=80, color=False)
    assert drawn.startswith("no token yet")


def test_a_server_that_has_long_been_up_still_shows_its_cold_start():
    fresh = cold_start(num_layers=4)
    late = {"request": "late"}
    spans = [
        *fresh["spans"],
        {"lane": "request", "name": "queued", "start_s": 86_400.0, "end_s": 86_401.0, "attributes": late},
        {
            "lane": "request",
            "name": "first token",
            "start_s": 86_401.0,
            "end_s": 86_401.0,
            "attributes": late,
        },
        {"lane": "execute", "name": "step 7", "start_s": 86_400.0, "end_s": 86_401.0},
    ]
    old = {**fresh, "now_s": 90_000.0, "spans": spans}
    assert picture_of(parse_snapshot(old), max_layer_rows=9).end_s < 10
    drawn = render(old, width=100, color=False)
    assert drawn.startswith("first token after 1.77 s")
    assert "1 more requests are not shown" in drawn


def test_dropped_spans_are_reported():
    drawn = render({**cold_start(), "dropped_spans": 12}, width=100, color=False)
    assert "12 spans were dropped" in drawn


def test_a_timeline_as_full_as_it_can_be_is_drawn():
    span = {"lane": "fetch", "start_s": 0.0, "end_s": 1e6}
    spans = [
        {**span, "name": f"{index}", "attributes": {"group": f"g{index}", "part": index, "bytes": 1 << 40}}
        for index in range(MAX_SPANS)
    ]
    snapshot = {"schema": 1, "started_unix_s": 0, "now_s": 1e6, "dropped_spans": 0, "spans": spans}
    drawn = render(snapshot, width=200, color=True, max_rows=40)
    assert len(drawn.split("\n")) < 60


def test_the_network_row_adds_up_to_the_bytes():
    picture = picture_of(parse_snapshot(cold_start()), max_layer_rows=99)
    for num_bins in (1, 7, 500):
        assert sum(throughput(picture, num_bins)) == pytest.approx(picture.figures.stored_bytes)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.0641, "64 ms"),
        (0.0996, "0.10 s"),
        (5.371, "5.37 s"),
        (99.96, "1 min 40 s"),
        (125, "2 min 5 s"),
    ],
)
def test_times_read_well(seconds, text):
    assert format_s(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (988e6, "988 MB"), (999.6e6, "1.00 GB"), (2.5e15, "2500.00 TB")],
)
def test_sizes_read_well(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("end_s", "ticks", "step_s"), [(5, 5, 1), (5.1, 5, 2), (0.04, 10, 0.005), (1e9, 4, 5e8)]
)
def test_ticks_are_round(end_s, ticks, step_s):
    assert tick_step_s(end_s, ticks) == pytest.approx(step_s)
