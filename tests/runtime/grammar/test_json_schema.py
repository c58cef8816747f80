"""Schemas in the keywords that the library has: the answers that they allow, judged by jsonschema-rs."""

from __future__ import annotations

import json
import random
from typing import Any, ClassVar

import jsonschema_rs
import pytest
from tests.support.grammar_answers import accepts, random_answer
from tests.support.instances import TinyParts

from teneral.runtime.errors import GrammarError, RequestError
from teneral.runtime.grammar.compiler import GrammarCompiler
from teneral.runtime.grammar.json_schema.scalars import FORMATS
from teneral.runtime.grammar.spec import GrammarSpec


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


ITEM = {"enum": ["a", "b", "c"]}
NODE: Any = {
    "$id": "https://example.com/strict",
    "$dynamicAnchor": "node",
    "$ref": "tree",
    "unevaluatedProperties": False,
    "$defs": {
        "tree": {
            "$id": "tree",
            "$dynamicAnchor": "node",
            "type": "object",
            "properties": {"value": True, "children": {"type": "array", "items": {"$dynamicRef": "#node"}}},
        }
    },
}
# A schema, the values that it is to allow, and values that it must not.
REWRITTEN: list[tuple[Any, list[Any], list[Any]]] = [
    (True, [1, {}], []),
    ({"not": {"type": "string"}}, [1, None], ["a"]),
    ({"not": {"type": ["integer", "null"]}}, ["a"], [1, None]),
    ({"not": {"enum": ["a", "ab", 1, None]}}, ["", "b", "abc", 2, 0, True, []], ["a", "ab", 1, None]),
    ({"not": {"const": [1, 2]}}, [[1], [2, 2], [1, 2, 3], 1], [[1, 2]]),
    ({"not": {"const": {"a": 1}}}, [{}, {"a": 2}, 1], [{"a": 1}]),
    ({"type": "string", "not": {"maxLength": 2}}, ["abc"], ["ab", ""]),
    ({"not": {"required": ["a"]}}, [{}, {"b": 1}], [{"a": 1}, 1]),
    ({"not": {"not": {"type": "string"}}}, ["a"], [1]),
    ({"properties": {"a": {"not": {}}}}, [{}, {"b": 1}], [{"a": 1}]),
    ({"if": {"type": "string"}, "type": "integer"}, [1], ["a"]),
    ({"then": {"type": "string"}, "type": "integer"}, [1], ["a"]),
    (
        {
            "type": "object",
            "properties": {"kind": {"enum": ["a", "b"]}, "x": {"type": "integer"}},
            "required": ["kind"],
            "additionalProperties": False,
            "if": {"properties": {"kind": {"const": "a"}}},
            "then": {"required": ["x"]},
            "else": {"properties": {"x": False}},
        },
        [{"kind": "a", "x": 1}, {"kind": "b"}],
        [{"kind": "a"}, {"kind": "b", "x": 1}, {}],
    ),
    ({"oneOf": [{"minimum": 2}, {"type": "integer"}]}, [1, 0], [2, 3]),
    ({"type": "string", "oneOf": [{"minLength": 2}, {"maxLength": 4}]}, ["a", "abcde"], ["ab", "abcd"]),
    (
        {"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object"},
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 1}],
    ),
    (
        {
            "oneOf": [
                {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False},
                {"type": "object", "properties": {"b": {"type": "string"}}, "additionalProperties": False},
            ]
        },
        [{"a": "x"}, {"b": "x"}],
        [{}, {"a": "x", "b": "x"}, {"a": 1}],
    ),
    ({"minContains": 2, "type": "array"}, [[]], [1]),
    ({"contains": {"type": "integer"}}, [[1], ["a", 1], [1, "a", 2], 7], [[], ["a"]]),
    (
        {"type": "array", "contains": {"const": 1}, "minContains": 1.0, "maxContains": 2},
        [[1], [1, 1], [2, 1], [1, 2, 1]],
        [[], [2], [1, 1, 1]],
    ),
    (
        {"type": "array", "items": ITEM, "uniqueItems": True},
        [[], ["b"], ["c", "a"], ["a", "b", "c"], ["c", "b", "a"]],
        [["a", "a"], ["d"], ["a", "b", "a"]],
    ),
    (
        {"prefixItems": [{"type": "boolean"}, {"type": "boolean"}], "items": False, "uniqueItems": True},
        [[], [True], [True, False], 1],
        [[True, True], [False, False], [True, False, True]],
    ),
    ({"type": "array", "items": True, "uniqueItems": True, "maxItems": 1}, [[], [1]], [[1, 1]]),
    (
        {"type": "array", "items": {"type": "string", "maxLength": 3}, "uniqueItems": True},
        [[], ["a"], ["a", "", "ab", "é\n"]],
        [["a", "a"], ["a", "ab", "a"], ["", ""], ['"', '"']],
    ),
    (
        {"uniqueItems": True, "items": {"type": ["integer", "null", "boolean"]}},
        [[1, 12, 2, None, True, -1], {"a": 1}],
        [[1, 12, 1], [None, None], [True, True], [0, 0]],
    ),
    (
        {
            "properties": {"x": {"type": "array", "uniqueItems": True, "items": {"$ref": "#/$defs/pair"}}},
            "$defs": {
                "pair": {
                    "type": "object",
                    "properties": {"k": {"type": "string"}, "t": {"$ref": "#/$defs/tags"}},
                    "additionalProperties": False,
                },
                "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
            },
        },
        [{"x": [{"k": "a", "t": ["p"]}, {"k": "a", "t": ["q"]}, {}]}, {"y": [1, 1]}],
        [{"x": [{"k": "a"}, {"k": "a"}]}, {"x": [{"k": "a", "t": ["p", "p"]}]}, {"x": [{}, {}]}],
    ),
    (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "unevaluatedProperties": False},
        [{"a": 1}, {}],
        [{"b": 1}, {"a": 1, "b": 1}],
    ),
    (
        {"allOf": [{"properties": {"a": {"type": "integer"}}}], "unevaluatedProperties": {"type": "string"}},
        [{"a": 1}, {"a": 1, "b": "x"}],
        [{"a": "x"}, {"b": 1}],
    ),
    (
        {
            "type": "object",
            "properties": {"k": {"enum": ["a", "b"]}},
            "required": ["k"],
            "oneOf": [
                {"properties": {"k": {"const": "a"}, "x": True}},
                {"properties": {"k": {"const": "b"}, "y": True}},
            ],
            "unevaluatedProperties": False,
        },
        [{"k": "a", "x": 1}, {"k": "b", "y": 1}, {"k": "a"}],
        [{"k": "a", "y": 1}, {"k": "b", "x": 1}, {"k": "a", "z": 1}],
    ),
    (
        {"dependentSchemas": {"a": {"properties": {"b": True}}}, "properties": {"a": True}, "type": "object",
         "unevaluatedProperties": False},
        [{"a": 1, "b": 2}, {}, {"a": 1}],
        [{"b": 2}, {"a": 1, "c": 1}],
    ),
    (
        {"type": "array", "prefixItems": [{"type": "integer"}], "unevaluatedItems": False},
        [[1], []],
        [[1, 2]],
    ),
    (
        {"type": "array", "prefixItems": [True], "contains": {"type": "string"}, "unevaluatedItems": False},
        [[1, "a"], ["a"], ["a", "b"]],
        [[1], [1, 2], ["a", 2]],
    ),
    ({"if": {"prefixItems": [{"const": "a"}]}, "unevaluatedItems": False}, [["a"], [], 1], [["b"], ["a", 1]]),
    (
        {
            "type": "object",
            "propertyNames": {"enum": ["a", "b"]},
            "additionalProperties": {"type": "integer"},
        },
        [{"a": 1}, {"a": 1, "b": 2}],
        [{"c": 1}, {"a": "x"}],
    ),
    ({"type": "object", "propertyNames": {"pattern": "^x+$"}}, [{"xx": 1}], [{"y": 1}]),
    (
        {"properties": {"a": True, "bbb": True}, "propertyNames": {"maxLength": 2}},
        [{"a": 1}, {"cc": 1}],
        [{"bbb": 1}],
    ),
    ({"propertyNames": {"not": {"const": "a"}}}, [{"b": 1}, {"aa": 1}], [{"a": 1}]),
    ({"propertyNames": False}, [{}, 1], [{"a": 1}]),
    ({"propertyNames": {"$ref": "#/$defs/x"}, "$defs": {"x": {"maxLength": 1}}}, [{"a": 1}], [{"aa": 1}]),
    (
        {"type": "object", "properties": {"a": True, "b": True}, "dependentRequired": {"a": ["b"]}},
        [{}, {"b": 1}, {"a": 1, "b": 1}],
        [{"a": 1}],
    ),
    (
        {"properties": {"a": True}, "dependentSchemas": {"a": {"properties": {"b": {"type": "integer"}}}}},
        [{"b": "x"}, {"a": 1, "b": 2}],
        [{"a": 1, "b": "x"}],
    ),
    (
        {"type": "object", "properties": {"a": True, "b": True, "c": True}, "minProperties": 2},
        [{"a": 1, "b": 1}, {"b": 1, "c": 1}],
        [{"a": 1}, {}],
    ),
    ({"patternProperties": {"^a": {"type": "integer"}, "^ab": {"type": "integer"}}}, [{"ab": 1}], [{"ab": "x"}]),
    ({"maxLength": 2.0, "type": "string"}, ["ab"], ["abc"]),
    ({"type": "number", "exclusiveMinimum": 1, "maximum": 1.5}, [1.25, 1.5], [1, 2]),
    ({"type": "integer", "format": "int32"}, [1], [1 << 31]),
    ({"type": "string", "format": "AWS::EC2::VPC.Id", "maxLength": 5}, ["vpc-1"], ["vpc-123"]),
    # References
    (
        {"$ref": "#item", "$defs": {"x": {"$anchor": "item", "type": "integer"}}},
        [1],
        ["a"],
    ),
    (
        {"$id": "https://example.com/a/b", "$ref": "c#/$defs/d", "$defs": {"x": {"$id": "/a/c", "$defs": {"d": ITEM}}}},
        ["a"],
        ["d", 1],
    ),
    (NODE, [{"value": 1, "children": [{"value": 2}]}], [{"vaule": 1}, {"children": [{"vaule": 1}]}]),
    (
        {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/x", "maxLength": 1,
         "definitions": {"x": {"type": "string"}}},
        ["abc"],
        [1],
    ),
    (
        {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "integer"}],
         "additionalItems": {"type": "string"}, "dependencies": {"a": ["b"], "c": {"required": ["d"]}}},
        [[1, "a"], [], {"b": 1, "a": 1}, {"d": 1, "c": 1}],
        [["a"], [1, 2], {"a": 1}, {"c": 1}],
    ),
    (
        {"$ref": "https://json-schema.org/draft/2020-12/schema"},
        [True, {"type": "object", "properties": {"a": {"minLength": 1}}}, {"type": ["null", "string"]}],
        [1, {"type": "text"}, {"minLength": -1}, {"properties": {"a": {"items": 1}}}],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "valid", "invalid"), REWRITTEN)
def test_rewritten_keywords_allow_what_the_schema_allows(
    parts: TinyParts, compiler: GrammarCompiler, schema: Any, valid: list[Any], invalid: list[Any]
) -> None:
    judge = jsonschema_rs.validator_for(schema)
    grammar = compiler.compile(GrammarSpec.json_schema(schema, closes=False))
    for value in valid:
        assert judge.is_valid(value), value
        assert accepts(parts, grammar, compact(value)), value
    for value in invalid:
        assert schema.get("format") or not judge.is_valid(value), value
        assert not accepts(parts, grammar, compact(value)), value


REFUSED: list[tuple[Any, str]] = [
    ({"allOf": [{"pattern": "a"}], "not": {"pattern": "a"}, "type": "string"}, ""),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "object", "minProperties": 2}, "minProperties"),
    ({"properties": {"a": {"$ref": "#/$defs/gone"}}}, "$ref"),
    ({"$ref": "https://example.com/elsewhere"}, "$ref"),
    ({"$ref": "#nowhere"}, "$ref"),
    ({"$schema": "https://example.com/dialect", "type": "string"}, "$schema"),
    ({"type": "strnig"}, "type"),
    ({"required": True}, "required"),
    ({"properties": [1]}, "properties"),
    ({"allOf": []}, "allOf"),
    ({"minLength": -1}, "minLength"),
    ({"minLength": 1.5}, "minLength"),
    ({"maximum": "1"}, "maximum"),
    ({"items": 5}, "a schema must be"),
    ({"disallow": "string"}, "disallow"),
    ({"dependentSchemas": {f"p{number}": {"required": ["x"]} for number in range(9)}}, "dependentRequired"),
    ({"propertyNames": {"pattern": "a", "not": {"pattern": "b"}}}, "propertyNames"),
    ({"not": {"enum": ["x" * 3_000]}}, "not"),
    (
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a", "unevaluatedItems": False}}},
        "leads back to itself",
    ),
    (False, "no value"),
]


@pytest.mark.parametrize(("schema", "keyword"), REFUSED)
def test_keywords_without_an_equivalent_are_refused_by_name(
    compiler: GrammarCompiler, schema: Any, keyword: str
) -> None:
    with pytest.raises(GrammarError) as caught:
        compiler.compile(GrammarSpec.json_schema(schema, param="p"))
    assert caught.value.param == "p"
    assert keyword in caught.value.message


def deep(length: int, key: str) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(length):
        schema = {key: schema} if key == "not" else {key: [schema, {"type": "null"}]}
    return schema


HOSTILE = [
    deep(600, "not"),
    deep(300, "oneOf"),
    deep(12, "oneOf"),
    {"oneOf": [{"properties": {f"a{number}": {"minimum": number}}} for number in range(40)]},
    {
        "unevaluatedProperties": False,
        "allOf": [{"anyOf": [{"properties": {f"a{m}{n}": True}} for n in range(4)]} for m in range(6)],
    },
    {"type": "array", "items": {"enum": [1.5, *range(60)]}, "uniqueItems": True},
    {"type": "array", "contains": {"const": 1}, "minContains": 500},
    {"x-guidance": {"lenient": True}, "type": "array", "items": {}, "uniqueItems": True},
    {f"$defs{number}": {} for number in range(3_000)} | {"$ref": "#/$defs0/x"},
]


@pytest.mark.parametrize("schema", HOSTILE)
def test_hostile_schemas_are_refused_with_an_error(compiler: GrammarCompiler, schema: Any) -> None:
    with pytest.raises(RequestError):
        compiler.compile(GrammarSpec.json_schema(schema))


@pytest.mark.parametrize("name", FORMATS)
def test_texts_of_a_format_are_valid(parts: TinyParts, compiler: GrammarCompiler, name: str) -> None:
    """Random answers of each format that is a pattern here."""
    judge = jsonschema_rs.validator_for({"format": name.rstrip("1345")}, validate_formats=True)
    grammar = compiler.compile(GrammarSpec.json_schema({"type": "string", "format": name}))
    rng = random.Random(name)
    answers = {answer for _ in range(60) if (answer := random_answer(parts, grammar, rng, 40)) is not None}
    assert answers
    for answer in answers:
        assert judge.is_valid(json.loads(answer)), answer


VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, -1, 1.5, 3, "", "a", "ab", "b", "c"),
    *([], [1], ["a"], [1, "a"], ["a", "a"], [1, 2], [2, 1], [1, 1, 1], [True, False], [1, 2, "a"], [[1]], [{}]),
    *({}, {"a": 1}, {"b": 1}, {"a": "a"}, {"a": 1, "b": 1}, {"a": None, "b": True, "c": 1}, {"c": "c"}),
    *({"ab": 1}, {"a": {"a": 1}}, {"a": [1, 2]}, {"b": "ab", "c": 2}, {"a": {}, "b": {"a": 1}}),
]  # fmt: skip
NAMES = ["a", "b", "c"]
UNIQUE = [{"enum": [1, 2, "a"]}, {"type": "boolean"}, {"type": ["string", "integer"]}, {"type": "integer"}]


class RandomSchemas:
    """Small schemas of all keywords, over few names and values, so that they meet often."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def schema(self, depth: int) -> Any:
        rng = self._rng
        if rng.random() < 0.08:
            return rng.choice([True, False, {}])
        keys = rng.sample(sorted(self.SIMPLE), rng.choice([1, 1, 2, 3]))
        if depth:
            keys += rng.sample(sorted(self.COMBINED), rng.choice([0, 1, 1, 2]))
        rng.shuffle(keys)
        result: dict[str, Any] = {}
        for key in keys:
            result |= {**self.SIMPLE, **self.COMBINED}[key](self, depth)
        return result

    def below(self, depth: int) -> Any:
        if depth:
            return self.schema(depth - 1)
        return self._rng.choice([True, False, {"type": "integer"}, {"const": 1}, {"type": "string"}])

    def one(self, *choices: Any) -> Any:
        return self._rng.choice(choices)

    def several(self, depth: int) -> list[Any]:
        return [self.below(depth) for _ in range(self.one(1, 2, 3))]

    SIMPLE: ClassVar[dict[str, Any]] = {
        "type": lambda s, d: {"type": s.one("object", "array", "string", "integer", "number", ["null", "boolean"])},
        "const": lambda s, d: {"const": s.one(*VALUES)},
        "enum": lambda s, d: {"enum": s._rng.sample(VALUES, s.one(1, 2, 4))},
        "bounds": lambda s, d: {s.one("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"): s.one(0, 1, 1.5)},
        "length": lambda s, d: {s.one("minLength", "maxLength"): s.one(1, 2)},
        "pattern": lambda s, d: {"pattern": s.one("^a", "b$", "^a*$")},
        "properties": lambda s, d: {"properties": {each: s.below(d) for each in s._rng.sample(NAMES, 2)}},
        "required": lambda s, d: {"required": s._rng.sample(NAMES, s.one(1, 2))},
        "additional": lambda s, d: {"additionalProperties": s.below(d)},
        "patterns": lambda s, d: {"patternProperties": {s.one("^a", "b"): s.below(d)}},
        "items": lambda s, d: {"items": s.below(d)},
        "prefix": lambda s, d: {"prefixItems": s.several(d)},
        "sizes": lambda s, d: {s.one("minItems", "maxItems", "minProperties", "maxProperties"): 1},
        "multiple": lambda s, d: {"multipleOf": s.one(2, 0.5)},
    }  # fmt: skip
    COMBINED: ClassVar[dict[str, Any]] = {
        "all": lambda s, d: {"allOf": s.several(d)},
        "any": lambda s, d: {"anyOf": s.several(d)},
        "one": lambda s, d: {"oneOf": s.several(d)},
        "not": lambda s, d: {"not": s.below(d)},
        "if": lambda s, d: {"if": s.below(d), s.one("then", "x"): s.below(d), s.one("else", "x"): s.below(d)},
        "contains": lambda s, d: {"contains": s.below(d), s.one("x", "minContains", "maxContains"): s.one(0, 1, 2)},
        "unique": lambda s, d: {"uniqueItems": True, "items": s.one(*UNIQUE)},
        "needs": lambda s, d: {"dependentRequired": {s.one(*NAMES): [s.one(*NAMES)]}},
        "depends": lambda s, d: {"dependentSchemas": {s.one(*NAMES): s.below(d)}},
        "unevaluated": lambda s, d: {"unevaluatedProperties": s.below(d)},
        "unevaluated items": lambda s, d: {"unevaluatedItems": s.below(d)},
        "names": lambda s, d: {"propertyNames": s.one({"maxLength": 1}, {"enum": ["a", "b"]}, {"pattern": "^a"})},
        "ref": lambda s, d: {"$ref": "#/$defs/" + s.one("x", "y")},
    }  # fmt: skip


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_no_schema_accepts_a_value_that_it_forbids(
    parts: TinyParts, compiler: GrammarCompiler, seed: int, closes: bool
) -> None:
    """Random schemas with values at random, and with random answers, judged by jsonschema-rs."""
    schemas, rng = RandomSchemas(seed), random.Random(seed)
    compiled = right = 0
    for _ in range(40):
        schema = schemas.schema(2)
        if not isinstance(schema, dict):
            continue
        schema["$defs"] = {"x": schemas.schema(1), "y": schemas.schema(1)}
        judge = jsonschema_rs.validator_for(schema)
        try:
            grammar = compiler.compile(GrammarSpec.json_schema(schema, closes=closes))
        except RequestError:
            continue
        compiled += 1
        for value in VALUES:
            is_accepted, is_valid = accepts(parts, grammar, compact(value)), judge.is_valid(value)
            assert is_valid or not is_accepted, (schema, value)
            right += is_accepted
        for _ in range(2):
            answer = random_answer(parts, grammar, rng, 30)
            if answer is not None:
                assert judge.is_valid(json.loads(answer)), (schema, answer)
    assert compiled > 15
    assert right > 100
