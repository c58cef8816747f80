"""Answers from the draft tier, measured: what tokens, predictions and pictures are made of."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from benchmarks import answers, draft, draft_picture, predictions, readme, report, store
from benchmarks.answers import Answer
from benchmarks.cold_start import BASE
from benchmarks.cold_starts import ColdStart
from benchmarks.draft import AHEAD, DRAFT, WITHOUT
from benchmarks.processes import RunError

SVG = "{http://www.w3.org/2000/svg}"
RUNAI = "runai-model-streamer"


def clock() -> Any:
    """One second later each time it is asked."""
    seconds: Iterator[int] = count(1)
    return lambda: float(next(seconds))


def ignore() -> None:
    """The first token came."""


def event(**chunk: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [], **chunk}).encode() + b"\n"


def tokens(number: int, text: str = "") -> bytes:
    return event(choices=[{"index": 0, "text": text, "logprobs": {"tokens": ["x"] * number}}], usage=None)


def usage(drafted: int, accepted: int, rejected: int) -> bytes:
    names = ("drafted_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens")
    details = dict(zip(names, (drafted, accepted, rejected), strict=True))
    return event(usage={"completion_tokens": 4, "completion_tokens_details": details})


# -- answers -------------------------------------------------------------------------------------------------------


def test_tokens_are_counted_though_their_text_is_held_back_or_comes_together() -> None:
    first: list[str] = []
    lines = [b": loading\n", b"\n", tokens(1), tokens(3, "abc"), usage(1, 2, 5), b"data: [DONE]\n"]
    answer = answers.of_stream(lines, clock(), lambda: first.append("came"))
    assert answer == Answer((1.0, 2.0, 2.0, 2.0), num_drafted=1, num_accepted=2, num_rejected=5)
    assert first == ["came"]


def test_a_chunk_that_only_ends_the_answer_is_no_token() -> None:
    end = event(choices=[{"index": 0, "text": "", "finish_reason": "length", "logprobs": None}])
    assert answers.of_stream([tokens(1), end], clock(), ignore).token_times_s == (1.0,)


def test_an_answer_that_fails_on_its_way_is_no_answer() -> None:
    with pytest.raises(RunError, match="no more memory"):
        answers.of_stream([tokens(1), event(error={"message": "no more memory"})], clock(), ignore)


def test_an_answer_without_a_token_is_none() -> None:
    with pytest.raises(RunError, match="without a token"):
        answers.of_stream([b"data: [DONE]\n"], clock(), ignore)


def test_of_a_program_the_lines_with_tokens_count() -> None:
    lines = [b"Loading weights\n", b"TOKEN 5\n", b"a warning\n", b"TOKEN 6\n"]
    assert answers.of_program(lines, clock(), ignore) == Answer((1.0, 2.0))


# -- predictions ---------------------------------------------------------------------------------------------------


def span(lane: str, name: str, start_s: float, **attributes: Any) -> dict[str, Any]:
    return {"lane": lane, "name": name, "start_s": start_s, "end_s": start_s, "attributes": attributes}


def timeline(*more: dict[str, Any]) -> dict[str, Any]:
    ready = [
        span("ready", "embed draft", 1.5, group="embed", tier="draft"),
        span("ready", "head draft", 2.5, group="head", tier="draft"),
        span("ready", "embed exact", 3.0, group="embed", tier="exact"),
        span("ready", "head exact", 4.5, group="head", tier="exact"),
    ]
    return {"spans": [span("fetch", "embed draft", 0.5), *ready, *more]}


DECIDED = span(
    "process", "draft-first: time for 9 proposals", 1.0,
    rate_bytes_per_s=2e8, draft_s=2.1, exact_s=4.2, token_s=0.07, num_proposals=9,
)  # fmt: skip
OUTCOME = span(
    "draft", "exact from here on", 4.6,
    num_draft_steps=7, step_s=0.08, num_judged=6, num_accepted=5, refine_wait_s=0.01,
)  # fmt: skip


def test_predictions_and_measured_times_count_from_the_load_s_beginning() -> None:
    found = predictions.of_timeline(timeline(DECIDED, OUTCOME))
    assert found.decision == "draft-first: time for 9 proposals"
    assert (found.rate_mb_s, found.draft_s, found.exact_s, found.num_proposals) == (200.0, 2.1, 4.2, 9)
    assert (found.draft_came_s, found.exact_came_s) == (2.0, 4.0)
    assert (found.num_draft_steps, found.draft_step_s, found.num_accepted) == (7, 0.08, 5)


def test_a_load_that_had_nothing_to_decide_says_so() -> None:
    found = predictions.of_timeline(timeline())
    assert found.decision == predictions.UNDECIDED
    assert found.draft_s is None
    assert found.num_draft_steps == 0


def test_a_group_that_became_exact_at_once_has_its_draft_then() -> None:
    late = span("ready", "norm exact", 5.5, group="norm", tier="exact")
    assert predictions.of_timeline(timeline(late)).draft_came_s == 5.0


def test_a_timeline_is_complete_when_the_load_is_over_and_the_draft_s_passes_too() -> None:
    over, drafted = span("process", "all weights exact", 4.5), span("draft", "draft step 0", 2.0)
    assert not predictions.is_complete(timeline())
    assert predictions.is_complete(timeline(over))
    assert not predictions.is_complete(timeline(over, drafted))
    assert predictions.is_complete(timeline(over, drafted, OUTCOME))


# -- the report ----------------------------------------------------------------------------------------------------


def start(*times_s: float, sent_bytes: int, drafted: int = 0, accepted: int = 0) -> ColdStart:
    answer = Answer(times_s, num_drafted=drafted, num_accepted=accepted)
    return ColdStart(answer, 0, None, sent_bytes, timeline(DECIDED, OUTCOME))


def result() -> dict[str, Any]:
    systems = {
        DRAFT: [start(2.2, 2.3, 3.6, 3.7, sent_bytes=412_000_000, drafted=2)],
        AHEAD: [start(3.5, 3.5, 3.5, 3.6, sent_bytes=664_000_000, accepted=3)],
        WITHOUT: [start(3.6, 3.7, 3.8, 3.9, sent_bytes=664_000_000)],
        BASE: [start(10.5, 10.6, 10.7, 10.8, sent_bytes=991_000_000)],
        RUNAI: [start(9.5, 9.6, 9.7, 9.8, sent_bytes=991_000_000)],
    }
    stored = {"plain": 1_000_000_000, "packed": 664_000_000, "draft": 410_000_000}
    link = {
        "rate_mb_s": 200.0,
        "wire_s": {way: size / 2e8 for way, size in stored.items()},
        "systems": {name: draft.summary(rows) for name, rows in systems.items()},
    }
    facts = report.begin("draft", model="<a & b>", weights=draft.RANDOM_WEIGHTS, rounds=1, num_tokens=4)
    facts |= {"latency_ms": 15.0, "stored_bytes": stored, "results": [link], "left_out": []}
    memory = {"rate_mb_s": 50.0, "peak_mib": {AHEAD: 1302.0, WITHOUT: 1300.0}}
    report_json: dict[str, Any] = json.loads(
        json.dumps(facts | {"memory": memory, "refine": {"1": 8.2, "2": 10.6}, "failed": {}})
    )
    return report_json


def test_a_token_s_time_is_the_median_of_that_token_s_times() -> None:
    rows = [start(1.0, 5.0, sent_bytes=10), start(3.0, 4.0, sent_bytes=30), start(2.0, 9.0, sent_bytes=20)]
    found = draft.summary(rows)
    assert found["token_times_s"] == [2.0, 5.0]
    assert (found["first_token_s"], found["last_token_s"], found["sent_bytes"]) == (2.0, 5.0, 20)
    assert found["all_s"] == [1.0, 3.0, 2.0]


def test_the_table_holds_each_system_against_the_bytes_that_it_needs() -> None:
    text = draft.render(result())
    assert f"| {DRAFT} | 2.20 | 1.07 x 2.05 s | 3.70 | 412 | 2 | 0, 0 |" in text
    assert f"| {AHEAD} | 3.50 | 1.05 x 3.32 s | 3.60 | 664 | 0 | 3, 0 |" in text
    assert f"| {BASE} | 10.50 | 2.10 x 5.00 s | 10.80 | 991 | 0 | 0, 0 |" in text
    assert "2.10, came 2.00 | 4.20, came 4.00 | 0.07, came 0.08 | 9, 7 | 0.01 |" in text
    assert f"{AHEAD} 1,302 MiB (+2)" in text
    assert "10.6 GB/s of weights on 2 threads" in text
    assert "says nothing about a real one" in text


def test_the_readme_s_table_is_that_of_the_result() -> None:
    text = readme.draft(result())
    assert "| `teneral serve --first-token draft` | 2.20 | 1.07 x 2.05 s | 3.70 | 412 | 2 | – |" in text
    assert "| 3.50 | 1.05 x 3.32 s | 3.60 | 664 | – | 3 of 3 |" in text
    assert "](draft.svg)" in text
    assert "says nothing about a real one" in text


# -- the picture ---------------------------------------------------------------------------------------------------


def test_the_picture_has_a_line_for_each_of_ours_and_for_the_best_peer() -> None:
    picture = ElementTree.fromstring(draft_picture.draw(result()))
    texts = [element.text for element in picture.iter(f"{SVG}text")]
    assert {DRAFT, AHEAD, WITHOUT, RUNAI, "<a & b> over 200 MB/s: tokens received"} <= set(texts)
    assert BASE not in texts
    assert "first 2.20 s, 4th 3.70 s" in texts
    assert len(list(picture.iter(f"{SVG}polyline"))) == 4


def test_the_picture_marks_drafted_tokens_and_both_limits_of_the_wire() -> None:
    picture = ElementTree.fromstring(draft_picture.draw(result()))
    fills = [element.get("fill") for element in picture.iter(f"{SVG}circle")]
    assert len(fills) == 4 * 4
    assert fills.count("none") == 2
    marks = [element.get("x1") for element in picture.iter(f"{SVG}line") if element.get("class") == "wire"]
    plot = draft_picture.Plot(1.05 * 9.8, 4)
    assert marks == [f"{plot.x(2.05):.1f}", f"{plot.x(3.32):.1f}"]


def test_later_is_further_right_and_more_is_higher() -> None:
    plot = draft_picture.Plot(10.0, 16)
    assert plot.x(0.0) == draft_picture.LEFT
    assert plot.x(1.0) < plot.x(2.0) < plot.x(10.0) <= draft_picture.WIDTH - draft_picture.RIGHT
    assert plot.y(16) == draft_picture.TOP < plot.y(1) < plot.y(0)


def test_a_rate_at_which_nothing_was_measured_is_no_picture() -> None:
    empty = result()
    empty["results"][0]["systems"] = {}
    with pytest.raises(SystemExit, match="nothing was measured"):
        draft_picture.draw(empty)


# -- a model of one's own ------------------------------------------------------------------------------------------


def test_two_models_of_one_name_have_folders_of_their_own(tmp_path: Path) -> None:
    one, other = tmp_path / "a" / "model", tmp_path / "b" / "model"
    assert store.folder_of(one, tmp_path).name.startswith("model-")
    assert store.folder_of(one, tmp_path) != store.folder_of(other, tmp_path)


def test_a_folder_that_is_no_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="neither an artifact nor a model directory"):
        store.prepare_own(tmp_path, tmp_path / "store")
