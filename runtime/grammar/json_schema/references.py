"""A schema's references, resolved: `$ref`, `$dynamicRef`, `$id`, `$anchor`, and the keywords of
older drafts.

Every target of a reference becomes a definition of its own, one for each dynamic scope that reaches
it differently. Nothing is fetched: resources are the schema's own, embedded by `$id`, and the
metaschema of draft 2020-12. That is for answers that are schemas themselves, and allows fewer of
them than the standard's own: `required` and the lists of `dependentRequired`, which may repeat no
name, have one name at most.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from msgspec import Struct, field

from .algebra import Schema, SchemaError
from .keywords import CHILD, CHILDREN, DROPPED, NAMED, checked

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
Scope = tuple[
    tuple[str, str], ...
]  # each dynamic anchor in scope, with the URI of the outermost resource that has it
MAX_DEFINITIONS = 4_000
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def metaschema() -> dict[str, Any]:
    """The schema, whose references lead into itself."""
    properties = {name: schema for schema, names in _BY_VALUE for name in names}
    return {
        "$id": DIALECT,
        "type": ["object", "boolean"],
        "properties": properties | dict.fromkeys(_GONE, False),
    }


def resolved(schema: Any) -> tuple[Schema, dict[str, Schema]]:
    """The schema and its definitions by name, to which each `$ref` leads as `#/$defs/NAME`. Raises `SchemaError`."""
    return _Resolver(schema).run()


class _Resource(Struct, eq=False):
    """A schema with a URI of its own."""

    uri: str
    schema: Any
    dialect: str
    anchors: dict[str, Any] = field(default_factory=dict)
    dynamic: dict[str, Any] = field(default_factory=dict)

    @property
    def is_old(self) -> bool:
        """True for drafts before 2019-09, where keywords next to `$ref` have no effect."""
        return DRAFTS[self.dialect] <= 7


class _Resolver:
    def __init__(self, schema: Any) -> None:
        self._resources: dict[str, _Resource] = {}
        self._resource_of: dict[int, _Resource] = {}  # by the identity of a schema within it
        self._has_dynamic_anchors = False
        self._names: dict[tuple[int, Scope], str] = {}
        self._definitions: dict[str, Schema] = {}
        self._pending: list[tuple[str, Any, _Resource, Scope]] = []
        self._root = schema
        self._index(schema, None)

    def run(self) -> tuple[Schema, dict[str, Schema]]:
        if isinstance(self._root, bool):
            return self._root, {}
        resource = self._resource_of[id(self._root)]
        root = self._converted(self._root, resource, self._entered(resource, ()))
        while self._pending:
            name, schema, resource, scope = self._pending.pop()
            self._definitions[name] = self._converted(schema, resource, scope)
        _check_cycles(root, self._definitions)
        return root, self._definitions

    def _index(self, schema: Any, resource: _Resource | None) -> None:
        """Find the resources and anchors within a schema."""
        if not isinstance(schema, Mapping):
            return
        resource = self._own_resource(schema, resource)
        self._resource_of[id(schema)] = resource
        for key, anchors in (("$anchor", resource.anchors), ("$dynamicAnchor", resource.dynamic)):
            if isinstance(name := schema.get(key), str):
                anchors[name] = schema
                self._has_dynamic_anchors |= key == "$dynamicAnchor"
        for key, value in schema.items():
            if key in NAMED and isinstance(value, Mapping):
                for each in value.values():
                    self._index(each, resource)
            elif key in CHILD or key in CHILDREN:
                for each in value if isinstance(value, list) else [value]:
                    self._index(each, resource)

    def _own_resource(self, schema: Mapping[str, Any], resource: _Resource | None) -> _Resource:
        """The resource that begins at this schema, or that of the schema around it."""
        dialect = resource.dialect if resource is not None else DIALECT
        if isinstance(given := schema.get("$schema"), str):
            dialect = given.rstrip("#")
        key = "id" if DRAFTS.get(dialect) == 4 else "$id"
        uri = schema.get(key)
        is_reference = "$ref" in schema and DRAFTS.get(dialect, 0) in (4, 6, 7)
        if not isinstance(uri, str) or (is_reference and resource is not None):
            if resource is None:
                resource = self._resources.setdefault("", _Resource("", schema, dialect))
            return resource
        if uri.startswith("#") and resource is not None:  # of older drafts: an anchor
            resource.anchors[uri[1:]] = schema
            return resource
        base = resource.uri if resource is not None else ""
        uri, fragment = urldefrag(urljoin(base, uri))
        own = self._resources[uri] = _Resource(uri, schema, dialect)
        if fragment:
            own.anchors[fragment] = schema
        return own

    def _entered(self, resource: _Resource, scope: Scope) -> Scope:
        if not self._has_dynamic_anchors:
            return ()
        known = dict(scope)
        for name in resource.dynamic:
            known.setdefault(name, resource.uri)
        return tuple(sorted(known.items()))

    def _converted(self, schema: Any, resource: _Resource, scope: Scope) -> Schema:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise SchemaError(f"a schema must be an object, true or false, not {str(schema)[:40]!r}")
        own = self._resource_of.get(id(schema), resource)
        if own is not resource:
            scope = self._entered(own, scope)
        if own.dialect not in DRAFTS:
            raise SchemaError(f"$schema {own.dialect[:100]!r} is not one of {', '.join(DRAFTS)}")
        if own.is_old and "$ref" in schema:
            schema = {"$ref": schema["$ref"]}
        result: dict[str, Any] = {}
        more: list[Schema] = []
        for key, value in checked(schema, DRAFTS[own.dialect]).items():
            if key in DROPPED:
                continue
            if key in ("$ref", "$dynamicRef", "$recursiveRef"):
                target = {"$ref": self._reference(key, value, own, scope)}
                if "$ref" in result:
                    more.append(target)
                else:
                    result |= target
            elif key in NAMED:
                result[key] = {name: self._converted(each, own, scope) for name, each in value.items()}
            elif key in CHILDREN:
                result[key] = [self._converted(each, own, scope) for each in value]
            elif key in CHILD:
                result[key] = self._converted(value, own, scope)
            else:
                result[key] = value
        if more:
            result["allOf"] = [*result.get("allOf", ()), *more]
        return result

    def _reference(self, key: str, value: Any, resource: _Resource, scope: Scope) -> str:
        """The reference's target as a definition, made if it is new."""
        if not isinstance(value, str):
            raise SchemaError(f"{key} must be a text")
        if key == "$recursiveRef":
            if any(
                isinstance(each.schema, Mapping) and each.schema.get("$recursiveAnchor")
                for each in self._resources.values()
            ):
                raise SchemaError("$recursiveRef to a $recursiveAnchor is not supported; use $dynamicRef")
            value = "#"
        target, owner, fragment = self._target(value, resource, key)
        if key == "$dynamicRef" and fragment in owner.dynamic and target is owner.dynamic[fragment]:
            owner = self._resources[dict(scope).get(fragment, owner.uri)]
            target = owner.dynamic[fragment]
        scope = self._entered(owner, scope)
        identity = (id(target), scope)
        if (name := self._names.get(identity)) is None:
            if len(self._names) >= MAX_DEFINITIONS:
                raise SchemaError(f"{key} leads to more than {MAX_DEFINITIONS} definitions")
            name = self._names[identity] = self._new_name(fragment)
            self._definitions[name] = True  # reserves the name
            self._pending.append((name, target, owner, scope))
        return f"#/$defs/{name}"

    def _new_name(self, fragment: str) -> str:
        last = fragment.rpartition("/")[2]
        name = base = last if _NAME.fullmatch(last) else "schema"
        number = 1
        while name in self._definitions:
            number += 1
            name = f"{base}-{number}"
        return name

    def _target(self, reference: str, resource: _Resource, key: str) -> tuple[Any, _Resource, str]:
        """The schema that a reference names, its resource, and the reference's fragment. Raises `SchemaError`."""
        if reference.startswith("#"):
            uri, fragment = resource.uri, reference[1:]
        else:
            uri, fragment = urldefrag(urljoin(resource.uri, reference))
        fragment = unquote(fragment)
        owner = self._resources.get(uri)
        if owner is None and uri == DIALECT:
            owner = self._add_metaschema()
        if owner is None:
            raise SchemaError(
                f"{key} {reference[:200]!r} leads outside of the schema; embed its target in $defs with its $id"
            )
        if not fragment.startswith("/"):
            if not fragment:
                return owner.schema, owner, fragment
            if fragment in owner.anchors:
                return owner.anchors[fragment], owner, fragment
            if fragment in owner.dynamic:
                return owner.dynamic[fragment], owner, fragment
            raise SchemaError(f"{key} {reference[:200]!r} is dangling: there is no such anchor")
        target: Any = owner.schema
        for token in fragment[1:].split("/"):
            name = token.replace("~1", "/").replace("~0", "~")
            if isinstance(target, Mapping) and name in target:
                target = target[name]
            elif isinstance(target, list) and name.isdecimal() and int(name) < len(target):
                target = target[int(name)]
            else:
                raise SchemaError(f"{key} {reference[:200]!r} is dangling: there is no {name[:50]!r}")
            owner = self._resource_of.get(id(target), owner)
        return target, owner, fragment

    def _add_metaschema(self) -> _Resource:
        schema = metaschema()
        self._index(schema, None)
        return self._resources[DIALECT]


def _check_cycles(root: Schema, definitions: Mapping[str, Schema]) -> None:
    """Raise `SchemaError` for a reference that leads back to itself for the same value: no value would end it."""
    done: set[str] = set()
    # A name and the references of its schema that are left, for each reference that was followed.
    path: list[tuple[str, Iterator[str]]] = [("", iter(_same_value(root)))]
    names = {""}
    while path:
        name, rest = path[-1]
        if (target := next(rest, None)) is None:
            path.pop()
            names.discard(name)
            done.add(name)
        elif target in names:
            raise SchemaError(
                f"$ref to {target!r} leads back to itself without a property or an item between"
            )
        elif target not in done:
            names.add(target)
            path.append((target, iter(_same_value(definitions[target]))))


def _same_value(schema: Schema) -> list[str]:
    """The definitions that a schema refers to for the same value."""
    found: list[str] = []
    pending = [schema]
    while pending:
        each = pending.pop()
        if isinstance(each, bool):
            continue
        if "$ref" in each:
            found.append(each["$ref"].removeprefix("#/$defs/"))
        for key in ("allOf", "anyOf", "oneOf"):
            pending += each.get(key, ())
        pending += [each[key] for key in ("not", "if", "then", "else") if key in each]
        pending += each.get("dependentSchemas", {}).values()
    return found
