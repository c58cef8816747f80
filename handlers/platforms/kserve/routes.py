"""The paths of the Open Inference Protocol with the method of `api.KServeRoutes` for each, and its form of errors,
`{"error": "text"}`; `http/errors.py` maps exceptions to statuses.

A model's name may have slashes. A version after it (`…/versions/1/infer`) is part of `name` here. The model's own
readiness is open like the server's: KServe's probes for its known runtimes carry no key, and it only reveals
whether a name is that of the model.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from ...http.errors import ApiError
from ...http.routes import ANY, BYTES, JSON, SSE, Route, Schema

_VERBS = "infer|generate|generate_stream|ready|config|stats"
# A name that is not followed by a verb.
_NAME = rf"{{name:(?:(?!/(?:{_VERBS})$).)+}}"

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
_TEXT_INPUT = {"text_input": "Once upon a time", "parameters": {"max_tokens": 16}}
_TENSOR = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["Once upon a time"]}
_SCHEMAS = ".platforms.kserve.schemas:"

ROUTES = (
    Route(
        "GET", "/v2", "server_metadata", "kserve", "The server and its extensions",
        None, f"{_SCHEMAS}ServerMetadata",
    ),
    Route("GET", "/v2/health/live", "live", "kserve", "Liveness", None, f"{_SCHEMAS}Live", is_open=True),
    Route(
        "GET", "/v2/health/ready", "ready", "kserve", "Readiness",
        None, f"{_SCHEMAS}Ready", status=("200", "503"), is_open=True,
    ),
    Route("GET", "/v2/models/stats", "stats", "kserve", "Statistics, as Triton has them", None, ANY),
    Route(
        "GET", f"/v2/models/{_NAME}", "model_metadata", "kserve", "The model's tensors",
        None, f"{_SCHEMAS}ModelMetadata",
    ),
    Route(
        "GET", "/v2/models/{name:.+}/ready", "model_ready", "kserve", "The model's readiness",
        None, f"{_SCHEMAS}ModelReady", status=("200", "503"), is_open=True,
    ),
    Route("GET", "/v2/models/{name:.+}/config", "config", "kserve", "The model's configuration", None, ANY),
    Route("GET", "/v2/models/{name:.+}/stats", "stats", "kserve", "The model's statistics", None, ANY),
    Route(
        "POST", "/v2/models/{name:.+}/infer", "infer", "kserve",
        "Outputs of input tensors; with Inference-Header-Content-Length, bytes follow the JSON",
        f"{_SCHEMAS}InferenceRequest", f"{_SCHEMAS}InferenceResponse", (JSON, BYTES),
        example={"inputs": [_TENSOR]},
    ),
    Route(
        "POST", "/v2/models/{name:.+}/generate", "generate", "kserve", "The whole text",
        _GENERATE, f"{_SCHEMAS}GenerateResponse", example=_TEXT_INPUT,
    ),
    Route(
        "POST", "/v2/models/{name:.+}/generate_stream", "generate_stream", "kserve",
        "The text as events, each a GenerateResponse; an error is the last",
        _GENERATE, media=(SSE,), example=_TEXT_INPUT,
    ),
    Route(
        "POST", "/v2/repository/index", "index", "kserve", "The models and their states",
        f"{_SCHEMAS}IndexRequest", {"type": "array", "items": {"$ref": "#/components/schemas/ModelIndex"}},
        needs_body=False, is_control=True,
    ),
    Route(
        "POST", "/v2/repository/models/{name:.+}/{action:load|unload}", "change", "kserve",
        "Load or unload the model; needs --model-control",
        f"{_SCHEMAS}ChangeRequest", media=(), needs_body=False, is_control=True,
    ),
)  # fmt: skip


def error_body(error: ApiError) -> bytes:
    return msgspec.json.encode({"error": error.message})


def error_response(error: ApiError) -> web.Response:
    return web.Response(
        status=error.status, body=error_body(error), content_type="application/json", headers=error.headers
    )
