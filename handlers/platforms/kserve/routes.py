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
from .. import Route

_VERBS = "infer|generate|generate_stream|ready|config|stats"
# A name that is not followed by a verb.
_NAME = rf"{{name:(?:(?!/(?:{_VERBS})$).)+}}"

ROUTES = (
    Route("GET", "/v2", "server_metadata"),
    Route("GET", "/v2/health/live", "live", is_open=True),
    Route("GET", "/v2/health/ready", "ready", is_open=True),
    Route("GET", "/v2/models/stats", "stats"),
    Route("GET", "/v2/models/{name:.+}/ready", "model_ready", is_open=True),
    Route("GET", "/v2/models/{name:.+}/config", "config"),
    Route("GET", "/v2/models/{name:.+}/stats", "stats"),
    Route("POST", "/v2/models/{name:.+}/infer", "infer"),
    Route("POST", "/v2/models/{name:.+}/generate", "generate"),
    Route("POST", "/v2/models/{name:.+}/generate_stream", "generate_stream"),
    Route("GET", f"/v2/models/{_NAME}", "model_metadata"),
    Route("POST", "/v2/repository/index", "index", is_control=True),
    Route("POST", "/v2/repository/models/{name:.+}/{action:load|unload}", "change", is_control=True),
)


def error_body(error: ApiError) -> bytes:
    return msgspec.json.encode({"error": error.message})


def error_response(error: ApiError) -> web.Response:
    return web.Response(
        status=error.status, body=error_body(error), content_type="application/json", headers=error.headers
    )
