"""The examples against tiny real models, and moto for S3, SNS and SQS."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto import mock_aws
from tests.support.instances import StagedInstance, TinyParts

from teneral.handlers.function.context import Context
from teneral.handlers.function.handler import load_handler, run


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("decoder")


@pytest.fixture(scope="session")
def generating(decoder: Path) -> Iterator[StagedInstance]:
    with StagedInstance(TinyParts.make("llama", decoder)) as instance:
        yield instance.let_in()


@pytest.fixture(scope="session")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StagedInstance]:
    with StagedInstance(TinyParts.make("bert", tmp_path_factory.mktemp("encoder"))) as instance:
        yield instance.let_in()


@pytest.fixture(scope="session")
def mocked_cloud() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as environment:
        for name in ("AWS_ENDPOINT_URL", "AWS_PROFILE"):
            environment.delenv(name, raising=False)
        environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
        with mock_aws():
            client = boto3.client("s3")
            client.create_bucket(Bucket="bucket")
            yield client


@pytest.fixture
def cloud(mocked_cloud: Any) -> Any:
    """S3 with an empty bucket `bucket`."""
    for found in mocked_cloud.list_objects_v2(Bucket="bucket").get("Contents", ()):
        mocked_cloud.delete_object(Bucket="bucket", Key=found["Key"])
    return mocked_cloud


@pytest.fixture
def invoke() -> Callable[..., Any]:
    """One invocation of the handler that is named, by its result."""

    async def invoke(name: str, event: Any, instance: StagedInstance) -> Any:
        handler = load_handler(f"teneral.handlers.contrib.examples.{name}:handler")
        context = Context(instance, request_id=uuid.uuid4().hex, timeout_s=60)
        try:
            (value,) = [value async for value in run(handler, event, context)]
        finally:
            handler.close()
        return value

    return invoke
