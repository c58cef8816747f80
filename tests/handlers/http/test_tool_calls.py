"""Tools over HTTP: what a model writes comes as calls, whole and streamed, and guided calls are always sound."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest
from tests.support.chat_families import scripted
from tests.support.http_server import events

PLACE = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TIME: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"weather": PLACE, "time": TIME}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
STRICT = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]  # type: ignore[dict-item]
HELLO = [{"role": "user", "content": "Hello"}]
CHAT: dict[str, Any] = {"messages": HELLO, "tools": TOOLS, "max_tokens": 120, "temperature": 0}
ROUTE = "/v1/chat/completions"
WRITTEN = {
    "hermes": 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city":"Oslo","days":2}}\n</tool_call>',
    "llama3": '<|python_tag|>{"name": "weather", "parameters": {"city":"Oslo","days":2}}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city":"Oslo","days":2}}]',
    "plain": '{"name": "weather", "arguments": {"city":"Oslo","days":2}}',
    "qwen3_coder": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call>"
    ),
    "pythonic": "<|python_start|>[weather(city='Oslo', days=2)]<|python_end|>",
}


def merged(body: bytes) -> dict[str, Any]:
    """The message that a stream of one choice comes to, as OpenAI's clients put it together, and its reason."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in events(body)[:-1]:
        [choice] = json.loads(chunk)["choices"]
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning_content"] += delta.get("reasoning_content") or ""
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for call in delta.get("tool_calls", []):
            if call["index"] == len(message["tool_calls"]):
                assert call["id"]
                assert call["type"] == "function"
                message["tool_calls"].append({"name": call["function"]["name"], "arguments": "", "pieces": 0})
            else:
                assert "id" not in call
                assert "name" not in call["function"]
            message["tool_calls"][-1]["arguments"] += call["function"]["arguments"]
            message["tool_calls"][-1]["pieces"] += 1
        if choice["finish_reason"]:
            message["finish_reason"] = choice["finish_reason"]
    return message


@pytest.mark.parametrize("name", WRITTEN)
async def test_each_familys_calls_are_read(start: Any, chat_parts: Any, name: str) -> None:
    async with start(parts=chat_parts(name)) as server:
        with scripted(server, WRITTEN[name]):
            whole = (await server.post(ROUTE, CHAT)).json["choices"][0]
            streamed = merged((await server.post(ROUTE, {**CHAT, "stream": True})).body)
    [call] = whole["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo", "days": 2}
    assert whole["finish_reason"] == streamed["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] == ("I look.\n" if name == "hermes" else None)
    assert streamed["content"] == (whole["message"]["content"] or "")
    assert streamed["tool_calls"][0]["arguments"] == call["function"]["arguments"]
    assert streamed["tool_calls"][0]["pieces"] > 3


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_required_calls_are_of_their_schema_whatever_the_model_says(
    start: Any, chat_parts: Any, name: str, choice: Any
) -> None:
    async with start(parts=chat_parts(name)) as server:
        for seed in range(3):
            body = {
                **CHAT,
                "tool_choice": choice,
                "temperature": 1,
                "seed": seed,
                "parallel_tool_calls": False,
            }
            whole = (await server.post(ROUTE, body)).json["choices"][0]
            assert whole["finish_reason"] == "tool_calls"
            assert whole["message"]["content"] is None
            [call] = whole["message"]["tool_calls"]
            jsonschema_rs.validate(
                SCHEMAS[call["function"]["name"]], json.loads(call["function"]["arguments"])
            )
            streamed = merged((await server.post(ROUTE, {**body, "stream": True})).body)
            assert streamed["content"] == ""
            assert streamed["tool_calls"][0]["arguments"] == call["function"]["arguments"]


async def test_guided_arguments_are_streamed_as_they_come(start: Any, chat_parts: Any) -> None:
    async with start(parts=chat_parts("hermes")) as server:
        with scripted(server, WRITTEN["hermes"]):
            strict = merged((await server.post(ROUTE, {**CHAT, "tools": STRICT, "stream": True})).body)
    assert strict["tool_calls"][0]["pieces"] > 2
    assert strict["content"] == "I look.\n"


async def test_a_strict_function_keeps_to_its_schema_once_its_call_has_begun(
    start: Any, chat_parts: Any
) -> None:
    text = '<tool_call>\n{"name": "weather", "arguments": {"city":"Bonn","days":2}}\n</tool_call>'
    async with start(parts=chat_parts("hermes")) as server:
        with scripted(server, text):
            loose = (await server.post(ROUTE, CHAT)).json["choices"][0]["message"]["tool_calls"][0]
        with scripted(server, text):
            answer = await server.post(ROUTE, {**CHAT, "tools": STRICT})
    assert json.loads(loose["function"]["arguments"]) == {"city": "Bonn", "days": 2}
    [call] = answer.json["choices"][0]["message"]["tool_calls"]
    jsonschema_rs.validate(PLACE, json.loads(call["function"]["arguments"]))


@pytest.mark.parametrize(
    "text",
    [
        "Just text.",
        'The tag <tool_call> begins {"name": "weather"}.',
        '<tool_call>\n{"name": "stranger", "arguments": {}}\n</tool_call>',
    ],
)
async def test_what_is_no_call_stays_text(start: Any, chat_parts: Any, text: str) -> None:
    async with start(parts=chat_parts("hermes")) as server:
        with scripted(server, text):
            whole = (await server.post(ROUTE, CHAT)).json["choices"][0]
            streamed = merged((await server.post(ROUTE, {**CHAT, "stream": True})).body)
    assert whole["message"]["content"] == streamed["content"] == text
    assert whole["finish_reason"] == streamed["finish_reason"] == "stop"
    assert "tool_calls" not in whole["message"]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('<tool_call>\n{"name": "weather", "arguments": {"city": }}\n</tool_call>', '{"city": }'),
        ('<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"', '{"city": "Oslo"'),
    ],
)
async def test_a_call_that_breaks_off_is_text_unless_it_was_streamed(
    start: Any, chat_parts: Any, text: str, arguments: str
) -> None:
    async with start(parts=chat_parts("hermes")) as server:
        with scripted(server, text):
            whole = (await server.post(ROUTE, CHAT)).json["choices"][0]
            streamed = merged((await server.post(ROUTE, {**CHAT, "stream": True})).body)
    assert whole["message"]["content"] == text
    assert "tool_calls" not in whole["message"]
    assert [(call["name"], call["arguments"]) for call in streamed["tool_calls"]] == [("weather", arguments)]
    assert streamed["content"] == ""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reason", ["length", "stop"])
@pytest.mark.parametrize(
    ("written", "calls"),
    [
        ('<tool_call>\n{"name": "wea', []),
        ('<tool_call>\n{"name": "weather", "arguments": {"city":"Os', [("weather", '{"city":"Os')]),
    ],
)
async def test_a_call_that_the_request_cuts_off_is_given_as_far_as_it_came_and_never_as_text(
    start: Any, chat_parts: Any, written: str, calls: list[tuple[str, str]], reason: str, stream: bool
) -> None:
    whole = "I look.\n" + WRITTEN["hermes"].partition("\n")[2]
    assert whole.startswith("I look.\n" + written)
    async with start(parts=chat_parts("hermes")) as server:
        tokens = server.instance.tokenizer.result().encode("I look.\n" + written, add_special_tokens=False)
        bound: dict[str, Any] = {"max_tokens": len(tokens)}
        if reason == "stop":
            bound = {"stop": whole.removeprefix("I look.\n" + written)[:3]}
        with scripted(server, whole):
            answer = await server.post(ROUTE, {**CHAT, **bound, "stream": stream})
    message = merged(answer.body) if stream else answer.json["choices"][0]["message"]
    found = message.get("tool_calls") or []
    assert [
        (each["name"], each["arguments"]) if stream else tuple(each["function"].values()) for each in found
    ] == calls
    assert message["content"].rstrip() == "I look."


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_and_responses_give_no_text_of_a_call_that_is_cut(
    start: Any, chat_parts: Any, stream: bool
) -> None:
    written = '<tool_call>\n{"name": "wea'
    functions = [tool["function"] for tool in TOOLS]
    messages = {
        "messages": HELLO,
        "tools": [{"name": each["name"], "input_schema": each["parameters"]} for each in functions],  # type: ignore[index]
    }
    responses = {
        "input": "Hello",
        "tools": [{"type": "function", "strict": False, **each} for each in functions],
    }  # type: ignore[dict-item]
    async with start(parts=chat_parts("hermes")) as server:
        num_tokens = len(server.instance.tokenizer.result().encode(written, add_special_tokens=False))
        for path, body, bound, end in (
            ("/v1/messages", messages, "max_tokens", b'"max_tokens"'),
            ("/v1/responses", responses, "max_output_tokens", b'"max_output_tokens"'),
        ):
            with scripted(server, WRITTEN["hermes"].partition("\n")[2]):
                asked = {"model": server.instance.model_name, **body, bound: num_tokens, "temperature": 0}
                answer = await server.post(path, {**asked, "stream": stream})
            assert answer.status == 200, answer.body
            assert b"<tool_call>" not in answer.body
            assert b"wea" not in answer.body.replace(b"weather", b"")
            assert end in answer.body


@pytest.mark.parametrize("family", ["hermes", "harmony", "plain"])
async def test_a_call_that_was_cut_off_is_taken_back_with_the_tools_error(
    start: Any, chat_parts: Any, family: str
) -> None:
    call = {"name": "weather", "arguments": '{"city'}
    echoed = [
        *HELLO,
        {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "arguments are not JSON"},
    ]
    items = [
        *HELLO,
        {"type": "function_call", "call_id": "call_1", **call, "status": "incomplete"},
        {"type": "function_call_output", "call_id": "call_1", "output": "arguments are not JSON"},
    ]
    async with start(parts=chat_parts(family)) as server:
        for path, body in (
            (ROUTE, {**CHAT, "messages": echoed, "max_tokens": 1}),
            ("/v1/responses", {"input": items, "max_output_tokens": 1}),
            ("/tokenize", {"messages": echoed}),
        ):
            answer = await server.post(path, body)
            assert answer.status == 200, answer.body


async def test_no_calls_are_read_where_there_are_to_be_none(start: Any, chat_parts: Any) -> None:
    async with start(parts=chat_parts("hermes")) as server:
        with scripted(server, WRITTEN["hermes"]):
            none = (await server.post(ROUTE, {**CHAT, "tool_choice": "none"})).json
    async with start(parts=chat_parts("hermes"), tool_parser="off") as server:
        with scripted(server, WRITTEN["hermes"]):
            off = (await server.post(ROUTE, CHAT)).json
        refused = await server.post(ROUTE, {**CHAT, "tool_choice": "required"})
    assert none["choices"][0]["message"]["content"] == WRITTEN["hermes"]
    assert off["choices"][0]["message"]["content"] == WRITTEN["hermes"]
    assert none["usage"]["prompt_tokens"] < off["usage"]["prompt_tokens"]
    assert (refused.status, refused.error["param"]) == (400, "tool_choice")


async def test_one_call_where_parallel_calls_are_off(start: Any, chat_parts: Any) -> None:
    async with start(parts=chat_parts("hermes")) as server:
        with scripted(server, f"{WRITTEN['hermes']}\n{WRITTEN['hermes']}"):
            both = (await server.post(ROUTE, {**CHAT, "max_tokens": 300})).json["choices"][0]["message"]
            one = await server.post(ROUTE, {**CHAT, "max_tokens": 300, "parallel_tool_calls": False})
    assert len(both["tool_calls"]) == 2
    assert len({call["id"] for call in both["tool_calls"]}) == 2
    assert len(one.json["choices"][0]["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("name", WRITTEN)
async def test_a_conversation_with_calls_and_results_goes_on(start: Any, chat_parts: Any, name: str) -> None:
    async with start(parts=chat_parts(name)) as server:
        with scripted(server, WRITTEN[name]):
            first = (await server.post(ROUTE, CHAT)).json["choices"][0]["message"]
        call = {**first["tool_calls"][0], "id": "call_of_another_server"}
        messages = [
            *HELLO,
            {**first, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": "Sun."},
        ]
        with scripted(server, "It is sunny."):
            answer = await server.post(ROUTE, {**CHAT, "messages": messages})
    assert answer.status == 200, answer.body
    assert answer.json["choices"][0]["message"]["content"] == "It is sunny."


async def test_a_form_and_tools_together(start: Any, chat_parts: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
    async with start(parts=chat_parts("hermes")) as server:
        body = {**CHAT, "response_format": form}
        with scripted(server, WRITTEN["hermes"].removeprefix("I look.\n")):
            called = (await server.post(ROUTE, body)).json["choices"][0]
        with scripted(server, '"yes, it is"'):
            written = (await server.post(ROUTE, body)).json["choices"][0]
            # Without effect where a call is required
            required = await server.post(ROUTE, {**body, "tool_choice": "required"})
    assert called["finish_reason"] == "tool_calls"
    assert required.json["choices"][0]["message"]["tool_calls"]
    assert written["message"]["content"] == '"yes"'


async def test_logprobs_cover_the_tokens_of_a_call(start: Any, chat_parts: Any) -> None:
    async with start(parts=chat_parts("hermes")) as server:
        with scripted(server, WRITTEN["hermes"]):
            body = {**CHAT, "logprobs": True}
            whole = (await server.post(ROUTE, body)).json
            streamed = events((await server.post(ROUTE, {**body, "stream": True})).body)[:-1]
    count = len(whole["choices"][0]["logprobs"]["content"])
    assert count == whole["usage"]["completion_tokens"]
    logprobs = [json.loads(chunk)["choices"][0]["logprobs"] for chunk in streamed]
    assert sum(len(each["content"]) for each in logprobs if each) == count


# Reasoning


async def test_reasoning_is_separated(start: Any, chat_parts: Any) -> None:
    async with start(parts=chat_parts("reasoning")) as server:
        body = {"messages": HELLO, "temperature": 0, "max_tokens": 80}
        with scripted(server, "Hm.\nSo.\n</think>\n\nHello!"):
            whole = (await server.post(ROUTE, body)).json["choices"][0]["message"]
            streamed = merged((await server.post(ROUTE, {**body, "stream": True})).body)
        assert (whole["reasoning_content"], whole["reasoning"], whole["content"]) == ("Hm.\nSo.",) * 2 + (
            "Hello!",
        )
        assert (streamed["reasoning_content"], streamed["content"]) == ("Hm.\nSo.", "Hello!")
        quiet = {**body, "chat_template_kwargs": {"enable_thinking": False}}
        with scripted(server, "Hello!"):
            whole = (await server.post(ROUTE, quiet)).json["choices"][0]["message"]
        assert whole["content"] == "Hello!"
        assert "reasoning_content" not in whole
    async with start(parts=chat_parts("reasoning"), reasoning_parser="off") as server:
        with scripted(server, "Hm.</think>Hello!"):
            whole = (await server.post(ROUTE, body)).json["choices"][0]["message"]
        assert whole["content"] == "Hm.</think>Hello!"


async def test_a_form_and_calls_begin_behind_the_reasoning(start: Any, chat_parts: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
    async with start(parts=chat_parts("reasoning")) as server:
        body = {"messages": HELLO, "temperature": 0, "max_tokens": 200}
        with scripted(server, 'Hm.</think>\n\n"yes, it is"'):
            formed = (await server.post(ROUTE, {**body, "response_format": form})).json["choices"][0][
                "message"
            ]
        assert (formed["reasoning_content"], formed["content"]) == ("Hm.", '"yes"')
        call = WRITTEN["hermes"].removeprefix("I look.\n")
        with scripted(server, f"Hm.</think>\n\n{call}"):
            answer = await server.post(ROUTE, {**body, "tools": TOOLS, "tool_choice": "required"})
    called = answer.json["choices"][0]["message"]
    assert (called["reasoning_content"], called["content"]) == ("Hm.", None)
    assert called["tool_calls"][0]["function"]["name"] == "weather"


async def test_no_forced_text_is_sent_before_reasoning(start: Any, chat_parts: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": PLACE}}
    async with start(parts=chat_parts("reasoning"), loaded=False) as server:
        body = {
            "messages": HELLO,
            "temperature": 0,
            "max_tokens": 60,
            "response_format": form,
            "stream": True,
        }
        async with server.stream(ROUTE, body) as response:
            server.instance.let_in()
            with scripted(server, 'Hm.</think>{"city":"Oslo","days":1}'):
                streamed = merged(await response.read())
    assert streamed["reasoning_content"] == "Hm."
    assert streamed["content"] == '{"city":"Oslo","days":1}'


# The chat template


async def test_variables_go_to_the_template_and_others_are_refused(start: Any, chat_parts: Any) -> None:
    async with start(parts=chat_parts("reasoning")) as server:
        body = {"messages": HELLO, "max_tokens": 1}
        for fields, param in (
            ({"chat_template_kwargs": {"no_such": 1}}, "chat_template_kwargs.no_such"),
            ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
            ({"documents": [{"title": "x"}]}, "documents"),
            ({"chat_template": "{{ messages[0].content }}"}, "chat_template"),
            ({"continue_final_message": True}, "continue_final_message"),
            ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ):
            refused = await server.post(ROUTE, {**body, **fields})
            assert (refused.status, refused.error["param"]) == (400, param)


async def test_the_last_message_is_gone_on_with(start: Any, chat_parts: Any) -> None:
    async with start(parts=chat_parts("plain")) as server:
        tokenizer = server.instance.tokenizer.result()
        messages = [*HELLO, {"role": "assistant", "content": "Once upon "}]
        body = {"messages": messages, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        chat = (await server.post(ROUTE, {**body, "continue_final_message": True})).json
        prompt = tokenizer.encode("<|user|>Hello<|end|><|assistant|>Once upon ", add_special_tokens=False)
        body = {"prompt": prompt, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        plain = (await server.post("/v1/completions", body)).json
        assert chat["choices"][0]["message"]["content"] == plain["choices"][0]["text"]
        bare = await server.post(ROUTE, {"messages": HELLO, "max_tokens": 1, "add_generation_prompt": False})
        assert bare.json["usage"]["prompt_tokens"] == len(
            tokenizer.encode("<|user|>Hello<|end|>", add_special_tokens=False)
        )


async def test_a_request_may_bring_its_template_where_the_server_trusts_it(
    start: Any, chat_parts: Any
) -> None:
    async with start(parts=chat_parts("plain"), trust_request_chat_template=True) as server:
        body = {"messages": HELLO, "max_tokens": 1}
        answer = await server.post(ROUTE, {**body, "chat_template": "{{ messages[0].content }}"})
        assert answer.json["usage"]["prompt_tokens"] == len("Hello")
        refused = await server.post(ROUTE, {**body, "chat_template": "{% if %}"})
        assert (refused.status, refused.error["param"]) == (400, "chat_template")


async def test_a_model_without_a_template_is_refused_with_what_to_do(start: Any, chat_parts: Any) -> None:
    async with start(parts=chat_parts("none")) as server:
        for fields in ({}, {"tools": TOOLS}, {"response_format": {"type": "json_object"}, "stream": True}):
            refused = await server.post(ROUTE, {"messages": HELLO, "max_tokens": 1, **fields})
            assert refused.status == 400
            assert "--chat-template" in refused.error["message"]
            assert "/v1/completions" in refused.error["message"]


async def test_tokens_of_messages_are_those_of_the_chat(start: Any, chat_parts: Any) -> None:
    async with start(parts=chat_parts("plain")) as server:
        chat = (await server.post(ROUTE, {**CHAT, "max_tokens": 1})).json
        tokens = (await server.post("/tokenize", {"messages": HELLO, "tools": TOOLS})).json
    assert tokens["count"] == chat["usage"]["prompt_tokens"]
