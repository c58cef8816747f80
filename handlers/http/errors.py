"""Errors as HTTP: one table from exceptions to statuses and OpenAI's error shape.

No other module of this package maps an exception to a status code. The text of an unexpected
exception is only logged: the client gets its request id to ask about.
"""

from __future__ import annotations

import math

import msgspec
from aiohttp import web

from ...loader.errors import FormatError, LoadError, PartsUnavailableError, SourceError, TeneralError
from ...runtime.errors import (
    AdapterError,
    AdapterNotFoundError,
    AdapterUnavailableError,
    CancelledError,
    CapacityError,
    ContextLengthError,
    DrainingError,
    HandlerBusyError,
    HandlerError,
    ModelError,
    RefusedError,
    RequestError,
    TryAgainError,
    UnloadedError,
)

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
DRAIN_RETRY_AFTER_S = 1.0  # another instance takes over at once

# Exception, status, type, code. The first match counts, so a subclass comes before its base.
_TABLE: tuple[tuple[type[TeneralError], int, str, str | None], ...] = (
    (ContextLengthError, 400, INVALID_REQUEST, "context_length_exceeded"),
    (AdapterNotFoundError, 404, INVALID_REQUEST, "model_not_found"),
    (AdapterError, 400, INVALID_REQUEST, "adapter_invalid"),
    (AdapterUnavailableError, 503, SERVER_ERROR, "adapter_unavailable"),
    (RefusedError, 400, INVALID_REQUEST, "content_refused"),  # or its own code
    (RequestError, 400, INVALID_REQUEST, None),
    (HandlerBusyError, 503, SERVER_ERROR, "handler_busy"),
    (CapacityError, 429, "rate_limit_error", "rate_limit_exceeded"),
    (DrainingError, 503, SERVER_ERROR, "draining"),
    (UnloadedError, 503, SERVER_ERROR, "model_unloaded"),
    (CancelledError, 503, SERVER_ERROR, "cancelled"),
    (TryAgainError, 503, SERVER_ERROR, "try_again"),  # or its own code
    (HandlerError, 500, SERVER_ERROR, "handler_error"),
    (PartsUnavailableError, 503, SERVER_ERROR, "weights_unavailable"),
    (ModelError, 503, SERVER_ERROR, "model_unavailable"),
    (SourceError, 503, SERVER_ERROR, "model_unavailable"),
    (FormatError, 503, SERVER_ERROR, "model_unavailable"),
    (LoadError, 503, SERVER_ERROR, "model_unavailable"),
)


class ApiError(TeneralError):
    """An error of the HTTP side only, or a translated one."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> bytes:
        """OpenAI's error shape as JSON."""
        return msgspec.json.encode(
            {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}
        )

    def response(self) -> web.Response:
        return web.Response(
            status=self.status, body=self.body(), content_type="application/json", headers=self.headers
        )


def as_api_error(error: BaseException) -> ApiError:
    """The client's view of an exception."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, TeneralError):
        return _translated(error)
    if isinstance(error, web.HTTPException):
        return _from_aiohttp(error)
    if isinstance(error, web.RequestPayloadError):
        return ApiError(400, "the body does not match its headers")
    return ApiError(500, "internal error: the server's log has it under this request's id", kind=SERVER_ERROR)


def _translated(error: TeneralError) -> ApiError:
    unknown = (TeneralError, 500, SERVER_ERROR, None)
    _, status, wire_type, code = next((row for row in _TABLE if isinstance(error, row[0])), unknown)
    # A hint is for the caller; hints of server errors are for the operator, who has the log.
    message = f"{error.message}. {error.hint}" if error.hint and status < 500 else error.message
    return ApiError(
        status,
        message,
        kind=wire_type,
        param=getattr(error, "param", "") or None,
        code=getattr(error, "code", code),
        headers=_retry_after(error),
    )


def _retry_after(error: TeneralError) -> dict[str, str]:
    if isinstance(error, CapacityError | UnloadedError):
        return retry_after(error.retry_after_s)
    if isinstance(error, DrainingError):
        return retry_after(DRAIN_RETRY_AFTER_S)
    return {}


def retry_after(seconds: float) -> dict[str, str]:
    """The header, in whole seconds, at least one."""
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


def _from_aiohttp(error: web.HTTPException) -> ApiError:
    allow = error.headers.get("Allow")
    if error.status == 404:
        return ApiError(404, "there is no such route here", code="unknown_url")
    if error.status == 405:
        message = f"this route does not support that method; it supports {allow}"
        return ApiError(405, message, code="method_not_allowed", headers={"Allow": allow} if allow else {})
    kind = INVALID_REQUEST if error.status < 500 else SERVER_ERROR
    return ApiError(error.status, error.reason or "the request failed", kind=kind)


NOT_READY_RETRY_AFTER_S = 1.0
# A load's rate varies, and its first layers are enough.
MAX_RETRY_AFTER_S = 30.0


def expected_wait_s(fraction: float, elapsed_s: float) -> float:
    """The bounded time before a retry: until everything is loaded, at the rate so far. `fraction`
    of the load has arrived in `elapsed_s`.
    """
    if fraction <= 0:
        return NOT_READY_RETRY_AFTER_S
    return min(MAX_RETRY_AFTER_S, max(NOT_READY_RETRY_AFTER_S, elapsed_s * (1 - fraction) / fraction))
