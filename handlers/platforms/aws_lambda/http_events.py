"""Lambda's events: their kind, from their structure alone, and HTTP requests and responses in three shapes, as pure
functions.

    function URL, API Gateway HTTP API   payload 2.0: cookies apart, headers of one name joined by commas
    API Gateway REST API                 payload 1.0: headers and parameters once joined and once apart; decoded
    application load balancer            the same, either joined or apart, as its target group says; not decoded

Events are untrusted: they contain a client's request. This module knows no sockets and no routes.
"""

from __future__ import annotations

import base64
import binascii
import enum
import http
import json
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote, urlencode

from msgspec import Struct

from ....runtime.errors import RequestError
from ...http.limits import OWN_HEADERS

STREAM_CONTENT_TYPE = "application/vnd.awslambda.http-integration-response"
PRELUDE_END = b"\0" * 8

Headers = list[tuple[str, str]]

_SAFE_IN_PATHS = "/:@!$&'()*+,;=~%-._"
_TEXTS = ("text/", "application/json", "application/x-ndjson", "application/javascript", "application/xml")


class EventKind(enum.StrEnum):
    HTTP_V2 = "http-v2"  # a function URL, or API Gateway's HTTP API: payload 2.0
    HTTP_V1 = "http-v1"  # API Gateway's REST API, or its HTTP API with payload 1.0
    ALB = "alb"  # an application load balancer
    S3 = "s3"
    SQS = "sqs"
    SNS = "sns"
    # Of another service: Kinesis, DynamoDB, …
    RECORDS = "records"
    EVENTBRIDGE = "eventbridge"
    # Any other event, from a direct invocation.
    DIRECT = "direct"

    @property
    def is_http(self) -> bool:
        return self in (EventKind.HTTP_V2, EventKind.HTTP_V1, EventKind.ALB)


_RECORD_SOURCES = {"aws:s3": EventKind.S3, "aws:sqs": EventKind.SQS, "aws:sns": EventKind.SNS}
_EVENTBRIDGE_KEYS = frozenset({"detail-type", "source", "detail"})


def kind_of_event(event: Any) -> EventKind:
    """The kind of an event, from the keys that the service always writes. An unknown kind is
    DIRECT.
    """
    if not isinstance(event, dict):
        return EventKind.DIRECT
    surroundings = event.get("requestContext")
    if isinstance(surroundings, dict):
        return _kind_of_request(event, surroundings)
    records = event.get("Records")
    if isinstance(records, list) and records and isinstance(records[0], dict):
        source = records[0].get("eventSource", records[0].get("EventSource"))  # SNS writes it with a capital
        if isinstance(source, str):
            return _RECORD_SOURCES.get(source, EventKind.RECORDS)
    return EventKind.EVENTBRIDGE if event.keys() >= _EVENTBRIDGE_KEYS else EventKind.DIRECT


def _kind_of_request(event: dict[str, Any], surroundings: dict[str, Any]) -> EventKind:
    http = surroundings.get("http")
    if (
        isinstance(http, dict)
        and isinstance(http.get("method"), str)
        and isinstance(event.get("rawPath"), str)
    ):
        return EventKind.HTTP_V2
    if isinstance(event.get("httpMethod"), str) and isinstance(event.get("path"), str):
        return EventKind.ALB if isinstance(surroundings.get("elb"), dict) else EventKind.HTTP_V1
    # For instance a WebSocket's, which has no path.
    return EventKind.DIRECT


class EventRequest(Struct, frozen=True):
    """A request. `target` is path and query, as sent."""

    method: str
    target: str
    headers: Headers
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name), None)


class ResponseHead(Struct, frozen=True):
    """The head of a response."""

    status: int
    headers: Headers


def request_of(event: dict[str, Any], kind: EventKind) -> EventRequest:
    """The request in an event of an HTTP kind. Raises `RequestError` for an invalid one."""
    read = {
        EventKind.HTTP_V2: _target_and_headers_v2,
        EventKind.HTTP_V1: _target_and_headers_v1,
        EventKind.ALB: _target_and_headers_alb,
    }
    method = event["requestContext"]["http"]["method"] if kind is EventKind.HTTP_V2 else event["httpMethod"]
    if not (method.isascii() and method.isalpha()):
        raise RequestError("the event's HTTP method is invalid", param="httpMethod")
    target, headers = read[kind](event)
    return EventRequest(method.upper(), target, [pair for pair in headers if _passes(*pair)], _body(event))


def response_of(head: ResponseHead, body: bytes, kind: EventKind, event: dict[str, Any]) -> bytes:
    """The response as an answer to the event, in its service's shape."""
    value: dict[str, Any] = {"statusCode": head.status}
    if kind is EventKind.HTTP_V2:
        value.update(_joined(head.headers))
    elif kind is EventKind.ALB:
        value["statusDescription"] = f"{head.status} {_phrase(head.status)}".strip()
        # The service reads the same form that it sends.
        if "multiValueHeaders" in event:
            value["multiValueHeaders"] = _apart(head.headers)
        else:
            value["headers"] = {name: values[-1] for name, values in _apart(head.headers).items()}
    else:
        value["multiValueHeaders"] = _apart(head.headers)
    text = _as_text(head.headers, body)
    value["body"] = base64.b64encode(body).decode() if text is None else text
    value["isBase64Encoded"] = text is None
    return json.dumps(value, ensure_ascii=False).encode()


def prelude_of(head: ResponseHead) -> bytes:
    """The prelude of a streamed answer."""
    return json.dumps({"statusCode": head.status, **_joined(head.headers)}).encode() + PRELUDE_END


# requests


def _target_and_headers_v2(event: dict[str, Any]) -> tuple[str, Headers]:
    path, query = event["rawPath"], event.get("rawQueryString")
    stage = event["requestContext"].get("stage")
    if isinstance(stage, str) and stage != "$default" and path.startswith(f"/{stage}/"):
        # API Gateway's own stages are before the path.
        path = path[len(stage) + 1 :]
    headers = _pairs(event.get("headers"))
    cookies = event.get("cookies")
    if isinstance(cookies, list):
        headers.append(("cookie", "; ".join(str(cookie) for cookie in cookies)))
    return _target(path, query if isinstance(query, str) else ""), headers


def _target_and_headers_v1(event: dict[str, Any]) -> tuple[str, Headers]:
    query = urlencode(_pairs_of(event, "multiValueQueryStringParameters", "queryStringParameters"))
    return _target(event["path"], query), _pairs_of(event, "multiValueHeaders", "headers")


def _target_and_headers_alb(event: dict[str, Any]) -> tuple[str, Headers]:
    pairs = _pairs_of(event, "multiValueQueryStringParameters", "queryStringParameters")
    query = "&".join(f"{name}={value}" for name, value in pairs)  # still encoded by the client
    return _target(event["path"], query), _pairs_of(event, "multiValueHeaders", "headers")


def _target(path: str, query: str) -> str:
    """The target of a request line, with all other characters encoded."""
    target = quote(f"/{path.lstrip('/')}", safe=_SAFE_IN_PATHS)
    return f"{target}?{quote(query, safe=_SAFE_IN_PATHS + '?')}" if query else target


def _pairs_of(event: dict[str, Any], many: str, one: str) -> Headers:
    several = event.get(many)
    if not isinstance(several, dict):
        return _pairs(event.get(one))
    return [
        (str(name), str(value))
        for name, values in several.items()
        for value in (values if isinstance(values, list) else [values])
    ]


def _pairs(values: Any) -> Headers:
    return [(str(name), str(value)) for name, value in values.items()] if isinstance(values, dict) else []


def _passes(name: str, value: str) -> bool:
    if name.lower() in OWN_HEADERS:
        return False
    if not name.isascii() or not all(char.isalnum() or char in "!#$%&'*+-.^_`|~" for char in name):
        raise RequestError(f"{name[:100]!r} is not a valid header name", param="headers")
    if any(char in "\r\n\0" for char in value):
        raise RequestError(f"the header {name[:100]!r} contains a line break", param="headers")
    return True


def _body(event: dict[str, Any]) -> bytes:
    body = event.get("body")
    if body is None:
        return b""
    if not isinstance(body, str):
        raise RequestError("the event's body must be a text", param="body")
    if event.get("isBase64Encoded") is not True:
        return body.encode("utf-8", "surrogatepass")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError("the event's body is not valid base64", param="body") from error


# responses


def _joined(headers: Headers) -> dict[str, Any]:
    """The headers of payload 2.0: cookies apart, the others joined."""
    apart = _apart(headers)
    cookies = apart.pop("set-cookie", [])
    joined: dict[str, Any] = {"headers": {name: ",".join(values) for name, values in apart.items()}}
    return joined | {"cookies": cookies} if cookies else joined


def _apart(headers: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    apart: dict[str, list[str]] = {}
    for name, value in headers:
        if name.lower() not in OWN_HEADERS:
            apart.setdefault(name.lower(), []).append(value)
    return apart


def _as_text(headers: Sequence[tuple[str, str]], body: bytes) -> str | None:
    """The body as text; None if it must be sent as base64."""
    named = {name.lower(): value.lower() for name, value in headers}
    content_type = named.get("content-type", "")
    if "content-encoding" in named or (body and not content_type.startswith(_TEXTS)):
        return None
    try:
        return body.decode()
    except UnicodeDecodeError:
        return None


def _phrase(status: int) -> str:
    try:
        return http.HTTPStatus(status).phrase
    except ValueError:
        return ""
