"""Fields of vLLM's and llama.cpp's clients that change an answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.support.chat_families import scripted
from tests.support.http_server import events

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HELLO = [{"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


@pytest.fixture
async def server(start: Any, chat_parts: Any) -> AsyncIterator[Any]:
    async with start(parts=chat_parts("reasoning")) as running:
        yield running


async def chunks(server: Any, route: str, body: dict[str, Any]) -> list[Any]:
    answer = await server.post(route, {**body, "stream": True})
    assert answer.status == 200, answer.text
    *items, last = events(answer.body)
    assert last == "[DONE]"
    return [json.loads(item) for item in items]


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
async def test_token_ids_are_those_of_the_prompt_and_the_answer(server: Any, route: str) -> None:
    body = {
        **GREEDY,
        "return_token_ids": True,
        **({"messages": HELLO} if route == CHAT else {"prompt": "Hello"}),
    }
    whole = (await server.post(route, body)).json
    (choice,) = whole["choices"]
    prompt = (whole if route == CHAT else choice)["prompt_token_ids"]
    assert len(prompt) == whole["usage"]["prompt_tokens"]
    assert len(choice["token_ids"]) == 6
    streamed = await chunks(server, route, body)
    first = streamed[0] if route == CHAT else streamed[0]["choices"][0]
    assert first["prompt_token_ids"] == prompt
    ids = [each["choices"][0].get("token_ids", []) for each in streamed]
    assert [token for each in ids for token in each] == choice["token_ids"]
    assert (
        "token_ids" not in (await server.post(route, {**body, "return_token_ids": False})).json["choices"][0]
    )


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
async def test_each_chunk_has_the_usage_so_far(server: Any, route: str) -> None:
    body = {**GREEDY, **({"messages": HELLO} if route == CHAT else {"prompt": "Hello"})}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    counts = [each["usage"]["completion_tokens"] for each in await chunks(server, route, body)]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert len(set(counts)) > 2


async def test_log_probabilities_name_tokens_by_their_ids(server: Any) -> None:
    named = {"return_tokens_as_token_ids": True, "return_token_ids": True, **GREEDY}
    chat = (await server.post(CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 1, **named})).json
    (choice,) = chat["choices"]
    names = [f"token_id:{token}" for token in choice["token_ids"]]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == names
    text = (await server.post(COMPLETIONS, {"prompt": "x", "logprobs": 1, **named})).json["choices"][0]
    plain = {**GREEDY, "prompt": "x", "logprobs": 1}
    usual = (await server.post(COMPLETIONS, plain)).json["choices"][0]
    assert text["logprobs"]["tokens"] == [f"token_id:{token}" for token in text["token_ids"]]
    assert text["logprobs"]["text_offset"] == usual["logprobs"]["text_offset"]
    streamed = await chunks(server, COMPLETIONS, {"prompt": "x", "logprobs": 1, **named})
    offsets = [
        each["choices"][0]["logprobs"]["text_offset"] for each in streamed if each["choices"][0]["logprobs"]
    ]
    assert [offset for each in offsets for offset in each] == usual["logprobs"]["text_offset"]


async def test_an_answer_has_the_requests_id(server: Any) -> None:
    answer = await server.post(CHAT, {"messages": HELLO, "request_id": "abc-1", **GREEDY})
    assert answer.json["id"] == "chatcmpl-abc-1"
    refused = await server.post(COMPLETIONS, {"prompt": "x", "request_id": "a b"})
    assert (refused.status, refused.error["param"]) == (400, "request_id")


async def test_names_of_other_servers_are_those_of_teneral(server: Any) -> None:
    body = {"prompt": "Hello", **GREEDY}
    usual = (await server.post(COMPLETIONS, body)).json
    named = {**body, "cache_salt": "s", "priority": 5, "session_id": "me"}
    assert (await server.post(COMPLETIONS, named)).json["choices"] == usual["choices"]
    agreeing = {**named, "teneral": {"cache_salt": "s", "priority": "batch", "session": "me"}}
    assert (await server.post(COMPLETIONS, agreeing)).status == 200
    for name, own in (("cache_salt", "cache_salt"), ("priority", "priority"), ("session_id", "session")):
        differing = {**body, name: named[name], "teneral": {own: "interactive"}}
        refused = await server.post(COMPLETIONS, differing)
        assert (refused.status, refused.error["param"]) == (400, name)


async def test_llama_cpps_names_count(server: Any) -> None:
    body = {"prompt": "Hello", "temperature": 0, "ignore_eos": True}
    assert (await server.post(COMPLETIONS, {**body, "n_predict": 3})).json["usage"]["completion_tokens"] == 3
    assert (await server.post(COMPLETIONS, {**body, "n_predict": 3, "max_tokens": 2})).json["usage"][
        "completion_tokens"
    ] == 2
    ours = (await server.post(COMPLETIONS, {**body, "repetition_penalty": 1.5})).json
    theirs = (await server.post(COMPLETIONS, {**body, "repeat_penalty": 1.5})).json
    assert ours["choices"] == theirs["choices"]
    guided = await server.post(COMPLETIONS, {**body, "grammar": 'root ::= "yes"'})
    assert guided.json["choices"][0]["text"] == "yes"
    defaults = {
        "mirostat": 0,
        "typical_p": 1.0,
        "top_n_sigma": -1,
        "samplers": ["top_k"],
        "cache_prompt": True,
    }
    assert (await server.post(COMPLETIONS, {**body, **defaults})).status == 200


async def test_reasoning_is_left_out_or_in_the_text_as_the_request_says(server: Any) -> None:
    with scripted(server, "Hm.</think>Hi."):
        answers = {}
        for fields in (
            {},
            {"include_reasoning": False},
            {"separate_reasoning": False},
            {"reasoning_format": "none"},
            {"reasoning_format": "raw"},
            {"reasoning_format": "hidden"},
        ):
            body = {"messages": HELLO, "max_tokens": 50, "temperature": 0, **fields}
            message = (await server.post(CHAT, body)).json["choices"][0]["message"]
            answers[json.dumps(fields)] = message
            streamed = [each["choices"][0]["delta"] for each in await chunks(server, CHAT, body)]
            for key in ("content", "reasoning_content"):
                assert "".join(each.get(key) or "" for each in streamed) == (message.get(key) or "")
    hidden = answers.popitem()[1]
    first, left_out, *in_text = answers.values()
    assert hidden == left_out
    assert (first["reasoning_content"], first["content"]) == ("Hm.", "Hi.")
    assert (left_out.get("reasoning_content"), left_out["content"]) == (None, "Hi.")
    assert [each["content"] for each in in_text] == ["Hm.</think>Hi."] * 3


async def test_an_effort_switches_reasoning_and_warns_where_it_has_no_effect(server: Any) -> None:
    body = {"messages": HELLO, "max_tokens": 1}
    usual = (await server.post(CHAT, body)).json
    none = (await server.post(CHAT, {**body, "reasoning_effort": "none"})).json
    assert none["usage"]["prompt_tokens"] < usual["usage"]["prompt_tokens"]
    assert "teneral" not in none
    answer = (await server.post(CHAT, {**body, "verbosity": "low"})).json
    (warning,) = answer["teneral"]["warnings"]
    assert "verbosity is without effect" in warning
    first, *_ = await chunks(server, CHAT, {**body, "verbosity": "low"})
    assert first["teneral"]["warnings"] == [warning]


async def test_an_answer_may_begin_with_the_message_that_it_goes_on(start: Any, chat_parts: Any) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Once upon "}]
    async with start(parts=chat_parts("plain")) as server:
        body = {"messages": messages, **GREEDY}
        usual = (await server.post(CHAT, {**body, "continue_final_message": True})).json
        text = usual["choices"][0]["message"]["content"]
        echoed = {**body, "continue_final_message": True, "echo": True}
        whole = (await server.post(CHAT, echoed)).json["choices"][0]["message"]["content"]
        assert whole == "Once upon " + text
        streamed = await chunks(server, CHAT, echoed)
        assert "".join(each["choices"][0]["delta"].get("content") or "" for each in streamed) == whole
        prefixed = {**body, "messages": [*HELLO, {**messages[-1], "prefix": True}]}
        assert (await server.post(CHAT, prefixed)).json["choices"][0]["message"]["content"] == text


async def test_histories_of_other_providers_are_taken(server: Any) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assistant = {
        "role": "assistant",
        "content": "Hi.",
        "id": "msg_1",
        "provider_specific_fields": {"refusal": None},
        "reasoning_details": [{"type": "reasoning.text", "text": "Hm."}],
        "thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": ""}],
        "tool_calls": [{**call, "provider_specific_fields": {"x": 1}, "extra_content": {"google": {}}}],
    }
    messages = [*HELLO, assistant, {"role": "tool", "content": "1", "tool_call_id": "a"}]
    answer = await server.post(CHAT, {"messages": messages, "max_tokens": 1})
    assert answer.status == 200, answer.text
    assistant["reasoning_details"] = [{"text": 1}]
    refused = await server.post(CHAT, {"messages": messages, "max_tokens": 1})
    assert refused.error["param"] == "messages[1].reasoning_details[0].text"


async def test_openrouters_fields_ask_for_usage_and_may_name_a_router(server: Any) -> None:
    routed = {
        "provider": {"order": ["a"]},
        "models": ["x"],
        "route": "fallback",
        "plugins": [],
        "transforms": [],
    }
    body = {"messages": HELLO, "max_tokens": 2, "usage": {"include": True}, **routed}
    *_, last = await chunks(server, CHAT, body)
    assert last["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("fields", [{"thinking": {"type": "disabled"}}, {"enable_thinking": False}])
async def test_reasoning_is_switched_by_each_of_the_fields(
    start: Any, chat_parts: Any, fields: dict[str, Any]
) -> None:
    async with start(parts=chat_parts("reasoning")) as server:
        body = {"messages": HELLO, "max_tokens": 1, "return_token_ids": True}
        ours = (await server.post(CHAT, {**body, "reasoning": {"enabled": False}})).json
        theirs = (await server.post(CHAT, {**body, **fields})).json
        plain = (await server.post(CHAT, body)).json
        assert theirs["prompt_token_ids"] == ours["prompt_token_ids"]
        assert theirs["prompt_token_ids"] != plain["prompt_token_ids"]
        refused = await server.post(CHAT, {**body, **fields, "reasoning": {"enabled": True}})
        assert (refused.status, refused.error["param"]) == (400, "reasoning.enabled")


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {"7": 100}},
        {"allowed_token_ids": [7, 9, 11]},
        {"seed": 3, "temperature": 1.5, "top_k": 40, "min_p": 0.01},
        {"presence_penalty": 2, "frequency_penalty": 2, "repetition_penalty": 1.5},
        {"structured_outputs": {"choice": ["yes"]}},
        {"ignore_eos": False, "stop": ["a"], "include_stop_str_in_output": True},
        {"cache_salt": "s", "priority": 5, "session_id": "me"},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
    ids=str,
)
async def test_responses_take_the_sampling_of_chats(server: Any, fields: dict[str, Any]) -> None:
    same = {"ignore_eos": True, "temperature": 0, **fields}
    body = {"messages": HELLO, "max_tokens": 6, **same}
    chat = (await server.post(CHAT, body)).json
    answer = await server.post(RESPONSES, {"input": "Hello", "max_output_tokens": 6, **same})
    assert answer.status == 200, answer.text
    assert answer.json["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    text = "".join(part["text"] for item in answer.json["output"] for part in item["content"])
    message = chat["choices"][0]["message"]
    assert text == message.get("reasoning", "") + (message["content"] or "")


async def test_responses_refuse_what_chats_refuse_by_the_same_names(server: Any) -> None:
    for fields, name in (
        ({"top_k": -7}, "top_k"),
        (
            {"structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_object"}}},
            "structured_outputs.regex",
        ),
        ({"modalities": ["image"]}, "modalities"),
        ({"reasoning": {"max_tokens": -2}}, "reasoning.max_tokens"),
        ({"session_id": "a", "teneral": {"session": "b"}}, "session_id"),
    ):
        refused = await server.post(RESPONSES, {"input": "Hello", **fields})
        assert (refused.status, refused.error["param"]) == (400, name), refused.body
    routed = {"provider": {"order": ["a"]}, "models": ["x"], "trace": {}, "plugins": [], "vllm_xargs": {}}
    usual = await server.post(RESPONSES, {"input": "Hello", "max_output_tokens": 1, **routed})
    assert usual.status == 200, usual.body
