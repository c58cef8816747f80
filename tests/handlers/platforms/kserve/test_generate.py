"""Triton's generate extension: one text, whole or bit by bit."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support.http_server import events
from tests.support.instances import TinyParts

URL = "/v2/models/tiny/model/generate"
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


async def completion(server: Any) -> str:
    answer = await server.post("/v1/completions", {"prompt": "Once", **GREEDY})
    return str(answer.json["choices"][0]["text"])


async def test_a_text_is_gone_on_from(start: Any) -> None:
    async with start() as server:
        expected = {
            "model_name": "tiny/model",
            "model_version": "1",
            "text_output": await completion(server),
            "finish_reason": "length",
        }
        for body in (
            {"text_input": "Once", "parameters": GREEDY},
            {"text_input": "Once", **GREEDY},
            {"text_input": "Once", "parameters": {**GREEDY, "stream": False}},
        ):
            for url in (URL, "/v2/models/tiny/model/versions/1/generate"):
                answer = await server.post(url, body)
                assert (answer.status, answer.json) == (200, expected)


async def test_a_stream_has_the_same_in_pieces_and_no_end_mark(start: Any) -> None:
    async with start() as server:
        body = {"text_input": "Once", "id": "7", "parameters": {**GREEDY, "stream": True}}
        answer = await server.post(f"{URL}_stream", body)
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        pieces = [json.loads(event) for event in events(answer.body)]
        assert "".join(piece["text_output"] for piece in pieces) == await completion(server)
        assert {(piece["model_name"], piece["id"]) for piece in pieces} == {("tiny/model", "7")}
        assert ["finish_reason" in piece for piece in pieces] == [False] * (len(pieces) - 1) + [True]


async def test_the_prompt_stands_before_the_answer_once_where_it_is_not_excluded(start: Any) -> None:
    async with start() as server:
        body = {"text_input": "Once", "parameters": {**GREEDY, "exclude_input_in_output": False}}
        expected = "Once" + await completion(server)
        assert (await server.post(URL, body)).json["text_output"] == expected
        answer = await server.post(f"{URL}_stream", body)
        assert "".join(json.loads(event)["text_output"] for event in events(answer.body)) == expected


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "text_input"),
        ({"text_input": ["a"]}, "text_input"),
        ({"text_input": ""}, "text_input"),
        ({"text_input": "a", "id": 7}, "id"),
        ({"text_input": "a", "parameters": [1]}, "parameters"),
        ({"text_input": "a", "bad_words": "x"}, "bad_words"),
        ({"text_input": "a", "parameters": {"max_tokens": -1}}, "max_tokens"),
        ({"text_input": "a", "parameters": {"stream": 1}}, "stream"),
    ],
)
@pytest.mark.parametrize("path", [URL, f"{URL}_stream"])
async def test_invalid_values_are_refused_by_name(start: Any, path: str, body: Any, named: str) -> None:
    async with start() as server:
        answer = await server.post(path, body)
        assert answer.status == 400
        assert list(answer.json) == ["error"]
        assert named in answer.json["error"]


async def test_whole_answers_do_not_come_as_a_stream(start: Any) -> None:
    async with start() as server:
        answer = await server.post(URL, {"text_input": "a", "stream": True})
        assert answer.status == 400
        assert "generate_stream" in answer.json["error"]


async def test_a_stream_that_fails_ends_with_an_error_of_the_protocols_shape(start: Any) -> None:
    async with start() as server:
        async with server.client.post(
            f"{URL}_stream", json={"text_input": "Once", **GREEDY, "max_tokens": 500}
        ) as response:
            await response.content.readany()
            server.instance.model.failure = RuntimeError("broken")
            rest = await response.content.read()
        last = json.loads(events(rest)[-1])
        assert list(last) == ["error"]
        assert isinstance(last["error"], str)


async def test_an_encoder_generates_nothing(start: Any, encoder_parts: TinyParts) -> None:
    async with start(parts=encoder_parts) as server:
        answer = await server.post(URL, {"text_input": "a"})
        assert answer.status == 400
        assert "generates no text" in answer.json["error"]
