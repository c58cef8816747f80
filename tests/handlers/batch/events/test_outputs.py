"""The places of answers; no answer can start a job in its turn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teneral.handlers.batch.events.outputs import Outputs
from teneral.handlers.batch.events.parse import EventError, Ignored, Job, JobFailedError
from teneral.handlers.function.object_events import ObjectRef


def upload(url: str, etag: str = "e1") -> Job:
    bucket, _, key = url.removeprefix("s3://").partition("/")
    return Job(ObjectRef(bucket, key, etag), is_upload=True)


def test_the_event_s_own_output_counts_first() -> None:
    job = Job(ObjectRef("bucket", "in.jsonl"), "s3://bucket/out.jsonl")
    for outputs in (Outputs.of(None, None), Outputs.of("s3://results/{key}", None)):
        assert outputs.of_job(job) == "s3://bucket/out.jsonl"


def test_else_it_follows_from_the_input() -> None:
    outputs = Outputs.of("s3://results/{bucket}/{key}/{etag}.jsonl", None)
    assert outputs.of_job(upload("s3://bucket/in/a b.jsonl")) == "s3://results/bucket/in/a b.jsonl/e1.jsonl"


def test_nothing_says_where_the_answers_go() -> None:
    with pytest.raises(JobFailedError, match="TENERAL_BATCH_OUTPUT"):
        Outputs.of(None, None).of_job(upload("s3://bucket/in.jsonl"))
    with pytest.raises(JobFailedError, match="TENERAL_BATCH_ANSWERS"):
        Outputs.of(None, None).key_of_answer("queue", "id")


def test_a_version_that_is_not_known_cannot_be_put_into_the_output() -> None:
    with pytest.raises(EventError, match="version"):
        Outputs.of("s3://results/{key}/{etag}", None).of_job(upload("s3://bucket/in.jsonl", etag=""))


def test_a_key_that_would_become_too_long_is_refused() -> None:
    with pytest.raises(EventError, match="too long"):
        Outputs.of("s3://results/{key}", None).of_job(upload(f"s3://bucket/{'x' * 1_000}"))


@pytest.mark.parametrize("template", ["s3://bucket/{key}.out.jsonl", "s3://{bucket}/{key}.out.jsonl"])
def test_answers_that_could_be_taken_for_inputs_are_refused(template: str) -> None:
    with pytest.raises(JobFailedError, match="would start jobs themselves"):
        Outputs.of(template, None).of_job(upload("s3://bucket/in.jsonl"))


def test_of_the_input_s_bucket_a_folder_is_for_answers_and_starts_nothing() -> None:
    outputs = Outputs.of("s3://{bucket}/answers/{key}.jsonl", None)
    answer = outputs.of_job(upload("s3://bucket/in/a.jsonl"))
    assert answer == "s3://bucket/answers/in/a.jsonl.jsonl"
    for name in ("", ".parts/job.json", ".parts/parts/000000.jsonl", ".parts/manifest.json"):
        assert isinstance(outputs.of_job(upload(f"{answer}{name}")), Ignored)
    assert outputs.of_job(upload("s3://bucket/answers.jsonl")) == "s3://bucket/answers/answers.jsonl.jsonl"


_NAME = st.text("ab/-.", min_size=1, max_size=6)


@given(
    bucket=st.sampled_from(["results", "{bucket}", "{bucket}-out", "in-{bucket}"]),
    beginning=st.sampled_from(["", "answers/", "answers/x-", "x-", "a/b/"]),
    end=st.sampled_from(["", ".jsonl", "/{etag}", "/{bucket}.jsonl"]),
    given_bucket=st.sampled_from(["in", "results", "in-out", "in-in-out"]),
    key=_NAME,
)
def test_no_answer_starts_a_job_whose_answers_could_go_on_for_ever(
    bucket: str, beginning: str, end: str, given_bucket: str, key: str
) -> None:
    """However often each answer sends an event, the chain ends: each of its jobs is in another bucket."""
    outputs = Outputs.of(f"s3://{bucket}/{beginning}{{key}}{end}", None)
    url, seen = f"s3://{given_bucket}/{key}", set()
    while True:
        try:
            output = outputs.of_job(upload(url))
        except JobFailedError:
            break
        if isinstance(output, Ignored):
            break
        found_bucket = url.removeprefix("s3://").partition("/")[0]
        assert found_bucket not in seen
        seen.add(found_bucket)
        url = f"{output}.parts/parts/000000.jsonl"


def test_the_answer_to_a_message_is_an_object_of_its_own() -> None:
    outputs = Outputs.of(None, "s3://answers/{queue}/{id}.json")
    assert outputs.bucket_of_answers() == "s3://answers"
    assert outputs.key_of_answer("jobs", "id-1") == "jobs/id-1.json"
    for queue, message_id in (("", "id"), ("jobs", "../id")):
        with pytest.raises(EventError):
            outputs.key_of_answer(queue, message_id)
