"""One invocation of the Runtime API: pure translation of headers and body.

This module does not know the purpose of an event, nor how long an answer takes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import InputError
from .runtime_api import INVOCATION_ID_HEADER, Answer

# Reserved of an invocation's time, so that its result still reaches Lambda after its deadline: an
# invocation that Lambda itself ends takes the whole instance with it, and its weights.
MARGIN_S = 0.2
MARGIN_SHARE = 0.1  # at most this share of the time

# Name in `Context.platform` → Lambda's variable.
_FACTS = {
    "function_name": "AWS_LAMBDA_FUNCTION_NAME",
    "function_version": "AWS_LAMBDA_FUNCTION_VERSION",
    "memory_limit_in_mb": "AWS_LAMBDA_FUNCTION_MEMORY_SIZE",
    "log_group_name": "AWS_LAMBDA_LOG_GROUP_NAME",
    "log_stream_name": "AWS_LAMBDA_LOG_STREAM_NAME",
}


@dataclass(frozen=True, slots=True)
class Invocation:
    request_id: str
    body: bytes
    content_type: str | None = None
    deadline_unix_ms: int | None = None
    function_arn: str | None = None
    trace_id: str | None = None
    client_context_json: str | None = None
    cognito_identity_json: str | None = None
    tenant_id: str | None = None
    # Of this attempt, where Lambda distinguishes attempts.
    invocation_id: str | None = None

    @classmethod
    def of(cls, answer: Answer) -> Invocation:
        """Parse an answer. Raises `InputError` without a request id, because it could not be
        answered.
        """
        headers = answer.headers
        request_id = headers.get("lambda-runtime-aws-request-id")
        if not request_id or "/" in request_id:
            raise InputError("Runtime.UnmarshalError", "the invocation has no request id")
        deadline = headers.get("lambda-runtime-deadline-ms", "")
        return cls(
            request_id,
            answer.body,
            headers.get("content-type"),
            int(deadline) if deadline.isdecimal() else None,
            headers.get("lambda-runtime-invoked-function-arn"),
            headers.get("lambda-runtime-trace-id"),
            headers.get("lambda-runtime-client-context"),
            headers.get("lambda-runtime-cognito-identity"),
            headers.get("lambda-runtime-aws-tenant-id"),
            headers.get(INVOCATION_ID_HEADER.lower()),
        )

    def event(self) -> Any:
        """The event: JSON, or bytes with another content type. Raises `InputError`."""
        if (self.content_type or "application/json") != "application/json":
            return self.body
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise InputError("Runtime.UnmarshalError", f"Unable to unmarshal input: {error}") from error

    def timeout_s(self) -> float | None:
        """The remaining time of the invocation; None without a limit.

        By the wall clock, like Lambda's: only that goes on while the instance is frozen.
        """
        if self.deadline_unix_ms is None:
            return None
        left_s = max(0.0, self.deadline_unix_ms / 1000 - time.time())
        return left_s - min(MARGIN_S, MARGIN_SHARE * left_s)

    def facts(self, environment: Mapping[str, str]) -> dict[str, Any]:
        """The content of `Context.platform`. Raises `InputError`."""
        facts: dict[str, Any] = {name: environment.get(variable) for name, variable in _FACTS.items()}
        client_context = _json(self.client_context_json, "Client Context")
        identity = _json(self.cognito_identity_json, "Cognito Identity")
        facts.update(
            name="lambda",
            invoked_function_arn=self.function_arn,
            deadline_unix_ms=self.deadline_unix_ms,
            client_context=client_context,
            identity=identity,
            tenant_id=self.tenant_id,
        )
        return facts


def _json(header: str | None, name: str) -> Any:
    if not header:
        return None
    try:
        return json.loads(header)
    except (ValueError, RecursionError) as error:
        raise InputError(
            "Runtime.LambdaContextUnmarshalError", f"Unable to parse {name} JSON: {error}"
        ) from error
