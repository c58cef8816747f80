"""A function's parameters as the schema of its arguments in a guided call.

Most schemas of functions list properties and do not say whether there may be others. JSON Schema allows any then, which
a model may go on inventing until its answer is full: guided arguments have none but those of the list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# With one of these a list of properties alone does not say which there are.
_OPEN = frozenset(
    {
        "additionalProperties",
        "patternProperties",
        "unevaluatedProperties",
        "anyOf",
        "oneOf",
        "$ref",
        "if",
        "not",
    }
)
_LISTS = ("anyOf", "oneOf", "prefixItems")
_NAMED = ("properties", "$defs", "definitions")


def arguments_schema(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """An object's schema; its objects are closed unless schemas are merged in it (`allOf`)."""
    schema = {**parameters, "type": "object"}
    return schema if _merges(schema) else _closed(schema)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    lists_properties = isinstance(schema.get("properties"), dict)
    for key in _NAMED:
        if isinstance(named := schema.get(key), dict):
            result[key] = {name: _closed(each) for name, each in named.items()}
    for key in _LISTS:
        if isinstance(each_of := schema.get(key), list) and not lists_properties:
            result[key] = [_closed(each) for each in each_of]
    if "items" in schema:
        result["items"] = _closed(schema["items"])
    if lists_properties and not _OPEN & schema.keys():
        result["additionalProperties"] = False
    return result


def _merges(schema: Any) -> bool:
    """True if a schema merges several by `allOf`, at any depth."""
    if isinstance(schema, dict):
        return len(schema.get("allOf") or ()) > 1 or any(_merges(each) for each in schema.values())
    return isinstance(schema, list) and any(_merges(each) for each in schema)
