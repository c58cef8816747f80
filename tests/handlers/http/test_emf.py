"""Lines in CloudWatch's embedded metric format, against the rules of its specification."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import jsonschema_rs
import pytest
from tests.support.instances import MODEL_NAME

from teneral.handlers.http.logs import MAX_DIMENSION_CHARS, EmfWriter, dimension

# Written from the rules of the specification in the CloudWatch user guide.
NAME = {"type": "string", "minLength": 1, "maxLength": 1024}
DIRECTIVE = {
    "type": "object",
    "required": ["Namespace", "Dimensions", "Metrics"],
    "properties": {
        "Namespace": {"type": "string", "pattern": "^[0-9A-Za-z./_#:-]{1,255}$"},
        "Dimensions": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "array",
                "maxItems": 30,
                "items": {"type": "string", "minLength": 1, "maxLength": 250},
            },
        },
        "Metrics": {
            "type": "array",
            "minItems": 1,
            "maxItems": 100,
            "items": {
                "type": "object",
                "required": ["Name"],
                "properties": {"Name": NAME, "Unit": {"enum": ["Seconds", "Count", "Bytes"]}},
                "additionalProperties": False,
            },
        },
    },
    "additionalProperties": False,
}
LINE = {
    "type": "object",
    "required": ["_aws"],
    "properties": {
        "_aws": {
            "type": "object",
            "required": ["Timestamp", "CloudWatchMetrics"],
            "properties": {
                "Timestamp": {"type": "integer", "minimum": 1_577_836_800_000, "maximum": 4_102_444_800_000},
                "CloudWatchMetrics": {"type": "array", "items": DIRECTIVE},
            },
        }
    },
}


def metrics_of(line: str) -> dict[str, Any]:
    """The line's object, once it is known to keep the rules."""
    found = json.loads(line)
    jsonschema_rs.validate(LINE, found)
    for directive in found["_aws"]["CloudWatchMetrics"]:
        for dimensions in directive["Dimensions"]:
            for name in dimensions:
                value = found[name]
                assert value.isascii()
                assert value.isprintable()
                assert 0 < len(value) <= 1024
        for metric in directive["Metrics"]:
            assert isinstance(found[metric["Name"]], int | float)
    return dict(found)


async def test_a_start_and_each_request_with_a_body_are_a_line(
    start: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    async with start(emf=True) as server:
        body = {"prompt": "x", "max_tokens": 3, "ignore_eos": True}
        await server.post("/v1/completions", body, headers={"x-request-id": "mine"})
        await server.post("/v1/completions", {"prompt": 5.5})
        await server.get("/v1/models")
        await server.get("/livez")
    began, answered, refused = map(metrics_of, capsys.readouterr().out.splitlines())
    assert (began["Model"], began["Kind"], began["FailedStarts"]) == (MODEL_NAME, "cold", 0)
    assert 0 < began["StartSeconds"] < server.instance.timeline.now_s()
    assert began["ReadBytes"] == server.instance.progress()["fetched_bytes"] > 0
    assert (answered["PromptTokens"], answered["GeneratedTokens"]) == (1, 3)
    assert 0 < answered["FirstTokenSeconds"] <= answered["RequestSeconds"]
    assert (answered["request_id"], answered["status"]) == ("mine", 200)
    assert refused["status"] == 400
    assert refused["ServerErrors"] == refused["Refusals"] == 0
    assert "FirstTokenSeconds" not in refused
    assert answered["CachedTokens"] == answered["ColdRequests"] == refused["ColdRequests"] == 0


async def test_cached_tokens_and_cold_requests_are_counted(
    start: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"prompt": "x" * 100, "max_tokens": 1, "ignore_eos": True}
    async with start(emf=True, loaded=False) as server:
        first = asyncio.ensure_future(server.post("/v1/completions", body))
        await server.eventually(lambda: len(server.service.in_flight) == 1)
        server.instance.let_in()
        used = [(await answer).json["usage"] for answer in (first, server.post("/v1/completions", body))]
    lines = [line for line in map(metrics_of, capsys.readouterr().out.splitlines()) if "PromptTokens" in line]
    assert [line["ColdRequests"] for line in lines] == [1, 0]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in used]
    assert [line["CachedTokens"] for line in lines] == cached
    assert cached[1] > 0


async def test_without_the_setting_nothing_is_written(start: Any, capsys: pytest.CaptureFixture[str]) -> None:
    async with start() as server:
        await server.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("status", "errors", "refusals"), [(200, 0, 0), (429, 0, 1), (503, 0, 1), (500, 1, 0), (504, 1, 0)]
)
def test_refusals_are_no_errors(status: int, errors: int, refusals: int) -> None:
    out = io.StringIO()
    EmfWriter("m", out).request_ended(
        status,
        0.5,
        prompt_tokens=0,
        cached_tokens=0,
        generated_tokens=0,
        first_token_s=float("nan"),
        is_cold=False,
        request_id="r",
    )
    line = metrics_of(out.getvalue())
    assert (line["ServerErrors"], line["Refusals"]) == (errors, refusals)
    assert "FirstTokenSeconds" not in line, "not a finite number"


@pytest.mark.parametrize("name", ["", ":", "größe/模型\n", "x" * 5000, "  "])
def test_any_name_of_a_model_is_a_valid_dimension(name: str) -> None:
    assert 0 < len(dimension(name)) <= MAX_DIMENSION_CHARS
    out = io.StringIO()
    EmfWriter(name, out).start_ended("reload", "failed", 1.0, 0)
    assert metrics_of(out.getvalue())["FailedStarts"] == 1


def test_a_reader_that_has_gone_away_costs_the_metrics_alone() -> None:
    out = io.StringIO()
    out.close()
    EmfWriter("m", out).start_ended("cold", "ok", 1.0, 5)
