from __future__ import annotations

import json

import boto3
import pytest

from teneral.handlers.contrib.examples.classify_and_act import LABELS, PROMPT
from teneral.handlers.contrib.processing import choose
from teneral.handlers.function.context import Context
from teneral.runtime.errors import HandlerError, RequestError


@pytest.fixture
def alerts(cloud, monkeypatch):
    """A topic, and what arrives in the queue behind it."""
    sns, sqs = boto3.client("sns"), boto3.client("sqs")
    topic = sns.create_topic(Name="alerts")["TopicArn"]
    queue = sqs.create_queue(QueueName="alerts")["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    sns.subscribe(TopicArn=topic, Protocol="sqs", Endpoint=arn)
    monkeypatch.setenv("ALERT_TOPIC_ARN", topic)

    def receive():
        found = sqs.receive_message(QueueUrl=queue, MaxNumberOfMessages=10).get("Messages", [])
        return [json.loads(message["Body"]) for message in found]

    return receive


@pytest.fixture
def classify(invoke, generating):
    async def classify(event):
        return await invoke("classify_and_act", event, generating)

    return classify


@pytest.fixture(scope="module")
def texts_by_urgency(generating):
    """The tiny model's weights are random, and so is what it finds urgent: texts of both kinds."""
    model = Context(generating, request_id="search", timeout_s=60).model
    found: dict[bool, str] = {}
    for number in range(100):
        text = f"message {number} {'!' * (number % 7)}"
        scores = choose(model, PROMPT.format(text=text), list(LABELS))
        found.setdefault(max(scores, key=scores.__getitem__) == "A", text)
        if len(found) == 2:
            return found
    raise AssertionError("the model finds everything of one kind")


@pytest.fixture
def any_is_enough(monkeypatch):
    monkeypatch.setenv("THRESHOLD", "0")


async def test_what_is_urgent_is_published_and_what_is_not_is_not(
    classify, alerts, texts_by_urgency, any_is_enough
):
    other = await classify({"id": "ticket-1", "text": texts_by_urgency[False]})
    assert other["label"] in {"routine", "spam"}
    assert alerts() == []

    answer = await classify({"id": "ticket-7", "text": texts_by_urgency[True]})
    assert answer["id"] == "ticket-7"
    assert set(answer["scores"]) == set(LABELS.values())
    assert sum(answer["scores"].values()) == pytest.approx(1)
    (alert,) = alerts()
    assert json.loads(alert["Message"]) == answer
    assert alert["MessageAttributes"]["idempotency-key"]["Value"] == "urgent-ticket-7"


async def test_what_is_not_sure_enough_triggers_nothing(classify, alerts, texts_by_urgency, monkeypatch):
    monkeypatch.setenv("THRESHOLD", "1.01")
    answer = await classify({"text": texts_by_urgency[True]})
    assert answer["label"] is None
    assert answer["score"] == max(answer["scores"].values())
    assert alerts() == []


async def test_an_alert_that_cannot_be_published_fails_the_invocation(
    cloud, classify, texts_by_urgency, any_is_enough, monkeypatch
):
    monkeypatch.setenv("ALERT_TOPIC_ARN", "arn:aws:sns:us-east-1:123456789012:nothing")
    with pytest.raises(HandlerError, match="the action alert failed"):
        await classify({"text": texts_by_urgency[True]})


@pytest.mark.parametrize("event", [None, "text", {}, {"text": 5}, {"text": "  "}])
async def test_an_event_without_a_text_is_refused(classify, event):
    with pytest.raises(RequestError):
        await classify(event)
