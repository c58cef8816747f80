"""Budgets of reasoning on every route, in streams, and before a form of the answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.support.chat_families import scripted
from tests.support.http_server import events

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
LONG = "Hm. " * 100 + "</think>Hi."
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["yes"]}}, "required": ["a"]}
BODY: dict[str, Any] = {"messages": HELLO, "max_tokens": 60, "temperature": 0}


@pytest.fixture
async def server(start: Any, chat_parts: Any) -> AsyncIterator[Any]:
    async with start(parts=chat_parts("reasoning")) as running:
        yield running


def num_tokens(server: Any, text: str) -> int:
    return len(server.instance.tokenizer.result().encode(text, add_special_tokens=False))


NAMES: list[dict[str, Any]] = [
    {"thinking_token_budget": 5},
    {"thinking_budget": 5},
    {"reasoning_budget_tokens": 5},
    {"reasoning": {"max_tokens": 5}},
    {"thinking": {"type": "enabled", "budget_tokens": 5}},
]


@pytest.mark.parametrize("fields", NAMES, ids=[next(iter(each)) for each in NAMES])
async def test_reasoning_ends_at_its_budget(server: Any, fields: dict[str, Any]) -> None:
    with scripted(server, LONG):
        message = (await server.post(CHAT, {**BODY, **fields})).json["choices"][0]["message"]
        assert 0 < num_tokens(server, message["reasoning_content"]) <= 5
        assert message["content"]
        answer = await server.post(CHAT, {**BODY, **fields, "stream": True})
        deltas = [json.loads(item)["choices"][0]["delta"] for item in events(answer.body)[:-1]]
        for key in ("content", "reasoning_content"):
            assert "".join(delta.get(key) or "" for delta in deltas) == message[key]


async def test_without_a_limit_reasoning_is_as_long_as_it_is(server: Any) -> None:
    with scripted(server, "Hm. Hm. Hm. Hm.</think>Hi."):
        for fields in ({}, {"thinking_token_budget": -1}, {"thinking_token_budget": 50}):
            message = (await server.post(CHAT, {**BODY, **fields})).json["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == ("Hm. Hm. Hm. Hm.", "Hi.")


async def test_a_form_follows_reasoning_that_was_ended(server: Any) -> None:
    form = {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
    with scripted(server, LONG):
        for budget in (0, 5):
            answer = (await server.post(CHAT, {**BODY, **form, "thinking_token_budget": budget})).json
            message = answer["choices"][0]["message"]
            assert num_tokens(server, message.get("reasoning_content") or "") <= 5
            assert json.loads(message["content"]) == {"a": "yes"}


async def test_a_budget_of_messages_and_of_a_model_that_does_not_reason(server: Any, start: Any) -> None:
    body = {
        "messages": HELLO,
        "max_tokens": 60,
        "temperature": 0,
        "thinking": {"type": "enabled", "budget_tokens": 5},
    }
    with scripted(server, LONG):
        first, second = (await server.post("/v1/messages", body)).json["content"]
    assert (first["type"], second["type"]) == ("thinking", "text")
    assert 0 < num_tokens(server, first["thinking"]) <= 5
    async with start() as plain:
        answer = (await plain.post(CHAT, {**BODY, "thinking_token_budget": 5})).json
        assert "does not reason" in answer["teneral"]["warnings"][0]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"thinking_token_budget": 1, "thinking_budget": 2}, "thinking_token_budget"),
        ({"reasoning": {"max_tokens": -5}}, "reasoning.max_tokens"),
        ({"reasoning": {"no_such": 1}}, "reasoning.no_such"),
    ],
)
async def test_budgets_that_make_no_sense_are_refused(
    server: Any, fields: dict[str, Any], param: str
) -> None:
    refused = await server.post(CHAT, {**BODY, **fields})
    assert (refused.status, refused.error["param"]) == (400, param)


async def test_gpt_oss_ends_its_analysis_at_the_budget(start: Any, chat_parts: Any) -> None:
    answer = "<|channel|>analysis<|message|>" + "Hm. " * 60 + "<|end|>"
    async with start(parts=chat_parts("harmony")) as server:
        with scripted(server, answer):
            message = (await server.post(CHAT, {**BODY, "thinking_token_budget": 5})).json["choices"][0][
                "message"
            ]
    assert 0 < num_tokens(server, message["reasoning_content"]) <= 5
