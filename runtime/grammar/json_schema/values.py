"""Sets of values known from a schema: finite ones, and pairs of schemas without a common value; and
the protocol of the rules that rewrite schemas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from .algebra import TYPES, Schema, key_of, type_of, types_of

MAX_DEPTH = 8  # of references and alternatives that are followed
MAX_RANGE = 64  # integers between two bounds
MAX_COMPARISONS = 20_000  # of pairs of schemas, for one document: beyond that any two may overlap


class Values:
    """The values that are possible of schemas with these definitions."""

    def __init__(self, definitions: Mapping[str, Schema]) -> None:
        self._definitions = definitions
        self._num_comparisons = 0
        # By the identity of a schema, which the definitions keep alive.
        self._types: dict[int, frozenset[str]] = {}
        self._keys: dict[int, frozenset[str] | None] = {}

    def target(self, schema: Mapping[str, Any]) -> Schema:
        """The definition to which `$ref` leads."""
        return self._definitions[schema["$ref"].removeprefix("#/$defs/")]

    def together(self, schema: Schema, seen: frozenset[str] = frozenset()) -> Iterator[Mapping[str, Any]]:
        """All schemas that may apply to the same value. There may be many: bound them."""
        if isinstance(schema, bool):
            return
        yield schema
        for key in ("allOf", "anyOf", "oneOf"):
            for each in schema.get(key, ()):
                yield from self.together(each, seen)
        for key in ("if", "then", "else"):
            yield from self.together(schema.get(key, True), seen)
        for each in schema.get("dependentSchemas", {}).values():
            yield from self.together(each, seen)
        if (name := schema.get("$ref")) is not None and name not in seen:
            yield from self.together(self.target(schema), seen | {name})

    def finite(self, schema: Schema, depth: int = MAX_DEPTH) -> list[Any] | None:
        """Values among which all values of the schema are; None: not known to be few."""
        if isinstance(schema, bool):
            return None if schema else []
        if "const" in schema:
            return [schema["const"]]
        if "enum" in schema:
            return list({key_of(value): value for value in schema["enum"]}.values())
        if (names := types_of(schema)) <= {"null", "boolean"}:
            return [
                *((None,) if "null" in names else ()),
                *((False, True) if "boolean" in names else ()),
            ]
        if schema.get("type") == "integer" and (values := _integers(schema)) is not None:
            return values
        if not depth:
            return None
        if "$ref" in schema and (found := self.finite(self.target(schema), depth - 1)) is not None:
            return found
        for each in schema.get("allOf", ()):
            if (found := self.finite(each, depth - 1)) is not None:
                return found
        for key in ("anyOf", "oneOf"):
            lists = [self.finite(each, depth - 1) for each in schema.get(key, ())]
            if lists and all(each is not None for each in lists):
                return list({key_of(value): value for each in lists for value in each or ()}.values())
        return None

    def has_one_text(self, schema: Schema, depth: int = MAX_DEPTH) -> bool:
        """True if each of its values has one text as compact JSON in a grammar: no floats, and objects that list their
        properties.
        """
        if isinstance(schema, bool) or not depth:
            return schema is False
        if "const" in schema or "enum" in schema:
            return all(map(_has_one_text, schema.get("enum", [schema.get("const")])))
        if "$ref" in schema and self.has_one_text(self.target(schema), depth - 1):
            return True
        if any(self.has_one_text(each, depth - 1) for each in schema.get("allOf", ())):
            return True
        for key in ("anyOf", "oneOf"):
            if key in schema and all(self.has_one_text(each, depth - 1) for each in schema[key]):
                return True
        names = [schema["type"]] if isinstance(schema.get("type"), str) else schema.get("type", ["number"])
        if "number" in names:
            return False
        if "array" in names and not all(
            self.has_one_text(each, depth - 1)
            for each in (*schema.get("prefixItems", ()), schema.get("items", True))
        ):
            return False
        return "object" not in names or (
            schema.get("additionalProperties") is False
            and "patternProperties" not in schema
            and all(self.has_one_text(each, depth - 1) for each in schema.get("properties", {}).values())
        )

    def are_disjoint(self, one: Schema, other: Schema, depth: int = MAX_DEPTH) -> bool:
        """True if it is certain that no value is one of both."""
        if one is False or other is False:
            return True
        self._num_comparisons += 1
        if isinstance(one, bool) or isinstance(other, bool) or not depth:
            return False
        if self._num_comparisons > MAX_COMPARISONS:
            return False
        if not self.types(one) & self.types(other):
            return True
        for a, b in ((one, other), (other, one)):
            if "$ref" in a and self.are_disjoint(self.target(a), b, depth - 1):
                return True
            if any(self.are_disjoint(each, b, depth - 1) for each in a.get("allOf", ())):
                return True
            for key in ("anyOf", "oneOf"):
                if key in a and all(self.are_disjoint(each, b, depth - 1) for each in a[key]):
                    return True
        values, others = self._own_keys(one), self._own_keys(other)
        if values is not None and others is not None:
            return not values & others
        if self.types(one) & self.types(other) == {"object"}:
            return self._are_disjoint_objects(one, other, depth) or self._are_disjoint_objects(
                other, one, depth
            )
        return False

    def _own_keys(self, schema: Mapping[str, Any]) -> frozenset[str] | None:
        """Its values where it lists them itself, each as a key."""
        if id(schema) not in self._keys:
            values = self.finite(dict(schema), 0)
            self._keys[id(schema)] = None if values is None else frozenset(map(key_of, values))
        return self._keys[id(schema)]

    def _are_disjoint_objects(self, one: Mapping[str, Any], other: Mapping[str, Any], depth: int) -> bool:
        """By a property that one requires, and that the other excludes or requires to be something else."""
        theirs = other.get("properties", {})
        for name in one.get("required", ()):
            if name in theirs:
                mine = one.get("properties", {}).get(name, True)
                if theirs[name] is False:
                    return True
                if name in other.get("required", ()) and self.are_disjoint(mine, theirs[name], depth - 1):
                    return True
            elif other.get("additionalProperties") is False and not other.get("patternProperties"):
                return True
        return False

    def types(self, schema: Schema, depth: int = MAX_DEPTH) -> frozenset[str]:
        """Types among which those of all its values are."""
        if isinstance(schema, bool):
            return frozenset(TYPES if schema else ())
        if (known := self._types.get(id(schema))) is not None:
            return known
        found = types_of(schema)
        if "const" in schema:
            found &= {type_of(schema["const"])}
        if "enum" in schema:
            found &= {type_of(value) for value in schema["enum"]}
        if not depth:
            return found
        if "$ref" in schema:
            found &= self.types(self.target(schema), depth - 1)
        for each in schema.get("allOf", ()):
            found &= self.types(each, depth - 1)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                found &= frozenset[str]().union(*(self.types(each, depth - 1) for each in schema[key]))
        self._types[id(schema)] = found
        return found


def _integers(schema: Mapping[str, Any]) -> list[Any] | None:
    least, most = schema.get("minimum"), schema.get("maximum")
    if not isinstance(least, int) or not isinstance(most, int) or most - least >= MAX_RANGE:
        return None
    return list(range(least, most + 1))


def _has_one_text(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_has_one_text, value))
    return not isinstance(value, float | Mapping)


class Rules(Protocol):
    """All methods return schemas in the library's keywords, and raise `SchemaError`."""

    values: Values
    left_out: set[str]  # keywords without an opposite, by which values fail that are left out

    def step(self) -> None:
        """Count one schema more. Raises `SchemaError` beyond the bound."""

    def positive(self, schema: Schema) -> Schema:
        """Values that fulfil the schema."""

    def negative(self, schema: Schema) -> Schema:
        """Values that do not fulfil the schema."""

    def own(self, schema: Mapping[str, Any]) -> Schema:
        """`positive` of a schema whose `unevaluated…` concern its own keywords alone."""

    def exclusive(self, alternatives: list[Schema]) -> list[tuple[Schema, list[Schema]]]:
        """Each alternative, with the opposites of those that it may overlap."""

    def reference(self, given: str, *, is_negated: bool) -> Schema:
        """A reference to a definition, or to its opposite."""
