"""POST /v1/responses, mostly through OpenAI's own client with its strict validation."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from tests.support.chat_families import scripted

MODEL = "tiny/model"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 8}
TOOL = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


@pytest.fixture
async def server(start: Any) -> Any:
    async with start() as running:
        yield running


@pytest.fixture(scope="module", params=["hermes", "reasoning"])
def family(request: Any) -> str:
    return str(request.param)


@pytest.fixture
async def family_server(start: Any, chat_parts: Any, family: str) -> Any:
    async with start(parts=chat_parts(family)) as running:
        yield running


def client_of(server: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="unused", max_retries=0, _strict_response_validation=True
    )


@pytest.fixture
async def client(server: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(server) as made:
        yield made


async def events_of(client: openai.AsyncOpenAI, **asked: Any) -> list[Any]:
    return [event async for event in await client.responses.create(stream=True, **asked)]


async def test_an_answer_is_what_a_chat_says(server: Any, client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(input="Hello", instructions="Be brief.", **GREEDY)
    chat = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
        temperature=0,
        max_tokens=8,
    )
    assert answer.output_text == chat.choices[0].message.content
    assert (answer.status, answer.object, answer.store) == ("incomplete", "response", True)
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert chat.usage is not None
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert (answer.usage.output_tokens, answer.usage.total_tokens) == (8, chat.usage.total_tokens)
    (message,) = answer.output
    assert (message.type, message.status) == ("message", "incomplete")


async def test_items_are_the_messages_of_a_chat(client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(input="Hello", **GREEDY)
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        *first.output,
        {"type": "message", "role": "user", "content": "And then?"},
    ]
    answer = await client.responses.create(input=items, **GREEDY)
    chat = await client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "And then?"},
        ],
        temperature=0,
        max_tokens=8,
    )
    assert answer.output_text == chat.choices[0].message.content


async def test_a_streams_events_come_in_order_and_add_up(client: openai.AsyncOpenAI) -> None:
    whole = await client.responses.create(input="Hello", **GREEDY)
    events = await events_of(client, input="Hello", **GREEDY)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    num_deltas = kinds.count("output_text.delta")
    assert num_deltas > 1
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * num_deltas,
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    assert "".join(event.delta for event in events if "delta" in event.type) == whole.output_text
    assert events[0].response.output == []
    last = events[-1].response
    assert (last.output_text, last.usage.output_tokens) == (whole.output_text, 8)
    assert {event.item_id for event in events[3:-2]} == {last.output[0].id}
    assert last.id == events[0].response.id


async def test_an_answer_that_ends_by_itself_is_complete(server: Any, client: openai.AsyncOpenAI) -> None:
    with scripted(server, "Hi."):
        answer = await client.responses.create(input="Hello", model=MODEL)
        assert (answer.status, answer.output_text) == ("completed", "Hi.")
        assert answer.incomplete_details is None
    with scripted(server, "Hi."):
        events = await events_of(client, input="Hello", model=MODEL)
        assert events[-1].type == "response.completed"
    with scripted(server, ""):
        (message,) = (await client.responses.create(input="Hello", model=MODEL)).output
        assert message.content[0].text == ""


async def test_the_streaming_helper_of_the_client_understands_the_events(client: openai.AsyncOpenAI) -> None:
    async with client.responses.stream(input="Hello", **GREEDY) as stream:
        kinds = [event.type async for event in stream]
    assert kinds[-1] == "response.incomplete"


async def test_a_json_schema_is_followed(client: openai.AsyncOpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["cat", "dog"]}},
        "required": ["kind"],
        "additionalProperties": False,
    }
    fmt: Any = {"type": "json_schema", "name": "pet", "schema": schema, "strict": True}
    answer = await client.responses.create(model=MODEL, input="Hello", text={"format": fmt})
    assert json.loads(answer.output_text)["kind"] in ("cat", "dog")
    assert answer.text is not None
    assert answer.text.format is not None
    assert answer.text.format.type == "json_schema"


async def test_logprobs_are_those_of_the_text(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {**GREEDY, "input": "Hello", "top_logprobs": 2}
    asked["include"] = ["message.output_text.logprobs"]
    whole = await client.responses.create(**asked)
    logprobs = whole.output[0].content[0].logprobs
    assert len(logprobs) == 8
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs)
    events = await events_of(client, **asked)
    streamed = [
        entry.logprob
        for event in events
        if event.type == "response.output_text.delta"
        for entry in event.logprobs
    ]
    assert streamed == pytest.approx([entry.logprob for entry in logprobs])
    assert events[-1].response.output[0].content[0].logprobs == logprobs


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_is_an_item_and_its_output_the_next_input(
    family_server: Any, family: str, stream: bool
) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": "Weather?", "tools": [TOOL]}
    async with client_of(family_server) as client:
        with scripted(family_server, "</think>" + CALL if family == "reasoning" else CALL):
            if stream:
                events = await events_of(client, **asked)
                answer = events[-1].response
                assert [event.sequence_number for event in events] == list(range(len(events)))
                arguments = "".join(event.delta for event in events if event.type.endswith("arguments.delta"))
                (done,) = [event for event in events if event.type.endswith("arguments.done")]
                assert arguments == done.arguments == answer.output[-1].arguments
            else:
                answer = await client.responses.create(**asked)
        call = answer.output[-1]
        assert (call.type, call.name, json.loads(call.arguments)) == (
            "function_call",
            "weather",
            {"city": "Bern"},
        )
        assert (answer.status, call.status) == ("completed", "completed")
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        with scripted(family_server, "</think>It is sunny." if family == "reasoning" else "It is sunny."):
            items: list[Any] = [{"role": "user", "content": "Weather?"}, *answer.output, result]
            after = await client.responses.create(model=MODEL, input=items, tools=[TOOL])
            assert after.output_text.endswith("It is sunny.")


async def test_reasoning_is_an_item_of_its_own(family_server: Any, family: str) -> None:
    if family != "reasoning":
        pytest.skip("this family does not reason")
    async with client_of(family_server) as client:
        with scripted(family_server, "Hmm.</think>Yes."):
            events = await events_of(client, model=MODEL, input="Hello")
        answer = events[-1].response
        assert [item.type for item in answer.output] == ["reasoning", "message"]
        assert answer.output[0].content[0].text.strip() == "Hmm."
        assert answer.output_text.strip() == "Yes."
        assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
        reasoning = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
        assert "".join(reasoning) == answer.output[0].content[0].text
        with scripted(family_server, "Again.</think>No."):
            items = [
                {"role": "user", "content": "Hello"},
                *answer.output,
                {"role": "user", "content": "Sure?"},
            ]
            whole = await client.responses.create(model=MODEL, input=items)
        assert [item.type for item in whole.output] == ["reasoning", "message"]


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
HISTORY: list[dict[str, Any]] = [
    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "x"},
]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
        ),
        (
            {"instructions": "x", "input": [HISTORY[0], {**HISTORY[1], "output": [IMAGE]}]},
            "input[1].output[0]",
        ),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0]"),
        ({"include": ["no_such_thing"]}, "include[0]"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tools[0].type"),
        ({"background": True, "store": False}, "background"),
        ({"truncation": "some"}, "truncation"),
        ({"previous_response_id": "resp_1", "conversation": "conv_1"}, "previous_response_id"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"$ref": "#"}}}},
            "text.format.schema",
        ),
        (
            {"tools": [{"type": "function", "name": "f", "strict": True, "parameters": {"$ref": "#"}}]},
            "tools[0].parameters",
        ),
        (
            {"tools": [{"type": "web_search"}, {"type": "function", "name": "f", "strict": 1}]},
            "tools[1].strict",
        ),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "?"}]}]},
            "tools[0].tools[0].name",
        ),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"no_such_field": 1}, "no_such_field"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(
    server: Any, change: dict[str, Any], param: str
) -> None:
    answer = await server.post("/v1/responses", {"input": "x", "max_output_tokens": 1, **change})
    assert (answer.status, answer.error["param"]) == (400, param)


async def test_what_is_without_effect_is_accepted(server: Any) -> None:
    idle = {
        "store": False,
        "background": False,
        "truncation": "disabled",
        "include": ["reasoning.encrypted_content"],
        "metadata": {"a": "b"},
        "reasoning": {"summary": "auto"},
        "service_tier": "auto",
        "user": "me",
    }
    answer = await server.post("/v1/responses", {"input": "x", "max_output_tokens": 1, **idle})
    assert answer.status == 200
    assert answer.json["metadata"] == {"a": "b"}


async def test_a_stream_that_fails_ends_with_an_error_event_of_the_next_number(server: Any) -> None:
    body = {"input": "x", "stream": True, "temperature": 0, "max_output_tokens": 200}
    server.instance.model.step_s = 0.02
    async with server.stream("/v1/responses", body) as response:
        await response.content.readuntil(b"output_text.delta")
        server.instance.model.failure = RuntimeError("broken")
        rest = await response.read()
    *_, last = rest.decode().strip().split("\n\n")
    name, data = last.split("\n")
    assert name == "event: error"
    error = json.loads(data.removeprefix("data: "))
    assert error["type"] == "error"
    assert error["sequence_number"] > 4
    assert "broken" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_all_apis_count_the_tokens_of_reasoning(start: Any, chat_parts: Any, stream: bool) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "stream": stream}
    routes = {
        "/v1/chat/completions": {**asked, "stream_options": {"include_usage": True} if stream else None},
        "/v1/responses": {"input": "Hello", "stream": stream},
        "/v1/messages": {**asked, "max_tokens": 100},
    }
    for family, text, count in (("reasoning", "Hmm.</think>Yes.", 4), ("hermes", "Yes.", None)):
        async with start(parts=chat_parts(family)) as server:
            for path, body in routes.items():
                with scripted(server, text):
                    answer = await server.post(path, {"model": MODEL, **body})
                assert answer.status == 200
                counted = [
                    int(number)
                    for number in re.findall(rb'"(?:reasoning|thinking)_tokens":(\d+)', answer.body)
                ]
                # OpenAI's responses have the field for every model.
                missing = [0] if path == "/v1/responses" else []
                assert counted == ([count] if count is not None else missing), path
