"""An upload to S3 triggers a classifier in ONNX, and its label an alert: through a real server, with moto's S3, SQS and
SNS.
"""

from __future__ import annotations

import io
import json
import uuid
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest
from PIL import Image
from tests.support.http_server import running_server
from tests.support.onnx_artifacts import Packed, pack_model
from tests.support.onnx_models import Made, Net

from teneral.handlers.function.handler import load_handler
from teneral.runtime.config import ServeConfig
from teneral.runtime.instance.instance import Instance

LABELS = ("red", "green", "blue")
SIZE = 16


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    """A network that says which colour a picture has most of."""
    net = Net()
    kernels = np.zeros((96, 3, 3, 3), "f4")
    kernels[np.arange(96), np.arange(96) % 3, 1, 1] = 1.0
    x = net.op("Conv", net.input("pixels", ["batch", 3, SIZE, SIZE]), net.constant(kernels), pads=[1] * 4)
    x = net.op("Flatten", net.op("GlobalAveragePool", net.op("Relu", x)))
    net.op("Gemm", x, net.constant(np.eye(3, dtype="f4")[np.arange(96) % 3] / 8), name="scores")
    net.output("scores", ["batch", 3])
    folder = tmp_path_factory.mktemp("classifier")
    config = {"id2label": {str(number): label for number, label in enumerate(LABELS)}}
    return pack_model(Made(net.model(), {}), folder, files={"config.json": json.dumps(config).encode()})


@pytest.fixture
def alerts(cloud: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A topic, and what arrives in the queue behind it."""
    name = f"alerts-{uuid.uuid4().hex}"  # other tests of the session have topics and queues, too
    topic = boto3.client("sns").create_topic(Name=name)["TopicArn"]
    queue = Queue(name)
    boto3.client("sns").subscribe(TopicArn=topic, Protocol="sqs", Endpoint=queue.arn)
    monkeypatch.setenv("ALERT_TOPIC_ARN", topic)
    monkeypatch.setenv("ALERT_LABELS", "red,blue")
    monkeypatch.setenv("IMAGE_SIZE", str(SIZE))
    return queue


class Queue:
    """One of moto's."""

    def __init__(self, name: str) -> None:
        self._sqs = boto3.client("sqs")
        self._url = self._sqs.create_queue(QueueName=name)["QueueUrl"]
        found = self._sqs.get_queue_attributes(QueueUrl=self._url, AttributeNames=["QueueArn"])
        self.arn = found["Attributes"]["QueueArn"]

    def receive(self) -> list[Any]:
        found = self._sqs.receive_message(QueueUrl=self._url, MaxNumberOfMessages=10).get("Messages", [])
        for message in found:
            self._sqs.delete_message(QueueUrl=self._url, ReceiptHandle=message["ReceiptHandle"])
        return [json.loads(message["Body"]) for message in found]


def picture(color: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (30, 20), color).save(file, "PNG")
    return file.getvalue()


async def test_an_upload_is_classified_and_its_label_triggers_an_alert(
    cloud: Any, alerts: Queue, classifier: Packed, tmp_path: Path
) -> None:
    uploads = Queue(f"uploads-{uuid.uuid4().hex}")
    notify = {"QueueConfigurations": [{"QueueArn": uploads.arn, "Events": ["s3:ObjectCreated:*"]}]}
    cloud.put_bucket_notification_configuration(Bucket="bucket", NotificationConfiguration=notify)
    uploads.receive()  # S3's test event
    handler = load_handler("teneral.handlers.contrib.examples.classify_upload:handler")
    instance = Instance(ServeConfig(model=str(classifier.artifact), threads=1))
    async with running_server(instance, handler=handler) as server:
        for color in ("red", "lime", "blue"):
            cloud.put_object(Bucket="bucket", Key=f"{color} picture.png", Body=picture(color))
        cloud.put_object(Bucket="bucket", Key="notes.txt", Body=b"no picture")
        cloud.put_object(Bucket="bucket", Key="broken.png", Body=b"no picture, either")
        answers = [await server.post("/invoke", event) for event in uploads.receive()]
    assert [answer.status for answer in answers] == [200, 200, 200, 200, 400]
    objects = [answer.json["objects"] for answer in answers[:4]]
    assert [[each["label"] for each in found] for found in objects] == [["red"], ["green"], ["blue"], []]
    assert [each["alerted"] for found in objects for each in found] == [True, False, True]
    received = alerts.receive()
    assert [json.loads(alert["Message"])["object"] for alert in received] == [
        "s3://bucket/red picture.png",
        "s3://bucket/blue picture.png",
    ]
    keys = [alert["MessageAttributes"]["idempotency-key"]["Value"] for alert in received]
    assert [key.rpartition("-")[2] for key in keys] == ["red", "blue"]


async def test_a_picture_that_is_gone_is_skipped(
    cloud: Any, alerts: Queue, classifier: Packed, invoke: Any
) -> None:
    event = {
        "Records": [
            {
                "eventName": "ObjectCreated:Put",
                "s3": {"bucket": {"name": "bucket"}, "object": {"key": "gone.png", "eTag": "0" * 32}},
            }
        ]
    }
    with Instance(ServeConfig(model=str(classifier.artifact), threads=1)) as instance:
        answer = await invoke("classify_upload", event, instance)
    assert answer == {"objects": [{"object": "s3://bucket/gone.png", "label": None, "skipped": True}]}
    assert alerts.receive() == []
