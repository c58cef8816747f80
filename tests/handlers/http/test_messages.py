"""POST /v1/messages and /v1/messages/count_tokens. Anthropic's own client is in scripts/conformance-anthropic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.chat_families import scripted
from tests.support.field_tables import as_markdown

from teneral.handlers.anthropic.bodies import COUNT_TOKENS, MESSAGES, ROUTES, CountBody, MessagesBody
from teneral.handlers.openai.fields import Effect

HELLO: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 8,
    "temperature": 0,
}
TOOL = {
    "name": "weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
DOCUMENT = Path(__file__).parents[3] / "docs" / "anthropic.md"


@pytest.fixture
async def server(start: Any) -> Any:
    async with start() as running:
        yield running


@pytest.fixture
async def reasoning(start: Any, chat_parts: Any) -> Any:
    async with start(parts=chat_parts("reasoning")) as running:
        yield running


async def send(server: Any, **changes: Any) -> Any:
    answer = await server.post("/v1/messages", {**HELLO, **changes})
    assert answer.status == 200, answer.body
    return answer.json


async def chat(server: Any, messages: list[Any], **changes: Any) -> Any:
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, **changes}
    return (await server.post("/v1/chat/completions", body)).json


def events_of(body: bytes) -> list[Any]:
    """The events of a stream, whose names are their types."""
    events = []
    for block in body.decode().strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def test_an_answer_is_what_a_chat_says(server: Any) -> None:
    answer = await send(server, model="tiny/model", system="Be brief.")
    same = await chat(
        server, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    )
    assert answer["content"] == [{"type": "text", "text": same["choices"][0]["message"]["content"]}]
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "tiny/model")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == same["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == 8


async def test_blocks_and_turns_are_the_messages_of_a_chat(server: Any) -> None:
    turns = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hel", "cache_control": {"type": "ephemeral"}}],
        },
        {"role": "user", "content": "lo"},
        {"role": "assistant", "content": [{"type": "text", "text": "Hi."}]},
        {"role": "user", "content": "And?"},
    ]
    answer = await send(server, messages=turns, system=[{"type": "text", "text": "Be brief."}])
    same = await chat(
        server,
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hel\nlo"},
            {"role": "assistant", "content": "Hi."},
            {"role": "user", "content": "And?"},
        ],
    )
    assert answer["content"][0]["text"] == same["choices"][0]["message"]["content"]


async def test_an_assistants_last_turn_is_gone_on_from(server: Any) -> None:
    turns = [*HELLO["messages"], {"role": "assistant", "content": "Once upon"}]
    answer = await send(server, messages=turns)
    same = await chat(server, turns, continue_final_message=True, add_generation_prompt=False)
    assert answer["content"][0]["text"] == same["choices"][0]["message"]["content"]


async def test_a_streams_events_come_in_order_and_add_up(server: Any) -> None:
    whole = await send(server)
    answer = await server.post("/v1/messages", {**HELLO, "stream": True})
    events = events_of(answer.body)
    kinds = [event["type"] for event in events]
    num_deltas = kinds.count("content_block_delta")
    assert num_deltas > 1
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * num_deltas,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    message = events[0]["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    prompt = whole["usage"]["input_tokens"] + whole["usage"]["cache_read_input_tokens"]
    assert (message["usage"]["input_tokens"], message["usage"]["output_tokens"]) == (prompt, 0)
    text = "".join(event["delta"]["text"] for event in events if "content_block_delta" in event["type"])
    assert text == whole["content"][0]["text"]
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 8


@pytest.mark.parametrize("stream", [False, True])
async def test_the_stop_reason_says_what_ended_the_answer(server: Any, stream: bool) -> None:
    async def ending(**changes: Any) -> tuple[str, str | None]:
        answer = await server.post("/v1/messages", {**HELLO, "max_tokens": 20, "stream": stream, **changes})
        end = events_of(answer.body)[-2]["delta"] if stream else answer.json
        return end["stop_reason"], end["stop_sequence"]

    with scripted(server, "One. Two. Three."):
        assert await ending() == ("end_turn", None)
    with scripted(server, "One. Two. Three."):
        assert await ending(stop_sequences=["xyz", "Two"]) == ("stop_sequence", "Two")
    with scripted(server, "One. Two. Three."):
        assert await ending(max_tokens=3) == ("max_tokens", None)
    assert (await ending(max_tokens=100_000))[0] in ("model_context_window_exceeded", "end_turn")


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_text_and_calls_are_blocks(reasoning: Any, stream: bool) -> None:
    asked = {**HELLO, "max_tokens": 200, "tools": [TOOL], "stream": stream}
    with scripted(reasoning, "Hmm.</think>Let me see." + CALL):
        answer = await reasoning.post("/v1/messages", asked)
    if stream:
        events = events_of(answer.body)
        blocks: list[Any] = []
        for event in events:
            if event["type"] == "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(dict(event["content_block"], pieces=""))
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                blocks[-1]["pieces"] += delta.get("text", delta.get("thinking", delta.get("partial_json")))
        assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
        assert blocks[0]["pieces"].strip() == "Hmm."
        assert blocks[1]["pieces"].strip() == "Let me see."
        assert json.loads(blocks[2]["pieces"]) == {"city": "Bern"}
        assert events[-2]["delta"]["stop_reason"] == "tool_use"
        return
    thinking, text, call = answer.json["content"]
    assert (thinking["type"], thinking["thinking"].strip(), thinking["signature"]) == ("thinking", "Hmm.", "")
    assert text["text"].strip() == "Let me see."
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Bern"})
    assert answer.json["stop_reason"] == "tool_use"
    result = {
        "type": "tool_result",
        "tool_use_id": call["id"],
        "content": [{"type": "text", "text": "sunny"}],
    }
    turns = [
        *HELLO["messages"],
        {"role": "assistant", "content": answer.json["content"]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    with scripted(reasoning, "</think>It is sunny."):
        after = await send(reasoning, messages=turns, tools=[TOOL], max_tokens=200)
    assert after["content"][-1]["text"].strip() == "It is sunny."


async def test_thinking_is_turned_on_and_off_where_the_template_can(server: Any, reasoning: Any) -> None:
    off = await reasoning.post("/v1/messages/count_tokens", counted(thinking={"type": "disabled"}))
    on = await reasoning.post(
        "/v1/messages/count_tokens", counted(thinking={"type": "enabled", "budget_tokens": 1024})
    )
    assert on.json["input_tokens"] > off.json["input_tokens"]
    assert (await server.post("/v1/messages", {**HELLO, "thinking": {"type": "disabled"}})).status == 200
    for thinking in ({"type": "enabled", "budget_tokens": 1}, {"type": "adaptive"}):
        answer = await send(server, thinking=thinking)
        assert "does not reason" in answer["teneral"]["warnings"][0]


async def test_reasoning_can_be_left_out(reasoning: Any) -> None:
    with scripted(reasoning, "Hmm.</think>Yes."):
        whole = await send(reasoning, thinking={"type": "adaptive"}, max_tokens=50)
        left_out = await send(reasoning, thinking={"type": "adaptive", "display": "omitted"}, max_tokens=50)
    assert [block["type"] for block in whole["content"]] == ["thinking", "text"]
    assert left_out["content"] == whole["content"][1:]


async def test_a_request_of_a_coding_agent_is_answered(start: Any, chat_parts: Any) -> None:
    """With all the fields that such programs send, whatever the model is."""
    cached = {"cache_control": {"type": "ephemeral"}}
    body = {
        "model": "tiny/model",
        "max_tokens": 8,
        "temperature": 0,
        "system": [{"type": "text", "text": "You are an agent.", **cached}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hello", **cached}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                    {"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "Bern"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t",
                        "content": [{"type": "text", "text": "sunny"}],
                    },
                    {"type": "text", "text": "And?", **cached},
                ],
            },
        ],
        "tools": [
            {**TOOL, **cached, "eager_input_streaming": True},
            {"type": "web_search_20250305", "name": "web_search"},
        ],
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": "x"},
        "mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}],
        "betas": ["context-management-2025-06-27"],
    }
    headers = {"anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14"}
    async with start(parts=chat_parts("hermes")) as server:
        answer = await server.post("/v1/messages?beta=true", body, headers=headers)
        assert answer.status == 200, answer.text
        assert answer.json["context_management"] == {"applied_edits": []}
        warnings = answer.json["teneral"]["warnings"]
        for words in (
            "tools[1]",
            "messages[1].content[2]",
            "mcp_servers",
            "reasoning_effort",
            "does not reason",
        ):
            assert any(words in warning for warning in warnings), words
        streamed = await server.post("/v1/messages?beta=true", {**body, "stream": True}, headers=headers)
        first, *_, last, _ = events_of(streamed.body)
        assert first["message"]["teneral"]["warnings"] == warnings
        assert last["context_management"] == {"applied_edits": []}
        refused = await server.post(
            "/v1/messages", {**body, "tool_choice": {"type": "tool", "name": "web_search"}}
        )
        assert refused.status == 400
        assert "tools[1]" in refused.json["error"]["message"]


async def test_documents_of_text_and_search_results_are_text(server: Any) -> None:
    document = {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": "B"},
        "title": "A",
    }
    found = {"type": "search_result", "source": "C", "title": "D", "content": [{"type": "text", "text": "E"}]}
    blocks = await send(server, messages=[{"role": "user", "content": [document, found]}])
    same = await send(server, messages=[{"role": "user", "content": "A\nB\nD\nC\nE"}])
    assert blocks["content"] == same["content"]
    for source in ({"type": "base64"}, {"type": "text"}):
        body = {**HELLO, "messages": [{"role": "user", "content": [{"type": "document", "source": source}]}]}
        assert (await server.post("/v1/messages", body)).status == 400


def calls_and_results(number: int) -> list[Any]:
    return [
        turn
        for index in range(number)
        for turn in (
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": f"Hm {index}.", "signature": ""},
                    {"type": "tool_use", "id": f"t{index}", "name": "weather", "input": {"city": "Bern"}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": f"t{index}", "content": "sunny " * 20}],
            },
        )
    ]


async def test_older_results_and_reasoning_are_cleared(start: Any, chat_parts: Any) -> None:
    turns = [*HELLO["messages"], *calls_and_results(5)]
    edit = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "input_tokens", "value": 100},
        "keep": {"type": "tool_uses", "value": 2},
    }
    thinking = {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}
    async with start(parts=chat_parts("hermes")) as server:
        plain = await server.post("/v1/messages/count_tokens", counted(messages=turns))

        async def managed(*edits: Any) -> Any:
            body = counted(messages=turns, context_management={"edits": list(edits)})
            return (await server.post("/v1/messages/count_tokens", body)).json

        cleared = await managed(edit)
        assert cleared["context_management"]["original_input_tokens"] == plain.json["input_tokens"]
        assert cleared["input_tokens"] < plain.json["input_tokens"] - 3 * 20
        untouched = await managed({**edit, "trigger": {"type": "input_tokens", "value": 1 << 20}})
        assert untouched["input_tokens"] == plain.json["input_tokens"]
        body = {
            **HELLO,
            "messages": turns,
            "context_management": {"edits": [thinking, edit, {"type": "compact_20260112"}]},
        }
        answer = (await server.post("/v1/messages", body)).json
        applied = {each["type"]: each for each in answer["context_management"]["applied_edits"]}
        assert applied[edit["type"]]["cleared_tool_uses"] == 3
        assert applied[edit["type"]]["cleared_input_tokens"] > 0
        assert applied[thinking["type"]]["cleared_thinking_turns"] == 4
        assert "edits[2]" in answer["teneral"]["warnings"][0]
        refused = await server.post(
            "/v1/messages",
            {**body, "context_management": {"edits": [{**edit, "trigger": {"type": "x", "value": 1}}]}},
        )
        assert refused.status == 400
        assert "context_management.edits[0].trigger" in refused.json["error"]["message"]


def counted(**changes: Any) -> dict[str, Any]:
    return {"messages": HELLO["messages"], **changes}


async def test_tokens_are_counted_as_an_answers_prompt(server: Any) -> None:
    answer = await server.post("/v1/messages/count_tokens", counted(model="tiny/model", system="Be brief."))
    usage = (await send(server, system="Be brief."))["usage"]
    assert answer.json == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


async def test_a_json_schema_is_followed(server: Any) -> None:
    schema = {"type": "object", "properties": {"kind": {"enum": ["cat"]}}, "required": ["kind"]}
    fmt = {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}
    answer = await send(server, max_tokens=100, output_config={"format": fmt})
    assert json.loads(answer["content"][0]["text"]) == {"kind": "cat"}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "content[0]"),
        ({"tool_choice": {"type": "all"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"$ref": "#"}}}},
            "output_config.format.schema",
        ),
        ({"tools": [{"name": "f", "strict": True, "input_schema": {"$ref": "#"}}]}, "tools[0].input_schema"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"no_such_field": 1}, "no_such_field"),
    ],
)
async def test_errors_have_anthropics_shape_and_name_the_field(
    server: Any, change: dict[str, Any], named: str
) -> None:
    answer = await server.post("/v1/messages", {**HELLO, **change})
    assert answer.status == 400
    assert answer.json["type"] == "error"
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert named in answer.json["error"]["message"]
    assert answer.json["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]


async def test_a_stream_that_fails_ends_with_an_error_event(server: Any) -> None:
    server.instance.model.step_s = 0.02
    async with server.stream("/v1/messages", {**HELLO, "max_tokens": 200, "stream": True}) as response:
        await response.content.readuntil(b"content_block_delta")
        server.instance.model.failure = RuntimeError("broken")
        rest = await response.read()
    name, data = rest.decode().strip().split("\n\n")[-1].split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["type"] == "overloaded_error"


async def test_a_key_is_taken_as_anthropics_clients_send_it(start: Any) -> None:
    async with start(api_key="secret") as server:
        for headers, status in (
            ({}, 401),
            ({"x-api-key": "wrong"}, 401),
            ({"x-api-key": "secret"}, 200),
            ({"Authorization": "Bearer secret"}, 200),
            ({"Authorization": "Bearer wrong", "x-api-key": "secret"}, 401),
        ):
            answer = await server.post("/v1/messages", HELLO, headers=headers)
            assert answer.status == status, headers
            if status == 401:
                assert answer.json["error"]["type"] == "authentication_error"
        answer = await server.get(
            "/v1/models", headers={"x-api-key": "wrong", "anthropic-version": "2023-06-01"}
        )
        assert (answer.status, answer.json["type"]) == (401, "error")
        assert answer.json["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("route", ROUTES)
def test_the_table_has_the_fields_of_the_body_and_no_others(route: str) -> None:
    bodies: dict[str, type[msgspec.Struct]] = {
        "/v1/messages": MessagesBody,
        "/v1/messages/count_tokens": CountBody,
    }
    assert set(ROUTES[route]) == set(bodies[route].__struct_fields__)


def test_the_documentation_has_this_table() -> None:
    assert as_markdown(ROUTES) in DOCUMENT.read_text()


@pytest.mark.parametrize(
    ("route", "fields"), [("/v1/messages", MESSAGES), ("/v1/messages/count_tokens", COUNT_TOKENS)]
)
async def test_refused_fields_are_refused_by_name_unless_null(server: Any, route: str, fields: Any) -> None:
    least = HELLO if route == "/v1/messages" else counted()
    for name, (effect, _) in fields.items():
        if effect is Effect.REFUSED:
            refused = await server.post(route, {**least, name: "x"})
            assert refused.status == 400
            assert name in refused.json["error"]["message"]
            assert (await server.post(route, {**least, name: None})).status == 200


async def test_fields_of_other_servers_count(reasoning: Any) -> None:
    usual = await send(reasoning)
    for fields in (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"thinking": {"type": "disabled"}},
        {"reasoning_effort": "none"},
    ):
        off = await send(reasoning, **fields)
        assert off["usage"]["input_tokens"] < usual["usage"]["input_tokens"]
    routed = {"provider": {}, "models": ["x"], "session_id": "me", "litellm_metadata": {}, "plugins": []}
    of_claude_code = {"messages": [{"role": "ctx", "content": "Hello"}]}
    assert (await send(reasoning, **routed, **of_claude_code))["content"] == usual["content"]
    contrary = {**HELLO, "reasoning_effort": "low", "output_config": {"effort": "high"}}
    refused = await reasoning.post("/v1/messages", contrary)
    assert refused.status == 400
    assert "reasoning_effort" in refused.json["error"]["message"]


async def test_errors_name_the_blocks_and_tools_that_were_sent(server: Any) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [image]}
    use = {"type": "tool_use", "id": "a", "name": "weather", "input": {}}
    turns = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{"type": "text", "text": "x"}, result]},
    ]
    broken = {**TOOL, "input_schema": {"$ref": "#"}, "strict": True}
    for changes, place in (
        ({"system": "x", "messages": turns}, "messages[2].content[1].content[0] is an image"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}, broken]}, "tools[1].input_schema"),
    ):
        refused = await server.post("/v1/messages", {**HELLO, **changes})
        assert refused.status == 400
        assert place in refused.json["error"]["message"]
