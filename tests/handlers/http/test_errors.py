"""Exceptions as HTTP: statuses, OpenAI's shape, and what is kept from clients."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
from aiohttp import web

from teneral.handlers.http.errors import as_api_error
from teneral.loader import errors as loader_errors
from teneral.loader.errors import NotFoundError, TeneralError
from teneral.runtime import errors as runtime_errors
from teneral.runtime.errors import CapacityError, ContextLengthError, RequestError


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestError("no", param="n"), 400, None),
        (ContextLengthError("long"), 400, "context_length_exceeded"),
        (CapacityError("full"), 429, "rate_limit_exceeded"),
        (runtime_errors.DrainingError("bye"), 503, "draining"),
        (runtime_errors.HandlerError("oops"), 500, "handler_error"),
        (NotFoundError("no bucket"), 503, "model_unavailable"),
        (loader_errors.IntegrityError("flipped"), 503, "model_unavailable"),
        (web.HTTPNotFound(), 404, "unknown_url"),
        (ValueError("secret"), 500, None),
    ],
)
def test_each_error_has_its_status_and_code(error: Exception, status: int, code: str | None) -> None:
    api_error = as_api_error(error)
    assert (api_error.status, api_error.code) == (status, code)
    assert json.loads(api_error.body())["error"]["type"] == (
        "invalid_request_error" if status < 429 else api_error.kind
    )


def test_every_error_of_ours_has_a_status() -> None:
    kinds = {
        kind
        for module in (loader_errors, runtime_errors)
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, TeneralError)
    }
    assert len(kinds) > 10
    for kind in kinds:
        assert 400 <= as_api_error(kind("message")).status < 600


def test_a_callers_error_says_what_to_do_and_a_servers_does_not() -> None:
    assert as_api_error(RequestError("wrong", hint="Do this.")).message == "wrong. Do this."
    assert as_api_error(NotFoundError("no bucket", hint="Check the key file.")).message == "no bucket"


def test_what_an_unforeseen_exception_says_is_kept_back() -> None:
    assert "secret" not in as_api_error(ValueError("secret")).message


@pytest.mark.parametrize(("seconds", "header"), [(0.2, "1"), (1.0, "1"), (2.1, "3")])
def test_retry_after_is_in_whole_seconds(seconds: float, header: str) -> None:
    api_error: Any = as_api_error(CapacityError("full", retry_after_s=seconds))
    assert api_error.headers == {"Retry-After": header}
