"""POST /v1/completions, in front of a real engine with a tiny model. Token n of its tokenizer is a byte."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support.http_server import events

GREEDY = {"model": "tiny/model", "temperature": 0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture
async def server(start: Any) -> Any:
    async with start() as running:
        yield running


async def test_a_completion_has_every_field_that_openai_gives(server: Any) -> None:
    answer = await server.post("/v1/completions", {**GREEDY, "prompt": "Once"})
    assert answer.status == 200
    body = answer.json
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == "tiny/model"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 8,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_a_stream_adds_up_to_the_whole(server: Any) -> None:
    whole = (await server.post("/v1/completions", {**GREEDY, "prompt": "Once"})).json
    streamed = await server.post("/v1/completions", {**GREEDY, "prompt": "Once", "stream": True})
    assert streamed.headers["Content-Type"].startswith("text/event-stream")
    *chunks, done = events(streamed.body)
    assert done == "[DONE]"
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert [choice["finish_reason"] for choice in choices][-1] == "length"
    assert all(choice["finish_reason"] is None for choice in choices[:-1])


@pytest.mark.parametrize("prompt", ["abc", [b"abc"[0], 98, 99], ["abc"], [[97, 98, 99]]])
async def test_texts_and_tokens_are_the_same_prompt(server: Any, prompt: Any) -> None:
    """The tokenizer's tokens of printable characters are not their bytes, so the tokens are asked of it."""
    tokenizer = server.instance.tokenizer.result()
    wanted = tokenizer.encode("abc")
    if prompt and not isinstance(prompt, str) and not isinstance(prompt[0], str):
        prompt = [wanted] if isinstance(prompt[0], list) else wanted
    answer = await server.post("/v1/completions", {**GREEDY, "prompt": prompt})
    reference = await server.post("/v1/completions", {**GREEDY, "prompt": "abc"})
    assert answer.json["choices"] == reference.json["choices"]


async def test_choices_of_several_prompts_stand_prompt_by_prompt(server: Any) -> None:
    both = await server.post("/v1/completions", {**GREEDY, "prompt": ["one", "two"], "n": 2})
    singles = [
        await server.post("/v1/completions", {**GREEDY, "prompt": prompt}) for prompt in ("one", "two")
    ]
    texts = [choice["text"] for choice in both.json["choices"]]
    one, two = (single.json["choices"][0]["text"] for single in singles)
    assert texts == [one, one, two, two]
    assert [choice["index"] for choice in both.json["choices"]] == [0, 1, 2, 3]
    assert both.json["usage"]["prompt_tokens"] == 6
    assert both.json["usage"]["completion_tokens"] == 32


async def test_choices_with_one_seed_differ_and_come_again(server: Any) -> None:
    body = {"prompt": "x", "n": 4, "seed": 7, "temperature": 5.0, "max_tokens": 6, "ignore_eos": True}
    first = [choice["text"] for choice in (await server.post("/v1/completions", body)).json["choices"]]
    again = [choice["text"] for choice in (await server.post("/v1/completions", body)).json["choices"]]
    assert first == again
    assert len(set(first)) == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_prompt_before_the_text(server: Any, stream: bool) -> None:
    plain = (await server.post("/v1/completions", {**GREEDY, "prompt": "Once"})).json["choices"][0]["text"]
    answer = await server.post(
        "/v1/completions", {**GREEDY, "prompt": "Once", "echo": True, "stream": stream}
    )
    if stream:
        text = "".join(json.loads(chunk)["choices"][0]["text"] for chunk in events(answer.body)[:-1])
    else:
        text = answer.json["choices"][0]["text"]
    assert text == "Once" + plain


async def test_an_echo_of_tokens_is_their_text(server: Any) -> None:
    tokens = server.instance.tokenizer.result().encode("Once")
    answer = await server.post("/v1/completions", {**GREEDY, "prompt": tokens, "echo": True, "max_tokens": 0})
    assert answer.json["choices"][0]["text"] == "Once"
    assert answer.json["usage"]["completion_tokens"] == 0


async def test_a_stop_string_ends_the_text_before_it(server: Any) -> None:
    a = server.instance.tokenizer.result().encode("a")[0]
    body = {"prompt": "x", "temperature": 0, "logit_bias": {str(a): 100}, "max_tokens": 20, "stop": ["aaaa"]}
    answer = await server.post("/v1/completions", body)
    choice = answer.json["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


async def test_max_tokens_is_16_unless_said(server: Any) -> None:
    answer = await server.post("/v1/completions", {"prompt": "x", "ignore_eos": True})
    assert answer.json["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_come_in_columns_whose_offsets_add_up(server: Any, stream: bool) -> None:
    body = {**GREEDY, "prompt": "Once", "logprobs": 3, "stream": stream}
    answer = await server.post("/v1/completions", body)
    if stream:
        parts = [json.loads(chunk)["choices"][0]["logprobs"] for chunk in events(answer.body)[:-1]]
        columns = {
            name: [entry for part in parts if part for entry in part[name]]
            for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs")
        }
    else:
        columns = answer.json["choices"][0]["logprobs"]
    assert len(columns["tokens"]) == 8
    assert all(logprob <= 0 for logprob in columns["token_logprobs"])
    lengths = [len(token) for token in columns["tokens"]]
    assert columns["text_offset"] == [sum(lengths[:index]) for index in range(8)]
    for token, logprob, top in zip(
        columns["tokens"], columns["token_logprobs"], columns["top_logprobs"], strict=True
    ):
        assert top[token] == pytest.approx(logprob)
        assert max(top.values()) == pytest.approx(logprob)  # greedy: the chosen one is the best


async def test_usage_ends_a_stream_that_asks_for_it(server: Any) -> None:
    body = {**GREEDY, "prompt": "Once", "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, done = events((await server.post("/v1/completions", body)).body)
    assert done == "[DONE]"
    assert json.loads(last)["choices"] == []
    assert json.loads(last)["usage"]["total_tokens"] == 12
    assert all(json.loads(chunk)["usage"] is None for chunk in chunks)


async def test_a_stream_that_does_not_ask_has_no_usage(server: Any) -> None:
    answer = await server.post("/v1/completions", {**GREEDY, "prompt": "Once", "stream": True})
    assert all("usage" not in json.loads(chunk) for chunk in events(answer.body)[:-1])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "the end"),
        ("best_of", 2),
        ("prompt", []),
        ("prompt", ["a", 1]),
        ("prompt", [[1], "a"]),
        ("prompt", [[]]),
        ("prompt", [999]),
        ("prompt", [-1]),
        ("prompt", "x" * 600),
        ("n", 0),
        ("n", 129),
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 1.5),
        ("top_k", -5),
        ("min_p", 2),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("max_tokens", -1),
        ("max_tokens", "many"),
        ("seed", 1 << 70),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"5": 1000}),
        ("logit_bias", {"99999": 1}),
        ("logprobs", 21),
        ("logprobs", -1),
        ("stop", ["a", 3]),
        ("stop", ""),
        ("stop", ["x"] * 17),
        ("stop_token_ids", ["a"]),
        ("stream_options", {"include_usage": True}),
    ],
)
async def test_an_invalid_field_is_refused_by_name(server: Any, field: str, value: Any) -> None:
    answer = await server.post("/v1/completions", {"prompt": "x", "max_tokens": 1, field: value})
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["param"].split("[")[0] == field
    assert field in answer.error["message"]


async def test_a_prompt_beyond_the_context_has_its_own_code(server: Any) -> None:
    answer = await server.post("/v1/completions", {"prompt": "x" * 600})
    assert answer.status == 400
    assert answer.error["code"] == "context_length_exceeded"


async def test_logprobs_of_an_echo_are_refused_rather_than_wrong(server: Any) -> None:
    answer = await server.post("/v1/completions", {"prompt": "x", "echo": True, "logprobs": 1})
    assert (answer.status, answer.error["param"]) == (400, "logprobs")


async def test_unknown_fields_are_refused_by_name(server: Any) -> None:
    body = {"prompt": "x", "max_tokens": 1, "user": "me"}
    refused = await server.post("/v1/completions", {**body, "some_new_field": {"a": [1]}})
    assert (refused.status, refused.error["param"]) == (400, "some_new_field")
    assert (await server.post("/v1/completions", {**body, "teneral": {"first_token": "exact"}})).status == 200
    refused = await server.post("/v1/completions", {**body, "teneral": {"frist_token": "exact"}})
    assert (refused.status, refused.error["param"]) == (400, "teneral.frist_token")


async def test_null_is_the_default(server: Any) -> None:
    nulls = dict.fromkeys(
        ["temperature", "n", "stop", "seed", "logit_bias", "stream", "logprobs", "top_p", "model"]
    )
    answer = await server.post(
        "/v1/completions", {"prompt": "x", "max_tokens": 2, "ignore_eos": True, **nulls}
    )
    assert answer.status == 200
