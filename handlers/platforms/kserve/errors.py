"""Errors in the Open Inference Protocol's form: `{"error": "text"}`. `http/errors.py` maps
exceptions to statuses.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from ...http.errors import ApiError


def error_body(error: ApiError) -> bytes:
    return msgspec.json.encode({"error": error.message})


def error_response(error: ApiError) -> web.Response:
    return web.Response(
        status=error.status, body=error_body(error), content_type="application/json", headers=error.headers
    )
