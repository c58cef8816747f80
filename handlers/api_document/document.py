"""The OpenAPI 3.1 document of all HTTP routes, served at /openapi.json.

Bodies are the types that parse requests and write answers, notes on fields are the tables of
`openai/fields.py` and `anthropic/bodies.py`; routes are the tables that servers register.
Imported by the first request for the document.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import msgspec

from ..anthropic.bodies import ROUTES as ANTHROPIC_FIELDS
from ..http.routes import JSON, Route, Schema
from ..openai.fields import ROUTES as OPENAI_FIELDS
from ..openai.fields import Effect
from .routes import server_routes

TAGS = {
    "generate": "OpenAI's API: generation. docs/openai.md describes each field.",
    "stored": "Answers and conversations that the server keeps, in memory or a store. docs/openai.md describes them.",
    "encode": "Vectors, labels and scores of encoders, as OpenAI, Jina, Cohere and vLLM have them.",
    "tokens": "Tokens of texts, as vLLM has them.",
    "anthropic": "Anthropic's API. docs/anthropic.md describes it.",
    "models": "The model and its adapters.",
    "function": "The user's function, and the routes by which platforms call it.",
    "kserve": "Open Inference Protocol V2 and Triton's extensions. docs/kserve.md describes them.",
    "operate": "Probes, metrics and views for operators.",
    "pool": "Only in front of `teneral pool run`. docs/pool.md describes it.",
}
MODEL_HEADER = "x-teneral-model"
_WHOSE = "The model, where neither the body nor the path names it."
_KSERVE = ".platforms.kserve.schemas:"
# Types that only a schema above names.
_MORE = (f"{_KSERVE}ModelIndex", ".openai.responses:ChatChunk")
_PARAMETER = re.compile(r"{(\w+)(?::([^{}]*))?}")
_CHOICE = re.compile(r"\w+(\|\w+)+")
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


def document(open_paths: Collection[str], front: Sequence[Route] = ()) -> dict[str, Any]:
    """The document of a server, or of a pool with a `front` of these routes, which passes all others on to an instance.
    `open_paths` need no key.
    """
    from ... import __version__

    own = {(each.method, each.canonical) for each in front}
    passed_on = [each for each in server_routes() if (each.method, each.canonical) not in own]
    routes = [*front, *passed_on]
    named = {name for each in routes for name in (each.body, each.answer) if isinstance(name, str)}
    _, schemas = msgspec.json.schema_components(
        [_type(name) for name in sorted(named.union(_MORE))], ref_template="#/components/schemas/{name}"
    )
    for (name, field), bounds in _BOUNDS.items():
        schemas[name]["properties"][field].update(bounds)
    for each in routes:
        _describe(schemas, each)
    paths: dict[str, dict[str, Any]] = {}
    for number, each in enumerate(routes):
        paths.setdefault(each.canonical, {})[each.method.lower()] = _described(
            each,
            is_open=each.method == "GET" and each.canonical in open_paths,
            is_passed_on=bool(front) and number >= len(front),
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
            if any(each.tag == name for each in routes)
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


def _describe(schemas: Mapping[str, Schema], route: Route) -> None:
    """Adds the notes of the tables of fields to the schema of a body."""
    fields = {**OPENAI_FIELDS, **ANTHROPIC_FIELDS}.get(route.canonical)
    if fields is None or not isinstance(route.body, str):
        return
    properties = schemas[_type(route.body).__name__]["properties"]
    for name, (effect, note) in fields.items():
        words = [] if effect is Effect.HONOURED else [str(effect)]
        text = ": ".join([*words, note] if note else words)
        if text:
            schema = properties[name]
            # A copy: msgspec may share one schema between fields.
            properties[name] = {**schema, "description": text}


def _described(route: Route, *, is_open: bool, is_passed_on: bool) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": _identifier(route),
        "tags": [route.tag],
        "summary": route.summary,
    }
    if is_open:
        described["security"] = []
    if parameters := list(_parameters(route, is_passed_on=is_passed_on)):
        described["parameters"] = parameters
    if route.body is not None:
        example = {} if route.example is None else {"example": route.example}
        described["requestBody"] = {
            "required": route.needs_body,
            "content": {route.body_media: {"schema": _schema(route.body), **example}},
        }
    success: dict[str, Any] = {"description": route.summary + "."}
    if route.media:
        success["content"] = {media: _content(route, media) for media in route.media}
    responses = dict.fromkeys(route.status, success)
    if "204" in responses:
        responses["204"] = {"description": "Nothing to say."}
    error: dict[str, Any] = {
        "description": "The error: its cause, and a remedy. 429 and 503 have Retry-After."
    }
    error |= {"content": {JSON: {"schema": {"$ref": f"#/components/schemas/{_error_of(route)}"}}}}
    described["responses"] = {**responses, "default": error}
    return described


def _content(route: Route, media: str) -> Schema:
    return {"schema": _schema(route.answer)} if media == JSON and route.answer is not None else {}


def _parameters(route: Route, *, is_passed_on: bool) -> Iterator[Schema]:
    for name, pattern in _PARAMETER.findall(route.path):
        schema: Schema = {"type": "string", "minLength": 1}
        if _CHOICE.fullmatch(pattern):
            schema = {"enum": pattern.split("|")}
        yield {"name": name, "in": "path", "required": True, "schema": schema}
    for name, schema in route.query:
        yield {"name": name, "in": "query", "schema": schema}
    if is_passed_on:
        yield {"name": MODEL_HEADER, "in": "header", "description": _WHOSE, "schema": {"type": "string"}}


def _identifier(route: Route) -> str:
    words = "".join(each if each.isalnum() else "_" for each in route.canonical).strip("_") or "root"
    return f"{route.method.lower()}_{words}".rstrip("_")


def _error_of(route: Route) -> str:
    return {"anthropic": "AnthropicError", "kserve": "KServeError"}.get(route.tag, "Error")


def _schema(given: str | Schema) -> Schema:
    return given if isinstance(given, dict) else {"$ref": f"#/components/schemas/{_type(given).__name__}"}


def _type(address: str) -> Any:
    module, _, name = address.partition(":")
    return getattr(import_module(module, __package__.rpartition(".")[0]), name)
