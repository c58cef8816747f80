"""Values that do not fulfil a schema, as a schema: the opposite of each keyword, or of all that it is made of.

Where a keyword's opposite has no equivalent, such as for `pattern`, values that fail by it alone are left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from .algebra import TYPES, Schema, all_of, any_of, key_of, of_types, type_of, types_of
from .scalars import above, below, bounds, other_than_strings
from .values import Rules

MAX_EXCLUDED_ARRAYS = 4  # arrays or objects of one enum
NUM_ITEMS = 4  # positions of an item that does not fulfil `items`

# Keywords with one number, and their opposites.
_BOUNDS = {
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}
# Of these no keyword is the opposite: values that fail by them alone are left out.
_WITHOUT_OPPOSITE = frozenset(
    {"pattern", "format", "multipleOf", "uniqueItems", "patternProperties", "propertyNames"}
)


def negated(rules: Rules, schema: Schema) -> Schema:
    """Values that fail the schema, in keywords that the library has. Raises `SchemaError`."""
    if isinstance(schema, bool):
        return not schema
    rules.step()
    parts: list[Schema] = []
    types = types_of(schema)
    if "type" in schema:
        parts.append(of_types(set(TYPES) - types))
    for key, value in schema.items():
        if (bound := _BOUNDS.get(key)) is not None:
            kind, opposite, change = bound
            if kind == "number":
                parts.append(_numbers({opposite: value}))
            elif kind in types and value + change >= 0:
                parts.append({"type": kind, opposite: value + change})
        elif key in ("minimum", "maximum"):
            parts.append(_numbers(below(value) if key == "minimum" else above(value)))
        elif (rule := _RULES.get(key)) is not None:
            parts += rule(rules, value, schema)
        elif key in _WITHOUT_OPPOSITE:
            rules.left_out.add(key)
    return any_of(part for part in parts if part is not False)


Parts = list[Schema]


def _numbers(limits: Mapping[str, Any]) -> Schema:
    return {"type": "number", **bounds(limits)}


def _const(rules: Rules, value: Any, schema: Mapping[str, Any]) -> Parts:
    return [_other_values(rules, [value])]


def _enum(rules: Rules, value: Any, schema: Mapping[str, Any]) -> Parts:
    return [_other_values(rules, value)]


def _other_values(rules: Rules, values: list[Any]) -> Schema:
    """All values but these."""
    rules.step()
    by_type: dict[str, list[Any]] = {}
    for value in {key_of(value): value for value in values}.values():
        by_type.setdefault(type_of(value), []).append(value)
    parts: Parts = [of_types(set(TYPES) - by_type.keys())]
    if "boolean" in by_type and len(by_type["boolean"]) == 1:
        parts.append({"enum": [not by_type["boolean"][0]]})
    if "string" in by_type:
        parts.append({"type": "string", "pattern": other_than_strings(by_type["string"])})
    if "number" in by_type:
        listed = sorted(by_type["number"])
        parts.append(_numbers(below(listed[0])))
        parts += [_numbers(above(low) | below(high)) for low, high in itertools.pairwise(listed)]
        parts.append(_numbers(above(listed[-1])))
    for kind, other in (("array", _other_arrays), ("object", _other_objects)):
        if 0 < len(by_type.get(kind, ())) <= MAX_EXCLUDED_ARRAYS:
            parts.append(all_of(any_of(other(rules, value)) for value in by_type[kind]))
    return any_of(parts)


def _other_arrays(rules: Rules, value: list[Any]) -> Parts:
    """Arrays of another length, or with another item."""
    length = len(value)
    parts: Parts = [{"type": "array", "minItems": length + 1}]
    if length:
        parts.append({"type": "array", "maxItems": length - 1})
    parts += [_item(number, _other_values(rules, [each])) for number, each in enumerate(value)]
    return parts


def _other_objects(rules: Rules, value: Mapping[str, Any]) -> Parts:
    """Objects without one of the properties, or with another value of one, or with a first property for none."""
    parts: Parts = [{"type": "object", "properties": {name: False}} for name in value]
    parts += [_property(name, _other_values(rules, [each])) for name, each in value.items()]
    return parts or [{"type": "object", "minProperties": 1}]


def _item(number: int, schema: Schema) -> Schema:
    """Arrays with this item at this position."""
    if schema is False:
        return False
    return {"type": "array", "prefixItems": [*[True] * number, schema], "minItems": number + 1}


def _property(name: str, schema: Schema) -> Schema:
    """Objects with this property."""
    if schema is False:
        return False
    return {"type": "object", "properties": {name: schema}, "required": [name]}


def _reference(rules: Rules, value: str, schema: Mapping[str, Any]) -> Parts:
    return [rules.reference(value, is_negated=True)]


def _any_all(rules: Rules, value: list[Schema], schema: Mapping[str, Any]) -> Parts:
    return [all_of(rules.negative(each) for each in value)]


def _any_one(rules: Rules, value: list[Schema], schema: Mapping[str, Any]) -> Parts:
    return [rules.negative(each) for each in value]


def _not(rules: Rules, value: Schema, schema: Mapping[str, Any]) -> Parts:
    return [rules.positive(value)]


def _one_of(rules: Rules, value: list[Schema], schema: Mapping[str, Any]) -> Parts:
    """Values of none, or of two."""
    none = all_of(rules.negative(each) for each in value)
    pairs = [
        all_of([rules.positive(one), rules.positive(other)])
        for number, one in enumerate(value)
        for other in value[number + 1 :]
        if not rules.values.are_disjoint(one, other)
    ]
    return [none, *pairs]


def _if(rules: Rules, value: Schema, schema: Mapping[str, Any]) -> Parts:
    return [
        all_of([rules.positive(value), rules.negative(schema.get("then", True))]),
        all_of([rules.negative(value), rules.negative(schema.get("else", True))]),
    ]


def _required(rules: Rules, value: list[str], schema: Mapping[str, Any]) -> Parts:
    return [{"type": "object", "properties": {name: False}} for name in value]


def _properties(rules: Rules, value: Mapping[str, Schema], schema: Mapping[str, Any]) -> Parts:
    return [_property(name, rules.negative(each)) for name, each in value.items()]


def _dependent_required(rules: Rules, value: Mapping[str, Any], schema: Mapping[str, Any]) -> Parts:
    return [
        {"type": "object", "required": [name], "properties": {missing: False}}
        for name, names in value.items()
        for missing in names
        if missing != name
    ]


def _dependent_schemas(rules: Rules, value: Mapping[str, Schema], schema: Mapping[str, Any]) -> Parts:
    return [
        all_of([{"type": "object", "required": [name]}, rules.negative(each)]) for name, each in value.items()
    ]


def _min_properties(rules: Rules, value: int, schema: Mapping[str, Any]) -> Parts:
    return [{"type": "object", "maxProperties": value - 1}] if value else []


def _max_properties(rules: Rules, value: int, schema: Mapping[str, Any]) -> Parts:
    return [{"type": "object", "minProperties": 1}] if not value else []


def _prefix_items(rules: Rules, value: list[Schema], schema: Mapping[str, Any]) -> Parts:
    return [_item(number, rules.negative(each)) for number, each in enumerate(value)]


def _items(rules: Rules, value: Schema, schema: Mapping[str, Any]) -> Parts:
    start = len(schema.get("prefixItems", ()))
    opposite = rules.negative(value)
    return [_item(start + number, opposite) for number in range(1 if opposite is True else NUM_ITEMS)]


def _contains(rules: Rules, value: Schema, schema: Mapping[str, Any]) -> Parts:
    """Too few items that match: none, where one would do."""
    if schema.get("minContains", 1) != 1:
        return []
    return [{"type": "array", "items": rules.negative(value)}]


def _additional(rules: Rules, value: Schema, schema: Mapping[str, Any]) -> Parts:
    """Objects with other properties and none of those that are listed, where no others are allowed."""
    if value is not False or "patternProperties" in schema:
        return []
    return [
        {
            "type": "object",
            "properties": dict.fromkeys(schema.get("properties", ()), False),
            "minProperties": 1,
        }
    ]


_RULES: dict[str, Any] = {
    "const": _const,
    "enum": _enum,
    "$ref": _reference,
    "anyOf": _any_all,
    "allOf": _any_one,
    "not": _not,
    "oneOf": _one_of,
    "if": _if,
    "required": _required,
    "properties": _properties,
    "dependentRequired": _dependent_required,
    "dependentSchemas": _dependent_schemas,
    "minProperties": _min_properties,
    "maxProperties": _max_properties,
    "prefixItems": _prefix_items,
    "items": _items,
    "contains": _contains,
    "additionalProperties": _additional,
}
