"""The routes of the OpenAPI document: of a server, and of a pool's front.

Bodies and answers are named by the types that parse and write them, as "module:Class" below `handlers`, so that listing
a route imports nothing.
"""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

Schema = dict[str, Any]

JSON, SSE, _TEXT, _BYTES = "application/json", "text/event-stream", "text/plain", "application/octet-stream"
POOL = "pool"  # the tag of routes that only `teneral pool run` has
TAGS = {
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
    media: tuple[str, ...] = (JSON,)  # of a successful answer
    query: tuple[tuple[str, Schema], ...] = ()
    status: tuple[str, ...] = ("200",)  # with the answer's schema
    needs_body: bool = True  # where it takes one
    example: Schema | None = None  # a body
    body_media: str = JSON
    is_passed_on: bool = False  # by a pool's front to an instance


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
_EVENT: Schema = {
    "type": "object",
    "required": ["specversion", "type", "source", "id"],
    "properties": {
        "specversion": {"const": "1.0"},
        **{name: {"type": "string", "minLength": 1} for name in ("type", "source", "id")},
        "data": {},
    },
}
_WAIT = (
    ("when", {"enum": ["first-layer", "exact"]}),
    ("wait_s", {"type": "number", "minimum": 0, "maximum": 60}),
)
_STREAMED = (JSON, SSE)
_O, _A, _K = ".openai.", ".anthropic.bodies:", ".platforms.kserve.schemas:"
_V2 = "/v2/models/{name}"
_TURNS = {"model": "my-model", "messages": [{"role": "user", "content": "Hello"}]}
_TEXT_INPUT = {"text_input": "Once upon a time", "parameters": {"max_tokens": 16}}
_PAIRS = {"text_1": "Which insects fly?", "text_2": ["A dragonfly", "A stone"]}
_DOCUMENTS = {"query": "Which insects fly?", "documents": ["A dragonfly", "A stone"]}

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "POST",
        "/v1/chat/completions",
        "generate",
        "Answer a chat",
        f"{_O}schemas:ChatBody",
        f"{_O}responses:ChatCompletion",
        _STREAMED,
        example={"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16},
    ),
    Operation(
        "POST",
        "/v1/completions",
        "generate",
        "Go on from a prompt",
        f"{_O}schemas:CompletionBody",
        f"{_O}responses:Completion",
        _STREAMED,
        example={"prompt": "Once upon a time", "max_tokens": 16},
    ),
    Operation(
        "POST",
        "/v1/responses",
        "generate",
        "Answer items; nothing is stored",
        f"{_O}responses_body:ResponsesBody",
        _RESPONSE,
        _STREAMED,
        example={"input": "Hello", "max_output_tokens": 16},
    ),
    Operation(
        "POST",
        "/v1/embeddings",
        "encode",
        "Vectors of texts",
        f"{_O}schemas:EmbeddingBody",
        f"{_O}responses:EmbeddingList",
        example={"input": ["Hello", "Good morning"]},
    ),
    *(
        Operation(
            "POST",
            path,
            "encode",
            summary,
            f"{_O}{module}:{body}",
            f"{_O}{module}:{answer}",
            example=example,
        )
        for paths, summary, module, body, answer, example in (
            (
                ("/v1/classify", "/classify"),
                "Labels of texts",
                "rerank",
                "ClassifyBody",
                "Classification",
                {"input": "Dragonflies are fast."},
            ),
            (("/v1/score", "/score"), "Scores of pairs of texts", "rerank", "ScoreBody", "Scores", _PAIRS),
            (
                ("/v1/rerank", "/v2/rerank", "/rerank"),
                "Documents in the order of their relevance",
                "rerank",
                "RerankBody",
                "Ranking",
                _DOCUMENTS,
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
        example={"prompt": "Hello"},
    ),
    Operation(
        "POST",
        "/detokenize",
        "tokens",
        "The text of tokens",
        f"{_O}tokens:DetokenizeBody",
        f"{_O}tokens:Detokenized",
        example={"tokens": [72, 105]},
    ),
    Operation(
        "POST",
        "/v1/messages",
        "anthropic",
        "Answer messages",
        f"{_A}MessagesBody",
        _MESSAGE,
        _STREAMED,
        example={**_TURNS, "max_tokens": 16},
    ),
    Operation(
        "POST",
        "/v1/messages/count_tokens",
        "anthropic",
        "Count the tokens of messages",
        f"{_A}CountBody",
        _COUNT,
        example=_TURNS,
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
        (JSON, "application/x-ndjson", SSE),
        needs_body=False,
    ),
    Operation("POST", "/invocations", "function", "SageMaker's call", {}, {}, (JSON, SSE), needs_body=False),
    *(
        Operation(
            "POST",
            path,
            "function",
            "A CloudEvent, also in binary mode, and a push of Pub/Sub",
            _EVENT,
            {},
            (JSON, "application/cloudevents+json"),
            status=("200", "204"),
            example={
                "specversion": "1.0",
                "type": "a.b",
                "source": "/c",
                "id": "1",
                "data": {"text": "Hello"},
            },
            body_media="application/cloudevents+json",
        )
        for path in ("/", "/events")
    ),
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
        (JSON, _BYTES),
        example={
            "inputs": [
                {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["Once upon a time"]}
            ]
        },
    ),
    Operation(
        "POST",
        f"{_V2}/generate",
        "kserve",
        "The whole text",
        _GENERATE,
        f"{_K}GenerateResponse",
        example=_TEXT_INPUT,
    ),
    Operation(
        "POST",
        f"{_V2}/generate_stream",
        "kserve",
        "The text as events, each a GenerateResponse; an error is the last",
        _GENERATE,
        None,
        (SSE,),
        example=_TEXT_INPUT,
    ),
    Operation(
        "POST",
        "/v2/repository/index",
        "kserve",
        "The models and their states",
        f"{_K}IndexRequest",
        {"type": "array", "items": {"$ref": "#/components/schemas/ModelIndex"}},
        needs_body=False,
    ),
    Operation(
        "POST",
        "/v2/repository/models/{name}/{action}",
        "kserve",
        "Load or unload the model; needs --model-control",
        f"{_K}ChangeRequest",
        media=(),
        needs_body=False,
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
    Operation("GET", "/timeline/events", "operate", "The same as it happens", media=(SSE,)),
    Operation("GET", "/debug/kv", "operate", "Blocks and prefixes of the KV pool", None, _ANY),
    Operation("GET", "/debug/artifact", "operate", "Layers, tiers and digests", None, _ANY),
    Operation("GET", "/openapi.json", "operate", "This document", None, _ANY),
    *(
        Operation("GET", path, "operate", "The console", media=(media,))
        for path, media in (
            ("/", "text/html"),
            ("/console.js", "text/javascript"),
            ("/console.svg", "image/svg+xml"),
        )
    ),
)

# Of a pool's front, in place of a server's with the same path; it passes all other requests on to instances.
_POOL_READINESS: Schema = {
    "type": "object",
    "required": ["state"],
    "properties": {"state": {"enum": ["starting", "ready", "draining"]}},
}
POOL_OPERATIONS: tuple[Operation, ...] = (
    Operation("GET", "/v1/pool", POOL, "Models, instances and memory", None, _ANY),
    Operation("POST", "/v1/pool/{name}/{action}", POOL, "Put a model to sleep, wake or drain it", None, _ANY),
    Operation("GET", "/v1/models", "models", "All models and aliases, with their states", None, _ANY),
    Operation("GET", "/v1/models/{id}", "models", "One of them", None, _ANY),
    Operation("GET", "/livez", "operate", "The process lives", None, _STATUS),
    Operation(
        "GET",
        f"{_V2}/ready",
        "kserve",
        "Requests to the model are answered, if need be after a start",
        None,
        f"{_K}ModelReady",
        status=("200", "503"),
    ),
    Operation("GET", "/v2/health/live", "kserve", "Liveness", None, _STATUS),
    *(
        Operation(
            "GET",
            path,
            tag,
            "Each model has its warm instances",
            None,
            _POOL_READINESS,
            status=("200", "503"),
        )
        for path, tag in (
            ("/readyz", "operate"),
            ("/health", "operate"),
            ("/ping", "operate"),
            ("/v2/health/ready", "kserve"),
        )
    ),
)
# Those of them that need no key.
POOL_OPEN_PATHS = frozenset(
    {"/livez", "/readyz", "/health", "/ping", "/v2/health/live", "/v2/health/ready", f"{_V2}/ready"}
)


def has_route(path: str) -> bool:
    """True if a server has a route with this path, whatever the method."""
    return _routes().fullmatch(path) is not None


@functools.cache
def _routes() -> re.Pattern[str]:
    """A parameter takes slashes, too: names of models have them, and versions follow them."""
    paths = {re.sub(r"\\{\w+\\}", ".+", re.escape(each.path)) for each in OPERATIONS}
    return re.compile("|".join(sorted(paths)))
