"""Objects that list their properties have no others, unless their schema says so."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest
from tests.support.grammar_vocabulary import Vocabulary

from teneral.runtime.grammar.spec import GrammarSpec

A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
X = {"x": 1}
TREE = {"type": "object", "properties": {"of": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}
PETS = {
    kind: {
        "type": "object",
        "properties": {"kind": {"const": kind}, name: {"type": "string"}},
        "required": ["kind"],
    }
    for kind, name in (("cat", "lives"), ("dog", "tail"))
}
# Schemas, values that they allow, and values that only an open object allows.
CLOSED: list[tuple[Any, list[Any], list[Any]]] = [
    (A, [{"a": 1}], [{"a": 1, **X}]),
    ({"properties": {}}, [{}, 1], [X]),
    ({**A, "additionalProperties": True}, [{"a": 1}, {"a": 1, **X}], []),
    ({**A, "additionalProperties": {"type": "integer"}}, [{"a": 1, **X}], []),
    ({**A, "unevaluatedProperties": {}}, [{"a": 1, **X}], []),
    ({**A, "unevaluatedProperties": True}, [{"a": 1, **X}], []),
    ({**A, "propertyNames": {"maxLength": 1}}, [{"a": 1, **X}], []),
    ({**A, "patternProperties": {"^x": True}}, [{"a": 1, **X}], [{"a": 1, "y": 1}]),
    ({**A, "required": ["a", "z"]}, [{"a": 1, "z": 2}], [{"a": 1, "z": 1, **X}]),
    ({**A, "minProperties": 1}, [{"a": 1}], [{"a": 1, **X}]),
    ({"type": "object"}, [X, {}], []),
    ({"required": ["a"]}, [{"a": 1, **X}], []),
    ({"allOf": [A, B]}, [{"a": 1, "b": 2}], [{"a": 1, "b": 2, **X}]),
    ({**A, "allOf": [B]}, [{"a": 1, "b": 2}], [{"a": 1, "b": 2, **X}]),
    ({"allOf": [{"$ref": "#/$defs/a"}, B], "$defs": {"a": A}}, [{"a": 1, "b": 2}], [{"a": 1, "b": 2, **X}]),
    ({"$ref": "#/$defs/a", "properties": {"b": True}, "$defs": {"a": A}}, [{"b": 1, "a": 1}], [{"a": 1, **X}]),
    ({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": A}}, [{"a": 1}], [{"a": 1, **X}]),
    ({"allOf": [{**A, "additionalProperties": True}, B]}, [{"a": 1, "b": 2, **X}], []),
    ({"anyOf": [A, B, {"type": "null"}]}, [{"a": 1}, {"b": 1}, None], [{"a": 1, **X}, {"b": 1, **X}]),
    ({"oneOf": list(PETS.values())}, [{"kind": "cat", "lives": "9"}], [{"kind": "cat", "tail": "x"}]),
    # Both hold for {"b": 1}, whichever of them is closed.
    ({"oneOf": [{"properties": {"a": True}}, {"properties": {"b": True}, "required": ["b"]}]}, [{"a": 1}], []),
    ({"properties": {"in": A}}, [{"in": {"a": 1}}], [{"in": {"a": 1, **X}}]),
    ({"type": "array", "items": A}, [[{"a": 1}]], [[{"a": 1, **X}]]),
    ({"additionalProperties": A}, [{"x": {"a": 1}}], [{"x": {"a": 1, **X}}]),
    ({"allOf": [{"properties": {"in": A}}, {"properties": {"in": B}}]}, [{"in": {"a": 1, "b": 2}}], [X]),
    ({"allOf": [{"properties": {"in": A}}, B]}, [{"in": {"a": 1}, "b": 2}], [{"in": {"a": 1, **X}, "b": 2}]),
    ({"$ref": "#/$defs/tree", "$defs": {"tree": TREE}}, [{"of": [{"of": []}]}], [{"of": [X]}, X]),
    (
        {"properties": {"a": {"enum": [1, 2]}}, "if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}},
        [{"a": 2}, {"a": 1, "b": 0}],
        [{"a": 2, **X}],
    ),
    ({"not": A}, [{"b": 1}], []),
    ({**A, "dependentRequired": {"a": ["c"]}}, [{"a": 1, "c": 1}], [{"a": 1, "c": 1, **X}]),
]  # fmt: skip


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary()


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


@pytest.mark.parametrize(("schema", "kept", "left_out"), CLOSED)
def test_objects_with_properties_are_closed_unless_the_schema_says_otherwise(
    vocabulary: Vocabulary, schema: Any, kept: list[Any], left_out: list[Any]
) -> None:
    spec = GrammarSpec.json_schema(schema)
    for value in kept:
        assert jsonschema_rs.is_valid(schema, value)
        assert vocabulary.accepts(spec, compact(value)), value
    opened = GrammarSpec.json_schema(schema, closes=False)
    for value in left_out:
        assert jsonschema_rs.is_valid(schema, value) == vocabulary.accepts(opened, compact(value))
        assert not vocabulary.accepts(spec, compact(value)), value
    for seed in range(20):
        if (answer := vocabulary.sample(spec, seed, 120)) is not None:
            assert jsonschema_rs.is_valid(schema, json.loads(answer)), answer


def test_too_many_combinations_stay_open(vocabulary: Vocabulary) -> None:
    alternatives = [{"anyOf": [{"properties": {f"{m}{n}": True}} for n in range(2)]} for m in "abcd"]
    assert vocabulary.accepts(GrammarSpec.json_schema({"allOf": alternatives}), compact({"x": 1}))


def test_references_that_multiply_are_bounded() -> None:
    levels: dict[str, Any] = {
        f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 1}"}]} for n in range(40)
    }
    GrammarSpec.json_schema({"$ref": "#/$defs/d0", "$defs": {**levels, "d40": A}})
