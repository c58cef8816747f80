"""JSON schemas in the keywords that the grammar library enforces.

`references.py` resolves a schema's references; the rules here express its keywords. Every rule keeps
or narrows the values that a schema allows, never widens them: `not`, `oneOf` and `if` are pushed
down to keywords whose opposite is one (`negate.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from . import arrays, evaluated, negate, scalars
from .algebra import Schema, SchemaError, all_of, any_of, other_than, types_of
from .closing import closed
from .keywords import CHILD, CHILDREN
from .references import resolved
from .scalars import FORMATS, NUMBER_FORMATS, is_annotation, length_pattern
from .values import Values

MAX_STEPS = 5_000  # schemas rewritten for one
MAX_ALTERNATIVES = 32  # of one `oneOf` that must be kept apart by their opposites
MAX_OPTIONAL = 1_000  # properties of one object that are not required
MAX_DEPENDENTS = 8  # of one schema: each doubles the forms of an object
# Keywords expressed by others, as further schemas that hold, too.
_EXPRESSED = frozenset(
    {
        *("oneOf", "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "contains"),
        *("minContains", "maxContains", "uniqueItems", "propertyNames", "minProperties", "format"),
        *("unevaluatedProperties", "unevaluatedItems"),
    }
)
_NOTHING: Any = object()


def enforceable(schema: Any, *, closes: bool = False) -> dict[str, Any]:
    """The schema in other words: every reference leads to `#/$defs`, and every keyword is one that the library has.

    With `closes`, objects that list their properties have no others unless the schema says so (`closing.py`); where
    the combinations of alternatives are too many for that, all stay open. Raises `SchemaError` for a keyword that is
    malformed, or that has no equivalent, and `RecursionError` for a schema nested too deeply.
    """
    root, definitions = resolved(schema)
    if closes:
        try:
            closed_root, closed_definitions = closed(root, definitions)
            return Rewriter(closed_definitions).document(closed_root)
        except SchemaError:
            pass  # of the closed schema alone, or raised again below
    return Rewriter(definitions).document(root)


class Rewriter:
    """The rules over one schema and its definitions."""

    def __init__(self, definitions: Mapping[str, Schema]) -> None:
        self.values = Values(definitions)
        self._definitions = definitions
        self._rewritten: dict[str, Schema] = {}
        self._pending: list[
            tuple[str, str, bool]
        ] = []  # a new definition, the old one, and whether it is negated
        self._num_steps = 0
        self.left_out: set[str] = set()

    def document(self, root: Schema) -> dict[str, Any]:
        """The whole schema. Raises `SchemaError`."""
        self._multiples = scalars.Multiples(self.values, [root, *self._definitions.values()])
        schema = self.positive(root)
        while self._pending:
            name, old, is_negated = self._pending.pop()
            rewrite = self.negative if is_negated else self.positive
            self._rewritten[name] = rewrite(self._definitions[old])
        if isinstance(schema, bool):
            if not schema:
                raise SchemaError(self._why_nothing())
            return {}
        return {**schema, "$defs": self._rewritten} if self._rewritten else schema

    def _why_nothing(self) -> str:
        if not self.left_out:
            return "no value fulfils the schema"
        names = ", ".join(sorted(self.left_out))
        return f"not, oneOf or if leave no value: a grammar cannot express what fails by {names} alone"

    def step(self) -> None:
        """Count one schema more. Raises `SchemaError` beyond the bound."""
        self._num_steps += 1
        if self._num_steps > MAX_STEPS:
            raise SchemaError("the schema is too complex: its alternatives combine too often")

    def reference(self, given: str, *, is_negated: bool) -> Schema:
        """A reference to a definition, or to its opposite."""
        old = given.removeprefix("#/$defs/")
        target = self._definitions[old]
        if isinstance(target, bool):
            return target is not is_negated
        name = f"not {old}" if is_negated else old
        if name not in self._rewritten:
            self._rewritten[name] = True
            self._pending.append((name, old, is_negated))
        return {"$ref": f"#/$defs/{name.replace(' ', '%20')}"}

    def negative(self, schema: Schema) -> Schema:
        """Values that do not fulfil the schema."""
        return negate.negated(self, schema)

    def positive(self, schema: Schema) -> Schema:
        """Values that fulfil the schema."""
        if isinstance(schema, bool):
            return schema
        self.step()
        self._multiples.check(schema)
        if evaluated.depends_on_others(schema):
            return evaluated.flattened(self, schema)
        return self.own(schema)

    def own(self, schema: Mapping[str, Any]) -> Schema:
        """`positive` of a schema whose `unevaluated…` concern its own keywords alone."""
        result: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _EXPRESSED:
                continue
            kept = self._kept(key, value, schema)
            if kept is False and key == "$ref":
                return False
            if kept is not _NOTHING:
                result[key] = kept
        for key, plain in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
            if key in schema and plain not in schema and schema[key] != {}:
                result[plain] = self.positive(schema[key])
        result |= scalars.bounds(schema)
        if "type" in schema and schema.get("multipleOf", 0.5) % 1 == 0:
            # Multiples of an integer are integers, whose grammar is much smaller.
            names = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
            result["type"] = ["integer" if name == "number" else name for name in names]
        result |= _format(schema)
        more = self._expressed(schema)
        if any(each is False for each in more):
            return False
        if types_of(schema) == {"object"} and any(
            result.get("properties", {}).get(name) is False for name in schema.get("required", ())
        ):
            return False
        more = [each for each in more if each is not True]
        if more:
            given = result.pop("allOf", [])
            result["allOf"] = [*given, *more]
            if result.keys() == {"allOf"}:
                return all_of(result["allOf"])
        return result

    def _kept(self, key: str, value: Any, schema: Mapping[str, Any]) -> Any:
        """The keyword's value; `_NOTHING`: it has no effect; False of a reference: it leads to `false`."""
        if key == "$ref":
            reference = self.reference(value, is_negated=False)
            return reference["$ref"] if isinstance(reference, dict) else False if not reference else _NOTHING
        if key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            return _NOTHING  # see `scalars.py`
        if key in CHILD:
            return self.positive(value)
        if key in CHILDREN:
            return [self.positive(each) for each in value]
        if key == "patternProperties":
            patterns = self._patterns(value)
            if "additionalProperties" not in schema and "unevaluatedProperties" not in schema:
                patterns = {each: kept for each, kept in patterns.items() if kept is not True and kept != {}}
            return patterns or _NOTHING
        if key == "properties":
            num_optional = len(value.keys() - set(schema.get("required", ())))
            if num_optional > MAX_OPTIONAL:
                raise SchemaError(
                    f"properties has {num_optional} that are not required; {MAX_OPTIONAL} may be optional"
                )
            return {name: self.positive(each) for name, each in value.items()}
        return value

    def _patterns(self, given: Mapping[str, Schema]) -> dict[str, Schema]:
        """The schemas by expression; those of one schema have one expression, as the library needs them apart."""
        merged: list[tuple[list[str], Schema]] = []
        for pattern, schema in given.items():
            rewritten = self.positive(schema)
            for patterns, known in merged:
                if known == rewritten:
                    patterns.append(pattern)
                    break
            else:
                merged.append(([pattern], rewritten))
        return {
            patterns[0] if len(patterns) == 1 else "|".join(f"(?:{each})" for each in patterns): schema
            for patterns, schema in merged
        }

    def _expressed(self, schema: Mapping[str, Any]) -> list[Schema]:
        more: list[Schema] = []
        if "oneOf" in schema:
            more.append(self.one_of(schema["oneOf"]))
        if "not" in schema:
            more.append(self.negative(schema["not"]))
        if "if" in schema:
            more.append(self._conditional(schema["if"], schema.get("then", True), schema.get("else", True)))
        for name, then in rules_of(schema):
            more.append(any_of([{"properties": {name: False}}, self.positive(then)]))
        if "contains" in schema:
            more.append(arrays.with_contains(schema, self.positive, self.negative))
        if "uniqueItems" in schema:
            more.append(arrays.with_unique_items(schema, self.values))
        if "propertyNames" in schema:
            more.append(self._property_names(schema["propertyNames"]))
        if schema.get("minProperties"):
            more.append(_min_properties(schema))
        return more

    def one_of(self, alternatives: list[Schema]) -> Schema:
        """Values of one alternative and of none of the others."""
        return any_of(
            all_of([self.positive(chosen), *opposites]) for chosen, opposites in self.exclusive(alternatives)
        )

    def exclusive(self, alternatives: list[Schema]) -> list[tuple[Schema, list[Schema]]]:
        """Each alternative, with the opposites of those that it may overlap."""
        given = [each for each in alternatives if each is not False]
        overlapping: list[list[Schema]] = [[] for _ in given]
        for (number, one), (index, other) in itertools.combinations(enumerate(given), 2):
            if not self.values.are_disjoint(one, other):
                if len(given) > MAX_ALTERNATIVES:
                    raise SchemaError(
                        f"oneOf has {len(given)} alternatives that overlap; {MAX_ALTERNATIVES} may. Use anyOf"
                    )
                overlapping[number].append(other)
                overlapping[index].append(one)
        return [
            (one, [self.negative(other) for other in others])
            for one, others in zip(given, overlapping, strict=True)
        ]

    def _conditional(self, condition: Schema, then: Schema, otherwise: Schema) -> Schema:
        if then is True or then == {}:
            return any_of([self.positive(condition), self.positive(otherwise)])
        if otherwise is True or otherwise == {}:
            return any_of([self.negative(condition), self.positive(then)])
        return any_of(
            [
                all_of([self.positive(condition), self.positive(then)]),
                all_of([self.negative(condition), self.positive(otherwise)]),
            ]
        )

    def _property_names(self, names: Schema) -> Schema:
        """Objects whose names are of this schema, and all values of other types."""
        if isinstance(names, bool):
            return names or any_of([other_than("object", {}), {"type": "object", "maxProperties": 0}])
        listed = self.values.finite(names)
        if listed is not None:
            properties = {name: True for name in listed if isinstance(name, str)}
            return {"properties": properties, "additionalProperties": False}
        while isinstance(names, dict) and names.keys() == {"$ref"}:
            self.step()
            names = self.values.target(names)
        if isinstance(names, bool):
            return self._property_names(names)
        if (patterns := name_patterns(self.positive(names))) is None:
            raise SchemaError("propertyNames is supported for lists, patterns, lengths and formats of names")
        return all_of({"patternProperties": {each: True}, "additionalProperties": False} for each in patterns)


def rules_of(schema: Mapping[str, Any]) -> list[tuple[str, Schema]]:
    """Of `dependentRequired` and `dependentSchemas`: names, and the schema of an object that has one. Raises
    `SchemaError`.
    """
    rules: list[tuple[str, Schema]] = [
        (name, {"required": names}) for name, names in schema.get("dependentRequired", {}).items() if names
    ]
    rules += [
        (name, then)
        for name, then in schema.get("dependentSchemas", {}).items()
        if then is not True and then != {}
    ]
    if len(rules) > MAX_DEPENDENTS:
        raise SchemaError(
            f"dependentRequired and dependentSchemas have {len(rules)} rules; {MAX_DEPENDENTS} may be"
        )
    return rules


def name_patterns(names: Schema) -> list[str] | None:
    """Expressions that a text must match to be of this schema, all of them; None: there are none."""
    if isinstance(names, bool):
        return [] if names else None
    patterns: list[str] = []
    for key, value in names.items():
        if key == "pattern":
            patterns.append(value)
        elif key == "allOf":
            for each in value:
                if (found := name_patterns(each)) is None:
                    return None
                patterns += found
        elif key == "anyOf" and all(isinstance(each, dict) for each in value):
            of_strings = [
                each for each in value if "type" not in each or "string" in (each["type"], *each["type"])
            ]
            found_each = [name_patterns(each) for each in of_strings]
            if any(each is None or len(each) != 1 for each in found_each):
                return None
            patterns.append("|".join(f"(?:{each[0]})" for each in found_each if each))
        elif key not in ("type", "minLength", "maxLength") or (
            key == "type" and "string" not in (value, *value)
        ):
            return None
    if "minLength" in names or "maxLength" in names:
        patterns.append(length_pattern(names.get("minLength", 0), names.get("maxLength")))
    return patterns


def _format(schema: Mapping[str, Any]) -> dict[str, Any]:
    """`format` as the library knows it, or as a pattern, or as bounds."""
    name = schema.get("format")
    if name is None or (isinstance(name, str) and is_annotation(name)):
        return {}
    if (bounds := NUMBER_FORMATS.get(name)) is not None:
        return {"allOf": [*schema.get("allOf", ()), bounds]}
    if (pattern := FORMATS.get(name)) is None:
        return {"format": name}
    if "pattern" in schema:
        return {"pattern": schema["pattern"], "allOf": [*schema.get("allOf", ()), {"pattern": pattern}]}
    return {"pattern": pattern}


def _min_properties(schema: Mapping[str, Any]) -> Schema:
    """Objects of at least `minProperties`. Names that a grammar repeats count once, so they must be names of a list."""
    least, required = schema["minProperties"], schema.get("required", [])
    if least <= max(1, len(required)):
        return {"minProperties": least}
    names = [
        name
        for name, each in schema.get("properties", {}).items()
        if name not in required and each is not False
    ]
    missing = least - len(required)
    if len(names) < missing:
        raise SchemaError(f"minProperties {least} is more than the names in properties and required")
    chosen = itertools.islice(itertools.combinations(names, missing), arrays.MAX_FORMS)
    return any_of(
        [other_than("object", schema), *({"type": "object", "required": list(each)} for each in chosen)]
    )
