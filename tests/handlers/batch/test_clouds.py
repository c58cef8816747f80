"""Jobs in Cloud Storage and Blob Storage, on the project's own servers: commits by generation and ETag, events that
start jobs, and workers that meet or are killed there.
"""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.support.az_server import ACCOUNT, AzServer, use_az_account
from tests.support.batch_jobs import config_of, prompts, wait_until, workers_of
from tests.support.cloud_events import blob_created, eventarc, grid_event, grid_validation, gs_notification
from tests.support.gs_server import GsServer, use_gs_account
from tests.support.load import patience_s

from teneral.handlers.app import create_app
from teneral.handlers.batch.spec import JobMismatchError, JobReport, Status
from teneral.handlers.function.context import Context
from teneral.handlers.function.handler import load_handler
from teneral.handlers.function.handler import run as call
from teneral.handlers.http.server import serving_inside
from teneral.loader.errors import ChangedError
from teneral.loader.sources.base import SourceOptions
from teneral.runtime.instance.instance import Instance

Run = Callable[..., JobReport]
BUCKET = "jobs"


@dataclass
class Cloud:
    scheme: str
    server: GsServer
    root: str  # the bucket's address
    endpoint: str

    @property
    def options(self) -> SourceOptions:
        return SourceOptions(endpoint_url=self.endpoint, max_attempts=2, outage_s=0)

    def put(self, key: str, lines: list[dict[str, Any]]) -> str:
        """The new object's version, as events tell it."""
        generation = self.server.put(
            BUCKET, key, b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        )
        return self.version(generation)

    def version(self, generation: int) -> str:
        return str(generation) if self.scheme == "gs" else f"0x{generation:X}"

    def read(self, key: str) -> bytes:
        return self.server.objects[BUCKET][key][0]

    def keys(self, prefix: str) -> list[str]:
        return sorted(key for key in self.server.objects[BUCKET] if key.startswith(prefix))

    def events(self, key: str, version: str) -> list[Any]:
        """An upload as each of the vendor's services tells of it."""
        if self.scheme == "gs":
            notification = gs_notification(BUCKET, key, generation=version)
            return [eventarc(BUCKET, key, generation=version), notification]
        where = (ACCOUNT, BUCKET, key)
        return [blob_created(*where, etag=version), [grid_event(*where, etag=version)]]


@contextmanager
def gs_cloud() -> Iterator[Cloud]:
    with GsServer(page_objects=100) as server, pytest.MonkeyPatch.context() as patch:
        use_gs_account(patch, server)
        server.objects[BUCKET] = {}
        yield Cloud("gs", server, f"gs://{BUCKET}", server.url)


@contextmanager
def az_cloud() -> Iterator[Cloud]:
    with AzServer() as server, pytest.MonkeyPatch.context() as patch:
        use_az_account(patch, server)
        server.objects[BUCKET] = {}
        yield Cloud("az", server, f"az://{ACCOUNT}/{BUCKET}", server.endpoint)


@pytest.fixture(scope="module", params=[gs_cloud, az_cloud], ids=["gs", "az"])
def cloud(request: pytest.FixtureRequest) -> Iterator[Cloud]:
    with request.param() as found:
        yield found


def ids(data: bytes) -> list[str]:
    return [json.loads(line)["custom_id"] for line in data.splitlines()]


def numbered(count: int) -> list[str]:
    return [f"id-{number}" for number in range(count)]


def test_a_job_from_a_store_to_a_store(run: Run, cloud: Cloud) -> None:
    version = cloud.put("a/in.jsonl", prompts(20))
    job = {"source_options": cloud.options, "part_lines": 6, "input_version": version}
    report = run(f"{cloud.root}/a/in.jsonl", f"{cloud.root}/a/out.jsonl", **job)
    assert (report.status, report.run_records) == (Status.COMPLETE, 20)
    assert ids(cloud.read("a/out.jsonl")) == numbered(20)
    index = json.loads(cloud.read("a/out.jsonl.parts/job.json"))
    assert (index["input"], index["input_version"]) == (f"{cloud.root}/a/in.jsonl", version)
    assert run(f"{cloud.root}/a/in.jsonl", f"{cloud.root}/a/out.jsonl", **job).run_records == 0


def test_workers_that_meet_make_each_record_visible_once(run: Run, cloud: Cloud) -> None:
    cloud.put("c/in.jsonl", prompts(24))
    reports: list[JobReport] = []

    def work() -> None:
        places = (f"{cloud.root}/c/in.jsonl", f"{cloud.root}/c/out.jsonl")
        reports.append(run(*places, source_options=cloud.options, part_lines=2))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience_s(60))
    assert [report.status for report in reports] == [Status.COMPLETE] * 3
    assert ids(cloud.read("c/out.jsonl")) == numbered(24)


def test_no_write_of_a_job_is_without_its_condition(run: Run, cloud: Cloud) -> None:
    cloud.put("w/in.jsonl", prompts(12))
    before = len(cloud.server.calls)
    run(f"{cloud.root}/w/in.jsonl", f"{cloud.root}/w/out.jsonl", source_options=cloud.options, part_lines=4)
    made = []
    for each in cloud.server.calls[before:]:
        if cloud.scheme == "gs" and each.path.startswith("/upload/") and "upload_id" not in each.query:
            made.append(each.query.get("ifGenerationMatch"))
        if cloud.scheme == "az" and each.method == "PUT" and each.query.get("comp") != "block":
            made.append(each.headers.get("if-none-match"))
    assert len(made) == 9  # job.json, three parts with a claim each, manifest.json, and the one file
    assert set(made) == {"0" if cloud.scheme == "gs" else "*"}


def test_a_replaced_input_is_noticed(run: Run, cloud: Cloud) -> None:
    old = cloud.put("d/in.jsonl", prompts(4))
    run(f"{cloud.root}/d/in.jsonl", f"{cloud.root}/d/out/", source_options=cloud.options)
    cloud.put("d/in.jsonl", prompts(5))
    with pytest.raises(JobMismatchError, match="another version"):
        run(f"{cloud.root}/d/in.jsonl", f"{cloud.root}/d/out/", source_options=cloud.options)
    with pytest.raises(ChangedError):
        run(
            f"{cloud.root}/d/in.jsonl",
            f"{cloud.root}/d/new/",
            source_options=cloud.options,
            input_version=old,
        )


def test_another_file_is_never_replaced(run: Run, cloud: Cloud) -> None:
    cloud.put("f/in.jsonl", prompts(6))
    cloud.server.put(BUCKET, "f/out.jsonl", b"another's")
    with pytest.raises(JobMismatchError, match=r"f/out\.jsonl"):
        run(f"{cloud.root}/f/in.jsonl", f"{cloud.root}/f/out.jsonl", source_options=cloud.options)
    assert cloud.read("f/out.jsonl") == b"another's"


@pytest.mark.timeout(300)
def test_a_killed_workers_job_is_finished_by_the_next(decoder_dir: Path, cloud: Cloud) -> None:
    cloud.put("k/in.jsonl", prompts(40, max_tokens=30, ignore_eos=True))
    settings = {"endpoint_url": cloud.endpoint, "outage_s": 0}
    places = {"input": f"{cloud.root}/k/in.jsonl", "output": f"{cloud.root}/k/out.jsonl"}
    job = {**places, "part_lines": 2, "settings": settings}
    with workers_of(decoder_dir) as workers:
        for _ in range(2):
            parts = len(cloud.keys("k/out.jsonl.parts/parts/"))
            pid = workers.start(**job)
            wait_until(lambda parts=parts: len(cloud.keys("k/out.jsonl.parts/parts/")) > parts)
            workers.kill(pid)
        assert not cloud.keys("k/out.jsonl.parts/manifest.json")
        both = [workers.start(**job) for _ in range(2)]
        for pid in both:
            workers.wait(pid)
    assert ids(cloud.read("k/out.jsonl")) == numbered(40)


# events


@pytest.fixture(scope="module")
def instance(cloud: Cloud, decoder_dir: Path, one_thread: None) -> Iterator[Instance]:
    output = f"{cloud.root}/answers/{{key}}/{{etag}}.jsonl"
    with Instance(
        config_of(decoder_dir, max_queued=64, endpoint_url=cloud.endpoint, batch_output=output)
    ) as found:
        yield found


@pytest.fixture
def invoke(instance: Instance) -> Callable[[Any], Any]:
    async def invoke_here(event: Any) -> Any:
        handler = load_handler("teneral.handlers.batch:handler")
        context = Context(instance, request_id=uuid.uuid4().hex, timeout_s=60.0)
        try:
            (value,) = [value async for value in call(handler, event, context)]
        finally:
            handler.close()
        return value

    return invoke_here


@pytest.mark.parametrize("kind", [0, 1])
async def test_an_upload_is_answered_once_however_often_its_event_comes(
    cloud: Cloud, invoke: Callable[[Any], Any], kind: int
) -> None:
    key = f"up{kind}/a b.jsonl"
    version = cloud.put(key, prompts(5))
    event = cloud.events(key, version)[kind]
    both = await asyncio.gather(invoke(event), invoke(event))
    assert [found["results"][0]["status"] for found in both] == ["complete"] * 2
    output = both[0]["results"][0]["output"]
    assert output == f"{cloud.root}/answers/{key}/{version}.jsonl"
    written = output.removeprefix(f"{cloud.root}/")
    assert ids(cloud.read(written)) == numbered(5)
    before = dict(cloud.server.objects[BUCKET])
    assert (await invoke(event))["results"][0]["run_records"] == 0
    for name in cloud.keys("answers/"):  # objects that a job writes have events, too
        (found,) = (await invoke(cloud.events(name, "1")[kind]))["results"]
        assert found["status"] == "ignored"
    assert cloud.server.objects[BUCKET] == before


async def test_the_event_of_a_version_that_was_replaced_is_superseded(
    cloud: Cloud, invoke: Callable[[Any], Any]
) -> None:
    old = cloud.put("late.jsonl", prompts(2))
    new = cloud.put("late.jsonl", prompts(3))
    (late,) = (await invoke(cloud.events("late.jsonl", old)[0]))["results"]
    assert late["status"] == "superseded"
    (report,) = (await invoke(cloud.events("late.jsonl", new)[0]))["results"]
    assert (report["status"], report["records"]) == ("complete", 3)


async def test_events_over_http_as_the_vendors_push_them(cloud: Cloud, instance: Instance) -> None:
    version = cloud.put("http.jsonl", prompts(2))
    event, other = cloud.events("http.jsonl", version)
    handler = load_handler("teneral.handlers.batch:handler")
    async with serving_inside(create_app(instance, handler=handler)) as session:
        headers = {"Content-Type": "application/cloudevents+json"}
        async with session.post("/events", data=json.dumps(event), headers=headers) as response:
            assert response.status == 200
            assert json.loads(await response.read())["data"]["results"][0]["status"] == "complete"
        route = "/events" if cloud.scheme == "gs" else "/invoke"  # Pub/Sub's push; Event Grid's own schema
        async with session.post(route, json=other) as response:
            assert response.status == 200
        missing = cloud.events("missing.jsonl", version)[0]
        async with session.post("/events", data=json.dumps(missing), headers=headers) as response:
            assert response.status == 400  # tried again by neither Event Grid nor Eventarc's retries
        async with session.post("/invoke", json=grid_validation("code-1")) as response:
            assert (response.status, await response.json()) == (200, {"validationResponse": "code-1"})
    handler.close()
