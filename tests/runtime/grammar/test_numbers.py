"""Numbers of answers: finite as doubles, and valid for the validators that people use, whatever the schema."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.grammar_vocabulary import Vocabulary

from teneral.runtime.errors import GrammarError
from teneral.runtime.grammar.number_matcher import MAX_DIGITS, MAX_MAGNITUDE
from teneral.runtime.grammar.spec import GrammarSpec

# Tokens of several digits, as vocabularies have them, and hostile ones.
TOKENS = ["100", "123", "999", "0000", "e1", "E+", "e-", "e400", "1e400", ".5e999", ":1e999", "," + "9" * 400]
LARGE = [1e17, 9.2e18, float(1 << 63), 1e30, 1e100, 1.797e308]
BOUND = st.one_of(
    st.floats(-1e6, 1e6),
    st.integers(-(1 << 63), 1 << 63),
    st.sampled_from(
        [*LARGE, *(-each for each in LARGE), 0, 1, -1, 0.1 + 0.2, 5e-324, (1 << 63) - 1, -(1 << 63)]
    ),
)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(TOKENS)


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from numbers(each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def check(schema: Any, answer: str) -> None:
    value = json.loads(answer)
    assert all(math.isfinite(float(each)) for each in numbers(value)), answer  # as JSON.parse reads them
    assert jsonschema_rs.is_valid(schema, value), (schema, answer)
    assert jsonschema.Draft202012Validator(schema).is_valid(value), (schema, answer)
    # A reader without integers has doubles alone.
    doubles = json.loads(answer, parse_int=float)
    assert all(math.isfinite(each) for each in numbers(doubles)), answer


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number"},
        {"type": "integer"},
        {"type": ["integer", "null"]},
        {"type": "number", "minimum": 0},
        {"type": "number", "maximum": 0},
        {"type": "array", "items": {"type": "number"}, "minItems": 3, "maxItems": 5},
        {"anyOf": [{"type": "number"}, {"type": "null"}]},
        {"not": {"type": ["string", "object", "array", "null", "boolean"]}},
    ],
)
def test_numbers_are_finite(vocabulary: Vocabulary, schema: Any) -> None:
    spec = GrammarSpec.json_schema(schema)
    answers = [answer for seed in range(60) if (answer := vocabulary.sample(spec, seed)) is not None]
    assert len(answers) > 30
    for answer in answers:
        check(schema, answer)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(["number", "integer"]),
    keys=st.dictionaries(
        st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]), BOUND, max_size=2
    ),
    seed=st.integers(0, 1 << 16),
)
def test_answers_keep_any_bounds_that_a_double_or_an_int64_holds(
    vocabulary: Vocabulary, kind: str, keys: dict[str, Any], seed: int
) -> None:
    schema = {"type": kind, **keys}
    try:
        spec = GrammarSpec.json_schema(schema)
        answers = [vocabulary.sample(spec, seed + number) for number in range(8)]
    except GrammarError:
        least = max(
            (keys[each] for each in ("minimum", "exclusiveMinimum") if each in keys), default=-math.inf
        )
        most = min((keys[each] for each in ("maximum", "exclusiveMaximum") if each in keys), default=math.inf)
        # Nothing is between, or nothing that has 64 bits.
        assert most - least <= max(1, abs(most) * 1e-12) or least > 9e18 or most < -9e18, schema
        return
    for answer in answers:
        if answer is not None:
            check(schema, answer)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "minimum": -1.797e308, "maximum": 1.797e308},
        {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1},
        {"type": "integer", "minimum": 0, "maximum": 1 << 63},
        {"type": "integer", "minimum": 0, "maximum": (1 << 64) - 1},
    ],
)
def test_the_bounds_that_generators_write_are_taken(vocabulary: Vocabulary, schema: Any) -> None:
    spec = GrammarSpec.json_schema(schema)
    for text in ("0", "7", "123456789012345678"):
        assert vocabulary.accepts(spec, text)


def test_what_reads_like_a_number_is_not_cut_in_texts(vocabulary: Vocabulary) -> None:
    long = "1" * 200 + "e12345"
    assert vocabulary.accepts(GrammarSpec.json_schema({"type": "string"}), json.dumps(long))
    for schema in ({"type": "string", "pattern": "^[0-9]{200}$"}, {"const": 10**100}, {"const": "1e400"}):
        spec = GrammarSpec.json_schema(schema)
        answer = vocabulary.sample(spec, random.Random(0).randrange(1 << 16))
        assert answer is not None
        check(schema, answer)


def test_the_largest_number_is_finite() -> None:
    assert math.isfinite(float(MAX_MAGNITUDE))
    assert MAX_DIGITS > 17  # of a double
