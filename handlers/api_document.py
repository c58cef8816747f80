"""The OpenAPI 3.1 document of all HTTP routes, served at /openapi.json.

Bodies are the types that parse requests and write answers, notes on fields are the tables of
`openai/fields.py` and `anthropic/bodies.py`; only the routes are listed here, and tests compare the
list with the routes of a real server. Imported by the first request for the document.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import msgspec

from .anthropic.bodies import ROUTES as ANTHROPIC_FIELDS
from .openai.fields import ROUTES as OPENAI_FIELDS
from .openai.fields import Effect

Schema = dict[str, Any]

_JSON, _SSE, _TEXT, _BYTES = "application/json", "text/event-stream", "text/plain", "application/octet-stream"
POOL = "pool"  # the tag of routes that only `teneral pool run` has
_TAGS = {
    "generate": "OpenAI's API: generation. docs/openai.md describes each field.",
    "encode": "Vectors, labels and scores of encoders, as OpenAI, Jina, Cohere and vLLM have them.",
    "tokens": "Tokens of texts, as vLLM has them.",
    "anthropic": "Anthropic's API. docs/anthropic.md describes it.",
    "models": "The model and its adapters.",
    "function": "The user's function, and the routes by which platforms call it.",
    "kserve": "Open Inference Protocol V2 and Triton's extensions. docs/kserve.md describes them.",
    "operate": "Probes, metrics and views for operators.",
    POOL: "Only in front of `teneral pool run`. docs/pool.md describes it.",
}


class Operation(NamedTuple):
    """One method of one path. `body` and `answer` name types as "module:Class", or are schemas."""

    method: str
    path: str  # the canonical path of the route
    tag: str
    summary: str
    body: str | Schema | None = None
    answer: str | Schema | None = None
    media: tuple[str, ...] = (_JSON,)  # of a successful answer
    query: tuple[tuple[str, Schema], ...] = ()
    status: tuple[str, ...] = ("200",)  # with the answer's schema


_ANY: Schema = {"type": "object"}
_STATUS: Schema = {
    "type": "object",
    "required": ["status"],
    "properties": {"status": {"const": "ok"}},
}
_READINESS: Schema = {
    "type": "object",
    "required": ["state", "model", "progress"],
    "properties": {
        "state": {"enum": ["loading", "partial", "ready", "unloaded", "draining", "failed"]},
        "model": {"type": "string"},
        "progress": {"type": "object", "properties": {"fraction": {"type": "number"}}},
        "error": {"type": "string"},
    },
}
_VERSION: Schema = {
    "type": "object",
    "required": ["version"],
    "properties": {"version": {"type": "string"}},
}
_RESPONSE: Schema = {
    "type": "object",
    "required": ["id", "object", "created_at", "model", "status", "output"],
    "properties": {
        "object": {"const": "response"},
        "output": {"type": "array", "items": _ANY},
        **{name: {"type": "string"} for name in ("id", "model", "status")},
    },
}
_MESSAGE: Schema = {
    "type": "object",
    "required": ["id", "type", "role", "model", "content", "stop_reason", "usage"],
    "properties": {
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "content": {"type": "array", "items": _ANY},
        "usage": _ANY,
    },
}
_COUNT: Schema = {
    "type": "object",
    "required": ["input_tokens"],
    "properties": {"input_tokens": {"type": "integer", "minimum": 0}},
}
_GENERATE: Schema = {
    "type": "object",
    "required": ["text_input"],
    "description": "Options are keys of `parameters`, or further keys of the request.",
    "properties": {
        "text_input": {"type": "string"},
        "id": {"type": ["string", "null"]},
        "parameters": {"type": ["object", "null"]},
    },
}
_WAIT = (
    ("when", {"enum": ["first-layer", "exact"]}),
    ("wait_s", {"type": "number", "minimum": 0, "maximum": 60}),
)
_STREAMED = (_JSON, _SSE)
_O, _A, _K = ".openai.", ".anthropic.bodies:", ".platforms.kserve.schemas:"
_V2 = "/v2/models/{name}"

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "POST",
        "/v1/chat/completions",
        "generate",
        "Answer a chat",
        f"{_O}schemas:ChatBody",
        f"{_O}responses:ChatCompletion",
        _STREAMED,
    ),
    Operation(
        "POST",
        "/v1/completions",
        "generate",
        "Go on from a prompt",
        f"{_O}schemas:CompletionBody",
        f"{_O}responses:Completion",
        _STREAMED,
    ),
    Operation(
        "POST",
        "/v1/responses",
        "generate",
        "Answer items; nothing is stored",
        f"{_O}responses_body:ResponsesBody",
        _RESPONSE,
        _STREAMED,
    ),
    Operation(
        "POST",
        "/v1/embeddings",
        "encode",
        "Vectors of texts",
        f"{_O}schemas:EmbeddingBody",
        f"{_O}responses:EmbeddingList",
    ),
    *(
        Operation(
            "POST",
            path,
            "encode",
            summary,
            f"{_O}{module}:{body}",
            f"{_O}{module}:{answer}",
        )
        for paths, summary, module, body, answer in (
            (
                ("/v1/classify", "/classify"),
                "Labels of texts",
                "classify",
                "ClassifyBody",
                "Classification",
            ),
            (("/v1/score", "/score"), "Scores of pairs of texts", "rerank", "ScoreBody", "Scores"),
            (
                ("/v1/rerank", "/v2/rerank", "/rerank"),
                "Documents in the order of their relevance",
                "rerank",
                "RerankBody",
                "Ranking",
            ),
        )
        for path in paths
    ),
    Operation(
        "POST",
        "/tokenize",
        "tokens",
        "Tokens of a text or a chat",
        f"{_O}tokens:TokenizeBody",
        f"{_O}tokens:Tokenized",
    ),
    Operation(
        "POST",
        "/detokenize",
        "tokens",
        "The text of tokens",
        f"{_O}tokens:DetokenizeBody",
        f"{_O}tokens:Detokenized",
    ),
    Operation(
        "POST",
        "/v1/messages",
        "anthropic",
        "Answer messages",
        f"{_A}MessagesBody",
        _MESSAGE,
        _STREAMED,
    ),
    Operation(
        "POST",
        "/v1/messages/count_tokens",
        "anthropic",
        "Count the tokens of messages",
        f"{_A}CountBody",
        _COUNT,
    ),
    Operation("GET", "/v1/models", "models", "The model and its adapters", None, f"{_O}responses:ModelList"),
    Operation("GET", "/v1/models/{id}", "models", "One of them", None, f"{_O}responses:Model"),
    Operation(
        "POST",
        "/v1/load_lora_adapter",
        "models",
        "Load an adapter; needs --model-control",
        f"{_O}adapters:LoadBody",
        None,
        (_TEXT,),
    ),
    Operation(
        "POST",
        "/v1/unload_lora_adapter",
        "models",
        "Unload an adapter; needs --model-control",
        f"{_O}adapters:UnloadBody",
        None,
        (_TEXT,),
    ),
    Operation(
        "POST",
        "/invoke",
        "function",
        "Call the function, or an ONNX model",
        {},
        {},
        (_JSON, "application/x-ndjson", _SSE),
    ),
    Operation("POST", "/invocations", "function", "SageMaker's call", {}, {}, (_JSON, _SSE)),
    Operation("POST", "/", "function", "A CloudEvent", {}, {}, status=("200", "204")),
    Operation("POST", "/events", "function", "A CloudEvent", {}, {}, status=("200", "204")),
    Operation("OPTIONS", "/events", "function", "Webhook permission for CloudEvents", media=()),
    Operation("GET", "/v2", "kserve", "The server and its extensions", None, f"{_K}ServerMetadata"),
    Operation("GET", "/v2/health/live", "kserve", "Liveness", None, f"{_K}Live"),
    Operation("GET", "/v2/health/ready", "kserve", "Readiness", None, f"{_K}Ready", status=("200", "503")),
    Operation("GET", "/v2/models/stats", "kserve", "Statistics, as Triton has them", None, _ANY),
    Operation("GET", _V2, "kserve", "The model's tensors", None, f"{_K}ModelMetadata"),
    Operation(
        "GET",
        f"{_V2}/ready",
        "kserve",
        "The model's readiness",
        None,
        f"{_K}ModelReady",
        status=("200", "503"),
    ),
    Operation("GET", f"{_V2}/config", "kserve", "The model's configuration", None, _ANY),
    Operation("GET", f"{_V2}/stats", "kserve", "The model's statistics", None, _ANY),
    Operation(
        "POST",
        f"{_V2}/infer",
        "kserve",
        "Outputs of input tensors; with Inference-Header-Content-Length, bytes follow the JSON",
        f"{_K}InferenceRequest",
        f"{_K}InferenceResponse",
        (_JSON, _BYTES),
    ),
    Operation("POST", f"{_V2}/generate", "kserve", "The whole text", _GENERATE, f"{_K}GenerateResponse"),
    Operation(
        "POST",
        f"{_V2}/generate_stream",
        "kserve",
        "The text as events, each a GenerateResponse; an error is the last",
        _GENERATE,
        None,
        (_SSE,),
    ),
    Operation(
        "POST",
        "/v2/repository/index",
        "kserve",
        "The models and their states",
        f"{_K}IndexRequest",
        {"type": "array", "items": {"$ref": "#/components/schemas/ModelIndex"}},
    ),
    Operation(
        "POST",
        "/v2/repository/models/{name}/{action}",
        "kserve",
        "Load or unload the model; needs --model-control",
        f"{_K}ChangeRequest",
        media=(),
    ),
    Operation("GET", "/livez", "operate", "The process lives", None, _STATUS),
    *(
        Operation(
            "GET",
            path,
            "operate",
            "Requests can be answered",
            None,
            _READINESS,
            query=_WAIT,
            status=("200", "503"),
        )
        for path in ("/readyz", "/health")
    ),
    Operation(
        "GET", "/ping", "operate", "The probe of SageMaker and RunPod", media=(), status=("200", "204", "503")
    ),
    Operation("GET", "/version", "operate", "The version", None, _VERSION),
    Operation("GET", "/metrics", "operate", "Metrics for Prometheus", media=(_TEXT,)),
    Operation("GET", "/timeline", "operate", "Each phase of the start", None, _ANY),
    Operation("GET", "/timeline/events", "operate", "The same as it happens", media=(_SSE,)),
    Operation("GET", "/debug/kv", "operate", "Blocks and prefixes of the KV pool", None, _ANY),
    Operation("GET", "/debug/artifact", "operate", "Layers, tiers and digests", None, _ANY),
    Operation("GET", "/openapi.json", "operate", "This document", None, _ANY),
    *(
        Operation("GET", path, "operate", "The console", media=(media,))
        for path, media in (
            ("/", "text/html"),
            ("/console.css", "text/css"),
            ("/console.js", "text/javascript"),
            ("/console.svg", "image/svg+xml"),
        )
    ),
    Operation("GET", "/v1/pool", POOL, "Models, instances and memory", None, _ANY),
    Operation("POST", "/v1/pool/{name}/{action}", POOL, "Put a model to sleep, wake or drain it", None, _ANY),
)

# Types that only a schema above names.
_MORE = (f"{_K}ModelIndex", f"{_O}responses:ChatChunk")
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
        "properties": {"type": {"const": "error"}, "error": _ANY},
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


def document(open_paths: Collection[str]) -> dict[str, Any]:
    """The document; `open_paths` need no key."""
    from .. import __version__

    named = {name for each in OPERATIONS for name in (each.body, each.answer) if isinstance(name, str)}
    _, schemas = msgspec.json.schema_components(
        [_type(name) for name in sorted(named.union(_MORE))], ref_template="#/components/schemas/{name}"
    )
    for (name, field), bounds in _BOUNDS.items():
        schemas[name]["properties"][field].update(bounds)
    for operation in OPERATIONS:
        _describe(schemas, operation)
    paths: dict[str, dict[str, Any]] = {}
    for each in OPERATIONS:
        paths.setdefault(each.path, {})[each.method.lower()] = _described(each, each.path in open_paths)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Teneral",
            "version": __version__,
            "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
        },
        "security": [{"key": []}, {"x-api-key": []}, {}],
        "tags": [{"name": name, "description": text} for name, text in _TAGS.items()],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "schemas": {**schemas, **_ERRORS},
        },
    }


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
        described["requestBody"] = {
            "required": not (isinstance(operation.body, str) and operation.body.startswith(_K))
            or operation.body == f"{_K}InferenceRequest",
            "content": {_JSON: {"schema": _schema(operation.body)}},
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
    error |= {"content": {_JSON: {"schema": {"$ref": f"#/components/schemas/{_error_of(operation)}"}}}}
    described["responses"] = {**responses, "default": error}
    return described


def _content(operation: Operation, media: str) -> Schema:
    return {"schema": _schema(operation.answer)} if media == _JSON and operation.answer is not None else {}


def _parameters(operation: Operation) -> Iterator[Schema]:
    for name in _names(operation.path):
        schema: Schema = {"type": "string", "minLength": 1}
        if name == "action":
            schema = {"enum": _ACTIONS[operation.path]}
        yield {"name": name, "in": "path", "required": True, "schema": schema}
    for name, schema in operation.query:
        yield {"name": name, "in": "query", "schema": schema}


def _names(path: str) -> Iterable[str]:
    return (part[1:-1] for part in path.split("/") if part.startswith("{"))


def _identifier(operation: Operation) -> str:
    words = "".join(each if each.isalnum() else "_" for each in operation.path).strip("_")
    return f"{operation.method.lower()}_{words}".rstrip("_")


def _error_of(operation: Operation) -> str:
    return {"anthropic": "AnthropicError", "kserve": "KServeError"}.get(operation.tag, "Error")


def _schema(given: str | Schema) -> Schema:
    return given if isinstance(given, dict) else {"$ref": f"#/components/schemas/{_type(given).__name__}"}


def _type(address: str) -> Any:
    module, _, name = address.partition(":")
    return getattr(import_module(module, __package__), name)
