"""Jobs whose input and output are in S3, as moto has it: conditional puts, versions, and workers that meet there."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer
from tests.support.batch_jobs import prompts
from tests.support.load import patience_s

from teneral.handlers.batch.finish import digests_of
from teneral.handlers.batch.spec import JobMismatchError, JobReport, Status
from teneral.loader.errors import AlreadyExistsError, ChangedError, NotFoundError
from teneral.loader.sources.base import SourceOptions, Writer
from teneral.loader.sources.s3.store import S3Store

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
        client.options = SourceOptions(endpoint_url=url, max_attempts=2, outage_s=0)
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
        thread.join(patience_s(60))
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


class Intruder(S3Store):
    """A store in which another writer creates the object while ours is being written."""

    content = b""

    def create(self, name: str, *, if_absent: bool = False) -> Writer:
        self.put(name, self.content)
        return super().create(name, if_absent=if_absent)


@pytest.mark.parametrize("is_ours", [True, False])
def test_an_output_that_appears_meanwhile_is_recognised_by_its_digests(
    run: Run, s3: Any, monkeypatch: pytest.MonkeyPatch, is_ours: bool
) -> None:
    name = f"race-{is_ours}"
    put_lines(s3, f"{name}/in.jsonl", prompts(12))
    addresses = (f"s3://jobs/{name}/in.jsonl", f"s3://jobs/{name}/out.jsonl")
    job = {"source_options": s3.options, "part_lines": 5}
    run(*addresses, **job)
    whole = read(s3, f"{name}/out.jsonl")
    s3.delete_object(Bucket=BUCKET, Key=f"{name}/out.jsonl")
    Intruder.content = whole if is_ours else b"x" * len(whole)
    monkeypatch.setattr("teneral.loader.sources.s3.store.S3Store", Intruder)
    if is_ours:
        assert run(*addresses, **job).status is Status.COMPLETE
    else:
        with pytest.raises(JobMismatchError, match=r"out\.jsonl"):
            run(*addresses, **job)
    assert read(s3, f"{name}/out.jsonl") == Intruder.content


def test_another_file_of_the_same_size_is_refused_by_name(run: Run, s3: Any) -> None:
    put_lines(s3, "f/in.jsonl", prompts(12))
    job = {"source_options": s3.options, "part_lines": 5}
    run("s3://jobs/f/in.jsonl", "s3://jobs/f/out.jsonl", **job)
    data = bytearray(read(s3, "f/out.jsonl"))
    data[-3] ^= 1
    s3.put_object(Bucket=BUCKET, Key="f/out.jsonl", Body=bytes(data))
    with pytest.raises(JobMismatchError, match=r"f/out\.jsonl"):
        run("s3://jobs/f/in.jsonl", "s3://jobs/f/out.jsonl", **job)
    assert read(s3, "f/out.jsonl") == data


def test_a_delayed_write_of_an_old_job_replaces_nothing(run: Run, s3: Any) -> None:
    """The answer to its condition comes from the store, however late the request arrives."""
    put_lines(s3, "g/in.jsonl", prompts(3))
    store = S3Store("s3://jobs/g", s3.options)
    delayed = store.create("out.jsonl", if_absent=True)
    delayed.write(b"old")
    run("s3://jobs/g/in.jsonl", "s3://jobs/g/out.jsonl", source_options=s3.options)
    with pytest.raises(AlreadyExistsError):
        delayed.commit()
    assert len(ids(read(s3, "g/out.jsonl"))) == 3
    store.close()


def test_the_digests_of_stretches_do_not_depend_on_the_pieces() -> None:
    data = bytes(range(256)) * 8
    sizes = [0, 1, 700, 0, 1300, 47]
    ends = list(accumulate(sizes))
    expected = [
        hashlib.sha256(data[end - size : end]).hexdigest() for size, end in zip(sizes, ends, strict=True)
    ]
    for step in (1, 7, 256, 4096):
        pieces = [data[start : start + step] for start in range(0, len(data), step)]
        assert list(digests_of(pieces, sizes)) == expected


def test_a_missing_object_is_named(run: Run, s3: Any) -> None:
    with pytest.raises(NotFoundError, match=r"nothing\.jsonl"):
        run("s3://jobs/nothing.jsonl", "s3://jobs/e/", source_options=s3.options)
