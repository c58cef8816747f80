"""Custom tools of chats, a client's search of tools, and messages between agents."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from tests.support.chat_families import scripted

MODEL = "tiny/model"
PATCH: dict[str, Any] = {"type": "custom", "custom": {"name": "patch", "description": "Change a file"}}
SEARCH = {
    "type": "tool_search",
    "execution": "client",
    "description": "Find tools",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
}
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


def written(name: str, arguments: Any) -> str:
    """A call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
async def server(start: Any, chat_parts: Any) -> AsyncIterator[Any]:
    async with start(parts=chat_parts("hermes")) as running:
        yield running


@pytest.fixture
async def client(server: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as made:
        yield made


async def test_a_chat_calls_a_custom_tool_with_a_text(server: Any, client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 200, "temperature": 0, "tools": [PATCH]}
    two = written("patch", {"input": 'a "b"\nc'}) + "\n" + written("patch", {"input": "d"})
    with scripted(server, two):
        whole = await client.chat.completions.create(messages=HELLO, **asked)
        streamed = [
            chunk.choices[0].delta.tool_calls
            async for chunk in await client.chat.completions.create(messages=HELLO, stream=True, **asked)
        ]
    message = whole.choices[0].message
    assert [each.custom.input for each in message.tool_calls or [] if each.type == "custom"] == [
        'a "b"\nc',
        "d",
    ]
    calls: dict[int, dict[str, str]] = {}
    for delta in (call.to_dict() for each in streamed for call in each or []):
        call = calls.setdefault(
            delta["index"], {"id": delta.get("id"), "type": delta.get("type"), "input": ""}
        )
        call["input"] += delta["custom"]["input"]
        assert "function" not in delta
    assert [(call["type"], call["input"]) for call in calls.values()] == [
        ("custom", 'a "b"\nc'),
        ("custom", "d"),
    ]
    result: Any = {"role": "tool", "content": "done", "tool_call_id": message.tool_calls[0].id}  # type: ignore[index]
    history = [*HELLO, message.to_dict(), result]
    again = await client.chat.completions.create(messages=history, **{**asked, "max_tokens": 1})
    function = {"name": "patch", "arguments": json.dumps({"input": 'a "b"\nc'})}
    history[1] = {**history[1], "tool_calls": [{"id": "x", "type": "function", "function": function}] * 2}
    same = await client.chat.completions.create(messages=history, **{**asked, "max_tokens": 1})
    assert again.usage.prompt_tokens == same.usage.prompt_tokens  # type: ignore[union-attr]


async def test_a_chats_custom_tool_is_guided_and_refused_by_name(server: Any) -> None:
    body = {"messages": HELLO, "max_tokens": 100, "temperature": 0}
    grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a{3}"}}
    tool = {"type": "custom", "custom": {"name": "patch", "format": grammar}}
    choice = {"type": "custom", "custom": {"name": "patch"}}
    answer = await server.post("/v1/chat/completions", {**body, "tools": [tool], "tool_choice": choice})
    (call,) = answer.json["choices"][0]["message"]["tool_calls"]
    assert (call["type"], call["custom"]) == ("custom", {"name": "patch", "input": "aaa"})
    grammar["grammar"] = {"syntax": "yacc", "definition": "x"}
    call = {"id": "a", "type": "custom"}
    for change, param in (
        ({"tools": [tool]}, "tools[0].custom.format"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom.name"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        (
            {"messages": [*HELLO, {"role": "assistant", "tool_calls": [call]}]},
            "messages[1].tool_calls[0].custom",
        ),
    ):
        refused = await server.post("/v1/chat/completions", {**body, **change})
        assert (refused.status, refused.error["param"]) == (400, param)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_searches_for_tools(server: Any, client: openai.AsyncOpenAI, stream: bool) -> None:
    asked: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 200, "tools": [SEARCH]}
    with scripted(server, written("tool_search", {"query": "weather"})):
        answer: Any = await client.responses.create(input="Hello", stream=stream, **asked)
        if stream:
            events = [event async for event in answer]
            done = [event.item for event in events if event.type == "response.output_item.done"]
            answer = events[-1].response
            assert done == answer.output
    (item,) = answer.output
    assert (item.type, item.execution, item.arguments) == ("tool_search_call", "client", {"query": "weather"})
    found = {"type": "namespace", "name": "sky", "tools": [{"type": "function", "name": "weather"}]}
    output: Any = {
        "type": "tool_search_output", "call_id": item.call_id, "execution": "client", "status": "completed",
        "tools": [found],
    }  # fmt: skip
    with scripted(server, written("sky.weather", {})):
        second = await client.responses.create(input=[output], previous_response_id=answer.id, **asked)
    (call,) = second.output
    assert (call.type, call.name, call.namespace) == ("function_call", "weather", "sky")  # type: ignore[union-attr]


async def test_a_message_of_another_agent_is_a_users(server: Any) -> None:
    def message(*content: Any) -> dict[str, Any]:
        return {"type": "agent_message", "author": "/root", "recipient": "/root/a", "content": [*content]}

    text, hidden = {"type": "input_text", "text": "Task:"}, {"type": "encrypted_content"}
    asked = {"max_output_tokens": 1}
    given = message(text, {**hidden, "encrypted_content": "Add one."})
    answer = (await server.post("/v1/responses", {**asked, "input": [given]})).json
    same = {"role": "user", "content": "Message from /root:\nTask:\nAdd one."}
    usual = (await server.post("/v1/responses", {**asked, "input": [same]})).json
    assert answer["usage"]["input_tokens"] == usual["usage"]["input_tokens"]
    items = (await server.get(f"/v1/responses/{answer['id']}/input_items")).json["data"]
    assert (items[0]["author"], items[0]["recipient"]) == ("/root", "/root/a")
    for wrong, param in (
        (message(text, {**hidden, "encrypted_content": "gAAAAABo" + "x" * 50}), "input[0].content[1]"),
        (message({"type": "input_image", "image_url": "data:"}), "input[0].content[0]"),
        ({"type": "agent_message", "content": []}, "input[0]"),
    ):
        refused = await server.post("/v1/responses", {**asked, "input": [wrong]})
        assert (refused.status, refused.error["param"]) == (400, param)
