"""Cached tokens in responses to prompts with a beginning that was computed before, and the sharing
of such beginnings.
"""

from __future__ import annotations

import json
from typing import Any

from tests.support.http_server import events

TOKENS = [(number * 7) % 90 for number in range(50)]
BODY: dict[str, Any] = {"prompt": TOKENS, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
BLOCK_SIZE = 16


def cached(answer: Any) -> int:
    return answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_the_usage_says_how_much_of_the_prompt_was_found(start: Any) -> None:
    async with start() as server:
        first, second = [await server.post("/v1/completions", BODY) for _ in range(2)]
        assert (cached(first), cached(second)) == (0, 3 * BLOCK_SIZE)
        assert first.json["choices"][0]["text"] == second.json["choices"][0]["text"]


async def test_so_does_a_streams_usage(start: Any) -> None:
    async with start() as server:
        await server.post("/v1/completions", BODY)
        streamed = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
        *_, last, _ = events((await server.post("/v1/completions", streamed)).body)
        assert json.loads(last)["usage"]["prompt_tokens_details"]["cached_tokens"] == 3 * BLOCK_SIZE


async def test_several_choices_of_one_prompt_count_it_once(start: Any) -> None:
    async with start() as server:
        await server.post("/v1/completions", BODY)
        usage = (await server.post("/v1/completions", {**BODY, "n": 3})).json["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 3 * BLOCK_SIZE <= usage["prompt_tokens"]


async def test_another_salt_finds_nothing(start: Any) -> None:
    async with start() as server:
        await server.post("/v1/completions", BODY)
        salted = {**BODY, "teneral": {"cache_salt": "tenant a"}}
        answers = [await server.post("/v1/completions", salted) for _ in range(2)]
        assert [cached(answer) for answer in answers] == [0, 3 * BLOCK_SIZE]


async def test_a_salt_that_is_too_long_is_refused(start: Any) -> None:
    async with start() as server:
        answer = await server.post("/v1/completions", {**BODY, "teneral": {"cache_salt": "x" * 257}})
        assert answer.status == 400
        assert "cache_salt" in answer.json["error"]["message"]


async def test_the_cache_can_be_seen_in_the_metrics(start: Any) -> None:
    async with start() as server:
        for _ in range(2):
            await server.post("/v1/completions", BODY)
        text = (await server.get("/metrics")).body.decode()
        assert f"teneral_engine_prefix_hit_tokens_total {float(3 * BLOCK_SIZE)}" in text
        assert f"teneral_engine_prefix_lookup_tokens_total {float(2 * len(TOKENS))}" in text
