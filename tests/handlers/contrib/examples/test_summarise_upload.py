from __future__ import annotations

import json

import pytest

from teneral import cli
from teneral.handlers.contrib import processing
from teneral.handlers.contrib.examples import summarise_upload
from teneral.loader.errors import AlreadyExistsError
from teneral.runtime.errors import RequestError

TEXT = "The nymph lives under water. It climbs a stem; its skin splits. A dragonfly flies.\n\n" * 8


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """The tiny model's context is 512 bytes."""
    monkeypatch.setenv("CHUNK_TOKENS", "100")
    monkeypatch.setenv("SUMMARY_TOKENS", "20")


def upload(cloud, text: str | bytes = TEXT, key: str = "notes & more.txt") -> dict:
    etag = cloud.put_object(Bucket="bucket", Key=key, Body=text)["ETag"].strip('"')
    quoted = key.replace("&", "%26").replace(" ", "+")
    described = {"bucket": {"name": "bucket"}, "object": {"key": quoted, "eTag": etag}}
    return {"Records": [{"eventName": "ObjectCreated:Put", "s3": described}]}


def summary_of(cloud, key: str = "notes & more.txt") -> str:
    return cloud.get_object(Bucket="bucket", Key=f"{key}.summary.txt")["Body"].read().decode()


@pytest.fixture
def summarise(invoke, generating):
    async def summarise(event):
        return (await invoke("summarise_upload", event, generating))["objects"]

    return summarise


async def test_an_upload_gets_its_summary_in_the_same_folder(cloud, summarise):
    (done,) = await summarise(upload(cloud))
    assert done == {
        "source": "s3://bucket/notes & more.txt",
        "summary": "s3://bucket/notes & more.txt.summary.txt",
        "done": "now",
    }
    assert 0 < len(summary_of(cloud)) <= 20 * 4


async def test_a_duplicate_of_the_event_does_nothing(cloud, summarise, generating):
    event = upload(cloud)
    await summarise(event)
    steps = generating.engine.result().statistics().steps_total
    before = cloud.head_object(Bucket="bucket", Key="notes & more.txt.summary.txt")["LastModified"]
    assert [done["done"] for done in await summarise(event)] == ["before"]
    assert cloud.head_object(Bucket="bucket", Key="notes & more.txt.summary.txt")["LastModified"] == before
    assert generating.engine.result().statistics().steps_total == steps


async def test_a_new_version_gets_a_new_summary_and_the_old_event_none(cloud, summarise):
    old = upload(cloud)
    await summarise(old)
    first = summary_of(cloud)
    new = upload(cloud, "Something else, and quite short.")
    assert [done["done"] for done in await summarise(new)] == ["now"]
    assert summary_of(cloud) != first
    assert [done["done"] for done in await summarise(old)] == ["skipped"]


async def test_of_two_at_the_same_time_one_writes(cloud, summarise, monkeypatch):
    event = upload(cloud)
    map_reduce = processing.map_reduce

    def overtaken(*arguments, **options):
        cloud.put_object(Bucket="bucket", Key="notes & more.txt.summary.txt", Body=b"the other's")
        return map_reduce(*arguments, **options)

    monkeypatch.setattr(processing, "map_reduce", overtaken)
    with pytest.raises(AlreadyExistsError):
        await summarise(event)
    assert summary_of(cloud) == "the other's"


async def test_a_summary_is_not_summarised(cloud, summarise):
    assert await summarise(upload(cloud, key="notes.txt.summary.txt")) == []


async def test_other_events_of_s3_are_let_pass(cloud, summarise):
    assert await summarise({"Service": "Amazon S3", "Event": "s3:TestEvent"}) == []
    event = upload(cloud)
    event["Records"][0]["eventName"] = "ObjectRemoved:Delete"
    assert await summarise(event) == []


async def test_eventbridge_tells_of_uploads_too(cloud, summarise):
    upload(cloud)
    event = {
        "detail-type": "Object Created",
        "detail": {"bucket": {"name": "bucket"}, "object": {"key": "notes & more.txt", "etag": ""}},
    }
    assert [done["done"] for done in await summarise(event)] == ["now"]


@pytest.mark.parametrize("event", [None, [], {}, {"Records": [{}]}, {"Records": 5}])
async def test_what_is_no_event_is_refused(cloud, summarise, event):
    with pytest.raises(RequestError):
        await summarise(event)


async def test_an_upload_that_is_too_large_or_no_text_is_refused(cloud, summarise, monkeypatch):
    with pytest.raises(RequestError, match="UTF-8"):
        await summarise(upload(cloud, b"\xff\xfe" * 50))
    monkeypatch.setattr(summarise_upload, "MAX_BYTES", 10)
    with pytest.raises(RequestError, match="more than 10"):
        await summarise(upload(cloud))


def test_it_runs_by_teneral_invoke(cloud, generating, decoder, tmp_path, capsys):
    event = upload(cloud)
    place = tmp_path / "event.json"
    place.write_text(json.dumps(event))
    spec = "teneral.handlers.contrib.examples.summarise_upload:handler"
    assert cli.run(["invoke", spec, "--model", str(decoder), "--event", str(place)]) == 0
    assert json.loads(capsys.readouterr().out)["objects"][0]["done"] == "now"
    assert summary_of(cloud)
