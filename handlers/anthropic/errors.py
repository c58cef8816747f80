"""Errors in the shape of Anthropic's API, as answers and as events of a stream. Light: a pool's front imports it."""

from __future__ import annotations

import msgspec
from aiohttp import web

from ..http.errors import ApiError

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: ApiError, request_id: str | None) -> bytes:
    """The error as JSON; a field that is wrong is named in the message."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return msgspec.json.encode(
        {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}
    )


def error_event(error: ApiError, request_id: str | None) -> bytes:
    """The last event of a stream, without the empty line after it."""
    return b"event: error\ndata: " + error_body(error, request_id)


def error_response(error: ApiError, request_id: str | None) -> web.Response:
    headers = dict(error.headers)
    if request_id is not None:
        headers["request-id"] = request_id
    body = error_body(error, request_id)
    return web.Response(status=error.status, body=body, content_type="application/json", headers=headers)
