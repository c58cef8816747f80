"""JSON's depth and number of values are bounded before it is decoded, whatever stands in its texts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from teneral.handlers.http.json_bodies import (
    ITEM_BYTES,
    MAX_JSON_DEPTH,
    MAX_JSON_ITEMS,
    JsonDecoder,
    check_shape,
    memory_bytes,
)
from teneral.runtime.errors import RequestError

# Texts of what could be taken for structure.
TEXT = st.text(alphabet='[]{},:"\\ab\n\u00e9', max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=12,
)
decoder: JsonDecoder[Any] = JsonDecoder(Any)


def depth(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


def num_items(value: Any) -> int:
    """Commas and opening brackets: an array of n values has n of them, where n > 0."""
    if isinstance(value, dict):
        value = list(value.values())
    return max(1, len(value)) + sum(map(num_items, value)) if isinstance(value, list) else 0


def is_within(data: bytes, **bounds: int) -> bool:
    try:
        check_shape(data, **bounds)
    except RequestError:
        return False
    return True


@given(JSON, st.integers(0, 6), st.booleans(), st.sampled_from([None, 1]))
@example({'\\"': ["\\", "\\\\"], '"[': '["'}, 2, True, None)
def test_what_is_within_the_bounds_is_what_a_parser_finds(
    value: Any, bound: int, ascii_only: bool, indent: int | None
) -> None:
    data = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    assert is_within(data, max_depth=bound, max_items=1000) == (depth(value) <= bound)
    assert is_within(data, max_depth=100, max_items=bound) == (num_items(value) <= bound)


@given(st.lists(st.sampled_from([b"[", b"]", b"{", b"}", b'"', b"\\", b",", b":", b"1"]), max_size=30))
def test_whatever_the_bytes_no_more_is_decoded_than_the_bounds_say(parts: list[bytes]) -> None:
    data = b"".join(parts)
    if is_within(data, max_depth=2, max_items=4):
        try:
            value = json.loads(data)
        except ValueError:
            return
        assert depth(value) <= 2
        assert num_items(value) <= 4


@given(st.binary(max_size=100))
def test_any_bytes_are_looked_at_without_an_error_of_ours(data: bytes) -> None:
    is_within(data, max_depth=1, max_items=1)


def test_the_deepest_and_the_largest_that_may_be_are_decoded() -> None:
    assert decoder.decode(b"[" * MAX_JSON_DEPTH + b"]" * MAX_JSON_DEPTH)
    with pytest.raises(RequestError, match="nested deeper than 64 levels"):
        decoder.decode(b"[" * (MAX_JSON_DEPTH + 1) + b"]" * (MAX_JSON_DEPTH + 1))
    with pytest.raises(RequestError, match="nested deeper"):
        decoder.decode(b'{"a":' * 100_000)
    assert len(decoder.decode(b"[" + b"0," * (MAX_JSON_ITEMS - 2) + b"0]")) == MAX_JSON_ITEMS - 1
    with pytest.raises(RequestError, match="more than 524288 values"):
        decoder.decode(b"[" + b"0," * MAX_JSON_ITEMS + b"0]")


@pytest.mark.parametrize("text", ["[" * 100_000, ",{" * 600_000, '"' * 1_200_000, "\\" * 100_000 + '"['])
def test_a_text_may_hold_as_many_brackets_as_it_likes(text: str) -> None:
    assert decoder.decode(json.dumps({"prompt": text, "n": [1]}).encode()) == {"prompt": text, "n": [1]}


@pytest.mark.parametrize(
    ("begin", "repeated", "end", "may_be"),
    [
        (b'["', b"x", b'"]', True),
        (b'["', b'\\"[', b'"]', True),
        (b'["', b"\\\\", b'"]', True),
        (b"[", b'",",', b"1]", False),
        (b"[", b"[],", b"1]", False),
        (b"", b"[", b"", False),
        (b"", b"]", b"", True),  # nothing that a decoder would go into
        (b"", b'"', b"", True),
    ],
)
def test_large_hostile_bodies_are_judged_by_passes_over_their_bytes(
    begin: bytes, repeated: bytes, end: bytes, may_be: bool
) -> None:
    """Anything that takes longer than such passes would run into the test's time limit."""
    assert is_within(begin + repeated * ((8 << 20) // len(repeated)) + end) is may_be


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[NaN]", "malformed"),
        (b"[Infinity]", "malformed"),
        (b"[1e999999999999]", "out of range"),
        (b"[-1e400]", "out of range"),
        (b"[" + b"1" * 5_000 + b"]", "out of range"),
        (b"[" + b"9" * (1 << 20) + b"]", "out of range"),
        (b"[01]", "malformed"),
        (b"[1] [2]", "malformed"),
        (b'["\\ud800"]', "unpaired surrogate|not JSON"),
        (b'["\\udc00\\ud800"]', "surrogate|not JSON"),
        (b'["\xed\xa0\x80"]', "not JSON"),
        (b'["\xff"]', "not JSON"),
        (b'\xef\xbb\xbf["bom"]', "malformed"),
        ('["16"]'.encode("utf-16"), "not JSON"),
        (b'["\x01"]', "not JSON"),
    ],
)
def test_numbers_and_texts_that_are_none_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        decoder.decode(data)


def test_a_fraction_of_any_length_is_a_number() -> None:
    assert decoder.decode(b"[0." + b"3" * 1_000_000 + b"]") == [1 / 3]


def test_of_two_equal_keys_the_last_one_counts() -> None:
    assert decoder.decode(b'{"a": 1, "a": 2}') == {"a": 2} == json.loads(b'{"a": 1, "a": 2}')


def test_a_body_is_charged_for_the_values_that_it_may_become() -> None:
    assert memory_bytes(b"{}") == 2 + ITEM_BYTES
    assert memory_bytes(b'"text"') == 6
    assert memory_bytes(b"," * (1 << 20)) == (1 << 20) + ITEM_BYTES * MAX_JSON_ITEMS
