"""POST /v1/completions, in front of a real engine with a tiny model. Token n of its tokenizer is a byte."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tests.support.decoding import oracle_logits
from tests.support.http_server import events
from tests.support.tiny_models import tiny_model

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


async def test_an_answer_has_only_allowed_tokens_and_no_bad_words(server: Any) -> None:
    tokenizer = server.instance.tokenizer.result()
    allowed = tokenizer.encode("abc", add_special_tokens=False)
    body = {"prompt": "x", "temperature": 5.0, "max_tokens": 40, "allowed_token_ids": allowed, "top_k": -1}
    texts = [
        (await server.post("/v1/completions", {**body, **more, "seed": 3})).json["choices"][0]["text"]
        for more in ({}, {"bad_words": ["b"]}, {"bad_words": ["cc"]})
    ]
    assert all(len(text) == 40 and set(text) <= set("abc") for text in texts)
    assert ["b" in text for text in texts] == [True, False, True]
    assert ["cc" in text for text in texts[::2]] == [True, False]


async def test_an_answer_does_not_end_before_min_tokens(server: Any) -> None:
    a = server.instance.tokenizer.result().encode("a", add_special_tokens=False)[0]
    body = {"prompt": "x", "temperature": 0, "logit_bias": {str(a): 100}, "max_tokens": 9}
    for stop in ({"stop_token_ids": [a]}, {"stop": ["a"]}):
        answer = (await server.post("/v1/completions", {**body, **stop, "min_tokens": 5})).json
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 6
        shorter = (await server.post("/v1/completions", {**body, **stop})).json
        assert shorter["usage"]["completion_tokens"] == 1


async def test_a_stop_string_or_token_can_be_included(server: Any) -> None:
    a = server.instance.tokenizer.result().encode("a", add_special_tokens=False)[0]
    body = {"prompt": "x", "temperature": 0, "logit_bias": {str(a): 100}, "include_stop_str_in_output": True}
    for stop, text in (({"stop": ["aaa"]}, "aaa"), ({"stop_token_ids": [a]}, "a")):
        answer = await server.post("/v1/completions", {**body, **stop})
        assert answer.json["choices"][0]["text"] == text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_the_stop_reason_is_what_the_request_named(server: Any, path: str, stream: bool) -> None:
    a = server.instance.tokenizer.result().encode("a", add_special_tokens=False)[0]
    prompt = (
        {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    )
    body = {**prompt, "temperature": 0, "logit_bias": {str(a): 100}, "max_tokens": 5, "stream": stream}
    for stop, reason in (({"stop": ["b", "aa"]}, "aa"), ({"stop_token_ids": [a]}, a), ({}, None)):
        answer = await server.post(path, {**body, **stop})
        last = json.loads(events(answer.body)[-2]) if stream else answer.json
        assert last["choices"][0].get("stop_reason") == reason


async def test_special_tokens_have_text_where_asked_for(server: Any) -> None:
    tokenizer = server.instance.tokenizer.result()
    (eos,) = tokenizer.eos_token_ids
    body = {"prompt": "x", "allowed_token_ids": [eos], "max_tokens": 2, "ignore_eos": True}
    hidden = await server.post("/v1/completions", body)
    shown = await server.post("/v1/completions", {**body, "skip_special_tokens": False})
    assert hidden.json["choices"][0]["text"] == ""
    assert shown.json["choices"][0]["text"] == 2 * tokenizer.id_to_piece(eos)


@pytest.mark.parametrize("prompt", ["Once upon", ["a longer text", "Once upon"]])
async def test_a_prompt_is_cut_to_its_last_tokens(server: Any, prompt: Any) -> None:
    whole = (await server.post("/v1/completions", {**GREEDY, "prompt": "upon", "echo": True})).json
    body = {**GREEDY, "prompt": prompt, "echo": True, "truncate_prompt_tokens": 4}
    cut = (await server.post("/v1/completions", body)).json
    assert cut["choices"][-1]["text"] == whole["choices"][0]["text"]
    assert cut["usage"]["prompt_tokens"] == 4 * len(cut["choices"])


async def test_a_prompt_is_cut_to_what_the_context_has_room_for(server: Any) -> None:
    body = {**GREEDY, "prompt": "x" * 5000, "truncate_prompt_tokens": -1}
    answer = (await server.post("/v1/completions", body)).json
    assert answer["usage"]["total_tokens"] == server.instance.engine.result().max_context
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 8


async def test_the_best_of_several_choices_are_the_likeliest(server: Any) -> None:
    body = {"prompt": ["x", "y"], "seed": 7, "max_tokens": 3, "ignore_eos": True, "temperature": 2.0}
    every = (await server.post("/v1/completions", {**body, "n": 6, "logprobs": 0})).json["choices"]
    mean = [sum(choice["logprobs"]["token_logprobs"]) / 3 for choice in every]
    best = (await server.post("/v1/completions", {**body, "n": 2, "best_of": 6})).json
    wanted = [
        sorted(range(first, first + 6), key=lambda index: mean[index], reverse=True)[:2] for first in (0, 6)
    ]
    assert [choice["text"] for choice in best["choices"]] == [
        every[index]["text"] for indexes in wanted for index in indexes
    ]
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in best["choices"])
    assert best["usage"]["completion_tokens"] == 36
    refused = await server.post("/v1/completions", {**body, "best_of": 2, "stream": True})
    assert (refused.status, refused.error["param"]) == (400, "best_of")


async def test_max_tokens_is_16_by_default(server: Any) -> None:
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


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_has_the_logprobs_of_the_prompt(server: Any, stream: bool, max_tokens: int) -> None:
    """lm-eval sends such requests."""
    tokenizer = server.instance.tokenizer.result()
    prompt = tokenizer.encode("Once upon a time")
    with torch.no_grad():
        rows = oracle_logits(tiny_model("llama"), prompt).log_softmax(-1)
    body = {**GREEDY, "prompt": [prompt], "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    answer = await server.post("/v1/completions", {**body, "stream": stream})
    if stream:
        choices = [json.loads(chunk)["choices"][0] for chunk in events(answer.body)[:-1]]
        parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        columns = {name: [entry for part in parts for entry in part[name]] for name in parts[0]}
        text = "".join(choice["text"] for choice in choices)
    else:
        columns, text = answer.json["choices"][0]["logprobs"], answer.json["choices"][0]["text"]
        assert answer.json["usage"]["prompt_tokens"] == len(prompt)
        assert answer.json["usage"]["completion_tokens"] == max_tokens
        assert "prompt_logprobs" not in answer.json["choices"][0]
    assert len(columns["tokens"]) == len(prompt) + max_tokens
    assert text.startswith("Once upon a time")
    assert "".join(columns["tokens"][: len(prompt)]) == "Once upon a time"
    assert columns["text_offset"][: len(prompt)] == list(range(len(prompt)))
    assert columns["token_logprobs"][0] is columns["top_logprobs"][0] is None
    for row, token, logprob, top in zip(
        rows, prompt[1:], columns["token_logprobs"][1:], columns["top_logprobs"][1:], strict=False
    ):
        assert logprob == pytest.approx(row[token].item(), abs=1e-3)
        assert max(top.values()) == pytest.approx(row.max().item(), abs=1e-3)
    for logprob, top in list(zip(columns["token_logprobs"], columns["top_logprobs"], strict=True))[1:]:
        assert logprob in top.values()


async def test_prompt_logprobs_have_vllms_shape(server: Any) -> None:
    tokenizer = server.instance.tokenizer.result()
    prompt = tokenizer.encode("Once")
    body = {**GREEDY, "prompt": ["Once", "upon"], "n": 2, "prompt_logprobs": 2}
    choices = (await server.post("/v1/completions", body)).json["choices"]
    assert choices[0]["logprobs"] is None
    assert choices[0]["prompt_logprobs"] == choices[1]["prompt_logprobs"] != choices[2]["prompt_logprobs"]
    first, *places = choices[0]["prompt_logprobs"]
    assert first is None
    assert len(places) == len(prompt) - 1
    for token, place in zip(prompt[1:], places, strict=True):
        assert place[str(token)]["decoded_token"] == tokenizer.decode([token])
        assert {1, 2} <= {entry["rank"] for entry in place.values()}
        ranked = sorted(place.values(), key=lambda entry: entry["rank"])
        assert [entry["logprob"] for entry in ranked] == sorted(
            (entry["logprob"] for entry in ranked), reverse=True
        )
    refused = await server.post("/v1/completions", {**body, "stream": True})
    assert (refused.status, refused.error["param"]) == (400, "prompt_logprobs")


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
        ("best_of", 0),
        ("best_of", 129),
        ("min_tokens", 2),
        ("min_tokens", -1),
        ("bad_words", [""]),
        ("bad_words", ["x" * 257]),
        ("bad_words", ["x"] * 257),
        ("bad_words", ["x" * 100]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", [99999]),
        ("allowed_token_ids", list(range(1 << 17))),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", -1),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
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
