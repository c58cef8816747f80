"""Schemas that a grammar cannot follow are refused soon, and with a reason that is true."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tests.support.grammar_vocabulary import Vocabulary

from teneral.handlers.openai.tools.functions import tool_plan
from teneral.runtime.errors import GrammarError, RequestError
from teneral.runtime.grammar import spec as specs
from teneral.runtime.grammar.json_schema import rewrite
from teneral.runtime.grammar.json_schema.rewrite import MAX_OPTIONAL
from teneral.runtime.grammar.json_schema.scalars import MAX_FACTOR
from teneral.runtime.grammar.spec import GrammarSpec


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary()


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"$ref": "#"}, "leads back to itself"),
        ({"allOf": [{"$ref": "#"}]}, "leads back to itself"),
        ({"anyOf": [{"type": "null"}, {"$ref": "#"}]}, "leads back to itself"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"not": {"$ref": "#/$defs/a"}}}}, "leads back to itself"),
        ({"not": {"pattern": "a"}}, "cannot express what fails by pattern alone"),
        ({"type": "string", "not": {"format": "date"}}, "cannot express what fails by format alone"),
        ({"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]}, "cannot express what fails by multipleOf alone"),
        (
            {"type": "object", "properties": {"a": {"not": {"pattern": "a"}}}, "required": ["a"]},
            "cannot express what fails by pattern alone",
        ),
        ({"not": {}}, "no value fulfils the schema"),
        ({"type": "integer", "multipleOf": 99_991}, f"up to {MAX_FACTOR}"),
        ({"type": "number", "multipleOf": 1e-30}, f"up to {MAX_FACTOR}"),
        ({"allOf": [{"multipleOf": 1993}, {"multipleOf": 1999}]}, f"above {MAX_FACTOR}"),
        ({"multipleOf": 1500, "allOf": [{"multipleOf": 0.001}]}, f"above {MAX_FACTOR}"),
        ({"properties": {f"p{n}": True for n in range(MAX_OPTIONAL + 1)}}, f"{MAX_OPTIONAL} may be optional"),
    ],
)
def test_the_reason_of_a_refusal_is_true_and_names_the_field(
    vocabulary: Vocabulary, schema: Any, reason: str
) -> None:
    with pytest.raises(GrammarError, match=reason) as caught:
        vocabulary.compiler.compile(GrammarSpec.json_schema(schema, param="p"))
    assert caught.value.param == "p"


@pytest.mark.parametrize(
    ("schema", "answer"),
    [
        ({"properties": {"a": {"$ref": "#"}}}, '{"a":{"a":1}}'),
        ({"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(MAX_OPTIONAL)}}, '{"p999":""}'),
        ({"type": "integer", "multipleOf": 1800}, "7200"),
        ({"type": ["number", "null"], "multipleOf": 1999}, "3998"),
        ({"type": "number", "multipleOf": 0.125}, "1.375"),
        ({"type": "number", "multipleOf": 0.01}, "-2.25"),
        ({"properties": {f"p{n}": {"multipleOf": 100 + n} for n in range(50)}}, '{"p0":200,"p1":202}'),
    ],
)  # fmt: skip
def test_schemas_within_the_bounds_are_followed(vocabulary: Vocabulary, schema: Any, answer: str) -> None:
    spec = GrammarSpec.json_schema(schema)
    assert vocabulary.accepts(spec, answer)
    for seed in range(10):
        vocabulary.sample(spec, seed, 60)  # never becomes too complex


def test_the_schemas_of_all_tools_have_one_bound_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs, "MAX_SCHEMAS_S", 0.05)
    parts = [{"anyOf": [{"required": [f"a{m}{n}"]} for n in range(8)]} for m in range(60)]
    tools = [
        {"type": "function", "function": {"name": f"f{n}", "parameters": {"allOf": parts, "title": str(n)}}}
        for n in range(200)
    ]
    start_s = time.thread_time()
    with pytest.raises(RequestError, match="its schemas take more than") as caught:
        tool_plan(tools, "required", None)
    assert caught.value.param == "tools"
    assert time.thread_time() - start_s < 30


def test_a_schema_that_comes_again_is_not_rewritten_again(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"type": "object", "properties": {"once": {"type": "string"}}}
    first = GrammarSpec.json_schema(schema)
    monkeypatch.setattr(rewrite, "enforceable", None)
    assert GrammarSpec.json_schema(dict(schema)) == first
