"""HTTP requests as Lambda's services write them, through the loop and our own application and back."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest
from tests.support.fake_runtime_api import FakeRuntimeApi
from tests.support.instances import StagedInstance, TinyParts
from tests.support.lambda_rig import running_loop

from teneral.handlers.platforms.aws_lambda.http_events import (
    EventKind,
    ResponseHead,
    kind_of_event,
    prelude_of,
    request_of,
    response_of,
)
from teneral.runtime.errors import RequestError


def function_url(
    method: str = "POST", path: str = "/invoke", body: Any = None, **more: Any
) -> dict[str, Any]:
    """A function URL's event; with `stage`, one of API Gateway's HTTP API."""
    stage = more.pop("stage", "$default")
    return {
        "version": "2.0",
        "routeKey": "$default",
        "rawPath": path,
        "rawQueryString": "",
        "headers": {"content-type": "application/json", "host": "x.lambda-url.eu-central-1.on.aws"},
        "requestContext": {
            "http": {"method": method, "path": path, "protocol": "HTTP/1.1", "sourceIp": "192.0.2.1"},
            "stage": stage,
        },
        "body": None if body is None else json.dumps(body),
        "isBase64Encoded": False,
        **more,
    }


def rest_api(method: str = "POST", path: str = "/invoke", body: Any = None, **more: Any) -> dict[str, Any]:
    return {
        "resource": "/{proxy+}",
        "path": path,
        "httpMethod": method,
        "headers": {"Content-Type": "application/json"},
        "multiValueHeaders": {"Content-Type": ["application/json"], "X-Twice": ["1", "2"]},
        "queryStringParameters": None,
        "multiValueQueryStringParameters": None,
        "requestContext": {"stage": "prod", "httpMethod": method},
        "body": None if body is None else json.dumps(body),
        "isBase64Encoded": False,
        **more,
    }


def load_balancer(
    method: str = "POST", path: str = "/invoke", body: Any = None, **more: Any
) -> dict[str, Any]:
    event = {
        "requestContext": {"elb": {"targetGroupArn": "arn:aws:elasticloadbalancing:x"}},
        "httpMethod": method,
        "path": path,
        "queryStringParameters": {},
        "headers": {"content-type": "application/json"},
        "body": "" if body is None else json.dumps(body),
        "isBase64Encoded": False,
        **more,
    }
    if "multiValueHeaders" in event:
        del event["headers"]
    return event


RECORD = {"eventVersion": "2.1", "s3": {}}
EVENTS: list[tuple[Any, EventKind]] = [
    (function_url(), EventKind.HTTP_V2),
    (rest_api(), EventKind.HTTP_V1),
    (load_balancer(), EventKind.ALB),
    ({"requestContext": {"connectionId": "x", "eventType": "MESSAGE"}, "body": "hi"}, EventKind.DIRECT),
    ({"requestContext": {"http": "POST"}}, EventKind.DIRECT),
    ({"requestContext": {"http": {"method": 1}}, "rawPath": 2}, EventKind.DIRECT),
    ({"Records": [{"eventSource": "aws:s3", **RECORD}]}, EventKind.S3),
    ({"Records": [{"eventSource": "aws:sqs", "body": "x"}]}, EventKind.SQS),
    ({"Records": [{"EventSource": "aws:sns", "Sns": {}}]}, EventKind.SNS),
    ({"Records": [{"eventSource": "aws:kinesis"}]}, EventKind.RECORDS),
    ({"Records": []}, EventKind.DIRECT),
    ({"Records": "mine"}, EventKind.DIRECT),
    ({"Records": [{"eventSource": 5}]}, EventKind.DIRECT),
    (
        {"version": "0", "detail-type": "Object Created", "source": "aws.s3", "detail": {}},
        EventKind.EVENTBRIDGE,
    ),
    ({"prompt": "hello"}, EventKind.DIRECT),
    ({}, EventKind.DIRECT),
    ([], EventKind.DIRECT),
    (None, EventKind.DIRECT),
    ("text", EventKind.DIRECT),
    (b"bytes", EventKind.DIRECT),
]


@pytest.mark.parametrize(("event", "kind"), EVENTS)
def test_an_event_is_known_by_its_structure(event: Any, kind: EventKind) -> None:
    assert kind_of_event(event) is kind


# -- requests ----------------------------------------------------------------------------------------------------------


def test_a_function_urls_request_is_read() -> None:
    event = function_url(
        path="/a b/ü%20",
        rawQueryString="x=1&y=%2F",
        cookies=["a=1", "b=2"],
        headers={"accept": "a, b", "connection": "close", "host": "h", "content-length": "9"},
        body={"x": 1},
    )
    request = request_of(event, EventKind.HTTP_V2)
    assert (request.method, request.target) == ("POST", "/a%20b/%C3%BC%20?x=1&y=%2F")
    assert request.headers == [("accept", "a, b"), ("cookie", "a=1; b=2")]
    assert request.body == b'{"x": 1}'


def test_a_stage_is_no_part_of_the_path() -> None:
    event = function_url(path="/prod/v1/models", stage="prod")
    assert request_of(event, EventKind.HTTP_V2).target == "/v1/models"


def test_a_rest_apis_parameters_are_encoded_again_and_a_load_balancers_are_left_alone() -> None:
    event = rest_api(multiValueQueryStringParameters={"q": ["a b", "c&d"]})
    request = request_of(event, EventKind.HTTP_V1)
    assert request.target == "/invoke?q=a+b&q=c%26d"
    assert [value for name, value in request.headers if name == "X-Twice"] == ["1", "2"]
    event = load_balancer(queryStringParameters={"q": "a%20b"})
    assert request_of(event, EventKind.ALB).target == "/invoke?q=a%20b"
    event = load_balancer(
        multiValueHeaders={"x": ["1", "2"]}, multiValueQueryStringParameters={"q": ["1", "2"]}
    )
    request = request_of(event, EventKind.ALB)
    assert (request.target, request.headers) == ("/invoke?q=1&q=2", [("x", "1"), ("x", "2")])


def test_a_body_in_base64_is_what_it_encodes() -> None:
    event = function_url(body=None) | {"body": base64.b64encode(b"\0\xff").decode(), "isBase64Encoded": True}
    assert request_of(event, EventKind.HTTP_V2).body == b"\0\xff"


@pytest.mark.parametrize(
    "event",
    [
        function_url(method="GET / HTTP/1.1\r\nX: y\r\n"),
        function_url(headers={"a\r\nb": "c"}),
        function_url(headers={"a": "c\r\nx: y"}),
        function_url() | {"body": {"not": "a text"}},
        function_url() | {"body": "?", "isBase64Encoded": True},
    ],
)
def test_invalid_values_are_refused(event: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        request_of(event, EventKind.HTTP_V2)


@pytest.mark.parametrize("path", ["//evil.example/x", "no-slash", "/a\r\nHost: x", "/?#[]", ""])
def test_a_path_never_leaves_the_first_line(path: str) -> None:
    target = request_of(function_url(path=path), EventKind.HTTP_V2).target
    assert target.startswith("/")
    assert not target.startswith("//")
    assert not set(target) & set("\r\n #?[]")


# -- responses ---------------------------------------------------------------------------------------------------------

HEADERS = [("Content-Type", "application/json"), ("Set-Cookie", "a=1"), ("Set-Cookie", "b=2"), ("Vary", "x")]


def test_each_service_gets_the_shape_that_it_reads() -> None:
    head = ResponseHead(200, [*HEADERS, ("Transfer-Encoding", "chunked")])
    text = {"statusCode": 200, "body": '{"ü": 1}', "isBase64Encoded": False}
    body = '{"ü": 1}'.encode()
    assert json.loads(response_of(head, body, EventKind.HTTP_V2, {})) == {
        **text,
        "headers": {"content-type": "application/json", "vary": "x"},
        "cookies": ["a=1", "b=2"],
    }
    several = {"content-type": ["application/json"], "set-cookie": ["a=1", "b=2"], "vary": ["x"]}
    assert json.loads(response_of(head, body, EventKind.HTTP_V1, {})) == {
        **text,
        "multiValueHeaders": several,
    }
    status = {"statusDescription": "200 OK"}
    assert json.loads(response_of(head, body, EventKind.ALB, {"multiValueHeaders": {}})) == {
        **text,
        **status,
        "multiValueHeaders": several,
    }
    one = {"content-type": "application/json", "set-cookie": "b=2", "vary": "x"}
    assert json.loads(response_of(head, body, EventKind.ALB, {})) == {**text, **status, "headers": one}


@pytest.mark.parametrize(
    ("content_type", "body", "is_base64"),
    [
        ("application/json; charset=utf-8", b"{}", False),
        ("text/event-stream", b"data: x\n\n", False),
        ("application/octet-stream", b"x", True),
        ("text/plain", b"\xff", True),
        ("application/octet-stream", b"", False),
    ],
)
def test_only_text_is_sent_as_text(content_type: str, body: bytes, is_base64: bool) -> None:
    reply = json.loads(
        response_of(ResponseHead(200, [("Content-Type", content_type)]), body, EventKind.HTTP_V2, {})
    )
    assert reply["isBase64Encoded"] is is_base64
    assert (base64.b64decode(reply["body"]) if is_base64 else reply["body"].encode()) == body


def test_a_stream_begins_with_its_head_and_eight_zeros() -> None:
    head, _, rest = prelude_of(ResponseHead(201, HEADERS)).partition(b"\0" * 8)
    assert json.loads(head) == {
        "statusCode": 201,
        "headers": {"content-type": "application/json", "vary": "x"},
        "cookies": ["a=1", "b=2"],
    }
    assert rest == b""


# -- through everything ------------------------------------------------------------------------------------------------


@pytest.fixture
def instance(tiny_parts: TinyParts) -> StagedInstance:
    return StagedInstance(tiny_parts)


def echo(event: Any, context: Any) -> Any:
    return event


@pytest.mark.parametrize("shape", [function_url, rest_api, load_balancer])
async def test_a_request_goes_through_the_routes_and_back(
    api: FakeRuntimeApi, instance: StagedInstance, shape: Any
) -> None:
    async with running_loop(api, instance, echo) as rig:
        outcome = await rig.invoke(shape("POST", "/invoke", {"text": "grün"}))
        answer = outcome.json
        assert answer["statusCode"] == 200
        assert json.loads(answer["body"]) == {"text": "grün"}
        headers = answer.get("headers") or answer["multiValueHeaders"]
        assert headers["x-request-id"] in (outcome.request_id, [outcome.request_id])
        assert (await rig.invoke(shape("GET", "/livez"))).json["statusCode"] == 200
        assert (await rig.invoke(shape("GET", "/nowhere"))).json["statusCode"] == 404


async def test_a_completion_is_answered_and_streamed(api: FakeRuntimeApi, instance: StagedInstance) -> None:
    instance.let_in()
    body = {"prompt": "ab", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    async with running_loop(api, instance, echo) as rig:
        answer = (await rig.invoke(function_url(path="/v1/completions", body=body))).json
        text = json.loads(answer["body"])["choices"][0]["text"]
        event = function_url(path="/v1/completions", body={**body, "stream": True})
        whole = (await rig.invoke(event)).json
        assert whole["body"].endswith(
            "data: [DONE]\n\n"
        )  # a function that does not stream has it all at once
    with FakeRuntimeApi() as another:
        instance = StagedInstance(instance.parts).let_in()
        async with running_loop(another, instance, echo, is_streaming=True) as rig:
            outcome = await rig.invoke(event)
    assert outcome.is_streamed
    assert outcome.headers["content-type"] == "application/vnd.awslambda.http-integration-response"
    head, _, stream = outcome.body.partition(b"\0" * 8)
    assert json.loads(head)["headers"]["content-type"].startswith("text/event-stream")
    pieces = [json.loads(line[6:]) for line in stream.decode().splitlines() if line.startswith("data: {")]
    assert "".join(piece["choices"][0]["text"] for piece in pieces if piece["choices"]) == text
    assert len(outcome.pieces) > 2


async def test_a_request_without_time_is_answered_504(api: FakeRuntimeApi, instance: StagedInstance) -> None:
    async with running_loop(api, instance, echo) as rig:  # a model that never comes
        body = {"prompt": "ab"}
        outcome = await rig.invoke(function_url(path="/v1/completions", body=body), timeout_s=0.4)
        assert (outcome.kind, outcome.json["statusCode"]) == ("response", 504)


async def test_an_event_that_is_no_request_is_answered_400(
    api: FakeRuntimeApi, instance: StagedInstance
) -> None:
    async with running_loop(api, instance, echo) as rig:
        outcome = await rig.invoke(function_url(headers={"a b": "c"}))
        assert outcome.json["statusCode"] == 400
        assert json.loads(outcome.json["body"])["error"]["code"] == "bad_event"


async def test_an_answer_that_is_too_large_says_so(api: FakeRuntimeApi, instance: StagedInstance) -> None:
    async with running_loop(api, instance, lambda event, context: "x" * (6 << 20)) as rig:
        answer = (await rig.invoke(function_url(body={}))).json
        assert answer["statusCode"] == 500
        assert json.loads(answer["body"])["error"]["code"] == "response_too_large"


async def test_many_requests_at_a_time_keep_apart(api: FakeRuntimeApi, instance: StagedInstance) -> None:
    async with running_loop(api, instance, echo, num_workers=4) as rig:
        submitted = [api.submit(function_url(body={"n": number})) for number in range(20)]
        outcomes = await asyncio.gather(*(rig.outcome(one) for one in submitted))
    assert [json.loads(outcome.json["body"])["n"] for outcome in outcomes] == list(range(20))
