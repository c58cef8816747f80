"""The requests of a file's lines, and the errors of lines."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teneral.handlers.batch.input import Embed, Generate, Line, LineProblem, RawLine, RouteCall, parse_line
from teneral.handlers.batch.worker import units_of


def parsed(value: Any, *, number: int = 7, is_duplicate: bool = False, job_is_openai: bool = False) -> Line:
    data = value if value is None or isinstance(value, bytes) else json.dumps(value).encode()
    return parse_line(
        RawLine(number, 0, data), is_duplicate=is_duplicate, job_is_openai=job_is_openai, max_line_bytes=100
    )


def call(**fields: Any) -> dict[str, Any]:
    return {"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}} | fields


@pytest.mark.parametrize(
    ("value", "request_"),
    [
        (call(), RouteCall("/v1/completions", {"prompt": "a"})),
        ({"url": "/v1/embeddings", "body": {"input": "a"}}, RouteCall("/v1/embeddings", {"input": "a"})),
        (call(body={"stream": False}), RouteCall("/v1/completions", {"stream": False})),
        ({"prompt": "a", "max_tokens": 3}, Generate("a", {"max_tokens": 3})),
        ({"messages": [{"role": "user"}], "seed": 1}, Generate([{"role": "user"}], {"seed": 1})),
        ({"input": "a", "custom_id": "n"}, Embed("a")),
    ],
)
def test_a_line_is_a_request(value: Any, request_: Any) -> None:
    assert parsed(value).request == request_


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (b"junk", "invalid_json"),
        (b'{"prompt": "a"', "invalid_json"),
        (b'{"prompt": "\xff"}', "invalid_json"),
        (b"[" * 5000, "invalid_json"),
        (b'{"x": ' * 5000, "invalid_json"),
        ([1], "invalid_json"),
        (None, "line_too_long"),
        ({}, "invalid_request"),
        ({"prompt": "a", "input": "b"}, "invalid_request"),
        ({"prompt": 7}, "invalid_request"),
        ({"messages": "hello"}, "invalid_request"),
        ({"input": ["a"]}, "invalid_request"),
        ({"input": "a", "dimensions": 3}, "invalid_request"),
        (call(method="GET"), "invalid_request"),
        (call(url="/v1/other"), "unknown_url"),
        (call(url=7), "unknown_url"),
        ({"method": "POST", "body": {}}, "unknown_url"),
        (call(body=[1]), "invalid_request"),
        (call(body={"stream": True}), "invalid_request"),
        (call(custom_id=[]), "invalid_custom_id"),
        (call(custom_id=""), "invalid_custom_id"),
        (call(custom_id="x" * 513), "invalid_custom_id"),
        (call(custom_id=True), "invalid_custom_id"),
    ],
)
def test_a_line_that_is_no_request_says_which_and_why(value: Any, code: str) -> None:
    problem = parsed(value).request
    assert isinstance(problem, LineProblem)
    assert problem.code == code
    assert "line 7" in problem.message


@pytest.mark.parametrize(
    ("fields", "custom_id"),
    [({}, "7"), ({"custom_id": None}, "7"), ({"custom_id": "a"}, "a"), ({"custom_id": 5}, 5)],
)
def test_a_line_without_a_custom_id_has_its_number(fields: dict[str, Any], custom_id: Any) -> None:
    assert parsed({"prompt": "a"} | fields).custom_id == custom_id


def test_a_duplicate_does_not_take_the_name() -> None:
    line = parsed(call(), is_duplicate=True)
    assert line.custom_id is None
    assert isinstance(line.request, LineProblem)
    assert line.request.code == "duplicate_custom_id"


def test_an_unreadable_line_is_of_the_jobs_form() -> None:
    assert parsed(b"junk", job_is_openai=True).is_openai
    assert not parsed(b"junk", job_is_openai=False).is_openai
    assert parsed(call(), job_is_openai=False).is_openai


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
fields = st.sampled_from(["custom_id", "method", "url", "body", "prompt", "messages", "input", "seed"])


@given(st.dictionaries(fields, json_values, max_size=6) | st.binary(max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_line_becomes_something(value: Any) -> None:
    assert parsed(value).number == 7


def test_long_lines_come_first_and_texts_go_with_those_of_similar_length() -> None:
    texts = [
        Line(number, str(number), Embed("a"), False, size_bytes=(number * 37) % 100) for number in range(70)
    ]
    prompts = [
        Line(number, str(number), Generate("a", {}), False, size_bytes=number % 7) for number in range(70, 80)
    ]
    units = list(units_of([*texts, *prompts], skip=lambda index: index == 3))
    assert sorted(index for unit in units for index in unit) == [index for index in range(80) if index != 3]
    sizes = [[(texts + prompts)[index].size_bytes for index in unit] for unit in units]
    assert [len(unit) for unit in units] == [32, 32, 5] + [1] * 10
    assert min(sizes[0]) >= max(sizes[1]) >= min(sizes[1]) >= max(sizes[2])
    assert [unit[0] for unit in sizes[3:]] == sorted((unit[0] for unit in sizes[3:]), reverse=True)
