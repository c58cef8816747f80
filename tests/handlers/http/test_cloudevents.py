"""CloudEvents in and out, written and read by the SDK for CloudEvents."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from cloudevents.core.bindings.http import (
    HTTPMessage,
    from_http_event,
    to_binary_event,
    to_structured_event,
)
from cloudevents.core.v1.event import CloudEvent
from tests.support.instances import TinyParts

from teneral.handlers.platforms.cloudevents import MAX_BATCH_EVENTS, header_value, message_of
from teneral.runtime.errors import CapacityError, RequestError

BATCH = {"Content-Type": "application/cloudevents-batch+json"}
ATTRIBUTES = {
    "id": "e-1",
    "source": "/bucket/uploads",
    "type": "com.example.uploaded",
    "subject": 'Euro € 😀 "quoted" 100%',
    "time": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    "datacontenttype": "application/json",
    "dataschema": "https://example.com/schema#1",
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "region": "eu-1",
}
AS_JSON = {**ATTRIBUTES, "specversion": "1.0", "time": "2026-01-02T03:04:05Z"}
GIVEN: dict[str, Any] = {"specversion": "1.0", "id": "1", "source": "/s", "type": "t"}
MODES = [to_binary_event, to_structured_event]


def event_itself(event: Any, context: Any) -> Any:
    return {"seen": event}


async def send(server: Any, message: HTTPMessage, path: str = "/") -> Any:
    return await server.request("POST", path, data=message.body, headers=message.headers)


def read(answer: Any) -> CloudEvent:
    return from_http_event(HTTPMessage(dict(answer.headers), answer.body))


@pytest.mark.parametrize("path", ["/", "/events"])
@pytest.mark.parametrize("write", MODES)
async def test_a_function_sees_the_same_event_in_either_mode(start: Any, write: Any, path: str) -> None:
    message = write(CloudEvent(ATTRIBUTES, {"key": "größe.txt", "size": 5}))
    async with start(handler=event_itself) as server:
        answer = await send(server, message, path)
        assert answer.status == 200
        assert read(answer).get_data()["seen"] == {**AS_JSON, "data": {"key": "größe.txt", "size": 5}}


@pytest.mark.parametrize("write", MODES)
@pytest.mark.parametrize(
    ("datacontenttype", "data", "seen"),
    [
        ("text/plain", "grüße", {"data": "grüße"}),
        ("image/png", b"\x89PNG\xff", {"data_base64": base64.b64encode(b"\x89PNG\xff").decode()}),
        ("application/vnd.x+json; charset=utf-8", [1, {"a": None}], {"data": [1, {"a": None}]}),
        ("application/json", None, {}),
    ],
)
async def test_data_of_every_kind_arrives(
    start: Any, write: Any, datacontenttype: str, data: Any, seen: dict[str, Any]
) -> None:
    attributes = {**ATTRIBUTES, "datacontenttype": datacontenttype}
    if isinstance(data, list) and write is to_binary_event:
        data, message = None, to_binary_event(CloudEvent(attributes, json.dumps(data)))
    else:
        message = write(CloudEvent(attributes, data))
    async with start(handler=event_itself) as server:
        answer = read(await send(server, message)).get_data()["seen"]
        expected = {**AS_JSON, "datacontenttype": datacontenttype, **seen}
        assert {key: value for key, value in answer.items() if value is not None} == expected


# replies


@pytest.mark.parametrize("write", MODES)
async def test_what_a_function_gives_goes_back_as_an_event_in_the_mode_that_came(
    start: Any, write: Any
) -> None:
    async with start(handler=lambda event, context: {"summary": "kurz & gut"}) as server:
        answer = await send(server, write(CloudEvent(ATTRIBUTES, {"a": 1})))
        assert ("ce-type" in answer.headers) == (write is to_binary_event)
        assert answer.headers["Content-Type"].startswith("application/cloudevents+json") != (
            write is to_binary_event
        )
        reply = read(answer)
        assert reply.get_data() == {"summary": "kurz & gut"}
        assert reply.get_type() == "com.example.uploaded.reply"
        assert reply.get_source() == "/teneral/tiny%2Fmodel"
        assert reply.get_subject() == ATTRIBUTES["subject"]
        assert reply.get_attributes()["traceparent"] == ATTRIBUTES["traceparent"]
        assert reply.get_id() != "e-1"


@pytest.mark.parametrize("write", MODES)
@pytest.mark.parametrize(
    ("value", "datacontenttype", "data"),
    [
        ("kurz", "text/plain; charset=utf-8", "kurz"),
        (b"\xff\x00", "application/octet-stream", b"\xff\x00"),
        ([1], "application/json", [1]),
    ],
)
async def test_a_reply_says_what_its_data_is(
    start: Any, write: Any, value: Any, datacontenttype: str, data: Any
) -> None:
    async with start(handler=lambda event, context: value) as server:
        reply = read(await send(server, write(CloudEvent(ATTRIBUTES, {}))))
        assert (reply.get_datacontenttype(), reply.get_data()) == (datacontenttype, data)


@pytest.mark.parametrize("write", MODES)
async def test_a_function_can_write_its_own_event(start: Any, write: Any) -> None:
    own = {"specversion": "1.0", "type": "com.example.done", "flag": True, "subject": "ü", "data": "x"}
    async with start(handler=lambda event, context: own) as server:
        reply = read(await send(server, write(CloudEvent(ATTRIBUTES, {}))))
        assert (reply.get_type(), reply.get_source()) == ("com.example.done", "/teneral/tiny%2Fmodel")
        assert reply.get_subject() == "ü"
        assert str(reply.get_attributes()["flag"]).lower() == "true"


async def test_an_event_of_its_own_that_is_none_is_the_functions_error(start: Any) -> None:
    async with start(handler=lambda event, context: {"specversion": "1.0", "Type": "x"}) as server:
        answer = await server.post("/", GIVEN, headers={"Content-Type": "application/cloudevents+json"})
        assert (answer.status, answer.error["code"]) == (500, "handler_error")


@pytest.mark.parametrize("write", MODES)
async def test_a_function_that_gives_nothing_is_done(start: Any, write: Any) -> None:
    async with start(handler=lambda event, context: None) as server:
        answer = await send(server, write(CloudEvent(ATTRIBUTES, {})))
        assert (answer.status, answer.body) == (204, b"")


async def test_a_reply_that_comes_back_is_not_replied_to(start: Any) -> None:
    async with start(handler=event_itself) as server:
        message = to_binary_event(CloudEvent(ATTRIBUTES, {}))
        first = await send(server, message)
        again = HTTPMessage({k: v for k, v in first.headers.items() if k.lower().startswith("ce-")}, b"{}")
        assert (await send(server, again)).status == 204


async def test_values_that_are_yielded_are_one_list(start: Any) -> None:
    def count(event: Any, context: Any) -> Any:
        yield from range(3)

    async with start(handler=count) as server:
        assert read(await send(server, to_binary_event(CloudEvent(ATTRIBUTES, {})))).get_data() == [0, 1, 2]


# batches


async def test_a_batch_gives_its_replies_in_order(start: Any) -> None:
    def odd(event: Any, context: Any) -> Any:
        return event["data"] if event["data"] % 2 else None

    async with start(handler=odd) as server:
        batch = [{**GIVEN, "id": str(number), "data": number} for number in range(50)]
        answer = await server.post("/", batch, headers=BATCH)
        assert answer.headers["Content-Type"] == BATCH["Content-Type"]
        assert [reply["data"] for reply in answer.json] == list(range(1, 50, 2))
        assert (await server.post("/", [], headers=BATCH)).status == 204


async def test_a_batch_fails_so_that_it_comes_again_where_that_is_of_use(start: Any) -> None:
    def picky(event: Any, context: Any) -> Any:
        if event["data"] == "refuse":
            raise RequestError("not this one")
        if event["data"] == "later":
            raise CapacityError("too much", retry_after_s=7)

    async with start(handler=picky) as server:

        async def status_of(*data: str) -> Any:
            return await server.post("/", [{**GIVEN, "data": item} for item in data], headers=BATCH)

        assert (await status_of("fine", "refuse")).status == 400
        later = await status_of("refuse", "later", "fine")
        assert (later.status, later.headers["Retry-After"]) == (429, "7")


async def test_a_batch_has_a_bound(start: Any) -> None:
    async with start(handler=event_itself) as server:
        assert (await server.post("/", [GIVEN] * (MAX_BATCH_EVENTS + 1), headers=BATCH)).status == 413
        assert (await server.post("/", {}, headers=BATCH)).status == 400


# Pub/Sub


def pubsub(content: bytes | None) -> dict[str, Any]:
    message = {"messageId": "17", "publishTime": "2026-01-02T03:04:05.123Z", "attributes": {"a": "b"}}
    if content is not None:
        message["data"] = base64.b64encode(content).decode()
    return {"message": message, "subscription": "projects/p/subscriptions/s"}


@pytest.mark.parametrize(
    ("content", "decoded"),
    [(b'{"prompt": "x"}', {"prompt": "x"}), ("grüße".encode(), "grüße"), (b"\xff", b"\xff"), (None, None)],
)
async def test_a_pushed_message_is_an_event_and_its_content_is_at_hand(
    start: Any, content: bytes | None, decoded: Any
) -> None:
    seen = []

    def handler(event: Any, context: Any) -> None:
        seen.append((event, message_of(event)))

    async with start(handler=handler) as server:
        assert (await server.post("/", pubsub(content))).status == 204
        event, message = seen[0]
        assert message == decoded
        assert event == {
            "specversion": "1.0",
            "id": "17",
            "source": "//pubsub.googleapis.com/projects/p/subscriptions/s",
            "type": "google.cloud.pubsub.topic.v1.messagePublished",
            "datacontenttype": "application/json",
            "time": "2026-01-02T03:04:05.123Z",
            "data": pubsub(content),
        }


def test_an_event_without_a_message_says_so() -> None:
    for event in ({}, {"data": 5}, {"data": {"message": {"data": "%"}}}):
        with pytest.raises(RequestError):
            message_of(event)


# without a function


async def test_without_a_function_the_model_is_asked_what_the_event_brings(start: Any) -> None:
    asked = {"prompt": "Once", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    async with start() as server:
        plain = (await server.post("/v1/completions", asked)).json["choices"][0]["text"]
        reply = read(await send(server, to_structured_event(CloudEvent(ATTRIBUTES, asked))))
        assert reply.get_data()["text"] == plain
        pushed = await server.post("/", pubsub(json.dumps(asked).encode()))
        assert pushed.json["text"] == plain
        refused = await send(server, to_structured_event(CloudEvent(ATTRIBUTES, {"x": 1})))
        assert refused.status == 400


async def test_without_a_function_an_encoder_embeds_what_the_event_brings(
    start: Any, encoder_parts: TinyParts
) -> None:
    async with start(parts=encoder_parts) as server:
        message = to_binary_event(CloudEvent(ATTRIBUTES, {"input": ["a", "b"]}))
        assert len(read(await send(server, message)).get_data()["embeddings"]) == 2
        message = to_binary_event(CloudEvent(ATTRIBUTES, {"input": "a", "x": 1}))
        assert (await send(server, message)).status == 400


# permanent errors: 4xx, which no sender repeats


@pytest.mark.parametrize(
    "event",
    [
        {},
        [],
        "x",
        {**GIVEN, "id": ""},
        {**GIVEN, "source": None},
        {**GIVEN, "type": 5},
        {**GIVEN, "specversion": "0.3"},
        {**GIVEN, "Upper": "x"},
        {**GIVEN, "under_score": "x"},
        {**GIVEN, "object": {}},
        {**GIVEN, "float": 1.5},
        {**GIVEN, "large": 1 << 31},
        {**GIVEN, "subject": "a\nb"},
        {**GIVEN, "subject": "x" * (64 << 10)},
        {**GIVEN, "time": "yesterday"},
        {**GIVEN, **{f"a{number}": 1 for number in range(64)}},
        {**GIVEN, "data": 1, "data_base64": ""},
        {**GIVEN, "data_base64": "%"},
        {**GIVEN, "data_base64": 5},
    ],
)
async def test_a_structured_event_that_is_none_is_refused(start: Any, event: Any) -> None:
    async with start(handler=event_itself) as server:
        answer = await server.post("/", event, headers={"Content-Type": "application/cloudevents+json"})
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")


BINARY = {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "/s", "ce-type": "t"}


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"ce-id": "1"}, b""),
        ({**BINARY, "ce-subject": "%C0%A0"}, b""),
        ({**BINARY, "ce-datacontenttype": "x/y"}, b""),
        ({**BINARY, "ce-data": "x"}, b""),
        ({**BINARY, "ce-": "x"}, b""),
        ({**BINARY, "Content-Type": "application/json"}, b"{"),
        ({"Content-Type": "application/json"}, b'{"prompt": "no event"}'),
        ({"Content-Type": "application/json"}, b'{"message": {}, "subscription": "s"}'),
        ({}, b""),
    ],
)
async def test_a_binary_event_that_is_none_is_refused(
    start: Any, headers: dict[str, str], body: bytes
) -> None:
    async with start(handler=event_itself) as server:
        answer = await server.request("POST", "/", data=body, headers=headers)
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("media", ["application/cloudevents+avro", "application/cloudevents-batch+avro"])
async def test_another_format_is_refused(start: Any, media: str) -> None:
    async with start(handler=event_itself) as server:
        answer = await server.request("POST", "/", data=b"{}", headers={"Content-Type": media})
        assert answer.status == 415


@pytest.mark.parametrize("method", ["GET", "PUT", "OPTIONS"])
async def test_only_post_brings_events(start: Any, method: str) -> None:
    async with start(handler=event_itself, console=False) as server:
        answer = await server.request(method, "/")
        assert (answer.status, answer.headers["Allow"]) == (405, "POST")


async def test_a_sender_that_asks_may_deliver(start: Any) -> None:
    async with start(handler=event_itself, api_key="secret") as server:
        asked = {"WebHook-Request-Origin": "eventgrid.azure.net", "WebHook-Request-Rate": "120"}
        assert (await server.request("OPTIONS", "/events", headers=asked)).status == 401
        key = {"Authorization": "Bearer secret"}
        answer = await server.request("OPTIONS", "/events", headers={**key, **asked})
        assert answer.status == 200
        assert answer.headers["WebHook-Allowed-Origin"] == "eventgrid.azure.net"
        assert answer.headers["WebHook-Allowed-Rate"] == "*"
        for sender in ("", "a b", "x" * 300):
            headers = {**key, "WebHook-Request-Origin": sender}
            assert (await server.request("OPTIONS", "/events", headers=headers)).status == 405


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("Euro%20%E2%82%AC%20%F0%9F%98%80", "Euro € 😀"),
        ('"a \\"b\\" c"', 'a "b" c'),
        ("%2525", "%25"),
        ("100%", "100%"),
        ('"', '"'),
    ],
)
def test_a_header_is_unquoted_and_decoded_once(header: str, value: str) -> None:
    assert header_value("subject", header) == value


async def test_what_a_retry_may_mend_says_so(start: Any) -> None:
    def failing(event: Any, context: Any) -> Any:
        raise {"later": CapacityError("too much", retry_after_s=3), "bug": KeyError("x")}[event["data"]]

    async with start(handler=failing) as server:
        headers = {"Content-Type": "application/cloudevents+json"}
        later = await server.post("/", {**GIVEN, "data": "later"}, headers=headers)
        assert (later.status, later.headers["Retry-After"]) == (429, "3")
        assert (await server.post("/", {**GIVEN, "data": "bug"}, headers=headers)).status == 500
