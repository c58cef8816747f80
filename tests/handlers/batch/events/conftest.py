"""A cloud for the tests of events: moto's S3 and SQS behind a socket, and an instance whose store it is."""

from __future__ import annotations

import json
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer
from tests.support.aws_environment import use_test_credentials
from tests.support.batch_jobs import config_of
from tests.support.load import patience_s

from teneral.handlers.batch.worker import PartPace
from teneral.handlers.function.context import Context
from teneral.handlers.function.handler import load_handler, run
from teneral.runtime.instance.instance import Instance

Invoke = Callable[..., Awaitable[Any]]


@dataclass(frozen=True)
class Cloud:
    url: str
    s3: Any
    sqs: Any

    def put(self, address: str, lines: list[Any]) -> str:
        """The new object's ETag."""
        bucket, _, key = address.removeprefix("s3://").partition("/")
        body = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        return str(self.s3.put_object(Bucket=bucket, Key=key, Body=body)["ETag"]).strip('"')

    def read(self, address: str) -> bytes:
        bucket, _, key = address.removeprefix("s3://").partition("/")
        data: bytes = self.s3.get_object(Bucket=bucket, Key=key)["Body"].read()
        return data

    def records(self, address: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.read(address).splitlines()]

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        found = self.s3.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])
        return [entry["Key"] for entry in found]

    def queue(self, **attributes: str) -> tuple[str, str]:
        """A new queue's address and ARN."""
        name = uuid.uuid4().hex + (".fifo" if attributes.get("FifoQueue") else "")
        url = self.sqs.create_queue(QueueName=name, Attributes={"VisibilityTimeout": "0", **attributes})[
            "QueueUrl"
        ]
        arn = self.sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"][
            "QueueArn"
        ]
        return url, arn

    def receive(self, url: str, arn: str) -> dict[str, Any]:
        """What Lambda makes of the messages that it receives."""
        got = self.sqs.receive_message(
            QueueUrl=url, MaxNumberOfMessages=10, AttributeNames=["All"], MessageAttributeNames=["All"]
        )
        return {
            "Records": [
                {
                    "messageId": message["MessageId"],
                    "receiptHandle": message["ReceiptHandle"],
                    "body": message["Body"],
                    "attributes": message["Attributes"],
                    "messageAttributes": message.get("MessageAttributes", {}),
                    "md5OfBody": message["MD5OfBody"],
                    "eventSource": "aws:sqs",
                    "eventSourceARN": arn,
                    "awsRegion": "us-east-1",
                }
                for message in got.get("Messages", [])
            ]
        }

    def delete_done(self, url: str, event: dict[str, Any], response: dict[str, Any]) -> None:
        """What Lambda does with a partial batch response."""
        failed = {failure["itemIdentifier"] for failure in response["batchItemFailures"]}
        for record in event["Records"]:
            if record["messageId"] not in failed:
                self.sqs.delete_message(QueueUrl=url, ReceiptHandle=record["receiptHandle"])


@pytest.fixture(scope="module")  # other files' tests use moto too, in this process, and begin by emptying it
def cloud() -> Iterator[Cloud]:
    with pytest.MonkeyPatch.context() as patch:
        use_test_credentials(patch)
        server = ThreadedMotoServer(port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        options = {"endpoint_url": url, "region_name": "us-east-1"}
        found = Cloud(url, boto3.client("s3", **options), boto3.client("sqs", **options))
        for bucket in ("uploads", "results"):
            found.s3.create_bucket(Bucket=bucket)
        yield found
        found.s3.close()
        found.sqs.close()
        server.stop()


@pytest.fixture(scope="module")
def instance(cloud: Cloud, decoder_dir: Path, one_thread: None) -> Iterator[Instance]:
    config = config_of(
        decoder_dir,
        max_queued=64,
        endpoint_url=cloud.url,
        batch_output="s3://results/{bucket}/{key}/{etag}.jsonl",
        batch_answers="s3://results/answers/{queue}/{id}.json",
    )
    with Instance(config) as found:
        yield found


@pytest.fixture
def invoke(instance: Instance) -> Invoke:
    """One invocation, as any platform makes it: `await invoke(event, timeout_s=…)`."""

    async def call(event: Any, *, host: Instance = instance, timeout_s: float | None = patience_s(60)) -> Any:
        handler = load_handler("teneral.handlers.batch:handler")
        context = Context(host, request_id=uuid.uuid4().hex, timeout_s=timeout_s)
        try:
            (value,) = [value async for value in run(handler, event, context)]
        finally:
            handler.close()
        return value

    return call


@pytest.fixture
def time_for(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`time_for(n)`: from now on jobs have time for `n` parts more, however fast the machine is."""

    def allow(num_parts: int) -> None:
        left = iter([True] * num_parts)
        monkeypatch.setattr(PartPace, "has_time", lambda _pace, _remaining_s: next(left, False))

    return allow
