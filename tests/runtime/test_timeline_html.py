from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest
from tests.support.cold_start import cold_start

from teneral.loader.timeline import MAX_SPANS, Timeline
from teneral.runtime.waterfall.html import MAX_BARS, render_html


class Page(HTMLParser):
    """The elements of a page: (tag, attributes), what is open at the end, and the text of some."""

    VOID = frozenset({"meta", "br"})

    def __init__(self, page):
        super().__init__()
        self.elements, self.open, self.texts = [], [], {}
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def of_class(self, name):
        return [
            attributes for _, attributes in self.elements if name in (attributes.get("class") or "").split()
        ]


@pytest.fixture(scope="module")
def page():
    return Page(render_html(cold_start(num_layers=4)))


def test_every_element_is_closed(page):
    assert page.open == []
    assert len(page.elements) > 50


def test_the_page_asks_nothing_of_any_other_place(page):
    for _, attributes in page.elements:
        assert not {"src", "href", "srcset", "data", "action", "xlink:href"} & set(attributes)
    style = "".join(page.texts["style"])
    assert "url(" not in style
    assert "@import" not in style
    assert "http" not in re.sub(r"http-equiv", "", render_html(cold_start(num_layers=1)))


def test_only_its_own_script_may_run(page):
    (policy,) = [one["content"] for tag, one in page.elements if tag == "meta" and "http-equiv" in one]
    (script,) = page.texts["script"]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]


def test_every_layer_has_its_phases(page):
    num_layers = 4 + 2  # and the embeddings and the head
    for name, count in {"verify": 2, "decode": 2, "refine": 1, "execute": 1, "exact": 1, "draft": 1}.items():
        shapes = [shape for shape in page.of_class(name) if "x" in shape]
        more = 8 if name == "execute" else 0  # forward passes
        assert len(shapes) == num_layers * count + more, name


def test_bars_lie_where_their_times_are(page):
    (svg,) = [attributes for tag, attributes in page.elements if tag == "svg"]
    left, right, end_s = (float(svg[f"data-{name}"]) for name in ("left", "right", "end"))
    first = min(float(bar["x"]) for bar in page.of_class("fetch") if "x" in bar)
    assert (first - left) / (right - left) * end_s == pytest.approx(0.2, abs=0.02)
    for bar in (bar for bar in page.of_class("task") if "x" in bar):
        assert left <= float(bar["x"]) <= float(bar["x"]) + float(bar["width"]) <= right + 2


def test_every_bar_says_what_it_is(page):
    titles = page.texts["title"]
    assert "layers.0 draft: fetch part 2, 14 MB in 0.21 s" in titles
    assert "layers.3: executed in 12 ms" in titles
    assert any(title.startswith("req-0: prefill for") for title in titles)


def test_the_figures_are_there(page):
    assert "1.77 s" in page.texts["em"]
    assert "132 MB in 1.07 s" in page.texts["dd"]


def test_the_legend_names_what_is_in_the_picture_alone():
    shapes = {one.get("data-shapes") for tag, one in Page(render_html(cold_start(draft_tier=False))).elements}
    assert ".decode" in shapes
    assert ".queued" in shapes
    timeline = Timeline(started_at=0.0)
    timeline.add("process", "start interpreter", 0.0, 0.1)
    only = {one.get("data-shapes") for _, one in Page(render_html(timeline.snapshot())).elements}
    assert only == {None, ".task"}


HOSTILE = "</title></svg><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


def test_texts_of_the_snapshot_are_never_markup():
    timeline = Timeline(started_at=0.0)
    timeline.add("process", HOSTILE, 0.0, 1.0)
    timeline.add(HOSTILE, HOSTILE, 0.0, 1.0)
    timeline.add("process", "failed", 1.0, 1.0, error=HOSTILE)
    timeline.add("fetch", "x", 0.0, 1.0, group=HOSTILE, tier="draft", part=1, bytes=1)
    timeline.add("ready", "x", 1.0, 1.0, group=HOSTILE, tier="exact")
    timeline.add("execute", HOSTILE, 0.0, 1.0, layer=1)
    timeline.add("request", "queued", 0.0, 1.0, request=HOSTILE)
    page = Page(render_html(timeline.snapshot()))
    assert page.open == []
    assert "img" not in {tag for tag, _ in page.elements}
    assert len([tag for tag, _ in page.elements if tag == "script"]) == 1
    assert any(HOSTILE in text for text in page.texts["h1"])  # it is there, as text


def test_a_load_that_failed_is_the_heading():
    timeline = Timeline(started_at=0.0)
    timeline.add("process", "failed", 1.0, 1.0, error="the bucket does not exist")
    assert "The cold start failed: the bucket does not exist" in "".join(
        Page(render_html(timeline.snapshot())).texts["h1"]
    )


@pytest.mark.parametrize("num_groups", [1, MAX_SPANS])
def test_a_timeline_as_full_as_it_can_be_makes_a_page_of_bounded_size(num_groups):
    spans = [
        {
            "lane": ("fetch", "verify", "decode", "ready")[index % 4],
            "name": "x",
            "start_s": index / 7,
            "end_s": index / 7 + 0.01,
            "attributes": {"group": f"g{index % num_groups}", "part": index, "bytes": index, "tier": "exact"},
        }
        for index in range(MAX_SPANS)
    ]
    page = render_html({"schema": 1, "started_unix_s": 0, "now_s": 1e4, "dropped_spans": 0, "spans": spans})
    assert page.count("<rect") <= MAX_BARS + 20_000
    assert len(page) < 8_000_000


def test_bars_that_were_put_together_keep_their_bytes():
    spans = [
        {
            "lane": "fetch",
            "name": "x",
            "start_s": index * 1e-4,
            "end_s": index * 1e-4 + 1e-4,
            "attributes": {"group": "embed", "part": index, "bytes": 1000},
        }
        for index in range(MAX_BARS + 1)
    ]
    page = render_html({"schema": 1, "started_unix_s": 0, "now_s": 1, "dropped_spans": 0, "spans": spans})
    assert "several: fetch 8 MB" in page
