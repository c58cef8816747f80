"""Errors in Anthropic's shape."""

from __future__ import annotations

import msgspec
from aiohttp import web

from ..http.errors import ApiError
from ..http.service import CALL

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


def error_body(error: ApiError) -> bytes:
    """The error as JSON; a field that is wrong is named in the message."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    call = CALL.get(None)
    return msgspec.json.encode(
        {
            "type": "error",
            "error": {"type": kind, "message": error.message},
            "request_id": None if call is None else call.request_id,
        }
    )


def error_response(error: ApiError) -> web.Response:
    headers = dict(error.headers)
    call = CALL.get(None)
    if call is not None:
        headers["request-id"] = call.request_id
    return web.Response(
        status=error.status, body=error_body(error), content_type="application/json", headers=headers
    )
