"""POST /tokenize and /detokenize, in front of real tokenizers."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.instances import TinyParts

MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture
async def server(start: Any) -> Any:
    async with start() as running:
        yield running


async def test_a_text_comes_back_from_its_tokens(server: Any) -> None:
    tokenizer = server.instance.tokenizer.result()
    answer = await server.post("/tokenize", {"model": "tiny/model", "prompt": "Once <|end|>"})
    tokens = tokenizer.encode("Once <|end|>")
    assert answer.json == {
        "count": len(tokens),
        "max_model_len": server.instance.engine.result().max_context,
        "tokens": tokens,
    }
    back = await server.post("/detokenize", {"model": "tiny/model", "tokens": tokens})
    assert back.json == {"prompt": "Once <|end|>", "content": "Once <|end|>"}
    assert (await server.post("/detokenize", {"tokens": []})).json == {"prompt": "", "content": ""}


async def test_token_strs_are_the_vocabularys(server: Any) -> None:
    answer = (await server.post("/tokenize", {"prompt": "a b", "return_token_strs": True})).json
    tokenizer = server.instance.tokenizer.result()
    assert answer["token_strs"] == [tokenizer.id_to_piece(token) for token in answer["tokens"]]


async def test_messages_are_what_a_chat_counts_as_its_prompt(server: Any) -> None:
    counted = (await server.post("/tokenize", {"messages": MESSAGES})).json["count"]
    chat = (await server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1})).json
    assert counted == chat["usage"]["prompt_tokens"]
    body = {"messages": MESSAGES, "add_generation_prompt": False}
    assert (await server.post("/tokenize", body)).json["count"] < counted
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    more = {"messages": [*MESSAGES, {"role": "assistant", "content": "Hi"}], "tools": tools}
    for fields in ({}, {"continue_final_message": True}):
        counted = (await server.post("/tokenize", {**more, **fields})).json["count"]
        chat = (await server.post("/v1/chat/completions", {**more, **fields, "max_tokens": 1})).json
        assert counted == chat["usage"]["prompt_tokens"]


async def test_an_encoder_adds_its_own_tokens_by_default(start: Any, encoder_parts: TinyParts) -> None:
    async with start(parts=encoder_parts) as server:
        answer = (await server.post("/tokenize", {"prompt": "hello"})).json
        assert answer["tokens"] == encoder_parts.tokenizer.encode("hello")
        assert answer["max_model_len"] == encoder_parts.model.config.max_tokens
        bare = (await server.post("/tokenize", {"prompt": "hello", "add_special_tokens": False})).json
        assert bare["tokens"] == answer["tokens"][1:-1]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": "x", "tools": []}, "tools"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"prompt": "x", "chat_template_kwargs": {}}, "chat_template_kwargs"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1 << 40]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
async def test_an_invalid_body_is_refused_by_name(server: Any, path: str, body: Any, param: str) -> None:
    answer = await server.post(path, body)
    assert (answer.status, answer.error["param"]) == (400, param)


async def test_another_model_is_not_found(server: Any) -> None:
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        answer = await server.post(path, {**body, "model": "gpt-5"})
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
