"""Jobs that events start, with a real model and moto's S3: reports, retries, duplicates, and no endless loops."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.handlers.batch.events.conftest import Cloud, Invoke
from tests.support.batch_events import (
    eventbridge,
    object_created,
    s3_event,
    s3_record,
    s3_test_event,
    sns_event,
)
from tests.support.batch_jobs import config_of, prompts
from tests.support.load import slowdown
from tests.support.speech_models import noise, save_speech, wav_of

from teneral.cli_report import exit_code
from teneral.handlers.batch.events.parse import EventError, JobFailedError, JobRetryError
from teneral.handlers.http.errors import as_api_error
from teneral.handlers.platforms.aws_lambda.errors import report as lambda_report
from teneral.runtime.instance.instance import Instance


def ids(count: int) -> list[str]:
    return [f"id-{number}" for number in range(count)]


# what starts jobs


@pytest.mark.parametrize("kind", ["s3", "eventbridge", "sns"])
async def test_an_upload_is_answered_where_the_setting_says(cloud: Cloud, invoke: Invoke, kind: str) -> None:
    key = f"{kind}/a b+c.jsonl"
    etag = cloud.put(f"s3://uploads/{key}", prompts(3))
    event = {
        "s3": s3_event("uploads", key, etag=etag),
        "eventbridge": object_created("uploads", key, etag=etag),
        "sns": sns_event(s3_event("uploads", key, etag=etag)),
    }[kind]
    (report,) = (await invoke(event))["results"]
    assert (report["status"], report["records"], report["failed"]) == ("complete", 3, 0)
    assert report["input"] == f"s3://uploads/{key}"
    assert report["output"] == f"s3://results/uploads/{key}/{etag}.jsonl"
    assert [record["custom_id"] for record in cloud.records(report["output"])] == ids(3)


async def test_an_uploaded_file_of_sound_is_written_down(
    cloud: Cloud, invoke: Invoke, tmp_path: Path, one_thread: None
) -> None:
    save_speech(tmp_path)
    keys = [f"calls/{name}.wav" for name in "ab"]
    etags = [
        cloud.s3.put_object(Bucket="uploads", Key=key, Body=data)["ETag"].strip('"')
        for key, data in zip(keys, (wav_of(noise(0.6)), b"RIFF"), strict=True)
    ]
    events = [s3_event("uploads", key, etag=etag) for key, etag in zip(keys, etags, strict=True)]
    config = config_of(
        tmp_path,
        endpoint_url=cloud.url,
        batch_output="s3://results/{key}/{etag}.jsonl",
        batch_audio='{"language": "en", "response_format": "verbose_json", "logprob_threshold": "none"}',
    )
    with Instance(config) as host:
        (made,), (broken,) = [(await invoke(event, host=host))["results"] for event in events]
        folder = {"input": "s3://uploads/calls/", "output": "s3://results/calls.jsonl"}
        whole = await invoke(folder, host=host)
        cloud.s3.put_object(Bucket="uploads", Key=keys[0], Body=wav_of(noise(0.5)))
        late = s3_event("uploads", keys[0], etag="0" * 32)
        (superseded,) = (await invoke(late, host=host))["results"]
    assert (made["status"], made["failed"], broken["failed"]) == ("complete", 0, 1)
    assert made["output"] == f"s3://results/calls/a.wav/{etags[0]}.jsonl"
    (record,) = cloud.records(made["output"])
    assert (record["custom_id"], bool(record["segments"])) == ("a.wav", True)
    assert (whole["records"], whole["failed"], superseded["status"]) == (2, 1, "superseded")
    assert [each["custom_id"] for each in cloud.records(whole["output"])] == ["a.wav", "b.wav"]


async def test_several_records_are_several_jobs(cloud: Cloud, invoke: Invoke) -> None:
    etags = [cloud.put(f"s3://uploads/several/{name}.jsonl", prompts(2)) for name in "ab"]
    records = [
        s3_record("uploads", f"several/{name}.jsonl", etag=etag)
        for name, etag in zip("ab", etags, strict=True)
    ]
    reports = (await invoke({"Records": records}))["results"]
    assert [report["status"] for report in reports] == ["complete", "complete"]


async def test_a_job_by_name_has_its_report_for_an_answer(cloud: Cloud, invoke: Invoke) -> None:
    cloud.put("s3://uploads/named.jsonl", prompts(5))
    job = {"input": "s3://uploads/named.jsonl", "output": "s3://results/named/", "part_lines": 2}
    report = await invoke(job)
    assert (report["status"], report["parts"], report["run_records"]) == ("complete", 3, 5)
    assert "named/manifest.json" in cloud.keys("results", "named/")
    again = (await invoke(eventbridge(job)))["results"][0]
    assert (again["status"], again["run_records"], again["key"]) == ("complete", 0, report["key"])


async def test_workers_of_one_job_by_name_do_their_shares(cloud: Cloud, invoke: Invoke) -> None:
    cloud.put("s3://uploads/shared.jsonl", prompts(4))
    job = {"input": "s3://uploads/shared.jsonl", "output": "s3://results/shared.jsonl", "part_lines": 1}
    first = await invoke({**job, "worker": "0/2"})
    second = await invoke({**job, "worker": "1/2"})
    assert [(of["status"], of["run_records"]) for of in (first, second)] == [
        ("share_done", 2),
        ("complete", 2),
    ]


async def test_an_event_that_starts_nothing_is_reported_as_ignored(cloud: Cloud, invoke: Invoke) -> None:
    assert (await invoke(s3_test_event("uploads")))["results"][0]["status"] == "ignored"
    assert (await invoke(s3_event("uploads", "folder/")))["results"][0]["status"] == "ignored"


# Step Functions


async def test_items_are_answered_in_their_order(cloud: Cloud, invoke: Invoke) -> None:
    cloud.put("s3://uploads/item.jsonl", prompts(2))
    items = [
        {"custom_id": "x", "prompt": "a", "temperature": 0},
        {
            "custom_id": "y",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "b", "max_tokens": 2},
        },
        {"custom_id": "x", "prompt": "the same name again"},
        {"prompt": 7},
    ]
    answers = await invoke({"Items": items, "BatchInput": {}})
    assert [answer["custom_id"] for answer in answers] == ["x", "y", None, "4"]
    assert answers[0]["text"]
    assert answers[1]["response"]["status_code"] == 200
    assert [answer["error"]["code"] for answer in answers[2:]] == ["duplicate_custom_id", "invalid_request"]
    jobs = {
        "Items": [{"input": "s3://uploads/item.jsonl", "output": f"s3://results/item{n}.jsonl"} for n in "12"]
    }
    assert [report["status"] for report in await invoke(jobs)] == ["complete", "complete"]


async def test_one_item_has_its_record_for_an_answer_and_the_same_when_it_comes_again(invoke: Invoke) -> None:
    item = {"prompt": "Once", "max_tokens": 6, "temperature": 1.0}
    first, again = await invoke(item), await invoke(item)
    assert first["custom_id"] == "1"
    assert first["text"] == again["text"]


# retries


async def test_what_is_not_complete_goes_on_when_it_comes_again(
    cloud: Cloud, invoke: Invoke, time_for: Callable[[int], None]
) -> None:
    """The time is up before the work is done: a report for callers that wait for it, an error for others."""
    etag = cloud.put("s3://uploads/long.jsonl", prompts(240, max_tokens=100, ignore_eos=True))
    job = {"input": "s3://uploads/long.jsonl", "output": "s3://results/long.jsonl", "part_lines": 8}
    time_for(2)
    report = await invoke({**job, "version": etag})
    assert (report["status"], report["stopped_by"]) == ("incomplete", "deadline")
    assert report["run_records"] == 16
    time_for(0)
    with pytest.raises(JobRetryError, match="of 240 records"):
        await invoke(eventbridge(job))
    time_for(240)
    finished = await invoke(job)
    assert finished["status"] == "complete"
    assert finished["run_records"] == 224
    assert [record["custom_id"] for record in cloud.records(job["output"])] == ids(240)


async def test_requests_that_are_not_answered_in_time_are_worth_a_retry(invoke: Invoke) -> None:
    items = [{"prompt": f"{number}", "max_tokens": 400, "ignore_eos": True} for number in range(600)]
    with pytest.raises(JobRetryError, match="before all requests"):
        await invoke({"Items": items}, timeout_s=4.0 * slowdown())  # a tenth of it is for handing back


async def test_a_store_that_does_not_answer_is_worth_a_retry(
    decoder_dir: Path, invoke: Invoke, unused_tcp_port: int
) -> None:
    config = config_of(
        decoder_dir,
        endpoint_url=f"http://127.0.0.1:{unused_tcp_port}",
        batch_output="s3://results/{key}",
        outage_s=0.0,
    )
    with Instance(config) as host, pytest.raises(JobRetryError, match="UnavailableError"):
        await invoke(s3_event("uploads", "a.jsonl"), host=host)


async def test_of_several_failures_a_retryable_one_is_raised(
    cloud: Cloud, invoke: Invoke, time_for: Callable[[int], None]
) -> None:
    etag = cloud.put("s3://uploads/mixed.jsonl", prompts(120, max_tokens=100, ignore_eos=True))
    missing, long = s3_record("uploads", "missing.jsonl"), s3_record("uploads", "mixed.jsonl", etag=etag)
    time_for(0)
    with pytest.raises(JobRetryError):
        await invoke({"Records": [missing, long]})


async def test_an_input_that_is_gone_fails_for_good(cloud: Cloud, invoke: Invoke) -> None:
    with pytest.raises(JobFailedError, match=r"NotFoundError.*missing\.jsonl"):
        await invoke(s3_event("uploads", "missing.jsonl"))


async def test_an_invalid_event_fails_for_good(invoke: Invoke) -> None:
    with pytest.raises(EventError, match="starts no job"):
        await invoke({"hello": "world"})
    with pytest.raises(JobFailedError, match="would be lost"):
        await invoke(sns_event({"prompt": "Hello"}))


def test_errors_have_names_that_retry_rules_can_distinguish() -> None:
    for error, name, status, code in (
        (JobRetryError("x"), "JobRetryError", 503, 75),
        (JobFailedError("x"), "JobFailedError", 400, 15),
        (EventError("x"), "EventError", 400, 15),
    ):
        assert json.loads(lambda_report(error).body())["errorType"] == name
        assert as_api_error(error).status == status
        assert as_api_error(error).code == error.code
        assert exit_code(error) == code


# duplicates, and other versions


async def test_the_same_event_again_is_cheap_and_changes_nothing(cloud: Cloud, invoke: Invoke) -> None:
    etag = cloud.put("s3://uploads/again.jsonl", prompts(4))
    event = s3_event("uploads", "again.jsonl", etag=etag)
    (first,) = (await invoke(event))["results"]
    before = cloud.s3.list_objects_v2(Bucket="results", Prefix="uploads/again.jsonl")["Contents"]
    (again,) = (await invoke(object_created("uploads", "again.jsonl", etag=etag)))["results"]
    assert (again["status"], again["run_records"], again["key"]) == ("complete", 0, first["key"])
    assert cloud.s3.list_objects_v2(Bucket="results", Prefix="uploads/again.jsonl")["Contents"] == before


async def test_the_same_event_at_the_same_time_gives_one_result(cloud: Cloud, invoke: Invoke) -> None:
    etag = cloud.put("s3://uploads/twice.jsonl", prompts(12))
    event = s3_event("uploads", "twice.jsonl", etag=etag)
    both = await asyncio.gather(*(invoke(event) for _ in range(3)))
    assert [found["results"][0]["status"] for found in both] == ["complete"] * 3
    output = both[0]["results"][0]["output"]
    assert [record["custom_id"] for record in cloud.records(output)] == ids(12)


async def test_a_replaced_object_is_a_job_of_its_own_and_the_old_event_none(
    cloud: Cloud, invoke: Invoke
) -> None:
    old = cloud.put("s3://uploads/replaced.jsonl", prompts(2))
    new = cloud.put("s3://uploads/replaced.jsonl", prompts(3))
    (late,) = (await invoke(s3_event("uploads", "replaced.jsonl", etag=old)))["results"]
    assert (late["status"], old in late["reason"]) == ("superseded", True)
    (report,) = (await invoke(s3_event("uploads", "replaced.jsonl", etag=new)))["results"]
    assert (report["status"], report["records"]) == ("complete", 3)
    assert f"uploads/replaced.jsonl/{old}.jsonl" not in cloud.keys("results", "uploads/replaced.jsonl")


async def test_a_job_by_name_of_a_version_that_is_gone_fails_for_good(cloud: Cloud, invoke: Invoke) -> None:
    cloud.put("s3://uploads/version.jsonl", prompts(2))
    with pytest.raises(JobFailedError, match="ChangedError"):
        await invoke(
            {"input": "s3://uploads/version.jsonl", "output": "s3://results/v/", "version": "0" * 32}
        )


# loops


async def test_no_answer_starts_a_job(cloud: Cloud, instance: Instance, invoke: Invoke) -> None:
    etag = cloud.put("s3://uploads/loop/a.jsonl", prompts(2))
    host = _with_settings(instance, batch_output="s3://{bucket}/answers/{key}.jsonl")
    (report,) = (await invoke(s3_event("uploads", "loop/a.jsonl", etag=etag), host=host))["results"]
    made = cloud.keys("uploads", "answers/")
    assert report["output"].removeprefix("s3://uploads/") in made
    for key in made:
        (found,) = (await invoke(s3_event("uploads", key), host=host))["results"]
        assert found["status"] == "ignored"
    assert cloud.keys("uploads", "answers/") == made


async def test_an_output_that_would_start_a_job_is_refused(
    cloud: Cloud, instance: Instance, invoke: Invoke
) -> None:
    etag = cloud.put("s3://uploads/loop/b.jsonl", prompts(2))
    host = _with_settings(instance, batch_output="s3://{bucket}/{key}.out.jsonl")
    with pytest.raises(JobFailedError, match="would start jobs themselves"):
        await invoke(s3_event("uploads", "loop/b.jsonl", etag=etag), host=host)
    assert cloud.keys("uploads", "loop/b") == ["loop/b.jsonl"]


class _with_settings:
    """The instance with other settings, which do not concern its model."""

    def __init__(self, instance: Instance, **settings: Any) -> None:
        self._instance = instance
        self.config = instance.config.replace(**settings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._instance, name)
