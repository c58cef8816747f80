"""POST /v1/chat/completions, in front of a real engine with a tiny model and its template."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support.http_server import events

HELLO = [{"role": "user", "content": "Hello"}]
GREEDY = {"messages": HELLO, "temperature": 0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture
async def server(start: Any) -> Any:
    async with start() as running:
        yield running


async def test_an_answer_has_every_field_that_openai_gives(server: Any) -> None:
    answer = await server.post("/v1/chat/completions", GREEDY)
    assert answer.status == 200
    body = answer.json
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["system_fingerprint"].startswith("teneral-")
    choice = body["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 8


async def test_the_prompt_is_what_the_models_template_makes(server: Any) -> None:
    tokenizer = server.instance.tokenizer.result()
    prompt = "<|user|>Hello<|end|><|assistant|>"
    chat = await server.post("/v1/chat/completions", GREEDY)
    plain = await server.post(
        "/v1/completions",
        {
            "prompt": tokenizer.encode(prompt, add_special_tokens=False),
            **{k: GREEDY[k] for k in ("temperature", "max_tokens", "ignore_eos")},
        },
    )
    assert chat.json["choices"][0]["message"]["content"] == plain.json["choices"][0]["text"]
    assert chat.json["usage"]["prompt_tokens"] == plain.json["usage"]["prompt_tokens"]


async def test_a_stream_gives_the_role_then_the_text_then_the_reason(server: Any) -> None:
    whole = (await server.post("/v1/chat/completions", GREEDY)).json
    body = (await server.post("/v1/chat/completions", {**GREEDY, "stream": True})).body
    *chunks, done = events(body)
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    assert done == "[DONE]"
    assert choices[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert text == whole["choices"][0]["message"]["content"]
    assert (choices[-1]["delta"], choices[-1]["finish_reason"]) == ({}, "length")
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    assert len({json.loads(chunk)["id"] for chunk in chunks}) == 1


async def test_every_choice_of_a_stream_has_its_own_role_and_reason(server: Any) -> None:
    body = (await server.post("/v1/chat/completions", {**GREEDY, "n": 3, "stream": True})).body
    choices = [json.loads(chunk)["choices"][0] for chunk in events(body)[:-1]]
    assert sorted(choice["index"] for choice in choices if "role" in choice["delta"]) == [0, 1, 2]
    assert sorted(choice["index"] for choice in choices if choice["finish_reason"]) == [0, 1, 2]


async def test_logprobs_name_each_token_with_its_bytes(server: Any) -> None:
    answer = await server.post("/v1/chat/completions", {**GREEDY, "logprobs": True, "top_logprobs": 2})
    content = answer.json["choices"][0]["logprobs"]["content"]
    assert len(content) == 8
    for entry in content:
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["logprob"] == pytest.approx(entry["logprob"])
        assert entry["bytes"] == entry["top_logprobs"][0]["bytes"]
    # The answer's bytes are those of its tokens, but for what is no UTF-8.
    data = bytes(byte for entry in content for byte in entry["bytes"])
    text = answer.json["choices"][0]["message"]["content"]
    assert data.decode("utf-8", "replace").startswith(text.rstrip("\ufffd"))


async def test_streamed_logprobs_are_those_of_the_whole(server: Any) -> None:
    asked = {**GREEDY, "logprobs": True, "top_logprobs": 1}
    whole = (await server.post("/v1/chat/completions", asked)).json
    streamed = events((await server.post("/v1/chat/completions", {**asked, "stream": True})).body)[:-1]
    entries = [
        entry
        for chunk in streamed
        for entry in (json.loads(chunk)["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert [entry["token"] for entry in entries] == [
        entry["token"] for entry in whole["choices"][0]["logprobs"]["content"]
    ]


async def test_text_parts_are_joined_and_others_refused(server: Any) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    joined = await server.post(
        "/v1/chat/completions", {**GREEDY, "messages": [{"role": "user", "content": parts}]}
    )
    plain = await server.post(
        "/v1/chat/completions", {**GREEDY, "messages": [{"role": "user", "content": "Hel\nlo"}]}
    )
    assert joined.json["choices"] == plain.json["choices"]
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    refused = await server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": image}]})
    assert (refused.status, refused.error["param"]) == (400, "messages[0].content[0]")


async def test_max_completion_tokens_goes_before_max_tokens(server: Any) -> None:
    answer = await server.post("/v1/chat/completions", {**GREEDY, "max_completion_tokens": 3})
    assert answer.json["usage"]["completion_tokens"] == 3


async def test_a_conversation_with_tool_calls_is_taken(server: Any) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "noon", "tool_call_id": "call_1"},
    ]
    tools = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
    answer = await server.post("/v1/chat/completions", {**GREEDY, "messages": messages, "tools": tools})
    assert answer.status == 200


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(
    server: Any, change: dict[str, Any], param: str
) -> None:
    answer = await server.post("/v1/chat/completions", {**GREEDY, **change})
    assert (answer.status, answer.error["param"]) == (400, param)


@pytest.mark.parametrize(
    "change",
    [
        {"functions": [], "function_call": "none"},
        {"function_call": "auto", "unknown": None},
        {"messages": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, *HELLO]},
        {"messages": [{"role": "assistant", "content": None, "refusal": "No."}, *HELLO]},
    ],
)
async def test_what_clients_send_by_default_is_accepted(server: Any, change: dict[str, Any]) -> None:
    answer = await server.post("/v1/chat/completions", {**GREEDY, **change})
    assert answer.status == 200, answer.body


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x " * 5000}]}, "messages"),
        ("/v1/responses", {"input": "x " * 5000}, "input"),
        ("/v1/completions", {"prompt": "x " * 5000}, "prompt"),
    ],
)
async def test_a_prompt_that_is_too_long_names_the_routes_field(
    server: Any, path: str, body: dict[str, Any], param: str
) -> None:
    answer = await server.post(path, body)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert answer.error["code"] == "context_length_exceeded"


async def test_plain_text_as_response_format_is_fine(server: Any) -> None:
    answer = await server.post("/v1/chat/completions", {**GREEDY, "response_format": {"type": "text"}})
    assert answer.status == 200


async def test_a_chats_prompt_logprobs_are_those_of_all_choices(server: Any) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "prompt_logprobs": 0, "n": 2}
    answer = (await server.post("/v1/chat/completions", body)).json
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert answer["prompt_logprobs"][0] is None
    assert all(len(place) == 1 for place in answer["prompt_logprobs"][1:])
