"""Routes of llama.cpp's server, and filling in the middle."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.support.chat_families import CONTEXT, scripted
from tests.support.http_server import events

HELLO = [{"role": "user", "content": "Hello"}]
PLACE = {"input_prefix": "def f(", "input_suffix": "): pass", "n_predict": 5, "temperature": 0}


@pytest.fixture
async def server(start: Any, chat_parts: Any) -> AsyncIterator[Any]:
    async with start(parts=chat_parts("fill")) as running:
        yield running


async def test_the_properties_are_those_of_the_model(server: Any) -> None:
    props = (await server.get("/props")).json
    assert props["default_generation_settings"]["n_ctx"] == CONTEXT
    assert props["chat_template"] == server.instance.tokenizer.result().templates["default"]
    assert props["total_slots"] == server.instance.config.max_running
    assert (await server.get("/v1/models")).json["data"][0]["max_model_len"] == CONTEXT


async def test_slots_are_idle_or_busy_and_show_no_prompt(server: Any) -> None:
    slots = (await server.get("/slots?fail_on_no_slot=1")).json
    assert len(slots) == server.instance.config.max_running
    assert [slot["is_processing"] for slot in slots] == [False] * len(slots)
    assert set(slots[0]) == {"id", "n_ctx", "is_processing"}
    for query in ("fail_on_no_slot=true", "fail_on_no_slot=1&fail_on_no_slot=1"):
        refused = await server.get(f"/slots?{query}")
        assert (refused.status, refused.error["param"]) == (400, "fail_on_no_slot")


async def test_the_applied_template_is_the_prompt(server: Any) -> None:
    answer = (await server.post("/apply-template", {"messages": HELLO})).json
    assert answer == {"prompt": "<|user|>Hello<|end|><|assistant|>"}
    tokens = (await server.post("/tokenize", {"messages": HELLO})).json["tokens"]
    assert tokens == server.instance.tokenizer.result().encode(answer["prompt"], add_special_tokens=False)
    refused = await server.post("/apply-template", {"messages": []})
    assert (refused.status, refused.error["param"]) == (400, "messages")


async def test_the_middle_is_filled_in_behind_prefix_and_suffix(server: Any) -> None:
    tokenizer = server.instance.tokenizer.result()
    prefix, suffix, middle, file = map(
        tokenizer.piece_to_id, ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>")
    )

    def text(part: str) -> list[int]:
        return tokenizer.encode(part, add_special_tokens=False)

    start = tokenizer.encode("")
    prompt = [*start, prefix, *text("def f("), suffix, *text("): pass"), middle]
    body = {"max_tokens": 5, "temperature": 0, "return_token_ids": True}
    filled = (await server.post("/v1/completions", {**body, "prompt": "def f(", "suffix": "): pass"})).json
    assert filled["choices"][0]["prompt_token_ids"] == prompt
    answer = (await server.post("/infill", PLACE)).json
    assert answer["content"] == filled["choices"][0]["text"]
    assert (answer["tokens_evaluated"], answer["stop"]) == (len(prompt), True)
    extra = {"input_extra": [{"filename": "a.py", "text": "x = 1"}], "prompt": "a"}
    answer = (await server.post("/infill", {**PLACE, **extra})).json
    files = [file, *text("a.py\nx = 1"), file, *text("filename\n")]
    assert answer["tokens_evaluated"] == len(prompt) + len(files) + len(text("a"))


async def test_a_token_of_the_family_ends_the_middle(server: Any) -> None:
    with scripted(server, "x<|file_sep|>y"):
        answer = (await server.post("/infill", {**PLACE, "n_predict": 40})).json
    assert (answer["content"], answer["stop_type"]) == ("x", "eos")


async def test_a_stream_of_the_middle_adds_up(server: Any) -> None:
    whole = (await server.post("/infill", PLACE)).json
    answer = await server.post(
        "/infill", {**PLACE, "stream": True, "samplers": ["top_k"], "t_max_predict_ms": 500}
    )
    chunks = [json.loads(item) for item in events(answer.body)]
    assert "".join(chunk["content"] for chunk in chunks) == whole["content"]
    assert [chunk["stop"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1] == {**whole, "content": ""}


async def test_what_cannot_be_filled_in_is_refused_by_name(start: Any, server: Any) -> None:
    for body, param in (
        ({"prompt": ["a", "b"], "suffix": "x"}, "suffix"),
        ({"prompt": "a", "suffix": "x", "echo": True}, "echo"),
    ):
        refused = await server.post("/v1/completions", body)
        assert (refused.status, refused.error["param"]) == (400, param)
    for body, param in (
        ({**PLACE, "n": 2}, "n"),
        ({**PLACE, "input_extra": [{"text": ""}] * 257}, "input_extra"),
    ):
        refused = await server.post("/infill", body)
        assert (refused.status, refused.error["param"]) == (400, param)
    async with start() as other:
        for route, body, param in (
            ("/infill", PLACE, "input_suffix"),
            ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ):
            refused = await other.post(route, body)
            assert (refused.status, refused.error["param"]) == (400, param)
            assert "no tokens for filling in the middle" in refused.error["message"]


@pytest.mark.parametrize("prompt", ["Hello", [5, 6, 7]], ids=["text", "tokens"])
async def test_a_completion_is_that_of_the_other_route(server: Any, prompt: Any) -> None:
    body = {"prompt": prompt, "temperature": 0, "ignore_eos": True}
    usual = (await server.post("/v1/completions", {**body, "max_tokens": 5})).json
    answer = (await server.post("/completion", {**body, "n_predict": 5})).json
    assert answer["content"] == usual["choices"][0]["text"]
    assert (answer["stop_type"], answer["tokens_predicted"]) == ("limit", 5)
    streamed = await server.post("/completion", {**body, "n_predict": 5, "stream": True})
    chunks = [json.loads(each) for each in events(streamed.body)]
    assert "".join(each["content"] for each in chunks) == answer["content"]
    assert [each["stop"] for each in chunks] == [False] * (len(chunks) - 1) + [True]
    several = await server.post("/completion", {"prompt": ["a", "b"]})
    assert (several.status, several.error["param"]) == (400, "prompt")


async def test_tokens_of_a_content_are_there_and_back(server: Any) -> None:
    tokenizer = server.instance.tokenizer.result()
    tokens = tokenizer.encode("Hé!", add_special_tokens=False)
    assert (await server.post("/tokenize", {"content": "Hé!"})).json["tokens"] == tokens
    special = (await server.post("/tokenize", {"content": "Hé!", "add_special": True})).json["tokens"]
    assert special == tokenizer.encode("Hé!")
    pieces = (await server.post("/tokenize", {"content": "Hé!", "with_pieces": True})).json["tokens"]
    assert [each["id"] for each in pieces] == tokens
    parts = [
        each["piece"].encode() if isinstance(each["piece"], str) else bytes(each["piece"]) for each in pieces
    ]
    assert b"".join(parts).decode().strip() == "Hé!"
    assert (await server.post("/detokenize", {"tokens": tokens})).json["content"].strip() == "Hé!"
    for body, param in (
        ({"content": "x", "prompt": "y"}, "prompt"),
        ({"prompt": "x", "add_special": True}, "add_special"),
    ):
        refused = await server.post("/tokenize", body)
        assert (refused.status, refused.error["param"]) == (400, param)


async def test_older_paths_are_the_same_routes(server: Any) -> None:
    assert (await server.get("/v1/health")).json == (await server.get("/health")).json
    assert (await server.get("/models")).json == (await server.get("/v1/models")).json
