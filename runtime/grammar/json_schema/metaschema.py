"""The metaschema of draft 2020-12 as a schema that grammars can follow: for answers that are schemas themselves.

It allows fewer than the standard's own: `required` and the lists of `dependentRequired`, which may repeat no name, have
one name at most.
"""

from __future__ import annotations

from typing import Any

DIALECT = "https://json-schema.org/draft/2020-12/schema"
DRAFTS = {
    "http://json-schema.org/draft-04/schema": 4,
    "http://json-schema.org/draft-06/schema": 6,
    "http://json-schema.org/draft-07/schema": 7,
    "https://json-schema.org/draft/2019-09/schema": 2019,
    DIALECT: 2020,
    # As many schemas spell them.
    "https://json-schema.org/draft-07/schema": 7,
    "http://json-schema.org/schema": 2020,
}
_TYPES = {"enum": ["array", "boolean", "integer", "null", "number", "object", "string"]}
_SCHEMA = {"$ref": "#"}
_BY_VALUE: tuple[tuple[Any, tuple[str, ...]], ...] = (
    ({"type": "string", "pattern": "^[^#\\s]*$", "format": "uri-reference"}, ("$id",)),
    ({"type": "string", "format": "uri"}, ("$schema",)),
    ({"type": "string", "format": "uri-reference"}, ("$ref", "$dynamicRef")),
    ({"type": "string", "pattern": "^[A-Za-z_][-A-Za-z0-9._]*$"}, ("$anchor", "$dynamicAnchor")),
    (
        {"type": "string"},
        ("$comment", "title", "description", "format", "contentEncoding", "contentMediaType"),
    ),
    ({"type": "string", "format": "regex"}, ("pattern",)),
    (True, ("const", "default")),
    ({"type": "array"}, ("enum", "examples")),
    ({"type": "boolean"}, ("uniqueItems", "deprecated", "readOnly", "writeOnly")),
    (
        {"type": "integer", "minimum": 0},
        (
            *("minLength", "maxLength", "minItems", "maxItems", "minContains", "maxContains"),
            *("minProperties", "maxProperties"),
        ),
    ),
    ({"type": "number"}, ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    ({"type": "number", "exclusiveMinimum": 0}, ("multipleOf",)),
    ({"type": "array", "items": {"type": "string"}, "maxItems": 1}, ("required",)),
    (
        {
            "type": "object",
            "additionalProperties": {"type": "array", "items": {"type": "string"}, "maxItems": 1},
        },
        ("dependentRequired",),
    ),
    (
        {"anyOf": [_TYPES, {"type": "array", "items": _TYPES, "minItems": 1, "uniqueItems": True}]},
        ("type",),
    ),
    ({"type": "array", "items": _SCHEMA, "minItems": 1}, ("allOf", "anyOf", "oneOf", "prefixItems")),
    (
        {"type": "object", "additionalProperties": _SCHEMA},
        ("$defs", "properties", "dependentSchemas"),
    ),
    (
        {
            "type": "object",
            "propertyNames": {"format": "regex"},
            "additionalProperties": _SCHEMA,
        },
        ("patternProperties",),
    ),
    (
        _SCHEMA,
        (
            *("items", "contains", "additionalProperties", "propertyNames", "not", "if", "then", "else"),
            *("unevaluatedItems", "unevaluatedProperties", "contentSchema"),
        ),
    ),
)
# Keywords that the standard still checks, though the draft no longer has them.
_GONE = ("definitions", "dependencies", "$recursiveAnchor", "$recursiveRef", "$vocabulary")


def metaschema() -> dict[str, Any]:
    """The schema, whose references lead into itself."""
    properties = {name: schema for schema, names in _BY_VALUE for name in names}
    return {
        "$id": DIALECT,
        "type": ["object", "boolean"],
        "properties": properties | dict.fromkeys(_GONE, False),
    }
