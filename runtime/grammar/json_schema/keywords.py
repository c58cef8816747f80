"""The keywords of JSON Schema: what their values are, and those of older drafts in the words of draft 2020-12."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .algebra import TYPES, SchemaError

CHILD = frozenset(
    {
        *("additionalProperties", "propertyNames", "unevaluatedProperties", "items", "unevaluatedItems"),
        *("contains", "not", "if", "then", "else"),
    }
)
CHILDREN = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
NAMED = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
# Without effect on which values a schema allows, once its references are resolved.
DROPPED = frozenset(
    {
        *("$schema", "$id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "$comment"),
        *("$defs", "definitions"),
    }
)
_COUNTS = frozenset(
    {
        *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        *("minContains", "maxContains"),
    }
)
_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_DATA = frozenset(
    {"const", "enum", "required", "type", "pattern", "format", "uniqueItems", "dependentRequired"}
)
_REFERENCES = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})
_KNOWN = CHILD | CHILDREN | NAMED | DROPPED | _COUNTS | _NUMBERS | _DATA | _REFERENCES


def checked(schema: Mapping[str, Any], draft: int) -> dict[str, Any]:
    """The schema's keywords as draft 2020-12 has them, without those that are unknown or annotations.

    Raises `SchemaError` for a value of a wrong type.
    """
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("items", "additionalItems", "dependencies"):
            continue
        if key in _KNOWN:
            result[key] = _checked(key, value, schema)
            if result[key] is None and key != "const":
                del result[key]
        elif key in ("extends", "disallow"):
            raise SchemaError(f"{key} is of draft 3, which is not supported")
    _items(schema, result, draft)
    if "dependencies" in schema:
        _dependencies(schema["dependencies"], result)
    return result


def _checked(key: str, value: Any, schema: Mapping[str, Any]) -> Any:
    """The value; None: the keyword has no effect."""
    if key in CHILDREN:
        _require(isinstance(value, list), key, "a list of schemas")
        _require(bool(value), key, "a list that is not empty")
    elif key in NAMED or key == "dependentRequired":
        _require(
            isinstance(value, Mapping) and all(isinstance(name, str) for name in value), key, "an object"
        )
        if key == "dependentRequired":
            for each in value.values():
                _require(_is_names(each), key, "an object of lists of names")
    elif key in _COUNTS:
        is_count = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        _require(is_count and value == int(value) and value < 1 << 53, key, "a whole number, 0 or more")
        return int(value)
    elif key in _NUMBERS:
        return _number(key, value, schema)
    elif key == "enum":
        _require(isinstance(value, list) and bool(value), key, "a list that is not empty")
    elif key == "required":
        _require(_is_names(value), key, "a list of names")
        return list(dict.fromkeys(value))
    elif key == "type":
        return _types(value)
    elif key in ("pattern", "format"):
        _require(isinstance(value, str), key, "a text")
    elif key == "uniqueItems":
        _require(isinstance(value, bool), key, "true or false")
        return value or None
    return value


def _number(key: str, value: Any, schema: Mapping[str, Any]) -> Any:
    if isinstance(value, bool) and key.startswith("exclusive"):  # draft 4
        return schema.get("minimum" if key == "exclusiveMinimum" else "maximum") if value else None
    _require(isinstance(value, int | float) and not isinstance(value, bool), key, "a number")
    _require(key != "multipleOf" or value > 0, key, "a number above 0")
    return value


def _types(value: Any) -> Any:
    names = [value] if isinstance(value, str) else value
    _require(isinstance(names, list) and bool(names), "type", "a type or a list of types")
    for name in names:
        _require(isinstance(name, str), "type", "a type or a list of types")
        if name not in TYPES and name != "integer":
            raise SchemaError(f"type {name[:50]!r} is unknown; there are {', '.join(TYPES)} and integer")
    return value


def _items(schema: Mapping[str, Any], result: dict[str, Any], draft: int) -> None:
    """`items` as a list, and `additionalItems`, are of older drafts."""
    items = schema.get("items")
    if isinstance(items, list):
        if items:
            result["prefixItems"] = items
        if "additionalItems" in schema:
            result["items"] = schema["additionalItems"]
    elif items is not None:
        result["items"] = items
    if draft <= 2019 and "prefixItems" in schema and not isinstance(items, list):
        result.pop("prefixItems", None)
    if draft == 2019 and "unevaluatedItems" in schema and _mentions_contains(schema):
        raise SchemaError("unevaluatedItems together with contains is supported as draft 2020-12 defines it")


def _mentions_contains(schema: Any) -> bool:
    if isinstance(schema, Mapping):
        return "contains" in schema or any(_mentions_contains(each) for each in schema.values())
    return isinstance(schema, list) and any(_mentions_contains(each) for each in schema)


def _dependencies(value: Any, result: dict[str, Any]) -> None:
    _require(isinstance(value, Mapping), "dependencies", "an object")
    names = {name: each for name, each in value.items() if isinstance(each, list)}
    for each in names.values():
        _require(_is_names(each), "dependencies", "an object of lists of names or schemas")
    schemas = {name: each for name, each in value.items() if name not in names}
    if names:
        result["dependentRequired"] = {**result.get("dependentRequired", {}), **names}
    if schemas:
        result["dependentSchemas"] = {**result.get("dependentSchemas", {}), **schemas}


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _require(holds: bool, key: str, what: str) -> None:
    if not holds:
        raise SchemaError(f"{key} must be {what}")
