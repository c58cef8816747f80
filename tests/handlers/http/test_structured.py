"""Structured answers over HTTP: every spelling of the same wish, whole and streamed, and what is refused."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from tests.support.http_server import events
from tests.support.instances import TinyParts
from tests.support.load import patience_s
from tests.support.tiny_models import save_tiny, tiny_model

from teneral.runtime.grammar import spec
from teneral.runtime.grammar.compiler import GrammarCompiler

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 100}
TEXT = {"prompt": "Hello", "max_tokens": 100}
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "count": {"type": "integer", "maximum": 50, "minimum": 0},
    },
    "required": ["kind", "count"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}


@pytest.fixture
async def server(start: Any) -> Any:
    async with start() as running:
        yield running


def content_of(body: dict[str, Any]) -> str:
    choice = body["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": FORMAT},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
        {"json_schema": json.dumps(SCHEMA)},
    ],
)
async def test_every_spelling_of_a_schema_gives_an_answer_of_it(server: Any, fields: dict[str, Any]) -> None:
    for route, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        answer = await server.post(route, {**body, **fields})
        assert answer.status == 200, answer.body
        jsonschema_rs.validate(SCHEMA, json.loads(content_of(answer.json)))
        assert answer.json["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"guided_choice": ["red", "blue"]}, {"red", "blue"}),
        ({"structured_outputs": {"choice": ["red"]}}, {"red"}),
        ({"guided_regex": "(ab|cd)e"}, {"abe", "cde"}),
        ({"regex": "(ab|cd)e"}, {"abe", "cde"}),
        ({"structured_outputs": {"regex": "abe"}}, {"abe"}),
        ({"ebnf": 'root ::= "x" | "y"'}, {"x", "y"}),
        ({"guided_grammar": 'start: "x" | "y"'}, {"x", "y"}),
    ],
)
async def test_every_spelling_of_other_forms(server: Any, fields: dict[str, Any], texts: set[str]) -> None:
    answer = await server.post("/v1/chat/completions", {**CHAT, **fields})
    assert answer.status == 200, answer.body
    assert content_of(answer.json) in texts


@pytest.mark.parametrize("first_token", ["exact", "draft"])
async def test_items_that_must_differ_do(server: Any, first_token: str) -> None:
    item = {"type": "string", "pattern": "^[a-c]$"}
    schema = {"type": "array", "items": item, "uniqueItems": True, "minItems": 3, "maxItems": 3}
    body = {**CHAT, "guided_json": schema, "n": 4, "temperature": 1, "teneral": {"first_token": first_token}}
    answer = await server.post("/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    for choice in answer.json["choices"]:
        assert sorted(json.loads(choice["message"]["content"])) == ["a", "b", "c"]


async def test_a_stream_says_what_the_whole_answer_says(server: Any) -> None:
    body = {**CHAT, "response_format": FORMAT, "temperature": 0, "n": 2}
    whole = (await server.post("/v1/chat/completions", body)).json
    streamed = events((await server.post("/v1/chat/completions", {**body, "stream": True})).body)
    texts = ["", ""]
    for chunk in streamed[:-1]:
        for choice in json.loads(chunk)["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]


async def test_whitespace_is_as_the_request_says(server: Any) -> None:
    schema = {"type": "array", "items": {"const": 1}, "minItems": 3, "maxItems": 3}
    compact = await server.post("/v1/chat/completions", {**CHAT, "guided_json": schema})
    assert content_of(compact.json) == "[1,1,1]"
    spaced = {**CHAT, "guided_json": schema, "guided_whitespace_pattern": " "}
    assert " " in content_of((await server.post("/v1/chat/completions", spaced)).json)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"guided_json": {"type": "strnig"}}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"ebnf": "root ::= ("}, "ebnf"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_regex": "a", "response_format": FORMAT}, "response_format"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.regex"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(
    server: Any, fields: dict[str, Any], param: str
) -> None:
    answer = await server.post("/v1/chat/completions", {**CHAT, **fields})
    assert (answer.status, answer.error["param"]) == (400, param), answer.body


async def test_an_answer_begins_before_the_model_computes(server: Any) -> None:
    server.instance.model.hold()
    body = {**CHAT, "response_format": {**FORMAT}, "stream": True}
    text = ""
    async with server.stream("/v1/chat/completions", body) as response:
        while not text:
            line = await response.content.readline()
            if line.startswith(b"data: "):
                text = json.loads(line[6:])["choices"][0]["delta"].get("content", "")
    assert '{"kind":"'.startswith(text)
    server.instance.model.release()


async def test_the_forced_text_comes_before_there_is_an_engine(start: Any) -> None:
    body = {**CHAT, "response_format": FORMAT, "temperature": 0, "n": 2}
    async with start(loaded=False) as server:
        texts, is_early = ["", ""], False
        async with server.stream("/v1/chat/completions", body) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        texts[choice["index"]] += choice["delta"].get("content", "")
                if texts == ['{"kind":"'] * 2 and not server.instance.engine.done():
                    is_early = True
                    server.instance.let_in()
        assert is_early
        whole = (await server.post("/v1/chat/completions", body)).json
        assert texts == [choice["message"]["content"] for choice in whole["choices"]]


async def test_the_forced_text_comes_before_the_vocabulary_is_prepared(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = threading.Event()
    prepare = GrammarCompiler.prepare

    def prepare_later(compiler: GrammarCompiler) -> None:
        assert began.wait(patience_s(30)), "no text came before the vocabulary was prepared"
        prepare(compiler)

    monkeypatch.setattr(GrammarCompiler, "prepare", prepare_later)
    body = {**CHAT, "response_format": FORMAT, "temperature": 0, "stream": True}

    async with start(loaded=False) as server:

        async def body_in_two() -> AsyncIterator[bytes]:
            data = json.dumps(body).encode()
            yield data[:10]
            await server.eventually(lambda: len(server.service.in_flight) == 1)
            server.instance.let_in()
            await server.eventually(server.instance.engine.done)
            yield data[10:]

        text = ""
        headers = {"Content-Type": "application/json"}
        async with server.client.post(
            "/v1/chat/completions", data=body_in_two(), headers=headers
        ) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    text += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
                if text == '{"kind":"':
                    began.set()
        whole = (await server.post("/v1/chat/completions", {**body, "stream": False})).json
        assert text == content_of(whole)


async def test_a_model_without_a_chat_template_is_refused_before_any_text(start: Any, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    parts = TinyParts.read(tmp_path, tiny_model("llama"))
    async with start(loaded=False, parts=parts) as server:
        body = {**CHAT, "response_format": FORMAT, "stream": True}
        request = asyncio.ensure_future(server.post("/v1/chat/completions", body))
        await server.eventually(lambda: len(server.service.in_flight) == 1)
        server.instance.let_in()
        answer = await request
    parts.tokenizer.close()
    assert "chat template" in answer.body.decode()
    assert b'{\\"kind' not in answer.body


@pytest.mark.parametrize("fields", [{"stop": "kind"}, {"max_tokens": 3}, {"logprobs": True}])
async def test_nothing_is_sent_ahead_that_might_be_taken_back(start: Any, fields: dict[str, Any]) -> None:
    body = {**CHAT, "response_format": FORMAT, "temperature": 0, **fields}
    async with start(loaded=False) as server:
        text = ""
        async with server.stream("/v1/chat/completions", body) as response:
            server.instance.let_in()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    text += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
        whole = (await server.post("/v1/chat/completions", body)).json
        assert text == content_of(whole)


REWRITING_ROUTES = {
    "/v1/chat/completions": {**CHAT, "response_format": FORMAT},
    "/v1/completions": {**TEXT, "guided_json": SCHEMA},
    "/v1/responses": {
        "input": "Hello",
        "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
    },
    "/v1/messages": {**CHAT, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    "/v1/messages/count_tokens": {
        "messages": CHAT["messages"],
        "tools": [{"name": "f", "strict": True, "input_schema": SCHEMA}],
    },
    "/tokenize": {
        "messages": CHAT["messages"],
        "tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": SCHEMA}}],
    },
    "/v2/models/tiny%2Fmodel/generate": {
        "text_input": "Hello",
        "parameters": {"guided_json": json.dumps(SCHEMA)},
    },
}


@pytest.mark.parametrize("route", REWRITING_ROUTES)
async def test_schemas_are_rewritten_in_a_thread_for_texts(
    server: Any, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large ones take seconds of CPU time, in which the event loop has to answer others."""
    threads: set[str] = set()

    def noted(given: str, *args: Any, **options: Any) -> str:
        threads.add(threading.current_thread().name.rpartition("_")[0])
        return given

    monkeypatch.setattr(spec, "_rewritten", noted)
    await server.post(route, REWRITING_ROUTES[route])
    assert threads == {"teneral-text"}
