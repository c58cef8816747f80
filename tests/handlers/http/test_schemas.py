"""Decoding of request bodies: hostile and mistaken ones are refused by name, never with a bug."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from teneral.handlers.function.options import ParsedOptions
from teneral.handlers.http.json_bodies import JsonDecoder, check_keys
from teneral.handlers.openai.chat import ChatFormat
from teneral.handlers.openai.completions import CompletionFormat
from teneral.handlers.openai.parameters import for_choice, options_of, split_prompt
from teneral.handlers.openai.prompts import ChatSettings
from teneral.handlers.openai.schemas import ChatBody, CompletionBody, EmbeddingBody
from teneral.runtime.errors import RequestError
from teneral.runtime.step.requests import FirstToken, SamplingParams

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def refusal(kind: type, body: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        JsonDecoder(kind).decode(msgspec.json.encode(body))
    return caught.value


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (CompletionBody, {}, "prompt"),
        (CompletionBody, {"prompt": 5}, "prompt"),
        (CompletionBody, {"prompt": [1, [2, "x"]]}, "prompt[1][1]"),
        (CompletionBody, {"prompt": "x", "n": "1"}, "n"),
        (CompletionBody, {"prompt": "x", "n": True}, "n"),
        (CompletionBody, {"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
        (CompletionBody, {"prompt": "x", "logit_bias": {"1": "a"}}, "logit_bias[...]"),
        (
            CompletionBody,
            {"prompt": "x", "stream_options": {"include_usage": "yes"}},
            "stream_options.include_usage",
        ),
        (CompletionBody, {"prompt": "x", "teneral": {"x": 1}}, "teneral.x"),
        (CompletionBody, {"prompt": "x", "teneral": {"first_token": "best"}}, "teneral.first_token"),
        (EmbeddingBody, {"input": "x", "teneral": {"first_token": "exact"}}, "teneral.first_token"),
        (ChatBody, {"messages": [{"role": "user", "content": "x"}, {"role": 1}]}, "messages[1].role"),
        (ChatBody, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (EmbeddingBody, {"input": {}}, "input"),
        (EmbeddingBody, {"input": "x", "encoding_format": "hex"}, "encoding_format"),
        (CompletionBody, [], ""),
    ],
)
def test_a_wrong_type_is_refused_with_the_way_to_it(kind: type, body: Any, param: str) -> None:
    error = refusal(kind, body)
    assert error.param == param
    assert "$" not in error.message


def test_an_error_does_not_repeat_all_of_a_hostile_value() -> None:
    error = refusal(ChatBody, {"messages": [{"role": "x" * 100_000}]})
    assert len(error.message) < 1000


FIELDS = sorted(
    {field.name for field in msgspec.structs.fields(ChatBody)} | set(CompletionBody.__struct_fields__)
)


@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6), JSON)
def test_any_json_is_either_a_request_or_refused(fields: dict[str, Any], value: Any) -> None:
    for kind, fmt, required in (
        (
            ChatBody,
            partial(ChatFormat, settings=ChatSettings(max_sequences=8)),
            {"messages": [{"role": "user", "content": "x"}]},
        ),
        (
            CompletionBody,
            partial(CompletionFormat, max_sequences=8, first_token=FirstToken.EXACT),
            {"prompt": "x"},
        ),
    ):
        for body in ({**required, **fields}, fields, value):
            try:
                decoded = JsonDecoder(kind).decode(msgspec.json.encode(body))
                made = fmt(decoded, model="m")
            except RequestError:
                continue
            assert 1 <= made.num_sequences <= 8


def test_json_in_a_text_of_the_body_has_a_bound_of_its_own() -> None:
    calls = [{"function": {"name": "f", "arguments": '{"a":"' + "x" * 600_000 + '"}'}}] * 2
    body = {"messages": [{"role": "assistant", "tool_calls": calls}]}
    with pytest.raises(RequestError) as caught:
        ChatFormat(
            JsonDecoder(ChatBody).decode(msgspec.json.encode(body)), model="m", settings=ChatSettings()
        )
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (
            ChatBody,
            {"messages": [{"role": "user", "content": "x", "cache_control": None}], "new_field": None},
        ),
        (ChatBody, {"messages": [], "stream_options": {"other": None}, "teneral": {"x": None}, "new": None}),
        (ChatBody, {"messages": [{"role": "user", "content": "x", "a": None}, {"role": "user", "b": None}]}),
        (ChatBody, {"messages": [], "response_format": {"type": "json_object", "new": None}}),
        (CompletionBody, {"prompt": "x", "new": None}),
        (EmbeddingBody, {"input": "x", "new": None}),
    ],
)
def test_null_stands_for_the_default_in_unknown_fields_too(kind: type, body: dict[str, Any]) -> None:
    JsonDecoder(kind).decode(msgspec.json.encode(body))


def test_null_of_a_schema_is_kept() -> None:
    schema = {"const": None, "default": None}
    body = {"messages": [], "guided_json": schema, "new": None, "temperature": None}
    decoded = JsonDecoder(ChatBody).decode(msgspec.json.encode(body))
    assert decoded.guided_json == schema
    assert decoded.temperature is None


@pytest.mark.parametrize("unknown", [{"new": 1}, {"new": None, "other": False}])
def test_an_unknown_field_with_a_value_is_refused(unknown: dict[str, Any]) -> None:
    assert refusal(ChatBody, {"messages": [], **unknown}).param == list(unknown)[-1]


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (b'{"prompt": "x", "prompt": "y"}', "prompt"),
        (b'{"prompt": "x", "pr\\u006fmpt": "y"}', "prompt"),
        (b'{"prompt":"a\\"b:c\\\\","guided_json":{"enum":[{"a":1,"a":2}]}}', "a"),
    ],
)
def test_a_key_that_comes_twice_is_refused(data: bytes, param: str) -> None:
    with pytest.raises(RequestError, match="twice") as caught:
        JsonDecoder(CompletionBody).decode(data)
    assert caught.value.param == param


@given(JSON)
def test_keys_that_differ_are_never_refused(value: Any) -> None:
    check_keys(msgspec.json.encode({"prompt": value}))
    check_keys(json.dumps({"prompt": value}, indent=1).encode())


@given(st.binary(max_size=200))
def test_any_bytes_are_either_a_request_or_refused(data: bytes) -> None:
    try:
        body = JsonDecoder(EmbeddingBody).decode(data)
    except RequestError:
        return
    assert body.input is not None


def test_a_prompt_is_sorted_out_by_its_items() -> None:
    assert split_prompt("a", param="p", max_prompts=3) == ["a"]
    assert split_prompt(["a", "b"], param="p", max_prompts=3) == ["a", "b"]
    assert split_prompt([1, 2], param="p", max_prompts=3) == [[1, 2]]
    assert split_prompt([[1], [2]], param="p", max_prompts=3) == [[1], [2]]
    assert split_prompt([1] * 100, param="p", max_prompts=3) == [[1] * 100]  # tokens, not prompts


@given(st.integers(min_value=-(1 << 63), max_value=(1 << 63) - 1), st.integers(min_value=0, max_value=127))
def test_every_choice_has_a_seed_of_its_own_within_range(seed: int, choice: int) -> None:
    params = SamplingParams(seed=seed, temperature=0.5)
    own = for_choice(params, choice)
    assert own.temperature == 0.5
    assert (own.seed == seed) == (choice == 0)


def test_missing_fields_have_openais_defaults() -> None:
    assert options_of(CompletionBody(prompt="x")) == ParsedOptions(sampling=SamplingParams())
