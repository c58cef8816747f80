"""Objects that list their properties, closed: a schema that does not say whether there may be other
properties allows any, which a model may go on inventing until its answer is full.

What is closed is a value's whole schema, by `unevaluatedProperties: false`, and never one part of a
conjunction, which would exclude the properties of the others. Schemas that are tested and not
followed (`not`, `if`, `contains`) stay as they are, and so do the alternatives of a `oneOf` that may
overlap: a value must fail the others as the schema has them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from .algebra import Schema
from .values import Values

# With one of these a schema says itself which other properties there are.
_OPEN = ("additionalProperties", "unevaluatedProperties", "propertyNames")
_ITEMS = ("items", "unevaluatedItems", "additionalProperties")
MAX_FOLLOWED = 100  # schemas that apply to one value
# The name of a definition that is the whole schema of a value; others are combined with the given one.
_NAME = "closed {}"


def closed(root: Schema, definitions: Mapping[str, Schema]) -> tuple[Schema, dict[str, Schema]]:
    """The schema and its definitions, with all objects closed that list their properties and do not say more."""
    return _Closer(definitions).document(root)


class _Closer:
    def __init__(self, definitions: Mapping[str, Schema]) -> None:
        self._given = definitions
        self._values = Values(definitions)
        self._made: dict[str, Schema] = dict(definitions)
        self._pending: list[str] = []

    def document(self, root: Schema) -> tuple[Schema, dict[str, Schema]]:
        schema = self._value(root)
        while self._pending:
            name = self._pending.pop()
            self._made[_NAME.format(name)] = self._value(self._given[name])
        return schema, self._made

    def _value(self, schema: Schema) -> Schema:
        """The whole schema of a value."""
        if isinstance(schema, bool):
            return schema
        if "$ref" in schema and schema.keys() <= {"$ref", "type"}:
            return {**schema, "$ref": f"#/$defs/{self._definition(schema)}"}
        if schema.keys() <= {"allOf", "type"} and len(schema.get("allOf", ())) == 1:
            return {**schema, "allOf": [self._value(schema["allOf"][0])]}
        for key in ("anyOf", "oneOf"):
            if schema.keys() <= {key, "type"} and key in schema and self._is_separate(key, schema[key]):
                return {**schema, key: [self._value(each) for each in schema[key]]}
        together = list(islice(self._values.together(schema), MAX_FOLLOWED + 1))
        if len(together) > MAX_FOLLOWED:
            return schema
        result = self._with_closed_children(schema, together)
        listed = {name for each in together for name in each.get("properties", ())}
        if not any("properties" in each for each in together):
            return result
        if any(key in each for each in together for key in _OPEN):
            return result
        if any(each.get("minProperties", 0) > len(listed) for each in together):
            return result
        if needed := {name for each in together for name in _needed(each)} - listed:
            result["properties"] = {**result.get("properties", {}), **dict.fromkeys(sorted(needed), True)}
        return {**result, "unevaluatedProperties": False}

    def _definition(self, schema: Mapping[str, Any]) -> str:
        name = schema["$ref"].removeprefix("#/$defs/")
        own = _NAME.format(name)
        if own not in self._made:
            self._made[own] = True  # reserves the name
            self._pending.append(name)
        return own

    def _is_separate(self, key: str, alternatives: list[Schema]) -> bool:
        """True if each alternative may be narrowed alone."""
        return key == "anyOf" or all(
            self._values.are_disjoint(one, other)
            for number, one in enumerate(alternatives)
            for other in alternatives[number + 1 :]
        )

    def _with_closed_children(
        self, schema: dict[str, Any], together: list[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """The schema with its own properties and items closed, but for properties that other schemas have, too."""
        num_lists = Counter(name for each in together for name in each.get("properties", ()))
        has_others = len(together) > 1
        result = dict(schema)
        if "properties" in schema:
            result["properties"] = {
                name: each if num_lists[name] > 1 else self._value(each)
                for name, each in schema["properties"].items()
            }
        if has_others:
            if "allOf" in schema:
                result["allOf"] = [self._part(each, num_lists) for each in schema["allOf"]]
            return result
        for key in _ITEMS:
            if key in schema:
                result[key] = self._value(schema[key])
        if "prefixItems" in schema:
            result["prefixItems"] = [self._value(each) for each in schema["prefixItems"]]
        return result

    def _part(self, schema: Schema, num_lists: Mapping[str, int]) -> Schema:
        """A part of a conjunction: its properties that no other part has are closed, and itself is not."""
        if isinstance(schema, bool) or "properties" not in schema:
            return schema
        properties = {
            name: each if num_lists[name] > 1 else self._value(each)
            for name, each in schema["properties"].items()
        }
        return {**schema, "properties": properties}


def _needed(schema: Mapping[str, Any]) -> Iterator[str]:
    """Names that an object must have, or must have with others."""
    yield from schema.get("required", ())
    for name, names in schema.get("dependentRequired", {}).items():
        yield name
        yield from names
    yield from schema.get("dependentSchemas", ())
