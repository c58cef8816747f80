"""The kind of an invocation's event, from its structure alone: one pure function."""

from __future__ import annotations

import enum
from typing import Any


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
