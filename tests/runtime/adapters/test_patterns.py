"""Regular expressions over names of modules: the same matches as Python's `re`, in bounded time."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.adapters import UNSLOTH

from teneral.runtime.adapters.patterns import Pattern, StepBudget
from teneral.runtime.errors import AdapterError

NAMES = [
    f"model.layers.{layer}.{module}"
    for layer in (0, 1, 17)
    for module in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
]
ATOMS = st.sampled_from(
    [
        "a",
        "b",
        "_",
        ".",
        r"\.",
        r"\d",
        r"\W",
        r"\w",
        r"\s",
        "[ab]",
        "[^a_]",
        r"[a-c\d]",
        "[]x]",
        r"[\.a-]",
        "^",
        "$",
        r"\b",
        r"\B",
        r"\A",
        r"\Z",
        "",
    ]
)
COUNTS = st.sampled_from(["", "*", "+", "?", "*?", "+?", "??", "{2}", "{1,}", "{,2}", "{0,3}?"])
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda each: f"(?:{'|'.join(each)})"),
        st.tuples(st.sampled_from(["(", "(?:", "(?P<name>"]), inner, COUNTS).map(
            lambda each: f"{each[0]}{each[1]}){each[2]}"
        ),
        st.tuples(st.sampled_from(["a", ".", r"\d", "[ab_]"]), COUNTS).map("".join),
    ),
    max_leaves=8,
)


@settings(max_examples=400, deadline=None)
@given(EXPRESSIONS, st.text("ab_.1x-", min_size=1, max_size=7))
def test_a_name_matches_where_it_does_for_python(expression: str, name: str) -> None:
    try:
        expected = re.fullmatch(expression, name) is not None
    except re.error:  # a group's name that occurs twice, say
        return
    assert Pattern(expression, StepBudget(), option="r").matches(name) == expected


@pytest.mark.parametrize(
    "expression",
    [UNSLOTH, r".*\.(q|o)_proj", r"(.*\.)?layers\.1[0-9]\..*", r"model\.layers\.(?:0|1)\.mlp\..+"],
)
def test_what_peft_is_given_is_matched(expression: str) -> None:
    budget = StepBudget()
    found = [name for name in NAMES if Pattern(expression, budget, option="r").matches(name)]
    assert found == [name for name in NAMES if re.fullmatch(expression, name)]
    assert 0 < len(found) < len(NAMES)


@pytest.mark.parametrize("expression", ["(a*)*" * 600, "(((()*){900}){900}){900}"])
def test_an_expression_that_takes_long_is_refused(expression: str) -> None:
    pattern = Pattern(expression, StepBudget(20_000), option="r")
    with pytest.raises(AdapterError, match="too long"):
        all(pattern.matches("a" * 60) for _ in range(100))
