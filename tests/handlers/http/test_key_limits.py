"""Limits of API keys: buckets by a clock of the test, and a server whose functions and streams count."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from teneral.handlers.http.errors import ApiError
from teneral.handlers.http.key_limits import KeyLimits, parse_key_limits
from teneral.handlers.http.keys import ApiKeys
from teneral.loader.errors import UsageError

ONE, TWO = {"Authorization": "Bearer one"}, {"Authorization": "Bearer two"}
BODY = {"prompt": "a b c", "max_tokens": 4, "ignore_eos": True}


def test_a_key_sends_a_minutes_requests_at_once_and_then_as_the_bucket_refills() -> None:
    clock = [100.0]
    limits = KeyLimits(ApiKeys(["a", "b"]), {"requests_minute": 6}, lambda: clock[0])
    for _ in range(6):
        limits.admit(b"a")
    with pytest.raises(ApiError) as refused:
        limits.admit(b"a")
    assert (refused.value.status, refused.value.headers["Retry-After"]) == (429, "10")
    assert limits.admit(b"b") == 2
    clock[0] += 9.9
    with pytest.raises(ApiError):
        limits.admit(b"a")
    clock[0] += 0.2
    limits.admit(b"a")
    with pytest.raises(ApiError):
        limits.admit(b"a")
    clock[0] += 1e6
    for _ in range(6):
        limits.admit(b"a")
    with pytest.raises(ApiError):
        limits.admit(b"a")
    assert limits.usage().requests == {"1": 13, "2": 1}
    assert limits.usage().refused == {("1", "requests_minute"): 4}


def test_a_long_answer_takes_a_bucket_below_zero_and_the_key_waits_until_it_is_above() -> None:
    clock = [0.0]
    limits = KeyLimits(ApiKeys(["a"]), {"tokens_minute": 60, "tokens_day": 1000}, lambda: clock[0])
    place = limits.admit(b"a")
    limits.spend(place, 90)
    assert limits.headers(place) == {
        "x-ratelimit-limit-tokens": "60",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "90.000s",
    }
    with pytest.raises(ApiError, match="60 tokens a minute") as refused:
        limits.admit(b"a")
    assert refused.value.headers["Retry-After"] == "31"  # 30 below zero, and one for the request
    clock[0] = 31.0
    limits.spend(limits.admit(b"a"), 952)
    clock[0] = 3600.0  # the minute's bucket is full again; to the day's, 1 comes back every 86.4 s
    with pytest.raises(ApiError, match="1,000 tokens a day") as refused:
        limits.admit(b"a")
    assert refused.value.headers["Retry-After"] == "116"  # (90 + 952 - 1000 + 1) * 86.4 - 3600
    clock[0] = 3600.0 + 116
    limits.admit(b"a")


@pytest.mark.parametrize(
    "setting",
    ["", "5", "tokens=5", "tokens_day", "tokens_day=0", "tokens_day=-1", "tokens_day=1.5", "tokens_day=²",
     "tokens_day=1,tokens_day=2", "tokens_day=1000000000001", "tokens_day=1,"],
)  # fmt: skip
def test_a_setting_that_is_no_limit_is_refused(setting: str) -> None:
    with pytest.raises(UsageError, match="requests_minute, requests_day, tokens_minute, tokens_day"):
        parse_key_limits(setting)


async def test_a_server_without_keys_has_none_to_limit(start: Any) -> None:
    with pytest.raises(UsageError, match="no API keys"):
        async with start(key_limits="tokens_day=1"):
            pass


def generate_twice(event: Any, context: Any) -> Iterator[str]:
    context.model.generate("a b c", max_tokens=2, ignore_eos=True)
    yield from context.model.stream("a b c", max_tokens=3, ignore_eos=True)


async def test_all_ways_to_use_a_model_count_and_the_surplus_is_refused(start: Any) -> None:
    settings = {"api_key": "one,two", "key_limits": "tokens_minute=100000,tokens_day=100,requests_day=50"}
    async with start(handler=generate_twice, **settings) as server:
        whole = await server.post("/v1/completions", BODY, headers=ONE)
        used = whole.json["usage"]["total_tokens"]
        num_prompt = whole.json["usage"]["prompt_tokens"]
        stream = await server.post("/v1/completions", {**BODY, "stream": True}, headers=ONE)
        assert stream.headers["x-ratelimit-limit-tokens"] == "100"
        assert stream.headers["x-ratelimit-remaining-tokens"] == str(100 - used)
        assert stream.headers["x-ratelimit-remaining-requests"] == "48"
        assert b": tokens" not in stream.body  # which only a pool asks for
        asked = await server.post(
            "/v1/completions", {**BODY, "stream": True}, headers={**ONE, "x-teneral-tokens": "1"}
        )
        assert f"\n: tokens {num_prompt}+4\n\ndata: [DONE]".encode() in asked.body
        await server.post("/invoke", {}, headers=ONE)
        spent = 3 * used + 2 * num_prompt + 5
        later = await server.post(
            "/v1/responses", {"input": "a", "background": True, "max_output_tokens": 2}, headers=ONE
        )
        while later.json["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
            later = await server.get(f"/v1/responses/{later.json['id']}", headers=ONE)
        spent += later.json["usage"]["total_tokens"]
        counts = (await server.get("/metrics", headers=TWO)).body.decode()
        assert f'teneral_key_tokens_total{{key="1"}} {float(spent)}' in counts
        long = await server.post("/v1/completions", {**BODY, "max_tokens": 100}, headers=ONE)
        assert long.status == 200
        refused = await server.post("/v1/completions", BODY, headers=ONE)
        assert (refused.status, refused.error["type"]) == (429, "rate_limit_error")
        assert int(refused.headers["Retry-After"]) > 60
        assert (await server.get("/v1/models", headers=ONE)).status == 200  # reading is no work
        assert (await server.post("/v1/completions", BODY, headers=TWO)).status == 200
        counts = (await server.get("/metrics", headers=TWO)).body.decode()
        assert 'teneral_key_refused_total{key="1",limit="tokens_day"} 1.0' in counts
