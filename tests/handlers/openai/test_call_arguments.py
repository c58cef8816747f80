"""Arguments of a conversation's calls: any text becomes an object that chat templates can use."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teneral.handlers.openai.tools.arguments import INVALID_JSON, arguments_object

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 53), 1 << 53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        (" null ", {}),
        ('{"city": "Oslo"}', {"city": "Oslo"}),
        ('{"city', {}),
        ('{"city": ', {}),
        ('{"city": "Os', {"city": "Os"}),
        ('{"city": "Oslo", "da', {"city": "Oslo"}),
        ('{"city": "Oslo", "days": 1', {"city": "Oslo", "days": 1}),
        ('{"city": "Oslo", "days": -', {"city": "Oslo"}),
        ('{"city": "Oslo", "sure": tru', {"city": "Oslo"}),
        ('{"a": [1, {"b": "x\\', {"a": [1, {"b": "x"}]}),
        ('{"a": "\\ud83d\\ude', {"a": ""}),
        ('{"a": "}]\\"', {"a": '}]"'}),
        ("nonsense", {INVALID_JSON: "nonsense"}),
        ("[1]", {INVALID_JSON: "[1]"}),
        ('"text"', {INVALID_JSON: '"text"'}),
        ('{"a": 1}}', {INVALID_JSON: '{"a": 1}}'}),
        ('{"a": nonsense', {INVALID_JSON: '{"a": nonsense'}),
        ('{"a": 1e999}', {INVALID_JSON: '{"a": 1e999}'}),
    ],
)
def test_any_text_of_arguments_becomes_an_object(text: str, expected: dict[str, Any]) -> None:
    assert arguments_object(text) == expected


@given(st.dictionaries(st.text(max_size=5), JSON, max_size=5), st.booleans(), st.data())
def test_a_cut_object_keeps_what_came_whole_and_nothing_else(
    value: dict[str, Any], is_ascii: bool, data: st.DataObject
) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii)
    assert arguments_object(text) == value
    cut = arguments_object(text[: data.draw(st.integers(1, len(text)))])
    assert INVALID_JSON not in cut or INVALID_JSON in value
    names = list(value)
    assert list(cut) == names[: len(cut)]
    assert all(cut[name] == value[name] for name in names[: max(0, len(cut) - 1)])


@given(st.text())
def test_no_text_is_lost_or_refused(text: str) -> None:
    assert isinstance(arguments_object(text), dict)
    assert arguments_object("x" + text) == {INVALID_JSON: ("x" + text).strip()}


@pytest.mark.parametrize(
    "text",
    [
        '{"a":' * 200_000,
        '{"a": "' + '\\"' * 500_000,
        '{"a": [' + "[]," * 300_000,
        '{"a": "' + "\\" * 999_999,
        '{"a": ["' + '","' * 300_000,
        '{"a' + '"' * 900_000,
        '{"a": [' + '"\\\\",' * 60_000,
        '{"a": [' + "1,{}," * 30_000,
    ],
)
def test_hostile_arguments_take_linear_time(text: str) -> None:
    assert isinstance(arguments_object(text), dict)
