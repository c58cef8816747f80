"""The handler where people run it: over HTTP, for CloudEvents, on AWS Lambda, and on the command line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.handlers.batch.events.conftest import Cloud
from tests.support.batch_events import s3_event, sqs_event
from tests.support.batch_jobs import prompts
from tests.support.fake_runtime_api import FakeRuntimeApi

from teneral.cli import run as teneral
from teneral.handlers.app import create_app
from teneral.handlers.batch import worker as worker_module
from teneral.handlers.function.handler import load_handler
from teneral.handlers.http.server import serving_inside
from teneral.handlers.platforms.aws_lambda.answers import LoopAnswers
from teneral.handlers.platforms.aws_lambda.loop import InvocationLoop
from teneral.runtime.instance.instance import Instance

HANDLER = "teneral.handlers.batch:handler"
MISSING = {"input": "s3://uploads/missing.jsonl", "output": "s3://results/missing.jsonl"}


@pytest.fixture
async def http(instance: Instance) -> AsyncIterator[aiohttp.ClientSession]:
    handler = load_handler(HANDLER)
    async with serving_inside(create_app(instance, handler=handler)) as session:
        yield session
    handler.close()


async def test_over_http(cloud: Cloud, http: aiohttp.ClientSession) -> None:
    cloud.put("s3://uploads/http.jsonl", prompts(2))
    job = {"input": "s3://uploads/http.jsonl", "output": "s3://results/http.jsonl"}
    async with http.post("/invoke", json=job) as response:
        assert (response.status, (await response.json())["status"]) == (200, "complete")
    async with http.post("/invoke", json={**MISSING, "input": "/etc/passwd"}) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"], error["param"]) == (400, "bad_event", "input")


async def test_as_cloudevents(
    cloud: Cloud, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fails for good is answered by a status that no platform tries again."""

    async def deliver(data: Any, **headers: str) -> tuple[int, Any]:
        event = {"specversion": "1.0", "id": "1", "type": "t", "source": "/s", "data": data}
        headers["Content-Type"] = "application/cloudevents+json"
        async with http.post("/events", data=json.dumps(event), headers=headers) as response:
            return response.status, json.loads(await response.read())

    etag = cloud.put("s3://uploads/ce.jsonl", prompts(2))
    status, reply = await deliver(s3_event("uploads", "ce.jsonl", etag=etag))
    assert (status, reply["data"]["results"][0]["status"]) == (200, "complete")
    status, reply = await deliver({"prompt": "Hello", "max_tokens": 2})
    assert (status, reply["data"]["custom_id"]) == (200, "1")
    assert (await deliver(MISSING))[0] == 400
    job = {"input": "s3://uploads/ce.jsonl", "output": "s3://results/ce-late.jsonl"}
    # With a deadline there is never time for a part, and without one always.
    monkeypatch.setattr(worker_module, "MIN_MARGIN_S", 1e9)
    status, answer = await deliver(job, **{"Deadline-Ms": "300000"})
    assert (status, answer["error"]["code"]) == (503, "job_retry")


async def test_on_lambda(cloud: Cloud, instance: Instance) -> None:
    handler = load_handler(HANDLER)
    etag = cloud.put("s3://uploads/lambda.jsonl", prompts(2))
    with FakeRuntimeApi() as api:
        answers = LoopAnswers(instance, handler, create_app, environment={}, is_streaming=False)
        loop = InvocationLoop(api.address, instance, answers.answer, num_workers=1, drain_timeout_s=1.0)
        task = asyncio.create_task(loop.run())

        async def invoke(event: Any) -> Any:
            return await asyncio.to_thread(api.submit(event).wait)

        done = await invoke(sqs_event(s3_event("uploads", "lambda.jsonl", etag=etag), "bad"))
        assert json.loads(done.body) == {"batchItemFailures": [{"itemIdentifier": "message-1"}]}
        failed = await invoke(MISSING)
        assert json.loads(failed.body)["errorType"] == "JobFailedError"
        loop.request_stop()
        await task
        await answers.close()
    handler.close()


def test_on_the_command_line(
    cloud: Cloud, decoder_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    etag = cloud.put("s3://uploads/cli.jsonl", prompts(2))
    event = tmp_path / "event.json"
    event.write_text(json.dumps(s3_event("uploads", "cli.jsonl", etag=etag)))
    command = ["invoke", HANDLER, "--model", str(decoder_dir), "--event", str(event)]
    flags = ["--endpoint-url", cloud.url, "--batch-output", "s3://results/cli/{key}"]
    flags += ["--loader", "thread", "--threads", "1", "--log-level", "error"]
    assert teneral([*command, *flags]) == 0
    (report,) = json.loads(capsys.readouterr().out)["results"]
    assert (report["status"], report["output"]) == ("complete", "s3://results/cli/cli.jsonl")
    assert len(cloud.records(report["output"])) == 2
    event.write_text(json.dumps({"hello": 1}))
    assert teneral([*command, *flags]) == 15
