"""The OpenAPI 3.1 document of all HTTP routes, served at /openapi.json.

Bodies are the types that parse requests and write answers, notes on fields are the tables of
`openai/fields.py` and `anthropic/bodies.py`; routes are those of `operations.py`, and tests compare
the list with the routes of a real server. Imported by the first request for the document.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any, Literal

import msgspec

from ..anthropic.bodies import ROUTES as ANTHROPIC_FIELDS
from ..openai.fields import ROUTES as OPENAI_FIELDS
from ..openai.fields import Effect
from .operations import JSON, OPERATIONS, POOL_OPERATIONS, TAGS, Operation, Schema

Scope = Literal["server", "pool"]
MODEL_HEADER = "x-teneral-model"
_WHOSE = "The model, where neither the body nor the path names it."
# A server's routes that a pool's front has itself, with the same answers.
_OF_THE_FRONT = frozenset({"/", "/console.js", "/console.svg", "/openapi.json", "/metrics"})
_KSERVE = ".platforms.kserve.schemas:"
# Types that only a schema above names.
_MORE = (f"{_KSERVE}ModelIndex", ".openai.responses:ChatChunk")
_ACTIONS = {
    "/v2/repository/models/{name}/{action}": ["load", "unload"],
    "/v1/pool/{name}/{action}": ["sleep", "wake", "drain"],
}
_ERRORS: Mapping[str, Schema] = {
    "Error": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "integer", "null"]},
                },
            }
        },
    },
    "AnthropicError": {
        "type": "object",
        "required": ["type", "error"],
        "properties": {"type": {"const": "error"}, "error": {"type": "object"}},
    },
    "KServeError": {
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"type": "string"}},
    },
}
# Bounds that are checked where the value is used, and not by its type.
_DATATYPES = (
    ["BOOL", "BYTES", "BF16"]
    + [f"{sign}INT{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)]
    + [f"FP{bits}" for bits in (16, 32, 64)]
)
_BOUNDS: Mapping[tuple[str, str], Schema] = {
    ("RequestInput", "name"): {"minLength": 1, "maxLength": 256},
    ("RequestInput", "shape"): {
        "maxItems": 8,
        "items": {"type": "integer", "minimum": 0, "maximum": (1 << 63) - 1},
    },
    ("RequestInput", "datatype"): {"enum": _DATATYPES},
    ("RequestInput", "data"): {"type": "array", "items": {"type": ["array", "number", "string", "boolean"]}},
    ("ResponseOutput", "datatype"): {"enum": _DATATYPES},
    ("InferenceRequest", "inputs"): {"maxItems": 64},
    ("ModelIndex", "state"): {"enum": ["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]},
}


def document(open_paths: Collection[str], scope: Scope = "server") -> dict[str, Any]:
    """The document of a server, or of a pool's front; `open_paths` need no key."""
    from ... import __version__

    operations = OPERATIONS if scope == "server" else _in_front_of_a_pool()
    named = {name for each in operations for name in (each.body, each.answer) if isinstance(name, str)}
    _, schemas = msgspec.json.schema_components(
        [_type(name) for name in sorted(named.union(_MORE))], ref_template="#/components/schemas/{name}"
    )
    for (name, field), bounds in _BOUNDS.items():
        schemas[name]["properties"][field].update(bounds)
    for operation in operations:
        _describe(schemas, operation)
    paths: dict[str, dict[str, Any]] = {}
    for each in operations:
        paths.setdefault(each.path, {})[each.method.lower()] = _described(
            each, each.method == "GET" and each.path in open_paths
        )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Teneral",
            "version": __version__,
            "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
        },
        "security": [{"key": []}, {"x-api-key": []}, {}],
        "tags": [
            {"name": name, "description": text}
            for name, text in TAGS.items()
            if any(each.tag == name for each in operations)
        ],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "schemas": {**schemas, **_ERRORS},
        },
    }


def _in_front_of_a_pool() -> tuple[Operation, ...]:
    """A pool's own routes, and those of a server that it passes on to the model of the request."""
    own = {(each.method, each.path) for each in POOL_OPERATIONS}
    passed_on = [each for each in OPERATIONS if (each.method, each.path) not in own]
    return (
        *POOL_OPERATIONS,
        *(
            each._replace(is_passed_on=each.method != "GET" or each.path not in _OF_THE_FRONT)
            for each in passed_on
        ),
    )


def _describe(schemas: Mapping[str, Schema], operation: Operation) -> None:
    """Adds the notes of the tables of fields to the schema of a body."""
    fields = {**OPENAI_FIELDS, **ANTHROPIC_FIELDS}.get(operation.path)
    if fields is None or not isinstance(operation.body, str):
        return
    properties = schemas[_type(operation.body).__name__]["properties"]
    for name, (effect, note) in fields.items():
        words = [] if effect is Effect.HONOURED else [str(effect)]
        text = ": ".join([*words, note] if note else words)
        if text:
            schema = properties[name]
            # A copy: msgspec may share one schema between fields.
            properties[name] = {**schema, "description": text}


def _described(operation: Operation, is_open: bool) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": _identifier(operation),
        "tags": [operation.tag],
        "summary": operation.summary,
    }
    if is_open:
        described["security"] = []
    if parameters := list(_parameters(operation)):
        described["parameters"] = parameters
    if operation.body is not None:
        example = {} if operation.example is None else {"example": operation.example}
        described["requestBody"] = {
            "required": operation.needs_body,
            "content": {operation.body_media: {"schema": _schema(operation.body), **example}},
        }
    success: dict[str, Any] = {"description": operation.summary + "."}
    if operation.media:
        success["content"] = {media: _content(operation, media) for media in operation.media}
    responses = dict.fromkeys(operation.status, success)
    if "204" in responses:
        responses["204"] = {"description": "Nothing to say."}
    error: dict[str, Any] = {
        "description": "The error: its cause, and a remedy. 429 and 503 have Retry-After."
    }
    error |= {"content": {JSON: {"schema": {"$ref": f"#/components/schemas/{_error_of(operation)}"}}}}
    described["responses"] = {**responses, "default": error}
    return described


def _content(operation: Operation, media: str) -> Schema:
    return {"schema": _schema(operation.answer)} if media == JSON and operation.answer is not None else {}


def _parameters(operation: Operation) -> Iterator[Schema]:
    for name in _names(operation.path):
        schema: Schema = {"type": "string", "minLength": 1}
        if name == "action":
            schema = {"enum": _ACTIONS[operation.path]}
        yield {"name": name, "in": "path", "required": True, "schema": schema}
    for name, schema in operation.query:
        yield {"name": name, "in": "query", "schema": schema}
    if operation.is_passed_on:
        yield {"name": MODEL_HEADER, "in": "header", "description": _WHOSE, "schema": {"type": "string"}}


def _names(path: str) -> Iterable[str]:
    return (part[1:-1] for part in path.split("/") if part.startswith("{"))


def _identifier(operation: Operation) -> str:
    words = "".join(each if each.isalnum() else "_" for each in operation.path).strip("_") or "root"
    return f"{operation.method.lower()}_{words}".rstrip("_")


def _error_of(operation: Operation) -> str:
    return {"anthropic": "AnthropicError", "kserve": "KServeError"}.get(operation.tag, "Error")


def _schema(given: str | Schema) -> Schema:
    return given if isinstance(given, dict) else {"$ref": f"#/components/schemas/{_type(given).__name__}"}


def _type(address: str) -> Any:
    module, _, name = address.partition(":")
    return getattr(import_module(module, __package__.rpartition(".")[0]), name)
