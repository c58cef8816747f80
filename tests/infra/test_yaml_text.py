from __future__ import annotations

import sys

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from teneral.infra.render.yaml_text import yaml_text
from teneral.loader.errors import UsageError

TEXTS = st.one_of(
    st.text(),
    st.text(alphabet="yesnofalutr ~:#-'\"|>{}[]&*!%@`,?\n \t0123456789.e+_", max_size=12),
    st.sampled_from(
        ["", "yes", "No", "0x1F", "1e3", "012", "1:30", "=", "<<", "null", "~", ".inf", "- a", "2026-11-23"]
    ),
)
VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXTS
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=12,
)


@given(st.lists(VALUES, min_size=1, max_size=3))
def test_a_reader_of_yaml_finds_the_value_that_was_written(documents):
    text = yaml_text(documents)
    assert list(yaml.safe_load_all(text)) == documents
    assert text == yaml_text(documents)


def test_lists_start_in_the_column_of_their_key_and_long_texts_keep_their_lines():
    text = yaml_text([{"a": [{"b": 1, "c": ["x", "y"]}], "text": "one\n\n  two\n", "empty": {}, "none": []}])
    assert text == 'a:\n- b: 1\n  c:\n  - x\n  - "y"\ntext: |\n  one\n\n    two\nempty: {}\nnone: []\n'


@pytest.mark.parametrize(
    "text", ["1e3", "0o17", "y", "4e12345678", "0x1F", "12_000", "1:30", ".inf", "2026-11-23"]
)
def test_texts_that_any_yaml_version_reads_as_something_else_are_quoted(text):
    assert yaml_text([{"a": text}]) == f'a: "{text}"\n'


def test_an_error_names_the_package_that_rendering_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(UsageError) as raised:
        yaml_text([{}])
    assert "teneral[render]" in str(raised.value.hint)


@pytest.mark.parametrize("value", [{1: 2}, object(), float("nan"), float("inf"), b"bytes", "\ud800", {1, 2}])
def test_values_outside_the_subset_are_refused(value):
    with pytest.raises((TypeError, ValueError)):
        yaml_text([{"a": value} if not isinstance(value, dict) else value])
