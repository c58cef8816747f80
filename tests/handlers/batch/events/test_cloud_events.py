"""Events of Cloud Storage and Event Grid: which objects they name, and where the answers to them go."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.handlers.batch.events.test_parse import only_named_errors
from tests.support.cloud_events import (
    blob_created,
    eventarc,
    grid_event,
    grid_validation,
    gs_notification,
    pubsub,
    pubsub_event,
)

from teneral.handlers.batch.events.outputs import Outputs
from teneral.handlers.batch.events.parse import (
    AwaitedCall,
    BatchRequest,
    EventError,
    Handshake,
    Ignored,
    Items,
    Job,
    JobFailedError,
    Notice,
    Queue,
    parse_event,
    parse_message,
)
from teneral.handlers.function.object_events import ObjectRef

KEYS = ["in.jsonl", "in/a b+c%2B&=ä 😀.jsonl", "100%/ü.jsonl"]
ACCOUNT = "teneralaccount"


def gs_ref(key: str, generation: str = "17") -> ObjectRef:
    return ObjectRef("uploads", key, generation, scheme="gs")


def az_ref(key: str, etag: str = "0x8D") -> ObjectRef:
    return ObjectRef("uploads", key, etag, scheme="az", account=ACCOUNT)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("payload", ["event", "JSON_API_V1", "NONE", "eventarc pubsub"])
def test_a_finalized_object_is_a_job_of_its_generation(key: str, payload: str) -> None:
    event = {
        "event": eventarc("uploads", key, generation="17"),
        "eventarc pubsub": pubsub_event(gs_notification("uploads", key, generation="17")),
    }.get(payload) or gs_notification("uploads", key, generation="17", payload=payload)
    found = Notice((Job(gs_ref(key), is_upload=True),))
    assert parse_event(event) == found
    assert Notice(parse_message(json.dumps(event))) == found
    assert gs_ref(key).url == f"gs://uploads/{key}"


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("etag", ["0x8D", '"0x8D"'])
def test_a_created_blob_is_a_job_of_its_etag(key: str, etag: str) -> None:
    found = Notice((Job(az_ref(key), is_upload=True),))
    assert parse_event(blob_created(ACCOUNT, "uploads", key, etag=etag)) == found
    assert parse_event([grid_event(ACCOUNT, "uploads", key, etag=etag)]) == found
    assert parse_event(grid_event(ACCOUNT, "uploads", key, etag=etag)) == found
    assert az_ref(key).url == f"az://{ACCOUNT}/uploads/{key}"


def test_a_delivery_of_event_grid_is_several_jobs() -> None:
    found = parse_event([grid_event(ACCOUNT, "uploads", f"{n}.jsonl", etag="0x8D") for n in range(3)])
    assert found == Notice(tuple(Job(az_ref(f"{n}.jsonl"), is_upload=True) for n in range(3)))


@pytest.mark.parametrize(
    "event",
    [
        eventarc("uploads", "a.jsonl", kind="deleted"),
        eventarc("uploads", "a.jsonl", kind="metadataUpdated"),
        eventarc("uploads", "folder/"),
        gs_notification("uploads", "a.jsonl", kind="OBJECT_DELETE"),
        blob_created(ACCOUNT, "uploads", "a.jsonl", kind="Microsoft.Storage.BlobDeleted"),
        blob_created(ACCOUNT, "uploads", "a.jsonl", api="CreateFile"),
        [grid_event(ACCOUNT, "uploads", "a.jsonl", kind="Microsoft.Storage.DirectoryCreated")],
    ],
)
def test_other_news_of_an_object_starts_nothing(event: Any) -> None:
    found = parse_event(event)
    assert isinstance(found, Notice)
    assert [type(asked) for asked in found.asked] == [Ignored]


def test_a_subscription_is_validated_by_its_code() -> None:
    assert parse_event(grid_validation("abc")) == Handshake("abc")
    with pytest.raises(EventError, match="validationCode"):
        parse_event(grid_validation(""))
    with pytest.raises(EventError, match="inside another"):
        parse_message(json.dumps(grid_validation("abc")))


@pytest.mark.parametrize(
    ("job", "ref"),
    [
        (
            {"input": "gs://uploads/a.jsonl", "output": "gs://results/a.jsonl", "version": "17"},
            gs_ref("a.jsonl"),
        ),
        (
            {
                "input": f"az://{ACCOUNT}/uploads/a.jsonl",
                "output": f"az://{ACCOUNT}/results/a/",
                "version": '"0x8D"',
            },
            az_ref("a.jsonl"),
        ),
    ],
)
def test_a_job_by_name_in_any_store_and_in_a_message_of_pubsub(job: dict[str, Any], ref: ObjectRef) -> None:
    asked = Job(ref, job["output"])
    assert parse_event(job) == AwaitedCall(asked)
    assert parse_event(pubsub(job)) == parse_event(pubsub_event(pubsub(job))) == Notice((asked,))


def test_a_request_in_a_message_of_pubsub_is_one_that_is_never_read() -> None:
    assert parse_event(pubsub({"prompt": "Hello"})) == Notice((BatchRequest({"prompt": "Hello"}),))


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (eventarc("UP", "a.jsonl"), "name of a bucket"),
        (eventarc("uploads", "../a.jsonl"), "object name"),
        (eventarc("uploads", "a.jsonl", generation="x"), "not a number"),
        (eventarc("uploads", "a.jsonl", generation="1" * 40), "too long"),
        (eventarc("uploads", "a.jsonl") | {"data": None}, "not JSON"),
        (gs_notification("u", "a.jsonl"), "name of a bucket"),
        (pubsub(None), "not JSON"),
        ({"message": {"data": "%"}, "subscription": "s"}, "base64"),
        ({"message": 7, "subscription": "s"}, "not JSON"),
        (blob_created("A_B", "uploads", "a.jsonl"), "storage account"),
        (blob_created(ACCOUNT, "u", "a.jsonl"), "name of a container"),
        (blob_created(ACCOUNT, "uploads", "a//b.jsonl"), "object name"),
        (blob_created(ACCOUNT, "uploads", "a.jsonl") | {"subject": "/x"}, "names no storage account"),
        (blob_created(ACCOUNT, "uploads", "a.jsonl") | {"source": "/x"}, "names no storage account"),
        (blob_created(ACCOUNT, "uploads", "a.jsonl", etag="a b"), "ETag"),
        ({"input": "az://uploads/a.jsonl"}, "az://account/container/key"),
        ({"input": "ftp://uploads/a.jsonl", "output": "gs://x/y"}, "gs://bucket/key"),
    ],
)
def test_invalid_values_are_named(event: Any, message: str) -> None:
    with pytest.raises(EventError) as caught:
        parse_event(event)
    assert message in str(caught.value)


# where the answers go


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        ("gs://results/{bucket}/{key}/{etag}.jsonl", "gs://results/uploads/in/a.jsonl/17.jsonl"),
        ("s3://results/{bucket}/{key}", "s3://results/uploads/in/a.jsonl"),
    ],
)
def test_an_output_follows_from_an_object_in_cloud_storage(template: str, answer: str) -> None:
    assert Outputs.of(template, None).of_job(Job(gs_ref("in/a.jsonl"), is_upload=True)) == answer


def test_an_output_follows_from_a_blob() -> None:
    outputs = Outputs.of("az://{account}/results-{bucket}/x/{key}/{etag}.jsonl", None)
    answer = f"az://{ACCOUNT}/results-uploads/x/in/a.jsonl/0x8D.jsonl"
    assert outputs.of_job(Job(az_ref("in/a.jsonl"), is_upload=True)) == answer
    with pytest.raises(EventError, match="no account"):
        outputs.of_job(Job(gs_ref("in/a.jsonl"), is_upload=True))


@pytest.mark.parametrize(
    ("template", "ref"),
    [
        ("gs://uploads/{key}.out.jsonl", gs_ref("a.jsonl")),
        ("gs://{bucket}/{key}.out.jsonl", gs_ref("a.jsonl")),
        (f"az://{ACCOUNT}/uploads/{{key}}.out.jsonl", az_ref("a.jsonl")),
        ("az://{account}/{bucket}/{key}.out.jsonl", az_ref("a.jsonl")),
    ],
)
def test_answers_that_could_be_taken_for_inputs_are_refused(template: str, ref: ObjectRef) -> None:
    with pytest.raises(JobFailedError, match="would start jobs themselves"):
        Outputs.of(template, None).of_job(Job(ref, is_upload=True))


@pytest.mark.parametrize(
    ("template", "ref"),
    [
        ("gs://{bucket}/answers/{key}.jsonl", gs_ref("answers/in/a.jsonl.jsonl.parts/job.json")),
        (f"az://{ACCOUNT}/uploads/answers/{{key}}.jsonl", az_ref("answers/in/a.jsonl.jsonl")),
    ],
)
def test_of_the_inputs_bucket_a_folder_is_for_answers_and_starts_nothing(
    template: str, ref: ObjectRef
) -> None:
    assert isinstance(Outputs.of(template, None).of_job(Job(ref, is_upload=True)), Ignored)


def test_the_same_name_in_another_kind_of_store_is_another_place() -> None:
    outputs = Outputs.of("s3://uploads/{key}.jsonl", None)
    assert outputs.of_job(Job(gs_ref("a.jsonl"), is_upload=True)) == "s3://uploads/a.jsonl.jsonl"


def test_an_output_without_its_account_hides_no_loop() -> None:
    """With an account set, az://uploads/answers/… is the container of the event."""
    outputs = Outputs.of("az://uploads/answers/{key}.jsonl", None)
    with pytest.raises(JobFailedError, match="does not name the account"):
        outputs.of_job(Job(az_ref("answers/a.jsonl"), is_upload=True))


@pytest.mark.parametrize(
    ("template", "root"),
    [
        ("gs://answers/{queue}/{id}.json", "gs://answers"),
        ("az://acc/answers/{queue}/{id}.json", "az://acc/answers"),
    ],
)
def test_the_answer_to_a_message_is_an_object_in_any_store(template: str, root: str) -> None:
    outputs = Outputs.of(None, template)
    assert outputs.bucket_of_answers() == root
    assert outputs.key_of_answer("jobs", "id-1") == "jobs/id-1.json"


# garbage

_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["\ud800", "a/b"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_EVENTS = [
    eventarc("uploads", "a.jsonl"),
    gs_notification("uploads", "a.jsonl"),
    pubsub_event(pubsub({"input": "gs://uploads/a.jsonl"})),
    blob_created(ACCOUNT, "uploads", "a.jsonl"),
    [grid_event(ACCOUNT, "uploads", "a.jsonl")],
    grid_validation(),
]


def _places(value: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        found.append((value, key))
        if isinstance(inner, dict | list):
            found += _places(inner)
    return found


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_real_event_with_one_wrong_value_raises_nothing_but_the_named_error(data: st.DataObject) -> None:
    event = json.loads(json.dumps(data.draw(st.sampled_from(_EVENTS))))
    owner, key = data.draw(st.sampled_from(_places(event)))
    if isinstance(owner, dict) and data.draw(st.booleans()):
        del owner[key]
    else:
        owner[key] = data.draw(_JSON)
    with only_named_errors():
        assert isinstance(parse_event(event), AwaitedCall | Items | Notice | Queue | Handshake)
