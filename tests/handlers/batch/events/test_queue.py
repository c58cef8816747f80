"""Messages of SQS: real ones through moto, and partial batch responses that equal Powertools'."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from aws_lambda_powertools.utilities.batch import (
    BatchProcessor,
    EventType,
    SqsFifoPartialProcessor,
    process_partial_response,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.handlers.batch.events.conftest import Cloud, Invoke
from tests.support.batch_events import eventbridge, s3_event, sns_envelope, sqs_event, sqs_record
from tests.support.batch_jobs import prompts

from teneral.handlers.batch.events.handler import work_off
from teneral.handlers.batch.events.outputs import Outputs
from teneral.handlers.batch.events.parse import BatchRequest, Queue, QueueMessage, parse_event
from teneral.handlers.batch.events.requests import Requests, open_queued_requests
from teneral.runtime.instance.instance import Instance

PROMPT = {"prompt": "Hello", "max_tokens": 4, "temperature": 0}


def failures(response: dict[str, Any]) -> list[str]:
    return [failure["itemIdentifier"] for failure in response["batchItemFailures"]]


def send(cloud: Cloud, url: str, *bodies: Any, **options: str) -> list[str]:
    """The messages' ids."""
    return [
        cloud.sqs.send_message(
            QueueUrl=url, MessageBody=body if isinstance(body, str) else json.dumps(body), **options
        )["MessageId"]
        for body in bodies
    ]


# through a queue


async def test_uploads_that_s3_tells_a_queue_of_are_answered_and_gone(cloud: Cloud, invoke: Invoke) -> None:
    url, arn = cloud.queue()
    notice = {"QueueArn": arn, "Events": ["s3:ObjectCreated:*"]}
    cloud.s3.put_bucket_notification_configuration(
        Bucket="uploads", NotificationConfiguration={"QueueConfigurations": [notice]}
    )
    try:
        etag = cloud.put("s3://uploads/queue/a b+c%.jsonl", prompts(3))
    finally:
        cloud.s3.put_bucket_notification_configuration(Bucket="uploads", NotificationConfiguration={})
    event = cloud.receive(url, arn)
    assert len(event["Records"]) >= 1
    response = await invoke(event)
    assert response == {"batchItemFailures": []}
    assert len(cloud.records(f"s3://results/uploads/queue/a b+c%.jsonl/{etag}.jsonl")) == 3
    cloud.delete_done(url, event, response)
    assert cloud.receive(url, arn)["Records"] == []


async def test_a_bad_message_is_left_to_the_dead_letter_queue_and_the_others_are_done(
    cloud: Cloud, invoke: Invoke, caplog: pytest.LogCaptureFixture
) -> None:
    dead_url, dead_arn = cloud.queue()
    policy = json.dumps({"deadLetterTargetArn": dead_arn, "maxReceiveCount": "2"})
    url, arn = cloud.queue(RedrivePolicy=policy)
    good, bad = send(cloud, url, PROMPT, "no JSON")
    for _ in range(2):
        event = cloud.receive(url, arn)
        response = await invoke(event)
        assert failures(response) == [bad]
        cloud.delete_done(url, event, response)
    assert cloud.receive(url, arn)["Records"] == []
    assert [record["body"] for record in cloud.receive(dead_url, dead_arn)["Records"]] == ["no JSON"]
    assert json.loads(cloud.read(f"s3://results/answers/{arn.rpartition(':')[2]}/{good}.json"))["text"]
    (notice, *_) = [record for record in caplog.records if record.name == "teneral.batch"]
    assert notice.levelno == logging.ERROR
    assert bad in notice.getMessage()
    assert "can never succeed" in notice.getMessage()


async def test_a_job_that_is_not_complete_comes_again_and_goes_on(
    cloud: Cloud, invoke: Invoke, time_for: Callable[[int], None]
) -> None:
    url, arn = cloud.queue()
    cloud.put("s3://uploads/queue-long.jsonl", prompts(40))
    job = {"input": "s3://uploads/queue-long.jsonl", "output": "s3://results/queue-long.jsonl"}
    (message,) = send(cloud, url, job)
    event = cloud.receive(url, arn)
    time_for(0)
    response = await invoke(event)
    assert failures(response) == [message]
    cloud.delete_done(url, event, response)
    time_for(40)
    event = cloud.receive(url, arn)
    assert [record["messageId"] for record in event["Records"]] == [message]
    assert await invoke(event) == {"batchItemFailures": []}
    assert len(cloud.records(job["output"])) == 40


async def test_every_kind_of_message(cloud: Cloud, invoke: Invoke) -> None:
    etag = cloud.put("s3://uploads/kinds.jsonl", prompts(2))
    upload = s3_event("uploads", "kinds.jsonl", etag=etag)
    job = {"input": "s3://uploads/kinds.jsonl", "output": "s3://results/kinds.jsonl"}
    call = {
        "custom_id": "c",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "b", "max_tokens": 2},
    }
    bodies = [upload, sns_envelope(upload), job, eventbridge(job), PROMPT, call, {"prompt": 7}]
    assert failures(await invoke(sqs_event(*bodies, queue="kinds"))) == []
    answers = [
        json.loads(cloud.read(f"s3://results/answers/kinds/message-{number}.json")) for number in (4, 5, 6)
    ]
    assert [answer["custom_id"] for answer in answers] == ["message-4", "c", "message-6"]
    assert answers[1]["response"]["status_code"] == 200
    assert answers[2]["error"]["code"] == "invalid_request"


async def test_the_answer_to_a_message_is_written_once(
    cloud: Cloud, invoke: Invoke, instance: Instance
) -> None:
    event = sqs_event({**PROMPT, "temperature": 1.0}, queue="once")
    place = "s3://results/answers/once/message-0.json"
    assert await asyncio.gather(invoke(event), invoke(event)) == [{"batchItemFailures": []}] * 2
    first, steps = cloud.read(place), instance.engine.result().statistics().steps_total
    assert await invoke(event) == {"batchItemFailures": []}
    assert cloud.read(place) == first
    assert instance.engine.result().statistics().steps_total == steps


async def test_of_two_answers_to_a_message_the_first_stays(
    cloud: Cloud, instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = Outputs.of(None, "s3://results/answers/{queue}/{id}.json")
    key = "answers/race/m.json"

    answer = Requests.answer

    async def overtaken(self: Requests, lines: Any) -> Any:
        cloud.s3.put_object(Bucket="results", Key=key, Body=b"the other's")
        return await answer(self, lines)

    monkeypatch.setattr(Requests, "answer", overtaken)
    async with open_queued_requests(instance, outputs) as queued:
        await queued.answer(QueueMessage("m", "race", None, ""), [BatchRequest(PROMPT)])
    assert cloud.read(f"s3://results/{key}") == b"the other's"


async def test_of_a_group_nothing_is_done_after_a_failure(cloud: Cloud, invoke: Invoke) -> None:
    url, arn = cloud.queue(FifoQueue="true", ContentBasedDeduplication="true")
    first = send(cloud, url, {**PROMPT, "seed": 1}, "bad", {**PROMPT, "seed": 2}, MessageGroupId="a")
    (other,) = send(cloud, url, {**PROMPT, "seed": 3}, MessageGroupId="b")
    event = cloud.receive(url, arn)
    assert [record["messageId"] for record in event["Records"]] == [*first, other]
    assert failures(await invoke(event)) == first[1:]
    answered = cloud.keys("results", f"answers/{arn.rpartition(':')[2]}/")
    assert sorted(key.rpartition("/")[2] for key in answered) == sorted(
        f"{of}.json" for of in (first[0], other)
    )


# as Powertools answers


class Refused(Exception):
    pass


def by_powertools(event: dict[str, Any], failing: set[str], processor: Any) -> list[str]:
    def handle(record: Any) -> None:
        if record.message_id in failing:
            raise Refused

    context: Any = None
    return failures(process_partial_response(event, handle, processor, context))


def by_us(event: dict[str, Any], failing: set[str]) -> tuple[list[str], list[str]]:
    """What failed, and what was tried."""
    tried: list[str] = []

    async def handle(message: QueueMessage) -> None:
        tried.append(message.id)
        await asyncio.sleep(0)
        if message.id in failing:
            raise Refused

    queue = parse_event(event)
    assert isinstance(queue, Queue)
    return failures(asyncio.run(work_off(queue.messages, handle))), tried


_OUTCOMES = st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(_OUTCOMES)
def test_a_partial_response_is_powertools_own(outcomes: list[tuple[str, bool]]) -> None:
    records = [sqs_record(PROMPT, message_id=f"m{number}") for number in range(len(outcomes))]
    failing = {f"m{number}" for number, (_, is_failing) in enumerate(outcomes) if is_failing}
    event = {"Records": records}
    processor = BatchProcessor(event_type=EventType.SQS, raise_on_entire_batch_failure=False)
    ours, tried = by_us(event, failing)
    assert ours == by_powertools(event, failing, processor)
    assert len(tried) == len(outcomes)


@settings(max_examples=60, deadline=None)
@given(_OUTCOMES)
def test_a_partial_response_of_groups_is_powertools_own(outcomes: list[tuple[str, bool]]) -> None:
    records = [
        sqs_record(PROMPT, message_id=f"m{number}", queue="q.fifo", group=group)
        for number, (group, _) in enumerate(outcomes)
    ]
    failing = {f"m{number}" for number, (_, is_failing) in enumerate(outcomes) if is_failing}
    event = {"Records": records}
    processor = SqsFifoPartialProcessor(skip_group_on_error=True)
    processor.raise_on_entire_batch_failure = False
    ours, tried = by_us(event, failing)
    assert ours == by_powertools(event, failing, processor)
    for group in "abc":
        of_group = [f"m{number}" for number, (of, _) in enumerate(outcomes) if of == group]
        seen = [message for message in tried if message in of_group]
        assert seen == of_group[: len(seen)]
        assert not failing & set(seen[:-1])
