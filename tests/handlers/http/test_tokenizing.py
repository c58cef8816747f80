"""The event loop never waits for the tokenizer, whose process may be busy with long texts."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from tests.support.http_server import Server
from tests.support.inspection import replace_result, text_backend_of
from tests.support.instances import TinyParts

BODY = {"prompt": "x", "max_tokens": 2, "ignore_eos": True}
HELD_S = 20.0  # a loop that waits for the tokenizer waits so long, and the test fails


class HeldTokenizer:
    """The real one, of which one method waits until it is released."""

    def __init__(self, tokenizer: Any, method: str) -> None:
        self._tokenizer = tokenizer
        self._method = method
        self._released = threading.Event()
        self.called = threading.Event()
        self.gave_up = False

    def release(self) -> None:
        self._released.set()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._tokenizer, name)
        if name != self._method:
            return method

        def held(*args: Any, **options: Any) -> Any:
            self.called.set()
            self.gave_up |= not self._released.wait(HELD_S)
            return method(*args, **options)

        return held

    @property
    def is_held(self) -> bool:
        return self.called.is_set() and not self._released.is_set() and not self.gave_up


def hold(server: Server, method: str) -> HeldTokenizer:
    held = HeldTokenizer(server.instance.tokenizer.result(), method)
    replace_result(server.instance.tokenizer, held)
    return held


async def check_loop_is_free(server: Server, path: str, body: dict[str, Any], held: HeldTokenizer) -> bytes:
    """What the request is answered, whose tokenizer is released after others were answered."""
    posted = asyncio.create_task(server.post(path, body))
    await server.eventually(held.called.is_set)
    assert (await server.get("/livez")).status == 200
    assert held.is_held, "the event loop waited for the tokenizer"
    held.release()
    answer = await posted
    assert answer.status == 200
    return answer.body


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", BODY),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
        ("/v2/models/tiny%2Fmodel/generate", {"text_input": "x", "parameters": {"max_tokens": 2}}),
    ],
)
async def test_probes_are_answered_while_a_prompt_is_tokenised(
    start: Any, path: str, body: dict[str, Any]
) -> None:
    async with start() as server:
        await check_loop_is_free(server, path, body, hold(server, "encode"))


async def test_probes_are_answered_while_the_texts_of_tokens_are_looked_up(start: Any) -> None:
    async with start() as server:
        body = {**BODY, "logprobs": 1, "temperature": 0}
        (expected,) = (await server.post("/v1/completions", body)).json["choices"]
        token = json.dumps(expected["logprobs"]["tokens"][0], ensure_ascii=False)
        for stream in (False, True):
            held = hold(server, "id_to_piece")
            data = await check_loop_is_free(server, "/v1/completions", {**body, "stream": stream}, held)
            assert token.encode() in data


async def test_long_texts_leave_threads_for_short_ones(start: Any) -> None:
    long = {"prompt": "x" * (200 << 10), "max_tokens": 1}
    async with start() as server:
        tokenizer = server.instance.tokenizer.result()
        held = HeldTokenizer(tokenizer, "encode")
        replace_result(server.instance.tokenizer, held)
        posted = [asyncio.create_task(server.post("/v1/chat/completions", chat(long))) for _ in range(20)]
        await server.eventually(held.called.is_set)
        replace_result(server.instance.tokenizer, tokenizer)
        assert (await server.post("/v1/completions", BODY)).status == 200
        assert held.is_held
        held.release()
        assert {answer.status for answer in await asyncio.gather(*posted)} == {400}


def chat(body: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": body["prompt"]}], "max_tokens": body["max_tokens"]}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_text_that_cannot_fit_the_context_is_refused_before_it_is_tokenised(
    start: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start() as server:
        backend = text_backend_of(server.instance.tokenizer.result())
        room = server.instance.engine.result().max_context * backend.max_token_bytes
        tokenised: list[int] = []
        encode = backend.encode
        monkeypatch.setattr(
            backend, "encode", lambda text, **options: tokenised.append(len(text)) or encode(text, **options)
        )
        for num_chars, is_looked_at in ((room // 2, True), (room + 1, False)):
            tokenised.clear()
            body = {"prompt": "x" * num_chars, "max_tokens": 1}
            answer = await server.post(path, body if path == "/v1/completions" else chat(body))
            assert bool(tokenised) is is_looked_at
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")


async def test_embeddings_refuse_such_a_text_too(start: Any, encoder_parts: TinyParts) -> None:
    async with start(parts=encoder_parts) as server:
        held = hold(server, "offsets")  # of no use here: the real `encode`
        most = text_backend_of(held).max_token_bytes
        assert most is not None
        limit = server.instance.embedder.result().max_tokens
        answer = await server.post("/v1/embeddings", {"input": "x" * (limit * most + 1)})
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert "bytes" in answer.error["message"]
