from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teneral.loader.errors import FormatError
from teneral.loader.timeline import MAX_SPANS, Timeline
from teneral.runtime.waterfall.command import checked_snapshot, chrome_trace
from teneral.runtime.waterfall.snapshot import MAX_NAME_CHARS, clean_text, parse_snapshot
from teneral.runtime.waterfall.view import render

SPAN = {"lane": "process", "name": "import", "start_s": 0.5, "end_s": 1.0}
SNAPSHOT = {"schema": 1, "started_unix_s": 1.7e9, "now_s": 2.0, "dropped_spans": 0, "spans": [SPAN]}


def with_span(**changes):
    return {**SNAPSHOT, "spans": [SPAN, {**SPAN, **changes}]}


def test_what_a_timeline_gave_is_understood():
    timeline = Timeline(started_at=0.0)
    timeline.add("fetch", "part", 0.25, 0.5, group="layers.0", bytes=7)
    timeline.mark("process", "port open")
    parsed = parse_snapshot(json.loads(json.dumps(timeline.snapshot())))
    fetch = parsed.spans[0]
    assert (fetch.lane, fetch.name, fetch.start_s, fetch.end_s) == ("fetch", "part", 0.25, 0.5)
    assert fetch.attributes == {"group": "layers.0", "bytes": 7}
    assert len(parsed.spans) == 2
    assert parsed.num_dropped == 0


@pytest.mark.parametrize(
    ("snapshot", "message"),
    [
        (None, "no timeline"),
        ([], "no timeline"),
        ({}, "no timeline"),
        ({"spans": {}}, "no timeline"),
        ({"spans": []}, "schema None"),
        ({**SNAPSHOT, "schema": 2}, "schema 2"),
        ({**SNAPSHOT, "schema": 10**5000}, "schema a huge number"),
        ({**SNAPSHOT, "schema": "x" * 1000}, "schema 'xxx"),
        ({**SNAPSHOT, "now_s": None}, "now_s is not a number"),
        ({**SNAPSHOT, "now_s": math.nan}, "now_s is nan"),
        ({**SNAPSHOT, "now_s": math.inf}, "now_s is inf"),
        ({**SNAPSHOT, "started_unix_s": 1e300}, "started_unix_s is 1e"),
        ({**SNAPSHOT, "dropped_spans": True}, "dropped_spans is not a number"),
        ({**SNAPSHOT, "spans": [SPAN] * (MAX_SPANS + 1)}, "more than 50000 spans"),
        ({**SNAPSHOT, "spans": [7]}, r"spans\[0\] is not an object"),
        (with_span(lane=1), r"spans\[1\].lane is not a text"),
        (with_span(name=None), r"spans\[1\].name is not a text"),
        (with_span(start_s="0"), r"spans\[1\].start_s is not a number"),
        (with_span(start_s=-7), r"spans\[1\].start_s is -7, out of bounds"),
        (with_span(end_s=10**400), r"spans\[1\].end_s is a huge number, out of bounds"),
        (with_span(start_s=2.0), r"spans\[1\] ends before it starts"),
        (with_span(attributes=[]), r"spans\[1\].attributes"),
        (with_span(attributes={str(key): key for key in range(100)}), r"spans\[1\].attributes"),
    ],
)
def test_what_is_no_timeline_is_refused_where_it_is_wrong(snapshot, message):
    with pytest.raises(FormatError, match=message):
        parse_snapshot(snapshot)


def test_a_span_that_seems_to_come_before_the_process_begins_with_it():
    assert parse_snapshot(with_span(start_s=-0.004)).spans[0].start_s == 0.0


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("plain – é", "plain – é"),
        ("\x1b[2J\x07\r\n", "?[2J???"),
        ("a\u202eb\u200bc\u0301", "a?b?c?"),
        ("蜻蛉", "??"),
        ("x" * 500, "x" * (MAX_NAME_CHARS - 1) + "…"),
    ],
)
def test_texts_keep_nothing_that_a_terminal_would_obey(text, clean):
    assert clean_text(text) == clean


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
LANES = [
    "process",
    "manifest",
    "fetch",
    "verify",
    "decode",
    "ready",
    "execute",
    "request",
    "tokenizer",
    "else",
]
NAMES = [
    "load",
    "first token",
    "last token",
    "queued",
    "prefill",
    "decode",
    "step 0",
    "failed",
    "layers.1",
    "<b>",
]
ATTRIBUTES = st.fixed_dictionaries(
    {},
    optional={
        "group": st.sampled_from(["embed", "layers.0", "layers.1", "<i>"]) | JSON,
        "tier": st.sampled_from(["draft", "refine", "exact"]) | JSON,
        "part": st.integers(-1, 9) | JSON,
        "bytes": st.integers(0, 10**12) | JSON,
        "layer": st.integers(-1, 3) | JSON,
        "request": st.sampled_from(["a", "b"]) | JSON,
        "error": JSON,
        "tokens": JSON,
        "stored_bytes": JSON,
        "weight_bytes": JSON,
    },
)
MOMENTS = st.floats(0, 1e9) | st.sampled_from([0.0, 1e-9, 0.5, 3.0])
SPANS = st.builds(
    lambda lane, name, moments, attributes: {
        "lane": lane,
        "name": name,
        "start_s": min(moments),
        "end_s": max(moments),
        "attributes": attributes,
    },
    st.sampled_from(LANES),
    st.sampled_from(NAMES),
    st.tuples(MOMENTS, MOMENTS),
    ATTRIBUTES,
)
SNAPSHOTS = st.builds(
    lambda spans, now_s: {**SNAPSHOT, "spans": spans, "now_s": now_s}, st.lists(SPANS, max_size=12), MOMENTS
)


@settings(max_examples=80, deadline=None)
@given(snapshot=SNAPSHOTS, width=st.integers(1, 300), max_rows=st.integers(0, 5))
def test_every_sound_timeline_can_be_drawn(snapshot, width, max_rows):
    drawn = render(snapshot, width=width, color=False, max_rows=max_rows)
    assert max(map(len, drawn.split("\n"))) <= max(width, 40)
    assert all(line == line.rstrip() for line in drawn.split("\n"))
    json.dumps(checked_snapshot(snapshot), allow_nan=False)
    events = chrome_trace(snapshot)["traceEvents"]
    assert sum(event["ph"] != "M" for event in events) == len(snapshot["spans"])


@settings(max_examples=80, deadline=None)
@given(snapshot=JSON | st.fixed_dictionaries({"schema": st.just(1), "spans": st.lists(JSON, max_size=3)}))
def test_any_other_value_is_refused_with_an_error_of_ours(snapshot):
    for draw in (lambda: render(snapshot, width=80, color=True), lambda: checked_snapshot(snapshot)):
        with pytest.raises(FormatError):
            draw()
