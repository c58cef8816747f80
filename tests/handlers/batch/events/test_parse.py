"""Events and the objects that they name, by their structure; AWS Lambda Powertools reads the same
from the same events.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from aws_lambda_powertools.utilities.data_classes import (
    EventBridgeEvent,
    S3Event,
    S3EventBridgeNotificationEvent,
    SNSEvent,
    SQSEvent,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.batch_events import (
    eventbridge,
    object_created,
    s3_event,
    s3_record,
    s3_test_event,
    sns_envelope,
    sns_event,
    sqs_event,
    sqs_record,
)

from teneral.handlers.batch.events.outputs import Outputs
from teneral.handlers.batch.events.parse import (
    AwaitedCall,
    BatchRequest,
    EventError,
    Ignored,
    Items,
    Job,
    Notice,
    Queue,
    parse_event,
    parse_message,
)
from teneral.handlers.batch.events.requests import lines_of
from teneral.handlers.batch.spec import JobSpec, Share
from teneral.handlers.function.object_events import ObjectRef

JOB = {"input": "s3://bucket/in.jsonl", "output": "s3://bucket/out.jsonl"}
PROMPT = {"custom_id": "a", "prompt": "Hello", "max_tokens": 3}
OUTPUTS = Outputs.of("s3://results/{bucket}/{key}/{etag}.jsonl", "s3://results/a/{id}.json")
KEYS = ["in.jsonl", "in/a b+c%2B&=ä 😀.jsonl", "100%/ü.jsonl", "a=b/c:d.jsonl"]


def upload(bucket: str, key: str, etag: str, version: str = "") -> Notice:
    return Notice((Job(ObjectRef(bucket, key, etag, version), is_upload=True),))


# what Powertools reads


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("version", [None, "096fKKXTRTtl3on89fVO.nfljtsv6qko"])
def test_an_s3_notification_names_what_powertools_reads(key: str, version: str | None) -> None:
    event = s3_event("bucket", key, version=version)
    theirs = S3Event(event)
    described = theirs.record.s3.get_object
    assert theirs.object_key == key
    assert parse_event(event) == upload(
        theirs.bucket_name, theirs.object_key, described.etag, described.version_id or ""
    )


@pytest.mark.parametrize("key", ["in.jsonl", "in/a b&=ä 😀.jsonl", "a=b/c:d.jsonl"])
@pytest.mark.parametrize("version", [None, "v1"])
def test_object_created_names_what_powertools_reads(key: str, version: str | None) -> None:
    event = object_created("bucket", key, version=version)
    detail = S3EventBridgeNotificationEvent(event).detail
    found = upload(detail.bucket.name, detail.object.key, detail.object.etag, version or "")
    assert parse_event(event) == found
    assert version is None or detail.object.version_id == version
    assert EventBridgeEvent(event).source == "aws.s3"


@pytest.mark.parametrize("key", ["a+b.jsonl", "100%.jsonl", "a%2Bb.jsonl"])
def test_eventbridge_quotes_no_keys(key: str) -> None:
    """Powertools undoes quotes that do not exist: of such keys it reads another one."""
    assert (
        S3EventBridgeNotificationEvent(object_created("bucket", "a+b.jsonl")).detail.object.key == "a b.jsonl"
    )
    (job,) = parse_message(json.dumps(object_created("bucket", key)))
    assert isinstance(job, Job)
    assert job.input.key == key


def test_messages_of_a_queue_are_those_that_powertools_reads() -> None:
    event = {
        "Records": [
            sqs_record(s3_event("bucket", "a b.jsonl"), message_id="1"),
            sqs_record(
                sns_envelope(s3_event("bucket", "c.jsonl")), message_id="2", queue="q.fifo", group="g"
            ),
        ]
    }
    theirs = list(SQSEvent(event).records)
    queue = parse_event(event)
    assert isinstance(queue, Queue)
    assert [message.id for message in queue.messages] == [record.message_id for record in theirs]
    assert [message.body for message in queue.messages] == [record.body for record in theirs]
    assert [message.group for message in queue.messages] == [None, theirs[1].attributes.message_group_id]
    (job,) = parse_message(queue.messages[0].body)
    assert isinstance(job, Job)
    assert job.input.key == theirs[0].decoded_nested_s3_event.object_key
    (job,) = parse_message(queue.messages[1].body)
    assert isinstance(job, Job)
    assert job.input.key == S3Event(json.loads(theirs[1].decoded_nested_sns_event.message)).object_key


def test_a_message_of_sns_is_the_one_that_powertools_reads() -> None:
    event = sns_event(s3_event("bucket", "a b.jsonl"))
    theirs = S3Event(json.loads(SNSEvent(event).sns_message))
    assert parse_event(event) == upload(
        theirs.bucket_name, theirs.object_key, theirs.record.s3.get_object.etag
    )


# kinds of events


def test_a_notification_may_have_several_records() -> None:
    event = {"Records": [s3_record("bucket", "a.jsonl"), s3_record("other", "b.jsonl")]}
    found = parse_event(event)
    assert isinstance(found, Notice)
    assert [job.input.url for job in found.asked if isinstance(job, Job)] == [
        "s3://bucket/a.jsonl",
        "s3://other/b.jsonl",
    ]


@pytest.mark.parametrize(
    "event",
    [
        s3_test_event("bucket"),
        s3_event("bucket", "a.jsonl", name="ObjectRemoved:Delete"),
        s3_event("bucket", "folder/"),
        object_created("bucket", "a.jsonl") | {"detail-type": "Object Deleted"},
    ],
)
def test_what_starts_nothing_is_ignored(event: dict[str, Any]) -> None:
    for found in (parse_event(event), Notice(parse_message(json.dumps(event)))):
        assert isinstance(found, Notice)
        assert [type(asked) for asked in found.asked] == [Ignored]


def test_a_job_by_name_with_its_options() -> None:
    asked = {**JOB, "version": '"abc"', "worker": "1/4", "part_lines": 7, "max_lines": 10}
    job = Job(
        ObjectRef("bucket", "in.jsonl", "abc"),
        JOB["output"],
        Share(1, 4),
        {"part_lines": 7, "max_lines": 10},
    )
    assert parse_event(asked) == AwaitedCall(job)
    assert parse_event({"input": "s3://bucket/in.jsonl"}) == AwaitedCall(Job(ObjectRef("bucket", "in.jsonl")))


@pytest.mark.parametrize(
    "event",
    [
        eventbridge(JOB),
        {"detail": JOB},
        sns_event(JOB),
        {"specversion": "1.0", "id": "1", "type": "job", "source": "/me", "data": JOB},
        sns_envelope(JOB),
    ],
)
def test_a_job_comes_in_any_wrapping(event: dict[str, Any]) -> None:
    job = Job(ObjectRef("bucket", "in.jsonl"), JOB["output"])
    found = parse_event(event)
    assert found == (AwaitedCall(job) if "Type" in event else Notice((job,)))
    assert parse_message(json.dumps(event)) == (job,)


@pytest.mark.parametrize(
    "line",
    [
        PROMPT,
        {"messages": [{"role": "user", "content": "Hello"}]},
        {"input": "a text to embed"},
        {"custom_id": "x", "input": "s3://this/is a text"},
        {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {}},
    ],
)
def test_a_line_of_a_job_is_a_request(line: dict[str, Any]) -> None:
    assert parse_event(line) == AwaitedCall(BatchRequest(line))
    assert parse_message(json.dumps(line)) == (BatchRequest(line),)


def test_items_of_a_distributed_map_have_what_all_of_the_batch_have() -> None:
    event = {
        "Items": [{"prompt": "a"}, {"prompt": "b", "max_tokens": 9}, JOB],
        "BatchInput": {"max_tokens": 3},
    }
    with pytest.raises(EventError, match="max_tokens"):
        parse_event(event)
    event["Items"].pop()
    assert parse_event(event) == Items(
        (BatchRequest({"prompt": "a", "max_tokens": 3}), BatchRequest({"prompt": "b", "max_tokens": 9}))
    )
    given = {"Items": [{"input": "s3://bucket/1.jsonl"}], "BatchInput": {"part_lines": 5}}
    assert parse_event(given) == Items((Job(ObjectRef("bucket", "1.jsonl"), limits={"part_lines": 5}),))


def test_only_a_fifo_queue_has_an_order() -> None:
    records = [sqs_record(JOB, queue=name, group="tenant") for name in ("fair", "strict.fifo")]
    queue = parse_event({"Records": records})
    assert isinstance(queue, Queue)
    assert [message.group for message in queue.messages] == [None, "tenant"]


# what is refused


@pytest.mark.parametrize(
    ("event", "part_of_message"),
    [
        (None, "must be an object"),
        ([], "must be an object"),
        ({}, "no fields"),
        ({"hello": 1}, "'hello'"),
        ({"Records": []}, "list of objects"),
        ({"Records": [1]}, "list of objects"),
        ({"Records": [{"eventSource": "aws:kinesis"}]}, "neither"),
        ({"Records": [sqs_record(JOB), s3_record("bucket", "a")]}, "neither"),
        ({"Records": [sqs_record(JOB, message_id="")]}, "messageId"),
        ({"Items": []}, "Items"),
        ({"Items": [1]}, "objects"),
        ({"Items": [JOB], "BatchInput": 3}, "BatchInput"),
        (s3_event("b", "x.jsonl"), "name of a bucket"),
        (s3_event("bucket", "a//b.jsonl"), "object name"),
        (s3_event("bucket", "/a.jsonl"), "object name"),
        (s3_event("bucket", "../a.jsonl"), "object name"),
        ({**JOB, "input": "/etc/passwd"}, "s3://bucket/key"),
        ({**JOB, "input": "https://host/in.jsonl"}, "s3://bucket/key"),
        ({**JOB, "output": "/tmp/out.jsonl"}, "s3://bucket/key"),
        ({**JOB, "output": "s3://bucket//out.jsonl"}, "object name"),
        ({**JOB, "output": 3}, "s3://bucket/key"),
        ({"output": JOB["output"]}, "s3://bucket/key"),
        ({**JOB, "temperature": 1}, "temperature"),
        ({**JOB, "worker": "4/4"}, "worker 4 of 4"),
        ({**JOB, "part_lines": "7"}, "whole numbers"),
        ({**JOB, "part_lines": True}, "whole numbers"),
        ({**JOB, "max_lines": 0}, "max_lines is 0"),
        ({**JOB, "version": 7}, "ETag"),
        ({**JOB, "version": "a b"}, "not an ETag"),
        (s3_event("bucket", "a.jsonl", etag="\ud800"), "not an ETag"),
        ({"Records": [sqs_record(JOB, message_id="a/b")]}, "messageId"),
        (eventbridge({"hello": 1}), "starts no job"),
        ({"detail": {"detail": {"detail": {"detail": {"detail": JOB}}}}}, "wrappings"),
        (sns_event("text"), "must be an object"),
        (eventbridge(sqs_event(JOB)), "queue's messages"),
    ],
)
def test_invalid_values_are_named(event: Any, part_of_message: str) -> None:
    with pytest.raises(EventError) as caught:
        parse_event(event)
    assert part_of_message in str(caught.value)


@pytest.mark.parametrize(
    ("body", "part_of_message"),
    [
        ("{", "not JSON"),
        (None, "must be a text"),
        ("[" * 100_000, "not JSON"),
        ("x" * (2 << 20), "must be a text"),
        ("7", "must be an object"),
        (json.dumps(sqs_event(JOB)), "queue's messages"),
    ],
)
def test_an_invalid_message_is_named(body: Any, part_of_message: str) -> None:
    with pytest.raises(EventError, match=part_of_message):
        parse_message(body)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)
_KNOWN = st.sampled_from(
    [
        "Records", "eventSource", "EventSource", "Sns", "Message", "Type", "s3", "bucket", "object", "name", "key",
        "eTag", "eventName", "detail", "detail-type", "source", "specversion", "data", "Items", "BatchInput", "input",
        "output", "version", "worker", "part_lines", "messageId", "body", "attributes", "MessageGroupId", "Event",
        "custom_id",
    ]
)  # fmt: skip
_VALUES = st.sampled_from(
    [
        "aws:s3",
        "aws:sqs",
        "aws:sns",
        "aws.s3",
        "Object Created",
        "ObjectCreated:Put",
        "s3://bucket/in",
        "\ud800",
        "1/2",
    ]
)
_EVENTS = st.recursive(
    _JSON | _VALUES,
    lambda inner: st.lists(inner, min_size=1, max_size=3) | st.dictionaries(_KNOWN, inner, max_size=5),
    max_leaves=30,
)


@contextmanager
def only_named_errors() -> Iterator[None]:
    """Accepts the named error, if it can be encoded: its subject may hold halves of characters."""
    try:
        yield
    except EventError as error:
        text_of_error = str(error) + error.param
    else:
        text_of_error = ""
    assert text_of_error.encode() is not None


@settings(max_examples=400, deadline=None)
@given(_EVENTS)
def test_garbage_raises_nothing_but_the_named_error(event: Any) -> None:
    with only_named_errors():
        assert isinstance(parse_event(event), AwaitedCall | Items | Notice | Queue)


def _places(value: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        found.append((value, key))
        if isinstance(inner, dict | list):
            found += _places(inner)
    return found


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_real_event_with_one_wrong_value_raises_nothing_but_the_named_error(data: st.DataObject) -> None:
    events = [
        s3_event("bucket", "a.jsonl", version="1"),
        object_created("bucket", "a.jsonl", version="1"),
        sns_event(s3_event("bucket", "a.jsonl")),
        sqs_event(s3_event("bucket", "a.jsonl"), queue="q.fifo"),
        {"Items": [dict(JOB), dict(PROMPT)], "BatchInput": {}},
        {**JOB, "worker": "0/2", "part_lines": 3},
    ]
    event = json.loads(json.dumps(data.draw(st.sampled_from(events))))
    owner, key = data.draw(st.sampled_from(_places(event)))
    owner[key] = data.draw(_JSON | _VALUES)
    with only_named_errors():
        found = parse_event(event)
        if isinstance(found, Queue):
            asked = parse_message(found.messages[0].body)
            assert "/" not in OUTPUTS.key_of_answer(
                found.messages[0].queue, found.messages[0].id
            ).removeprefix("a/")
        else:
            asked = (found.asked,) if isinstance(found, AwaitedCall) else found.asked
        for job in asked:
            if isinstance(job, Job):
                assert isinstance(job.spec(OUTPUTS.of_job(job)), JobSpec)


_FIELDS = st.dictionaries(st.sampled_from(["custom_id", "prompt", "messages", "input", "url", "body"]), _JSON)


@settings(max_examples=200, deadline=None)
@given(st.lists(_FIELDS, min_size=1, max_size=4))
def test_any_requests_are_lines_in_their_order(fields: list[dict[str, Any]]) -> None:
    with only_named_errors():
        lines = lines_of([BatchRequest(of) for of in fields])
        assert [line.number for line in lines] == list(range(1, len(fields) + 1))
        names = [line.custom_id for line in lines if line.custom_id is not None]
        assert len(names) == len(set(names))
