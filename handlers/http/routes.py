"""The type of a route, and the routes of every server: probes, metrics, views, the function and the document.

A table of routes is data: it names what answers a route and the types of its bodies by address, so that listing it
imports nothing. Tables of other folders are in their own `routes.py`; `api_document/` walks all of them.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

Schema = dict[str, Any]

JSON, SSE, TEXT, BYTES = "application/json", "text/event-stream", "text/plain", "application/octet-stream"
FORM = "multipart/form-data"
STREAMED = (JSON, SSE)
ANY: Schema = {"type": "object"}
_PARAMETER = re.compile(r"{(\w+):[^{}]*}")


class Route(NamedTuple):
    """One method of one path, and its operation in the OpenAPI document.

    `body` and `answer` are schemas, or addresses of types ("module:Class" below `handlers`).
    """

    method: str
    path: str  # in aiohttp's syntax
    handler: str  # ".module:Class.method" below `handlers`, or a method of the object that answers the table
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
    is_open: bool = False  # a probe, without a key
    is_control: bool = False  # works without a model

    @property
    def canonical(self) -> str:
        """The path without the parameters' patterns: "/v1/models/{id}"."""
        return _PARAMETER.sub(r"{\1}", self.path)


STATUS: Schema = {
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
_WAIT = (
    ("when", {"enum": ["first-layer", "exact"]}),
    ("wait_s", {"type": "number", "minimum": 0, "maximum": 60}),
)
METRICS = Route("GET", "/metrics", "metrics", "operate", "Metrics for Prometheus", media=(TEXT,))
DOCUMENT = Route("GET", "/openapi.json", "document", "operate", "This document", None, ANY)
ROUTES = (
    Route("GET", "/livez", "livez", "operate", "The process lives", None, STATUS, is_open=True),
    *(
        Route(
            "GET", path, "readyz", "operate", "Requests can be answered",
            None, _READINESS, query=_WAIT, status=("200", "503"), is_open=True,
        )
        for path in ("/readyz", "/health", "/v1/health")
    ),
    Route(
        "GET", "/ping", "ping", "operate", "The probe of SageMaker and RunPod",
        media=(), status=("200", "204", "503"), is_open=True,
    ),
    Route("GET", "/version", "version", "operate", "The version", None, _VERSION),
    METRICS,
    Route("GET", "/debug/kv", "kv", "operate", "Blocks and prefixes of the KV pool", None, ANY),
    Route(
        "POST", "/invoke", "invoke", "function", "Call the function, or an ONNX model",
        {}, {}, (JSON, "application/x-ndjson", SSE), needs_body=False,
    ),
    Route("GET", "/timeline", "timeline", "operate", "Each phase of the start", None, ANY),
)  # fmt: skip
