"""Calls in a model's text: each family's formats, any split into pieces, and text that is no call."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from teneral.handlers.openai.deltas import Answer, Delta, Finish, TextDelta
from teneral.handlers.openai.tools.format import ToolFormat
from teneral.handlers.openai.tools.generic_json import GENERIC_JSON
from teneral.handlers.openai.tools.hermes import HERMES
from teneral.handlers.openai.tools.llama3 import LLAMA3
from teneral.handlers.openai.tools.mistral import LIST, NAMED
from teneral.handlers.openai.tools.reader import CallReader

CUTS = st.lists(st.integers(0, 200), max_size=8)
PATIENT = settings(suppress_health_check=[HealthCheck.too_slow])
NAMES = ("get_time", "add", "get")
FORMATS = {"hermes": HERMES, "llama3": LLAMA3, "mistral": LIST, "mistral-named": NAMED, "json": GENERIC_JSON}
CALL = {"name": "add", "arguments": {"a": 1, "b": [2, {"c": '}"]\\'}]}}


def read(
    fmt: ToolFormat, pieces: Sequence[str], *, is_guided: bool = False, max_calls: int | None = None
) -> tuple[str, list[tuple[str, Any]]]:
    """The text and the calls, by name with the text of their arguments."""
    reader = CallReader(fmt, NAMES, is_guided=is_guided, max_calls=max_calls)
    deltas: list[Delta] = []
    for piece in pieces:
        deltas += reader.push(piece)
    answer = Answer.of([*deltas, *reader.finish(), Finish("stop")])
    return answer.text, [(call.name, call.arguments) for call in answer.calls]


def written(fmt: ToolFormat, calls: Sequence[dict[str, Any]]) -> str:
    """The calls in the exact shape that a grammar gives them."""
    shape = fmt.shape
    each = [
        f"{shape.before_name}{call['name']}{shape.before_arguments}"
        f"{json.dumps(call['arguments'])}{shape.after_arguments}"
        for call in calls
    ]
    return shape.first + shape.separator.join(each) + shape.last


CASES: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "", [("add", {"a": 1})]),
    (
        "hermes",
        'Let me see.\n<tool_call>{"arguments": {}, "name": "get_time"}</tool_call>\n<tool_call>\n'
        '{"name": "add", "arguments": "{\\"a\\": 1}"}\n</tool_call>\n',
        "Let me see.\n",
        [("get_time", {}), ("add", {"a": 1})],
    ),
    ("hermes", '<tool_call>{"name": "get_time"}', "", [("get_time", {})]),
    ("hermes", '<tool_call>{"name": "get"}\n<tool_call>{"name": "add"}', "", [("get", {}), ("add", {})]),
    ("hermes", '<tool_call>[{"name": "get"}, {"name": "add"}]</tool_call>', "", [("get", {}), ("add", {})]),
    ("llama3", '{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})]),
    (
        "llama3",
        '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": "1"}}; '
        '{"name": "get", "parameters": {}}',
        "",
        [("add", {"a": "1"}), ("get", {})],
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "get"}]',
        "",
        [("add", {"a": 1}), ("get", {})],
    ),
    (
        "mistral",
        'Yes.[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]get[ARGS]{}',
        "Yes.",
        [("add", {"a": 1}), ("get", {})],
    ),
    ("mistral", '[TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}', "", [("add", {"a": 1})]),
    ("mistral", '[TOOL_CALLS]add{"a": 1}', "", [("add", {"a": 1})]),
    (
        "json",
        '\n{"name": "add", "arguments": {"a": 1}}\n{"name": "get", "arguments": {}}\n',
        "",
        [("add", {"a": 1}), ("get", {})],
    ),
    ("json", '{"function": {"name": "add", "arguments": "{}"}, "type": "function"}', "", [("add", {})]),
]
TEXTS = [
    ("hermes", "A <tool_call> is a tag."),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": }}</tool_call> and more'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {}}}</tool_call>'),
    ("hermes", " \n <tool_"),
    ("llama3", '{"name": "Ada", "age": 36}'),
    ("llama3", '  {"answer": 42}'),
    ("llama3", "<|python_tag|>print(1)"),
    ("mistral", "[TOOL_CALLS]nothing[ARGS]{}"),
    ("mistral", "[TOOL_CALLS]" + "x" * 300 + "{}"),
    ("json", "{"),
    ("json", '[1, 2, {"name": "add"}]'),
    ("json", '{"name": "add", "arguments": [1]}'),
    ("json", "[" * 5_000),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_each_formats_calls_in_any_pieces(
    name: str, text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    for pieces in ([text], list(text), [text[i : i + 7] for i in range(0, len(text), 7)]):
        given_text, given_calls = read(FORMATS[name], pieces)
        assert given_text == content
        assert [(call, json.loads(arguments)) for call, arguments in given_calls] == calls


@pytest.mark.parametrize(("name", "text"), TEXTS)
def test_text_that_is_no_call_survives_whole(name: str, text: str) -> None:
    for pieces in ([text], list(text)):
        assert read(FORMATS[name], pieces) == (text, [])


PARTS = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", '{"name": "add", "arguments": {}}',
        '{"name": "get", "parameters": {"x": "}"}}', "{", "}", "[", "]", ";", ",", " ", "\n", '"', "\\", "add",
        "text", "<", '{"a": 1}', '"name"', ":", "é",
    ]
)  # fmt: skip


@PATIENT
@given(st.sampled_from(sorted(FORMATS)), st.lists(PARTS, max_size=12), st.booleans(), CUTS)
def test_the_result_does_not_depend_on_the_pieces(
    name: str, parts: list[str], is_guided: bool, cuts: list[int]
) -> None:
    text = "".join(parts)
    cuts = sorted(min(cut, len(text)) for cut in cuts)
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(FORMATS[name], [text], is_guided=is_guided)
    assert read(FORMATS[name], pieces, is_guided=is_guided) == whole
    assert read(FORMATS[name], list(text), is_guided=is_guided) == whole
    if not whole[1]:
        assert whole[0] == text


@PATIENT
@given(st.sampled_from(sorted(FORMATS)), st.text(max_size=60))
def test_any_other_text_survives(name: str, text: str) -> None:
    assert read(FORMATS[name], list(text)) == (text, [])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(
    st.fixed_dictionaries(
        {
            "name": st.sampled_from(NAMES),
            "arguments": st.dictionaries(st.text(max_size=5), VALUES, max_size=3),
        }
    ),
    min_size=1,
    max_size=3,
)


@PATIENT
@given(st.sampled_from(sorted(FORMATS)), CALLS, st.booleans())
def test_calls_in_a_formats_own_shape_are_read_back(
    name: str, calls: list[dict[str, Any]], is_guided: bool
) -> None:
    text = written(FORMATS[name], calls)
    for pieces in ([text], list(text)):
        content, found = read(FORMATS[name], pieces, is_guided=is_guided)
        assert content == ""
        assert [{"name": call, "arguments": json.loads(arguments)} for call, arguments in found] == calls


@pytest.mark.parametrize("name", FORMATS)
def test_a_guided_calls_arguments_are_given_out_as_they_come(name: str) -> None:
    fmt = FORMATS[name]
    reader = CallReader(fmt, NAMES, is_guided=True, max_calls=None)
    text = written(fmt, [CALL])
    start = text.index("[2, {")
    assert any(not isinstance(delta, TextDelta) for delta in reader.push(text[:start]))
    [delta] = reader.push(text[start : start + 4])
    assert delta.arguments == "[2, "  # type: ignore[union-attr]


def test_nothing_comes_behind_the_last_call_that_is_allowed() -> None:
    for is_guided in (False, True):
        text = written(HERMES, [CALL, CALL]) + " and more"
        assert len(read(HERMES, list(text), is_guided=is_guided, max_calls=1)[1]) == 1
        assert read(HERMES, list(text), is_guided=is_guided, max_calls=1)[0] == ""
