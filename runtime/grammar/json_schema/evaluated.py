"""`unevaluatedProperties` and `unevaluatedItems`, where other keywords next to them evaluate properties and items.

What is evaluated depends on which alternatives hold, so they are enumerated: each conjunction of alternatives knows
what it evaluates, and the rest is then `additionalProperties` or `items` of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from .algebra import Schema, SchemaError, all_of, any_of
from .values import Rules

MAX_CASES = 64
MAX_TOGETHER = 4  # alternatives of an anyOf of which several may hold at once
_UNEVALUATED = frozenset({"unevaluatedProperties", "unevaluatedItems"})
# With one of these, the properties or items that a schema evaluates are not those of its own keywords alone.
_IN_PLACE = ("allOf", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas", "$ref", "contains")


class _Case(Struct, frozen=True):
    """A conjunction of schemas, and what it evaluates."""

    schemas: tuple[Schema, ...] = ()
    names: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()
    all_properties: bool = False
    num_items: int = 0
    matching: tuple[Schema, ...] = ()  # items of these schemas: of `contains`
    all_items: bool = False

    def with_schema(self, *schemas: Schema) -> _Case:
        return self & _Case(schemas)

    def __and__(self, other: _Case) -> _Case:
        return _Case(
            self.schemas + other.schemas,
            self.names | other.names,
            self.patterns | other.patterns,
            self.all_properties or other.all_properties,
            max(self.num_items, other.num_items),
            self.matching + other.matching,
            self.all_items or other.all_items,
        )


def depends_on_others(schema: Mapping[str, Any]) -> bool:
    """True if what is unevaluated depends on further schemas that apply to the same value."""
    counts = [key for key in _UNEVALUATED if schema.get(key, True) not in (True, {})]
    return bool(counts) and any(key in schema for key in _IN_PLACE)


def flattened(rules: Rules, schema: dict[str, Any]) -> Schema:
    """The schema as alternatives without unevaluated properties and items. Raises `SchemaError`."""
    return any_of(all_of(case.schemas) for case in _cases(rules, schema, frozenset()))


def _cases(rules: Rules, schema: Schema, seen: frozenset[str]) -> list[_Case]:
    if isinstance(schema, bool):
        return [_Case()] if schema else []
    rules.step()
    own = {key: value for key, value in schema.items() if key not in _IN_PLACE and key not in _UNEVALUATED}
    cases = [_own_case(rules, own, schema)]
    for key, value in schema.items():
        match key:
            case "allOf":
                for each in value:
                    cases = _product(cases, _cases(rules, each, seen))
            case "anyOf":
                cases = _product(cases, _any_of(rules, value, seen))
            case "oneOf":
                cases = _product(cases, _one_of(rules, value, seen))
            case "if":
                cases = _product(cases, _conditional(rules, schema, seen))
            case "$ref":
                if value in seen:
                    raise SchemaError(f"unevaluatedProperties or …Items with a {key} to itself")
                cases = _product(cases, _cases(rules, rules.values.target(schema), seen | {value}))
            case "dependentSchemas":
                for name, each in value.items():
                    without = _Case(({"properties": {name: False}},))
                    having = [
                        case.with_schema({"type": "object", "required": [name]})
                        for case in _cases(rules, each, seen)
                    ]
                    # Values of other types are of the first case.
                    cases = _product(cases, [without, *having])
            case _:
                pass
    return [_without_rest(rules, case, schema) for case in cases]


def _own_case(rules: Rules, own: Mapping[str, Any], schema: Mapping[str, Any]) -> _Case:
    contains = {
        key: schema[key] for key in ("contains", "minContains", "maxContains", "type") if key in schema
    }
    schemas = [rules.own(own)]
    if "contains" in schema:
        schemas.append(rules.own(contains))
    return _Case(
        tuple(schemas),
        frozenset(schema.get("properties", ())),
        frozenset(schema.get("patternProperties", ())),
        "additionalProperties" in schema,
        len(schema.get("prefixItems", ())),
        (rules.positive(schema["contains"]),) if "contains" in schema else (),
        "items" in schema,
    )


def _any_of(rules: Rules, alternatives: list[Schema], seen: frozenset[str]) -> list[_Case]:
    """Those of each alternative, and of several together, which evaluate more."""
    each_of = [_cases(rules, each, seen) for each in alternatives]
    found = [case for cases in each_of for case in cases]
    if len(alternatives) <= MAX_TOGETHER:
        for size in range(2, len(alternatives) + 1):
            for chosen in itertools.combinations(each_of, size):
                together = [_Case()]
                for cases in chosen:
                    together = _product(together, cases)
                found += together
    return found


def _one_of(rules: Rules, alternatives: list[Schema], seen: frozenset[str]) -> list[_Case]:
    return [
        case.with_schema(*opposites)
        for chosen, opposites in rules.exclusive(alternatives)
        for case in _cases(rules, chosen, seen)
    ]


def _conditional(rules: Rules, schema: Mapping[str, Any], seen: frozenset[str]) -> list[_Case]:
    condition = schema["if"]
    then = _product(_cases(rules, condition, seen), _cases(rules, schema.get("then", True), seen))
    opposite = rules.negative(condition)
    if opposite is False:
        return then
    return then + [case.with_schema(opposite) for case in _cases(rules, schema.get("else", True), seen)]


def _without_rest(rules: Rules, case: _Case, schema: Mapping[str, Any]) -> _Case:
    """The case with the schema's own `unevaluated…` as what it leaves over."""
    if (rest := schema.get("unevaluatedProperties")) is not None:
        if not case.all_properties and rest is not True and rest != {}:
            others: dict[str, Any] = {"additionalProperties": rules.positive(rest)}
            if case.names:
                others["properties"] = dict.fromkeys(sorted(case.names), True)
            if case.patterns:
                others["patternProperties"] = dict.fromkeys(sorted(case.patterns), True)
            case = case.with_schema(others)
        case = case & _Case(all_properties=True)
    if (rest := schema.get("unevaluatedItems")) is not None:
        if not case.all_items and rest is not True and rest != {}:
            items: dict[str, Any] = {"items": any_of([*case.matching, rules.positive(rest)])}
            if case.num_items:
                items["prefixItems"] = [True] * case.num_items
            case = case.with_schema(items)
        case = case & _Case(all_items=True)
    return case


def _product(cases: list[_Case], others: list[_Case]) -> list[_Case]:
    if len(cases) * len(others) > MAX_CASES:
        raise SchemaError(
            f"unevaluatedProperties or …Items with more than {MAX_CASES} combinations of alternatives"
        )
    return [case & other for case in cases for other in others]
