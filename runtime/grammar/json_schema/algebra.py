"""Schemas as sets of values: unions, intersections, and the types of values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Schema = dict[str, Any] | bool

TYPES = ("null", "boolean", "number", "string", "array", "object")


class SchemaError(ValueError):
    """A schema that is malformed, or that has no equivalent. The text begins with a keyword."""


def all_of(schemas: Iterable[Schema]) -> Schema:
    """The values of all of these schemas."""
    kept: list[Schema] = []
    for schema in schemas:
        if schema is False:
            return False
        if schema is True or schema == {}:
            continue
        if isinstance(schema, dict) and schema.keys() == {"allOf"}:
            kept += [each for each in schema["allOf"] if each not in kept]
        elif schema not in kept:
            kept.append(schema)
    if len(kept) <= 1:
        return kept[0] if kept else True
    return {"allOf": kept}


def any_of(schemas: Iterable[Schema]) -> Schema:
    """The values of any of these schemas."""
    kept: list[Schema] = []
    for schema in schemas:
        if schema is True or schema == {}:
            return True
        if schema is False:
            continue
        if isinstance(schema, dict) and schema.keys() == {"anyOf"}:
            kept += [each for each in schema["anyOf"] if each not in kept]
        elif schema not in kept:
            kept.append(schema)
    if len(kept) <= 1:
        return kept[0] if kept else False
    return {"anyOf": kept}


def of_types(names: Iterable[str]) -> Schema:
    """All values of these types."""
    chosen = set(names)
    kept = [name for name in TYPES if name in chosen]
    if "integer" in chosen and "number" not in chosen:
        kept.append("integer")
    if not kept or len(kept) == len(TYPES):
        return bool(kept)
    return {"type": kept if len(kept) > 1 else kept[0]}


def types_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """The types that the keyword `type` allows; "number" stands for integers, too."""
    given = schema.get("type", TYPES)
    names = [given] if isinstance(given, str) else given
    return frozenset("number" if name == "integer" else name for name in names)


def other_than(kind: str, schema: Mapping[str, Any]) -> Schema:
    """The values of other types that `type` allows: keywords of one type do not concern them."""
    return of_types(types_of(schema) - {kind})


def type_of(value: Any) -> str:
    """The type of a JSON value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, Sequence) else "object"


def key_of(value: Any) -> str:
    """Equal for values that JSON Schema holds equal: 1 and 1.0, but not 1 and true."""
    return json.dumps(_normal(value), sort_keys=True)


def _normal(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list | tuple):
        return [_normal(each) for each in value]
    if isinstance(value, Mapping):
        return {str(name): _normal(each) for name, each in value.items()}
    return value
