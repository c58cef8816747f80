"""`teneral timeline -o`: the console's page with a timeline inside, whatever that timeline holds."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from tests.support.cold_start import cold_start

from teneral.handlers.console.files import standalone
from teneral.loader.timeline import MAX_SPANS, Timeline
from teneral.runtime.waterfall.command import checked_snapshot, chrome_trace


class Page(HTMLParser):
    """The elements of a page: (tag, attributes), and the text of its scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open = tag

    def handle_data(self, data: str) -> None:
        if self._open in ("script", "style"):
            self.texts.setdefault(self._open, []).append(data)
            self._open = ""


def page_of(snapshot: Any) -> Page:
    return Page(standalone(checked_snapshot(snapshot)))


def digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def test_the_page_asks_nothing_of_any_other_place() -> None:
    page = page_of(cold_start(num_layers=2))
    for tag, attributes in page.elements:
        places = {attributes.get(name) for name in ("src", "href", "srcset", "data", "action")}
        assert places <= {None, "#main"}, tag
        assert "style" not in attributes
    text = standalone(checked_snapshot(cold_start(num_layers=1))).replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|url\(|@import", text)


def test_only_its_own_script_and_style_may_run() -> None:
    page = page_of(cold_start(num_layers=2))
    (policy,) = [one["content"] for tag, one in page.elements if tag == "meta" and "http-equiv" in one]
    data, script = page.texts["script"]
    (style,) = page.texts["style"]
    assert (
        policy
        == f"default-src 'none'; script-src 'sha256-{digest(script)}'; style-src 'sha256-{digest(style)}'"
    )
    assert json.loads(data)["spans"]


def test_it_holds_the_timeline() -> None:
    given = cold_start(num_layers=4)
    data = json.loads(page_of(given).texts["script"][0])
    assert {**data, "spans": []} == {**given, "spans": []}
    assert [(span["lane"], span["name"], span["start_s"]) for span in data["spans"]] == [
        (span["lane"], span["name"], span["start_s"]) for span in given["spans"]
    ]


HOSTILE = "</script><!--<script><img src=x onerror=alert(2)>\"'&\u2028"


def test_texts_of_the_snapshot_are_never_markup() -> None:
    timeline = Timeline(started_at=0.0)
    timeline.add("process", HOSTILE, 0.0, 1.0)
    timeline.add(HOSTILE, HOSTILE, 0.0, 1.0, group=HOSTILE, other=HOSTILE)
    timeline.add("process", "failed", 1.0, 1.0, error=HOSTILE)
    page = page_of(timeline.snapshot())
    assert "img" not in {tag for tag, _ in page.elements}
    assert len([tag for tag, _ in page.elements if tag == "script"]) == 2
    spans = json.loads(page.texts["script"][0])["spans"]
    assert spans[-1]["attributes"]["error"].startswith("</script><!--<script>")
    assert {name for span in spans for name in span["attributes"]} == {"group", "error"}


@pytest.mark.parametrize("value", [True, None, [], {}, "7", float("inf"), float("nan"), 10**400])
def test_a_number_of_another_type_or_size_is_left_out(value: Any) -> None:
    timeline = Timeline(started_at=0.0)
    timeline.add("fetch", "x", 0.0, 1.0, group="embed", bytes=value, part=1)
    (span,) = checked_snapshot(timeline.snapshot())["spans"]
    assert span["attributes"] == {"group": "embed", "part": 1}


def test_a_timeline_as_full_as_it_can_be_makes_a_page_of_bounded_size() -> None:
    attributes = {"group": "g" * 500, "x": "y" * 500}
    span = {"lane": "fetch", "name": "n" * 500, "start_s": 0, "end_s": 1, "attributes": attributes}
    given = {"schema": 1, "started_unix_s": 0, "now_s": 1e4, "dropped_spans": 0, "spans": [span] * MAX_SPANS}
    assert len(standalone(checked_snapshot(given))) < MAX_SPANS * 350 + 200_000


def test_a_chrome_trace_has_every_span_once_and_no_two_at_the_same_time_in_a_row() -> None:
    given = cold_start(num_layers=4)
    events = chrome_trace(given)["traceEvents"]
    drawn = [event for event in events if event["ph"] in "Xi"]
    assert sorted((event["cat"], event["name"], event["ts"]) for event in drawn) == sorted(
        (span["lane"], span["name"], round(1e6 * span["start_s"])) for span in given["spans"]
    )
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    ends: dict[int, int] = {}
    for event in sorted(drawn, key=lambda event: event["ts"]):
        assert names[event["tid"]].startswith(event["cat"])
        assert event["ts"] >= ends.get(event["tid"], 0) - 1
        ends[event["tid"]] = event["ts"] + event.get("dur", 0)
    assert {"fetch", "fetch 2", "process", "request"} <= set(names.values())
    json.dumps(events)
