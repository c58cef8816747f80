"""Actions behind a result: when, with which key, and what becomes of one that fails; against moto and a real server."""

from __future__ import annotations

import asyncio
import json
import logging

import boto3
import pytest
from aiohttp import web
from moto import mock_aws

from teneral.handlers.contrib.processing import act, handler, post_json, publish_sns, send_sqs
from teneral.runtime.errors import HandlerError


def acting(**options):
    return handler(post=act(**options))(lambda event, context: event)


def is_urgent(value):
    return value["score"] > 0.5


@pytest.fixture
def done():
    return []


@pytest.fixture
def do(done):
    def do(value, key):
        done.append((value, key))

    return do


async def test_only_what_meets_the_condition_triggers_the_action(invoke, do, done):
    act_on = acting(when=is_urgent, do=do)
    assert await invoke(act_on, {"score": 0.4}) == [{"score": 0.4}]
    assert done == []
    assert await invoke(act_on, {"score": 0.9}) == [{"score": 0.9}]
    assert [value for value, _ in done] == [{"score": 0.9}]


async def test_an_action_may_be_async(invoke, done):
    async def do(value, key):
        await asyncio.sleep(0)
        done.append(value)

    await invoke(acting(when=is_urgent, do=do), {"score": 0.9})
    assert done == [{"score": 0.9}]


async def test_each_value_of_a_stream_may_act(invoke, do, done):
    def values(event, context):
        yield {"score": 0.1}
        yield {"score": 0.6}
        yield {"score": 0.7}

    await invoke(handler(post=act(when=is_urgent, do=do))(values))
    assert [value["score"] for value, _ in done] == [0.6, 0.7]


async def test_a_repeated_request_acts_again_with_the_same_key(make_context, done, do):
    post = act(when=is_urgent, do=do)
    context, other = make_context(), make_context()
    for each in (context, context, other):
        post({"score": 0.9, "a": 1}, each)
    post({"score": 0.8}, context)
    keys = [key for _, key in done]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


async def test_a_key_of_ones_own_is_used(invoke, do, done):
    await invoke(
        acting(when=is_urgent, do=do, key=lambda value, context: f"doc-{value['id']}"), {"score": 1, "id": 7}
    )
    assert done[0][1] == "doc-7"


def broken(value, key):
    raise OSError("no listener")


async def abroken(value, key):
    raise OSError("no listener")


@pytest.mark.parametrize("do", [broken, abroken])
async def test_an_action_that_fails_fails_the_invocation(invoke, do):
    with pytest.raises(HandlerError, match=r"the action .*broken failed: OSError: no listener"):
        await invoke(acting(when=is_urgent, do=do), {"score": 1})


@pytest.mark.parametrize("do", [broken, abroken])
async def test_or_is_only_logged(invoke, do, caplog):
    with caplog.at_level(logging.ERROR, logger="teneral.handler"):
        assert await invoke(acting(when=is_urgent, do=do, on_error="log"), {"score": 1}) == [{"score": 1}]
    assert "no listener" in caplog.text


@pytest.mark.parametrize("on_error", ["fail", "log"])
async def test_a_condition_that_fails_is_never_only_logged(invoke, do, on_error):
    with pytest.raises(HandlerError, match="KeyError"):
        await invoke(acting(when=is_urgent, do=do, on_error=on_error), {})


@pytest.fixture
def cloud(monkeypatch):
    for name in ("AWS_ENDPOINT_URL", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with mock_aws():
        yield


async def test_a_value_is_published_to_a_topic_and_arrives_in_its_queue(invoke, cloud):
    sns, sqs = boto3.client("sns"), boto3.client("sqs")
    # Names of its own: an action that another test left behind may still send.
    topic = sns.create_topic(Name="published")["TopicArn"]
    queue = sqs.create_queue(QueueName="published")["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    sns.subscribe(TopicArn=topic, Protocol="sqs", Endpoint=arn)
    await invoke(acting(when=is_urgent, do=publish_sns(topic)), {"score": 0.9})
    (message,) = sqs.receive_message(QueueUrl=queue)["Messages"]
    body = json.loads(message["Body"])
    assert json.loads(body["Message"]) == {"score": 0.9}
    assert len(body["MessageAttributes"]["idempotency-key"]["Value"]) == 32


async def test_a_fifo_queue_drops_the_repetition(make_context, cloud):
    sqs = boto3.client("sqs")
    queue = sqs.create_queue(QueueName="alerts.fifo", Attributes={"FifoQueue": "true"})["QueueUrl"]
    post, context = act(when=is_urgent, do=send_sqs(queue)), make_context()
    for score in (0.9, 0.9, 0.8):
        post({"score": score}, context)
    found = sqs.receive_message(QueueUrl=queue, MaxNumberOfMessages=10)["Messages"]
    assert [json.loads(message["Body"])["score"] for message in found] == [0.9, 0.8]


@pytest.fixture
async def receiver():
    received, statuses, gate = [], [200], asyncio.Event()
    gate.set()

    async def receive(request):
        received.append((request.headers["Idempotency-Key"], await request.json()))
        await gate.wait()
        return web.Response(status=statuses[0], headers={"Location": "/elsewhere"})

    app = web.Application()
    app.router.add_post("/hook", receive)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    yield f"http://127.0.0.1:{port}/hook", received, statuses, gate
    gate.set()
    await runner.cleanup()


async def test_a_value_is_posted_with_its_key(invoke, receiver):
    url, received, _, _ = receiver
    await invoke(acting(when=is_urgent, do=post_json(url)), {"score": 0.9})
    ((key, value),) = received
    assert (len(key), value) == (32, {"score": 0.9})


@pytest.mark.parametrize("status", [302, 400, 500])
async def test_an_answer_that_is_no_success_is_a_failure(invoke, receiver, status):
    url, _, statuses, _ = receiver
    statuses[0] = status
    with pytest.raises(HandlerError, match=f"answered {status}"):
        await invoke(acting(when=is_urgent, do=post_json(url)), {"score": 0.9})


async def test_a_receiver_that_does_not_answer_is_given_up(invoke, receiver):
    url, _, _, gate = receiver
    gate.clear()
    with pytest.raises(HandlerError, match="Timeout"):
        await invoke(acting(when=is_urgent, do=post_json(url, timeout_s=0.05)), {"score": 0.9})


@pytest.mark.parametrize(
    "make", [lambda: post_json("http://x", timeout_s=0), lambda: act(when=bool, do=print, on_error="no")]
)
def test_invalid_settings_are_refused(make):
    with pytest.raises(HandlerError):
        make()
