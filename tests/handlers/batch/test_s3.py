"""Jobs whose input and output are in S3, as moto has it: conditional puts, versions, and workers that meet there."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer
from tests.support.batch_jobs import prompts

from teneral.handlers.batch.errors import JobMismatchError
from teneral.handlers.batch.spec import JobReport, Status
from teneral.loader.errors import ChangedError, NotFoundError
from teneral.loader.sources.base import SourceOptions

Run = Callable[..., JobReport]
BUCKET = "jobs"


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    """A client; `s3.options` are those of a job."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN"):
            patch.delenv(name, raising=False)
        patch.setenv("AWS_ACCESS_KEY_ID", "AKIATEST")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_CONFIG_FILE", "/nonexistent")
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
        server = ThreadedMotoServer(port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        client = boto3.client("s3", endpoint_url=url, region_name="us-east-1")
        client.create_bucket(Bucket=BUCKET)
        client.options = SourceOptions(endpoint_url=url, max_attempts=2)
        yield client
        client.close()
        server.stop()


def put_lines(s3: Any, key: str, lines: list[dict[str, Any]]) -> str:
    """The new object's ETag."""
    body = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    return str(s3.put_object(Bucket=BUCKET, Key=key, Body=body)["ETag"])


def read(s3: Any, key: str) -> bytes:
    data: bytes = s3.get_object(Bucket=BUCKET, Key=key)["Body"].read()
    return data


def keys(s3: Any, prefix: str) -> list[str]:
    return [found["Key"] for found in s3.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])]


def ids(data: bytes) -> list[str]:
    return [json.loads(line)["custom_id"] for line in data.splitlines()]


def test_a_job_from_s3_to_s3(run: Run, s3: Any) -> None:
    etag = put_lines(s3, "a/in.jsonl", prompts(20))
    job = {"source_options": s3.options, "part_lines": 6, "input_version": etag.strip('"')}
    report = run("s3://jobs/a/in.jsonl", "s3://jobs/a/out.jsonl", **job)
    assert report.status is Status.COMPLETE
    assert ids(read(s3, "a/out.jsonl")) == [f"id-{number}" for number in range(20)]
    index = json.loads(read(s3, "a/out.jsonl.parts/job.json"))
    assert (index["input"], index["input_version"]) == ("s3://jobs/a/in.jsonl", etag.strip('"'))
    assert run("s3://jobs/a/in.jsonl", "s3://jobs/a/out.jsonl", **job).run_records == 0


def test_a_folder_of_parts_as_output(run: Run, s3: Any) -> None:
    put_lines(s3, "b/in.jsonl", prompts(10))
    run("s3://jobs/b/in.jsonl", "s3://jobs/b/out/", source_options=s3.options, part_lines=5)
    names = ["job.json", "manifest.json", "parts/000000.jsonl", "parts/000001.jsonl"]
    assert keys(s3, "b/out/") == [f"b/out/{name}" for name in names]
    manifest = json.loads(read(s3, "b/out/manifest.json"))
    assert [part["records"] for part in manifest["parts"]] == [5, 5]
    assert [part["bytes"] for part in manifest["parts"]] == [
        len(read(s3, f"b/out/{name}")) for name in names[2:]
    ]


def test_two_workers_that_meet_make_each_record_visible_once(run: Run, s3: Any) -> None:
    put_lines(s3, "c/in.jsonl", prompts(40))
    reports: list[JobReport] = []

    def work() -> None:
        reports.append(
            run("s3://jobs/c/in.jsonl", "s3://jobs/c/out.jsonl", source_options=s3.options, part_lines=2)
        )

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [report.status for report in reports] == [Status.COMPLETE] * 2
    assert ids(read(s3, "c/out.jsonl")) == [f"id-{number}" for number in range(40)]


def test_a_replaced_input_is_noticed(run: Run, s3: Any) -> None:
    old = put_lines(s3, "d/in.jsonl", prompts(4))
    run("s3://jobs/d/in.jsonl", "s3://jobs/d/out/", source_options=s3.options)
    put_lines(s3, "d/in.jsonl", prompts(5))
    with pytest.raises(JobMismatchError, match="another version"):
        run("s3://jobs/d/in.jsonl", "s3://jobs/d/out/", source_options=s3.options)
    with pytest.raises(ChangedError):
        run("s3://jobs/d/in.jsonl", "s3://jobs/d/new/", source_options=s3.options, input_version=old)


def test_a_missing_object_is_named(run: Run, s3: Any) -> None:
    with pytest.raises(NotFoundError, match=r"nothing\.jsonl"):
        run("s3://jobs/nothing.jsonl", "s3://jobs/e/", source_options=s3.options)
