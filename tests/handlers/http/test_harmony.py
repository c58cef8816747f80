"""A model that answers in channels, as gpt-oss does, on each route of chats: whole, streamed and continued."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from tests.support.chat_families import scripted
from tests.support.http_server import events

MODEL = "tiny/model"
ROUTE = "/v1/chat/completions"
PLACE = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": PLACE}}
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
CHAT: dict[str, Any] = {"model": MODEL, "messages": HELLO, "temperature": 0, "max_tokens": 300}
THOUGHT = "<|channel|>analysis<|message|>Hm, été.<|end|><|start|>assistant"
ANSWER = f"{THOUGHT}<|channel|>final<|message|>It is sunny.<|return|>"
CALL = (
    f"{THOUGHT}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>'
)
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}


@pytest.fixture
async def server(start: Any, chat_parts: Any) -> Any:
    async with start(parts=chat_parts("harmony")) as running:
        yield running


def client_of(server: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="unused", max_retries=0, _strict_response_validation=True
    )


async def whole(server: Any, **changes: Any) -> Any:
    answer = await server.post(ROUTE, {**CHAT, **changes})
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]


async def prompt(server: Any, **changes: Any) -> str:
    """The text that the template makes."""
    counted = await server.post("/tokenize", {"model": MODEL, **changes})
    assert counted.status == 200, counted.body
    text = await server.post("/detokenize", {"model": MODEL, "tokens": counted.json["tokens"]})
    return str(text.json["prompt"])


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_and_the_answer(server: Any, stream: bool) -> None:
    async with client_of(server) as client:
        with scripted(server, ANSWER):
            if stream:
                chunks = [chunk async for chunk in await client.chat.completions.create(**CHAT, stream=True)]
                deltas = [chunk.choices[0].delta for chunk in chunks]
                reasoning = "".join(
                    (delta.model_extra or {}).get("reasoning_content") or "" for delta in deltas
                )
                content = "".join(delta.content or "" for delta in deltas)
                reason = chunks[-1].choices[0].finish_reason
                assert len(chunks) > 15
            else:
                choice = (await client.chat.completions.create(**CHAT)).choices[0]
                reasoning = (choice.message.model_extra or {})["reasoning_content"]
                content, reason = choice.message.content or "", choice.finish_reason
    assert (reasoning, content, reason) == ("Hm, été.", "It is sunny.", "stop")


async def test_a_call_its_result_and_the_answer(server: Any) -> None:
    with scripted(server, CALL):
        called = await whole(server, tools=[TOOL])
        body = {**CHAT, "tools": [TOOL], "stream": True}
        streamed = [json.loads(each) for each in events((await server.post(ROUTE, body)).body)[:-1]]
    message = called["message"]
    [call] = message["tool_calls"]
    assert called["finish_reason"] == "tool_calls"
    assert (message["reasoning_content"], message["content"]) == ("Hm, été.", "I look.")
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    pieces = [each for chunk in streamed for each in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert pieces[0]["function"]["name"] == "weather"
    assert "".join(each["function"]["arguments"] for each in pieces) == '{"city": "Oslo"}'
    assert len(pieces) > 10
    assert streamed[-1]["choices"][0]["finish_reason"] == "tool_calls"
    turns = [*HELLO, message, {"role": "tool", "tool_call_id": call["id"], "content": "Sun"}]
    assert (await prompt(server, messages=turns, tools=[TOOL])).endswith(
        "<|start|>assistant<|channel|>analysis<|message|>Hm, été.\nI look.<|end|>"
        '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>'
        '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"Sun"<|end|><|start|>assistant'
    )
    with scripted(server, ANSWER):
        assert (await whole(server, messages=turns, tools=[TOOL]))["message"]["content"] == "It is sunny."


async def test_an_earlier_turn_has_its_answer_alone(server: Any) -> None:
    turns = [
        {"role": "system", "content": "Be short."},
        *HELLO,
        {"role": "assistant", "content": "It is sunny.", "reasoning_content": "Hm."},
        {"role": "user", "content": "Sure?"},
    ]
    text = await prompt(server, messages=turns)
    assert "Hm." not in text
    assert "<|start|>assistant<|channel|>final<|message|>It is sunny.<|end|>" in text
    assert text.endswith("<|start|>user<|message|>Sure?<|end|><|start|>assistant")
    with scripted(server, ANSWER):
        answer = await whole(server, messages=turns, reasoning_effort="high")
    assert answer["message"]["content"] == "It is sunny."


async def test_two_calls_at_once_are_two_messages(server: Any) -> None:
    calls = [
        {"type": "function", "id": f"c{city}", "function": {"name": "weather", "arguments": f'{{"city": "{city}"}}'}}
        for city in ("Oslo", "Rome")
    ]  # fmt: skip
    results = [{"role": "tool", "tool_call_id": f"c{city}", "content": city} for city in ("Rome", "Oslo")]
    turns = [*HELLO, {"role": "assistant", "tool_calls": calls}, *results]
    text = await prompt(server, messages=turns, tools=[TOOL])
    places = [
        text.index(each)
        for each in ('{"city": "Oslo"}', '"Oslo"<|end|>', '{"city": "Rome"}', '"Rome"<|end|>')
    ]
    assert places == sorted(places)


async def test_a_form_and_required_calls_come_behind_the_reasoning(server: Any) -> None:
    # A script begins at the first logits, which come behind a guided answer's forced tokens: a free one is first.
    with scripted(server, f'{THOUGHT}<|channel|>final<|message|>"yes, it is"'):
        await whole(server)
        formed = (await whole(server, response_format=FORM))["message"]
    assert (formed["reasoning_content"], formed["content"]) == ("Hm, été.", '"yes"')
    with scripted(server, f'{THOUGHT}<|channel|>final<|message|>"yes, it is"'):
        await whole(server, tools=[TOOL])
        both = (await whole(server, response_format=FORM, tools=[TOOL]))["message"]
    assert (both["reasoning_content"], both["content"]) == ("Hm, été.", '"yes"')
    with scripted(server, CALL.replace('{"city": "Oslo"}', '{"city":"Bern"}')):
        await whole(server, tools=[TOOL])
        called = await whole(server, tools=[TOOL], tool_choice="required")
    assert called["finish_reason"] == "tool_calls"
    [call] = called["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome")


async def test_no_forced_text_is_sent_before_the_channels(start: Any, chat_parts: Any) -> None:
    body = {**CHAT, "response_format": FORM, "stream": True}
    async with (
        start(parts=chat_parts("harmony"), loaded=False) as server,
        server.stream(ROUTE, body) as response,
    ):
        server.instance.let_in()
        with scripted(server, f'{THOUGHT}<|channel|>final<|message|>"yes"'):
            received = await response.read()
    deltas = [json.loads(each)["choices"][0]["delta"] for each in events(received)[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == '"yes"'


async def test_a_message_is_continued(server: Any) -> None:
    turns = [*HELLO, {"role": "assistant", "content": "It is"}]
    with scripted(server, " sunny.<|return|>"):
        answer = await whole(server, messages=turns, continue_final_message=True, add_generation_prompt=False)
    assert answer["message"]["content"] == " sunny."


async def test_logprobs_cover_the_tokens_of_all_channels(server: Any) -> None:
    with scripted(server, ANSWER):
        answer = await server.post(ROUTE, {**CHAT, "logprobs": True})
    assert len(answer.json["choices"][0]["logprobs"]["content"]) == answer.json["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reasoning_parser": "off"}, {"content": "Hm, été.\nI look."}),
        ({"tool_parser": "off"}, {"content": 'I look.\n{"city": "Oslo"}', "reasoning_content": "Hm, été."}),
    ],
)
async def test_settings_leave_reasoning_and_calls_in_the_text(
    start: Any, chat_parts: Any, settings: Any, message: dict[str, str]
) -> None:
    async with start(parts=chat_parts("harmony"), **settings) as server:
        with scripted(server, CALL):
            answer = (await whole(server, tools=[TOOL]))["message"]
    assert {name: answer.get(name) for name in message} == message
    assert ("reasoning_content" in answer) == ("reasoning_content" in message)
    assert ("tool_calls" in answer) == ("tool_parser" not in settings)


@pytest.mark.parametrize("stream", [False, True])
async def test_items_of_the_responses_api(server: Any, stream: bool) -> None:
    function = {"type": "function", "strict": False, **TOOL["function"]}
    asked: dict[str, Any] = {"model": MODEL, "input": "Weather?", "temperature": 0, "tools": [function]}
    async with client_of(server) as client:
        with scripted(server, CALL):
            if stream:
                received = [event async for event in await client.responses.create(**asked, stream=True)]
                assert [event.sequence_number for event in received] == list(range(len(received)))
                answer: Any = received[-1].response  # type: ignore[union-attr]
            else:
                answer = await client.responses.create(**asked)
        assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
        assert answer.output[0].content[0].text == "Hm, été."
        assert answer.output_text == "I look."
        call = answer.output[2]
        assert (call.name, call.arguments) == ("weather", '{"city": "Oslo"}')
        assert answer.usage.output_tokens_details.reasoning_tokens > 0
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "Sun"}
        items: list[Any] = [{"role": "user", "content": "Weather?"}, *answer.output, output]
        with scripted(server, ANSWER):
            after = await client.responses.create(**{**asked, "input": items})
    assert [item.type for item in after.output] == ["reasoning", "message"]
    assert after.output_text == "It is sunny."


async def test_blocks_of_the_messages_api(server: Any) -> None:
    tool = {"name": "weather", "input_schema": PLACE}
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 300, "temperature": 0, "tools": [tool]}
    with scripted(server, CALL):
        answer = await server.post("/v1/messages", body)
    assert answer.status == 200, answer.body
    assert [block["type"] for block in answer.json["content"]] == ["thinking", "text", "tool_use"]
    assert answer.json["stop_reason"] == "tool_use"
